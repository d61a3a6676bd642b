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
    row: str
    """In JSON."""
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


def said(*pairs: str) -> list[dict[str, Any]]:
    """Messages of ``role: content`` pairs."""
    return [dict(zip(("role", "content"), each.split(": ", 1), strict=True)) for each in pairs]


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
        """
{
  "messages": [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."}
  ]
}
""",
        "system: Be brief.\nuser: Why?\nassistant: So.",
    ),
    "openai-weight": Format(
        OPENAI,
        """
{
  "messages": [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Bad.", "weight": 0},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So.", "weight": 1}
  ]
}
""",
        "user: Why?\nassistant!: Bad.\nuser: Why?\nassistant: So.",
    ),
    "openai-tools": Format(
        AZURE,
        r"""
{
  "messages": [
    {"role": "user", "content": "Why?"},
    {
      "role": "assistant",
      "tool_calls": [
        {
          "id": "c1",
          "type": "function",
          "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}
        }
      ]
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    {
      "role": "assistant",
      "content": null,
      "tool_calls": [
        {
          "id": "c1",
          "type": "function",
          "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}
        }
      ]
    }
  ],
  "tools": [
    {
      "type": "function",
      "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    }
  ],
  "parallel_tool_calls": false
}
""",
        "user: Why?\n"
        'assistant: [weather {"city": "Oslo"}]\n'
        "tool: 7 {tool_call_id: c1}\n"
        'assistant: [weather {"city": "Oslo"}]\n'
        "tool weather",
        "parallel_tool_calls",
    ),
    "openai-functions": Format(
        AZURE,
        r"""
{
  "messages": [
    {"role": "user", "content": "Why?"},
    {
      "role": "assistant",
      "content": null,
      "function_call": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}
    },
    {"role": "function", "name": "weather", "content": "7"}
  ],
  "functions": [{"name": "weather", "parameters": {"type": "object", "properties": {}}}]
}
""",
        'user: Why?\nassistant: [weather {"city": "Oslo"}]\ntool: 7 {name: weather}\ntool weather',
    ),
    "openai-refusal": Format(
        OPENAI,
        """
{
  "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "refusal": "No."}]
}
""",
        "message 2 (assistant): refusal",
    ),
    "openai-empty": Format(
        OPENAI,
        """
{
  "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": null}]
}
""",
        "message 2 (assistant)",
    ),
    "mistral": Format(
        MISTRAL,
        r"""
{
  "messages": [
    {"role": "user", "content": "Why?"},
    {
      "role": "assistant",
      "content": "",
      "tool_calls": [
        {
          "id": "c1",
          "type": "function",
          "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}
        }
      ]
    }
  ]
}
""",
        'user: Why?\nassistant: [weather {"city": "Oslo"}]',
    ),
    "cohere": Format(
        "https://docs.cohere.com/docs/chat-preparing-the-data",
        """
{
  "messages": [
    {"role": "System", "content": "Be brief."},
    {"role": "User", "content": "Why?"},
    {"role": "Chatbot", "content": "So."}
  ]
}
""",
        "system: Be brief.\nuser: Why?\nassistant: So.",
    ),
    "gemini": Format(
        GEMINI,
        """
{
  "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
  "contents": [
    {"role": "user", "parts": [{"text": "Wh"}, {"text": "y?"}]},
    {"role": "model", "parts": [{"text": "So."}]}
  ]
}
""",
        "system: Be brief.\nuser: Why?\nassistant: So.",
    ),
    "gemini-file": Format(
        GEMINI,
        """
{"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "gs://b/a.pdf"}}]}]}
""",
        "(fileData)",
    ),
    "bedrock": Format(
        "https://docs.aws.amazon.com/bedrock/latest/userguide/preparing-text-data.html",
        """
{
  "schemaVersion": "bedrock-conversation-2024",
  "system": [{"text": "Be brief."}],
  "messages": [
    {"role": "user", "content": [{"text": "Why?"}]},
    {"role": "assistant", "content": [{"text": "So."}]}
  ]
}
""",
        "system: Be brief.\nuser: Why?\nassistant: So.",
        "schemaVersion",
    ),
    "sharegpt": Format(
        LLAMA_FACTORY,
        r"""
{
  "conversations": [
    {"from": "human", "value": "Why?"},
    {
      "from": "function_call",
      "value": "{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}"
    },
    {"from": "observation", "value": "7"},
    {"from": "gpt", "value": "So."}
  ],
  "system": "Be brief.",
  "tools": "[{\"name\": \"weather\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}]"
}
""",
        "system: Be brief.\n"
        "user: Why?\n"
        'assistant: [weather {"city": "Oslo"}]\n'
        "tool: 7\n"
        "assistant: So.\n"
        "tool weather",
    ),
    "sharegpt-images": Format(
        LLAMA_FACTORY,
        """
{
  "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}],
  "images": ["a.jpg"]
}
""",
        'what is under "images" cannot',
    ),
    "alpaca-history": Format(
        LLAMA_FACTORY,
        """
{"instruction": "Why?", "input": "", "output": "So.", "history": [["Hi", "Ho"]]}
""",
        'what is under "history" cannot be learned',
    ),
    "kto": Format(
        LLAMA_FACTORY,
        """
{"instruction": "Why?", "input": "", "output": "Bad.", "kto_tag": true}
""",
        'what is under "kto_tag"',
    ),
    "alpaca": Format(
        "https://huggingface.co/datasets/yahma/alpaca-cleaned",
        """
{"instruction": "Add", "input": "1 and 2", "output": "3"}
""",
        "user: Add\n\n1 and 2\nassistant: 3",
    ),
    "dolly": Format(
        "https://huggingface.co/datasets/databricks/databricks-dolly-15k",
        """
{"instruction": "Why?", "context": "It is.", "response": "So.", "category": "open_qa"}
""",
        "user: Why?\n\nIt is.\nassistant: So.",
        "category",
    ),
    "openorca": Format(
        "https://huggingface.co/datasets/Open-Orca/OpenOrca",
        """
{"id": "flan.1", "system_prompt": "Be brief.", "question": "Why?", "response": "So."}
""",
        "system: Be brief.\nuser: Why?\nassistant: So.",
        "id",
    ),
    "gsm8k": Format(
        "https://huggingface.co/datasets/openai/gsm8k",
        """
{"question": "Why?", "answer": "So."}
""",
        "user: Why?\nassistant: So.",
    ),
    "ultrachat": Format(
        "https://huggingface.co/datasets/HuggingFaceH4/ultrachat_200k",
        """
{
  "prompt": "Why?",
  "prompt_id": "f0",
  "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
}
""",
        "user: Why?\nassistant: So.",
        "prompt, prompt_id",
    ),
    "lmsys": Format(
        "https://huggingface.co/datasets/lmsys/lmsys-chat-1m",
        """
{
  "model": "vicuna-13b",
  "conversation": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}],
  "turn": 1
}
""",
        "user: Why?\nassistant: So.",
        "model, turn",
    ),
    "flan": Format(
        "https://huggingface.co/datasets/Muennighoff/flan",
        """
{"inputs": "Why?", "targets": "So.", "task": "qa"}
""",
        "user: Why?\nassistant: So.",
        "task",
    ),
    "xlam": Format(
        "https://huggingface.co/datasets/Salesforce/xlam-function-calling-60k",
        r"""
{
  "query": "Why?",
  "answers": "[{\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\"}\"}]",
  "tools": "[{\"name\": \"weather\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}]"
}
""",
        "user: Why?\n"
        'assistant: [{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}]\n'
        "tool weather",
        columns={"prompt": "query", "answer": "answers"},
    ),
    "swift": Format(
        SWIFT,
        """
{"query": "Why?", "response": "So.", "system": "Be brief.", "history": []}
""",
        "system: Be brief.\nuser: Why?\nassistant: So.",
    ),
    "swift-loss": Format(
        SWIFT,
        """
{
  "messages": [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So.", "loss": false}
  ]
}
""",
        "user: Why?\nassistant!: So.",
    ),
    "trl-completion": Format(
        TRL,
        """
{
  "prompt": [{"role": "user", "content": "Why?"}],
  "completion": [{"role": "assistant", "content": "So."}],
  "chat_template_kwargs": {"enable_thinking": false}
}
""",
        'what is under "chat_template_kwargs" cannot be learned',
    ),
    "trl-text-pair": Format(
        TRL,
        """
{"prompt": "Why?", "completion": "So."}
""",
        "user: Why?\nassistant: So.",
    ),
    "trl-unpaired": Format(
        TRL,
        """
{"prompt": "Why?", "completion": "Bad.", "label": false}
""",
        'what is under "label" cannot be learned',
    ),
    "trl-preference": Format(
        TRL,
        """
{"prompt": "Why?", "chosen": "So.", "rejected": "Bad."}
""",
        "(chosen, rejected)",
    ),
    "axolotl": Format(
        AXOLOTL,
        """
{
  "conversations": [
    {"from": "human", "value": "Why?", "train": false},
    {"from": "assistant", "value": "So.", "train": true},
    {"from": "assistant", "value": "Bad.", "train": false}
  ]
}
""",
        "user: Why?\nassistant: So.\nassistant!: Bad.",
    ),
    "axolotl-user": Format(
        AXOLOTL,
        """
{"conversations": [{"from": "human", "value": "Why?", "train": true}]}
""",
        "message 1 (human): train",
    ),
    "axolotl-detail": Format(
        AXOLOTL,
        """
{
  "conversations": [{"from": "assistant", "value": "So.", "train_detail": [{"train": false}]}]
}
""",
        "message 1 (assistant): train_detail",
    ),
    "reasoning": Format(
        "https://huggingface.co/docs/trl/dataset_formats#reasoning",
        """
{
  "messages": [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
  ]
}
""",
        "user: Why?\nassistant: So. {reasoning_content: Hm.}",
    ),
    "anthropic": Format(
        "https://docs.claude.com/en/api/messages",
        """
{
  "messages": [
    {
      "role": "user",
      "content": [{"type": "tool_result", "tool_use_id": "t", "content": "7"}]
    }
  ]
}
""",
        "(tool_result)",
    ),
    "langchain": Format(
        "https://reference.langchain.com/python/langchain-core/messages",
        """
{"messages": [{"role": "human", "content": "Why?"}, {"role": "ai", "content": "So."}]}
""",
        "user: Why?\nassistant: So.",
    ),
    "json": Format(
        "https://huggingface.co/datasets/seankski/tool-parameters-v1-1",
        r"""
{
  "messages": "[{\"role\": \"assistant\", \"content\": \"So.\"}]"
}
""",
        "assistant: So.",
    ),
    "text": Format(
        "https://huggingface.co/datasets/tatsu-lab/alpaca",
        """
{"instruction": "Why?", "input": "", "output": "So.", "text": "Below is ..."}
""",
        "'Below is ...'",
        "instruction, output",
    ),
    "empty": Format(
        TRL,
        """
{"prompt": "Why?", "completion": null}
""",
        "None",
    ),
}
