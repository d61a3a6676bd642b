"""Rows of conversations as their publishers write them, and what is read of each.

Made after the page in ``source``, with short texts in place of its own. In ``read``, a line is a
message: its role, ``!`` if it is an answer that is not learned, its content, its calls in brackets,
what else it has in braces; tools come last. For a row that is refused it is how the reason begins.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from training.data.conversations import Conversation


class Format(NamedTuple):
    """One way to write a conversation."""

    source: str
    row: Mapping[str, Any]
    read: str
    unused: str = ""
    """Columns of which a warning has the names."""
    columns: Mapping[str, str] | None = None
    """As ``--columns`` asks for."""


def shown(content: str | Conversation | None) -> str:
    """What was read, in the form of ``Format.read``."""
    if not isinstance(content, Conversation):
        return repr(content)
    lines = []
    for each in content.messages:
        parts = [f"{each.role}{'' if each.is_learned else '!'}:", each.content]
        calls = [call["function"] for call in each.calls]
        parts += [f"[{call['name']} {json.dumps(call['arguments'])}]" for call in calls]
        parts += [f"{{{key}: {value}}}" for key, value in each.more.items()]
        lines.append(" ".join(filter(None, parts)))
    lines += [f"tool {each['function']['name']}" for each in content.tools]
    return "\n".join(lines)


def said(*pairs: str, role: str = "role", text: str = "content") -> list[dict[str, Any]]:
    """Messages of ``role: text`` pairs."""
    return [dict(zip((role, text), each.split(": ", 1), strict=True)) for each in pairs]


PAIR = "user: Why?\nassistant: So."
HUB = "https://huggingface.co/datasets/"
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = '{"city": "Oslo"}'
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLED = 'assistant: [weather {"city": "Oslo"}]'
LLAMA_FACTORY = "https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md"
AZURE = "https://learn.microsoft.com/en-us/azure/ai-services/openai/how-to/fine-tuning-functions"
TRL = "https://huggingface.co/docs/trl/dataset_formats"
AXOLOTL = "https://docs.axolotl.ai/docs/dataset-formats/conversation.html"
GEMINI = (
    "https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-about"
)
SWIFT = "https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html"
MISTRAL = "https://docs.mistral.ai/capabilities/finetuning/text_finetuning"
OPENAI = "https://platform.openai.com/docs/api-reference/fine-tuning/chat-input"

FORMATS = {
    "openai": Format(
        OPENAI,
        {"messages": said("system: Be brief.", "user: Why?", "assistant: So.")},
        f"system: Be brief.\n{PAIR}",
    ),
    "openai-weight": Format(
        OPENAI,
        {
            "messages": [
                *said("user: Why?"),
                {"role": "assistant", "content": "Bad.", "weight": 0},
                *said("user: Why?"),
                {"role": "assistant", "content": "So.", "weight": 1},
            ]
        },
        f"user: Why?\nassistant!: Bad.\n{PAIR}",
    ),
    "openai-tools": Format(
        AZURE,
        {
            "messages": [
                *said("user: Why?"),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
            ],
            "tools": [{"type": "function", "function": WEATHER}],
            "parallel_tool_calls": False,
        },
        f"user: Why?\n{CALLED}\ntool: 7 {{tool_call_id: c1}}\n{CALLED}\ntool weather",
        "parallel_tool_calls",
    ),
    "openai-functions": Format(
        AZURE,
        {
            "messages": [
                *said("user: Why?"),
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "weather", "content": "7"},
            ],
            "functions": [WEATHER],
        },
        f"user: Why?\n{CALLED}\ntool: 7 {{name: weather}}\ntool weather",
    ),
    "openai-refusal": Format(
        OPENAI,
        {"messages": [*said("user: Why?"), {"role": "assistant", "refusal": "No."}]},
        "message 2 (assistant): refusal is not known here",
    ),
    "openai-empty": Format(
        OPENAI,
        {"messages": [*said("user: Why?"), {"role": "assistant", "content": None}]},
        "message 2 (assistant): has neither a content nor tool_calls",
    ),
    "mistral": Format(
        MISTRAL,
        {
            "messages": [
                *said("user: Why?"),
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
            ]
        },
        f"user: Why?\n{CALLED}",
    ),
    "cohere": Format(
        "https://docs.cohere.com/docs/chat-preparing-the-data",
        {"messages": said("System: Be brief.", "User: Why?", "Chatbot: So.")},
        f"system: Be brief.\n{PAIR}",
    ),
    "gemini": Format(
        GEMINI,
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Wh"}, {"text": "y?"}]},
                {"role": "model", "parts": [{"text": "So."}]},
            ],
        },
        f"system: Be brief.\n{PAIR}",
    ),
    "gemini-file": Format(
        GEMINI,
        {"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "gs://b/a.pdf"}}]}]},
        "message 1 (user): has a part that is no text (fileData)",
    ),
    "bedrock": Format(
        "https://docs.aws.amazon.com/bedrock/latest/userguide/preparing-text-data.html",
        {
            "schemaVersion": "bedrock-conversation-2024",
            "system": [{"text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"text": "Why?"}]},
                {"role": "assistant", "content": [{"text": "So."}]},
            ],
        },
        f"system: Be brief.\n{PAIR}",
        "schemaVersion",
    ),
    "sharegpt": Format(
        LLAMA_FACTORY,
        {
            "conversations": said(
                "human: Why?",
                f'function_call: {{"name": "weather", "arguments": {ARGUMENTS}}}',
                "observation: 7",
                "gpt: So.",
                role="from",
                text="value",
            ),
            "system": "Be brief.",
            "tools": json.dumps([WEATHER]),
        },
        f"system: Be brief.\nuser: Why?\n{CALLED}\ntool: 7\nassistant: So.\ntool weather",
    ),
    "sharegpt-images": Format(
        LLAMA_FACTORY,
        {
            "conversations": said("human: <image>", "gpt: A cat.", role="from", text="value"),
            "images": ["a.jpg"],
        },
        'what is under "images" cannot',
    ),
    "alpaca-history": Format(
        LLAMA_FACTORY,
        {"instruction": "Why?", "input": "", "output": "So.", "history": [["Hi", "Ho"]]},
        'what is under "history" cannot be learned',
    ),
    "kto": Format(
        LLAMA_FACTORY,
        {"instruction": "Why?", "input": "", "output": "Bad.", "kto_tag": True},
        'what is under "kto_tag"',
    ),
    "alpaca": Format(
        HUB + "yahma/alpaca-cleaned",
        {"instruction": "Add", "input": "1 and 2", "output": "3"},
        "user: Add\n\n1 and 2\nassistant: 3",
    ),
    "dolly": Format(
        HUB + "databricks/databricks-dolly-15k",
        {"instruction": "Why?", "context": "It is.", "response": "So.", "category": "open_qa"},
        "user: Why?\n\nIt is.\nassistant: So.",
        "category",
    ),
    "openorca": Format(
        HUB + "Open-Orca/OpenOrca",
        {"id": "flan.1", "system_prompt": "Be brief.", "question": "Why?", "response": "So."},
        f"system: Be brief.\n{PAIR}",
        "id",
    ),
    "gsm8k": Format(HUB + "openai/gsm8k", {"question": "Why?", "answer": "So."}, PAIR),
    "ultrachat": Format(
        HUB + "HuggingFaceH4/ultrachat_200k",
        {"prompt": "Why?", "prompt_id": "f0", "messages": said("user: Why?", "assistant: So.")},
        PAIR,
        "prompt, prompt_id",
    ),
    "lmsys": Format(
        HUB + "lmsys/lmsys-chat-1m",
        {"model": "vicuna-13b", "conversation": said("user: Why?", "assistant: So."), "turn": 1},
        PAIR,
        "model, turn",
    ),
    "flan": Format(
        HUB + "Muennighoff/flan", {"inputs": "Why?", "targets": "So.", "task": "qa"}, PAIR, "task"
    ),
    "xlam": Format(
        HUB + "Salesforce/xlam-function-calling-60k",
        {
            "query": "Why?",
            "answers": json.dumps([CALL["function"]]),
            "tools": json.dumps([WEATHER]),
        },
        "user: Why?\nassistant: " + json.dumps([CALL["function"]]) + "\ntool weather",
        columns={"prompt": "query", "answer": "answers"},
    ),
    "swift": Format(
        SWIFT,
        {"query": "Why?", "response": "So.", "system": "Be brief.", "history": []},
        f"system: Be brief.\n{PAIR}",
    ),
    "swift-loss": Format(
        SWIFT,
        {"messages": [*said("user: Why?"), {"role": "assistant", "content": "So.", "loss": False}]},
        "user: Why?\nassistant!: So.",
    ),
    "trl-completion": Format(
        TRL,
        {
            "prompt": said("user: Why?"),
            "completion": said("assistant: So."),
            "chat_template_kwargs": {"enable_thinking": False},
        },
        'what is under "chat_template_kwargs" cannot be learned',
    ),
    "trl-text-pair": Format(TRL, {"prompt": "Why?", "completion": "So."}, PAIR),
    "trl-unpaired": Format(
        TRL,
        {"prompt": "Why?", "completion": "Bad.", "label": False},
        'what is under "label" cannot be learned',
    ),
    "trl-preference": Format(
        TRL,
        {"prompt": "Why?", "chosen": "So.", "rejected": "Bad."},
        'no text under "text", and neither messages nor a pair of texts, but prompt, chosen',
    ),
    "axolotl": Format(
        AXOLOTL,
        {
            "conversations": [
                {"from": "human", "value": "Why?", "train": False},
                {"from": "assistant", "value": "So.", "train": True},
                {"from": "assistant", "value": "Bad.", "train": False},
            ]
        },
        "user: Why?\nassistant: So.\nassistant!: Bad.",
    ),
    "axolotl-user": Format(
        AXOLOTL,
        {"conversations": [{"from": "human", "value": "Why?", "train": True}]},
        "message 1 (human): train is set, and only answers are learned",
    ),
    "axolotl-detail": Format(
        AXOLOTL,
        {
            "conversations": [
                {"from": "assistant", "value": "So.", "train_detail": [{"train": False}]}
            ]
        },
        "message 1 (assistant): train_detail is not known here",
    ),
    "reasoning": Format(
        "https://huggingface.co/docs/trl/dataset_formats#reasoning",
        {
            "messages": [
                *said("user: Why?"),
                {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
            ]
        },
        f"{PAIR} {{reasoning_content: Hm.}}",
    ),
    "anthropic": Format(
        "https://docs.claude.com/en/api/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "7"}],
                }
            ]
        },
        "message 1 (user): has a part that is no text (tool_result)",
    ),
    "langchain": Format(
        "https://reference.langchain.com/python/langchain-core/messages",
        {"messages": said("human: Why?", "ai: So.")},
        PAIR,
    ),
    "json": Format(
        HUB + "seankski/tool-parameters-v1-1",
        {"messages": json.dumps(said("user: Why?", "assistant: So."))},
        PAIR,
    ),
    "text": Format(
        HUB + "tatsu-lab/alpaca",
        {"instruction": "Why?", "input": "", "output": "So.", "text": "Below is ..."},
        "'Below is ...'",
        "instruction, output",
    ),
    "empty": Format(TRL, {"prompt": "Why?", "completion": None}, "None"),
}
