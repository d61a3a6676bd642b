"""Proves which tokens of a conversation are learned, token by token, by itself and packed, and that
each conversation comes once an epoch on any number of workers."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from contract.errors import InputError
from tests.published import chats
from training.data import vocabulary
from training.data.conversations import (
    ChatWriter,
    Conversation,
    columns_of,
    content_of,
    parse_columns,
)
from training.data.feed import Feed, Packs, best_fit, feed_of
from training.data.rows import TokenStore, store_for
from training.loop.losses import IGNORE
from training.models import pretrained, serving

pytestmark = pytest.mark.usefixtures("cache")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As DeepSeek's: it asks with more than it writes before an answer, and takes out its thoughts.
THINKING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>a\n"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>"
    "{% else %}<|im_start|>u\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n<think>\n{% endif %}"
)
#: As Qwen3's: only the last answer has a place for thoughts.
LAST_DIFFERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As gpt-oss's: it writes words of its own between its request and an answer.
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' "
    "}}<|message|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
#: As Qwen3's: thoughts have a line to themselves, whether there are any or not.
LAID_OUT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "<think>\n{{ parts[0].split('<think>')[-1] if parts[1:] }}\n</think>\n{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS_FROM_THE_FIRST = "{{ '(asks)' if add_generation_prompt }}" + CHATML
ANNOTATED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
WITHOUT_END = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


BOS = {"__type": "AddedToken", "content": "<bos>"}


def members_of(feed: Feed, sequence: int) -> list[int]:
    """Numbers of the conversations of a sequence."""
    assert isinstance(feed.train, Packs)
    return [*map(int, feed.train.members(sequence))]


def tokenizer_folder(
    folder: Path,
    template: str = CHATML,
    *,
    words: Sequence[str] = (),
    trims: bool = True,
    bos: object = BOS,
    special: Sequence[str] = (),
) -> Path:
    """A tokenizer of bytes with the tokens of ChatML, as a model publishes it.

    Args:
        words: of a space and one or two letters, which are tokens too.
        trims: no token begins with the space before its word.
    """
    folder.mkdir(exist_ok=True)
    alphabet = {each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in words:
        at = "\u0120"
        for letter in word[1:]:
            merges.append((at, letter))
            at += letter
            alphabet[at] = len(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trims)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("</s>", "<eos>", "<|im_start|>", "<|im_end|>", "<bos>", *special)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in dict.fromkeys(names)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<eos>",
        "bos_token": bos,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "t")


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant, by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def conversation(messages: object, **more: object) -> Conversation:
    found = content_of({"messages": messages, **more}, "text")
    assert isinstance(found, Conversation)
    return found


def learned_rows(
    folder: Path, messages: object, **more: object
) -> list[tuple[str, list[str], set[str]]]:
    """What is written of a conversation, the stretches of it that are learned, and the tokens that
    end the last of them; row by row."""
    words = vocabulary.read(folder)
    decode = partial(words.tokenizer.decode, skip_special_tokens=False)
    rows: list[tuple[str, list[str], set[str]]] = []
    for encoded in ChatWriter(words).encode([conversation(messages, **more)]):
        assert encoded.is_further == bool(rows)
        stretches = groupby(zip(encoded.ids, encoded.learned, strict=True), key=itemgetter(1))
        found = [[token for token, _ in each] for is_learned, each in stretches if is_learned]
        stops = {decode([stop]) for stop in encoded.stops}
        rows.append((decode(encoded.ids), [*map(decode, found)], stops))
    return rows


def learned(folder: Path, messages: object, **more: object) -> tuple[str, list[str]]:
    """What is written of a conversation in one row, and the stretches that are learned."""
    ((text, found, _),) = learned_rows(folder, messages, **more)
    return text, found


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses .*: roles must alternate"),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            r"leaves out or repeats content of message 1",
        ),
        (
            "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}",
            r"leaves out or repeats content of message 2",
        ),
        (
            CHATML.replace("{{ m.content }}", "{{ m.content }}" * 2),
            r"repeats content of message 2",
        ),
        # "there" stands before the answer.
        ("{% for m in messages %}there {{ m.content | upper }}{% endfor %}", r"changes .* answer"),
        (
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
            "mixes earlier messages with an answer",
        ),
    ],
)
def test_a_template_that_cannot_be_learned_from_is_refused(
    template: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        learned(tokenizer_folder(tmp_path / "t", template), turns("Hi", "there"))


@pytest.mark.parametrize("each", chats.FORMATS.values(), ids=chats.FORMATS)
def test_each_published_format_is_read_whole_or_refused_by_name(each: chats.Format) -> None:
    unused: set[str] = set()
    try:
        found = chats.shown(content_of(json.loads(each.row), "text", each.columns, unused=unused))
        assert ", ".join(sorted(unused)) == each.unused
    except ValueError as error:
        found = f"refused: {error}"
    assert found == each.read or (found.startswith("refused: ") and each.read in found)


NOT_LEARNED = ("weight", "train", "trainable", "train_on_turn")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(
            ["label", *NOT_LEARNED, "mask", "loss_mask", "kto_tag"],
            [False, "false", 0, "0", 0.0],
        ),
    ],
)
def test_what_other_trainers_do_not_learn_is_not_learned(
    name: str, value: object, tokenizer: Path
) -> None:
    """In the words of TRL (KTO), axolotl and others, as JSON and tables write them."""
    row = {"prompt": "Why?", "completion": "Bad.", name: value}
    with pytest.raises(ValueError, match=f'under "{name}" cannot be learned'):
        content_of(row, "text")
    assert isinstance(content_of({**row, name: None}, "text"), Conversation)
    first, answer, *rest = turns("Why?", "Bad.", "Why?", "So.")
    marked = [first, {**answer, name: value}, *rest]
    if name in NOT_LEARNED:
        assert isinstance(content_of({**row, name: "1"}, "text"), Conversation)
        assert learned(tokenizer, marked)[1] == ["So.<|im_end|>"]
        with pytest.raises(ValueError, match=rf"its {name} is 0\.5: it can be 0 or 1"):
            conversation([first, {**answer, name: 0.5}])
    elif name == "label":
        # Beside other columns a number is a class.
        assert isinstance(content_of({**row, name: 0, "source": "x"}, "text"), Conversation)
    else:
        with pytest.raises(ValueError, match=f"{name} is not known here"):
            conversation(marked)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, '"text".* body: --columns prompt=NAME'),
        ({"text": "half \ud83d"}, "surrogates not allowed"),
        ({"prompt": "half \ud83d", "completion": "y"}, "surrogates not allowed"),
        ({"prompt": 1, "completion": "y"}, r"message 1 \(user\): .*\(int"),
        ({"messages": "Hi"}, "messages"),
        ({"text": 5}, "text"),
    ],
)
def test_a_row_that_is_none_of_them_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        content_of(row, "text")


def test_columns_are_given_by_what_they_hold() -> None:
    assert parse_columns("prompt=a,answer=b c") == {"prompt": "a", "answer": "b c"}
    for text in ("prompt", "question=a", "prompt="):
        with pytest.raises(InputError, match=r"--columns is .*write prompt=COLUMN,answer=COLUMN"):
            parse_columns(text)
    assert columns_of(["a", "system"], "text", {"messages": "a"}) == {
        "messages": "a",
        "system": "system",
    }
    assert columns_of(["a"], "text", {"prompt": "a", "answer": "b"}) == {}


#: A call as OpenAI has it.
CALLED = json.loads("""
{"messages": [
  {"role": "user", "content": "Where?"},
  {"role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}
  ]},
  {"role": "tool", "content": "7"},
  {"role": "assistant", "content": "7 it is.", "reasoning_content": "Done."}
], "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]}
""")
#: Writes thoughts and calls as Qwen3's does, and their arguments as DeepSeek's: only as text, and
#: a call only where there are no words.
CALLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is none %}{% for t in m.tool_calls %}"
    "{{ t.function.name + ' ' + t.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


UNMARKED = CALLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [CALLS, UNMARKED], ids=["annotated", "plain"])
def test_calls_and_thoughts_are_learned_in_the_form_that_the_template_takes(
    template: str, tmp_path: Path
) -> None:
    text, found = learned(tokenizer_folder(tmp_path / "t", template), **CALLED)
    assert found == [
        '<think>Hm.</think>weather {"city": "Oslo"}<|im_end|>',
        "<think>Done.</think>7 it is.<|im_end|>",
    ]
    assert '"parameters"' in text.partition("<|im_end|>")[0]
    messages = [{**each, "weight": number // 2} for number, each in enumerate(CALLED["messages"])]
    assert learned(tmp_path / "t", messages, tools=CALLED["tools"])[1] == found[1:]


def test_null_as_json_is_nothing() -> None:
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "null"}]}
    messages = [*turns("Hi"), called, {**turns("", "Yes")[1], "tool_calls": "null"}]
    found = conversation(messages, tools="null")
    assert found == conversation(
        [*turns("Hi"), {**called, "tool_calls": [{"name": "f"}]}, *turns("", "Yes")[1:]]
    )


#: Two turns with a call, its result and an answer, each with thoughts.
AGENT: list[dict[str, Any]] = [
    message
    for turn in ("1", "2")
    for message in (
        {"role": "user", "content": f"Q{turn}"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"T{turn}",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": turn}}}],
        },
        {"role": "tool", "content": turn},
        {"role": "assistant", "content": f"A{turn}", "reasoning_content": f"U{turn}"},
    )
]
_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n"
)
_REST = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name + c.function.arguments.x }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
#: As GLM-4.5's: in place of the thoughts of an earlier turn stand empty ones.
EMPTY = (
    f"{_LAST}{{% if m.role == 'assistant' %}}<think>"
    "{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>{% endif %}"
    f"{_REST}{{% endif %}}"
)
#: As Qwen3.5's: it asks with the begin of thoughts, which earlier turns have none of.
NONE = (
    f"{_LAST}{{% if m.role == 'assistant' and loop.index0 > ns.last %}}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}"
    f"{_REST}<think>{{% endif %}}"
)


#: As huggingface/trl#5988: the block ends before the token that ends the turn.
BLOCK_WITHOUT_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
#: As GLM's: a turn ends where the next begins.
NEXT_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_IN_WORDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} END\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


_TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ASKS_ALWAYS = _TURN + "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
NEVER_ASKS = _TURN + "{{ m.content }}<|im_end|>\n{% endfor %}"
ENDS_TEXTS = (
    _TURN + "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
_ASKS = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#: As EXAONE's: of the content, only what follows the thoughts, but in the last turn.
LAST_ONLY = _TURN + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}" + _ASKS
#: As Gemma 4's: thoughts are written beside calls only.
CALLS_ONLY = _TURN + (
    "{% if m.reasoning_content and m.tool_calls %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}" + _ASKS
)
#: As TRL's for training, with an earlier turn as Qwen3's.
MARKED_LAST = _TURN + (
    "{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
#: As gpt-oss's: thoughts end as an earlier answer does, and the last answer in another way.
HARMONY = (
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}<|im_start|>assistant"
    "<|channel|>{{ m.reasoning_content }}<|im_end|>{% endif %}<|im_start|>{{ m.role }}<|message|>"
    "{{ m.content }}{{ eos_token if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


#: The words of the roles are what is said, too.
SAID = turns("user", "assistant, ü!", "user again?", "user")
WHY = turns("Why?", "So.", "Sure?", "Yes.")


def repeated(answer: str) -> list[dict[str, str]]:
    """An answer whose words are in the questions too."""
    return turns(f"Is it {answer}?", answer, f"Again: {answer}", answer)


#: A template, a conversation, and what of it is learned.
LEARNED: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "chatml": (CHATML, SAID, ["assistant, ü!<|im_end|>", "user<|im_end|>"]),
    "annotated": (ANNOTATED, SAID, ["assistant, ü!<|im_end|>", "user<|im_end|>"]),
    "thinking": (THINKING, SAID, ["assistant, ü!<|im_end|>", "user<|im_end|>"]),
    # Nothing ends an answer: the last one gets the end of text.
    "without-end": (WITHOUT_END, SAID, ["assistant, ü!", "user<eos>"]),
    "plain": ("", SAID, ["assistant, ü!<eos>", "user<eos>"]),
    # "<" is the begin of "<think>", with which the template asks.
    "asks-for-thoughts": (THINKING, turns("And?", "<b>Bold."), ["<b>Bold.<|im_end|>"]),
    "words-before-it": (CHANNELS, repeated("a"), ["<|channel|>final<|message|>a<|im_end|>"] * 2),
    "place-for-thoughts": (
        LAID_OUT,
        repeated("think"),
        ["<think>\n\n</think>\nthink<|im_end|>"] * 2,
    ),
    "thoughts": (
        LAID_OUT,
        repeated("<think>So.</think>So."),
        ["<think>\nSo.\n</think>\nSo.<|im_end|>"] * 2,
    ),
    # A model gets them with the request.
    "begins-with-the-request": (THINKING, repeated("<think>\nSo."), ["So.<|im_end|>"] * 2),
    # Of a request that is written in another way, nothing can be left out.
    "asks-from-the-first": (
        ASKS_FROM_THE_FIRST,
        repeated("So."),
        ["<|im_start|>assistant\nSo.<|im_end|>"] * 2,
    ),
    "block-without-end": (BLOCK_WITHOUT_END, WHY, ["So.<|im_end|>", "Yes.<|im_end|>"]),
    "next-turn": (NEXT_TURN, WHY, ["So.<|im_start|>", "Yes.<eos>"]),
    # As Command A's and Phi-3's: what follows each text is no part of an answer.
    "asks-always": (ASKS_ALWAYS, WHY, ["So.<|im_end|>", "Yes.<|im_end|>"]),
    "ends-texts": (ENDS_TEXTS, WHY, ["So.<|im_end|>", "Yes.<|im_end|>"]),
    "never-asks": (
        NEVER_ASKS,
        WHY,
        [f"<|im_start|>assistant\n{each}<|im_end|>" for each in ("So.", "Yes.")],
    ),
    "end-in-words": (END_IN_WORDS, WHY, ["So. END", "Yes. END<eos>"]),
}


@pytest.mark.parametrize("name", LEARNED)
def test_only_answers_and_what_ends_them_are_learned(name: str, tmp_path: Path) -> None:
    template, messages, expected = LEARNED[name]
    text, found = learned(tokenizer_folder(tmp_path / "t", template), messages)
    assert found == expected
    assert messages[-2]["content"] in text
    writer = ChatWriter(vocabulary.read(tmp_path / "t"))
    assert [*writer.encode([conversation(messages)])]
    assert [*filter(None, writer.counts.values())] == [1] * (template is NEVER_ASKS)


THOUGHTS = turns("What?", "<think>Hm.</think>That.", "And?", "<think>Oh.</think>This.")
KEYS = [{**each, "reasoning_content": f"T{i}"} if i % 2 else each for i, each in enumerate(WHY)]
#: A template, a conversation whose earlier answers it writes in another way once others follow,
#: what is learned in each row, and what ends the last.
SPLIT: dict[str, tuple[str, list[dict[str, Any]], list[list[str]], str]] = {
    "last-differs": (
        LAST_DIFFERS,
        SAID,
        [["<think></think>assistant, ü!<|im_end|>"], ["<think></think>user<|im_end|>"]],
        "<|im_end|>",
    ),
    "thoughts-between-calls": (
        EMPTY,
        AGENT,
        [
            [
                f"<think>T{turn}</think><tool_call>f{turn}</tool_call><|im_end|>",
                f"<think>U{turn}</think>A{turn}<|im_end|>",
            ]
            for turn in (1, 2)
        ],
        "<|im_end|>",
    ),
    "no-thoughts-between-calls": (
        NONE,
        AGENT,
        [
            [
                f"T{turn}</think><tool_call>f{turn}</tool_call><|im_end|>",
                f"U{turn}</think>A{turn}<|im_end|>",
            ]
            for turn in (1, 2)
        ],
        "<|im_end|>",
    ),
    "thoughts-of-the-last": (
        LAST_ONLY,
        THOUGHTS,
        [["<think>Hm.</think>That.<|im_end|>"], ["<think>Oh.</think>This.<|im_end|>"]],
        "<|im_end|>",
    ),
    "another-end": (
        HARMONY,
        KEYS,
        [
            ["<|channel|>T1<|im_end|><|im_start|>assistant<|message|>So.<eos>"],
            ["<|channel|>T3<|im_end|><|im_start|>assistant<|message|>Yes.<eos>"],
        ],
        "<eos>",
    ),
    "two-in-a-row": (
        LAST_DIFFERS,
        [*turns("Why?", "So."), turns("", "Sure.")[1]],
        [["<think></think>So.<|im_end|>"], ["<think></think>Sure.<|im_end|>"]],
        "<|im_end|>",
    ),
    "marked": (
        MARKED_LAST,
        KEYS,
        [["<think>T1</think>So.<|im_end|>"], ["<think>T3</think>Yes.<|im_end|>"]],
        "<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_an_answer_that_is_written_otherwise_once_others_follow_has_a_row(
    name: str, tmp_path: Path
) -> None:
    template, messages, expected, end = SPLIT[name]
    rows = learned_rows(tokenizer_folder(tmp_path / "t", template), messages)
    assert [found for _, found, _ in rows] == expected
    assert {stop for _, _, stops in rows for stop in stops} == {end}


@pytest.mark.parametrize(
    ("template", "messages", "missing"),
    [
        (THINKING, THOUGHTS[:2], "thoughts of message 2"),
        (LAST_ONLY, KEYS[:2], "reasoning_content of message 2"),
        (CALLS_ONLY, KEYS[:2], "reasoning_content of message 2"),
        # A request that never comes is no answer, and an argument is a part of its call.
        (EMPTY.replace(" + c.function.arguments.x", ""), AGENT, "tool_calls of message 2"),
        (CHATML + "{{ tools | length if tools }}", WHY, "tools"),
    ],
)
def test_what_the_last_answer_loses_is_refused(
    template: str, messages: list[dict[str, Any]], missing: str, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path / "t", template)
    with pytest.raises(InputError, match=f"leaves out or repeats {missing}"):
        learned_rows(folder, messages, tools=[{"name": "f"}] if missing == "tools" else [])


def test_rows_of_a_conversation_are_held_out_together_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    ignored = [{**each, "weight": 0} if i == 1 else each for i, each in enumerate(KEYS)]
    rows = [KEYS, KEYS, KEYS, ignored]
    file.write_text("\n".join(json.dumps({"messages": each}) for each in rows))
    store = store_for(str(file), tokenizer_folder(tmp_path / "t", MARKED_LAST), held_out_every=2)
    assert store.info.num_documents == 4
    assert store.info.num_train_conversations == 4
    assert store.info.num_held_out_conversations == 3
    split, unseen = store.info.notes
    assert split.startswith("conversations in several rows")
    assert split.endswith(": 3")
    assert unseen.startswith("thoughts of answers that are not learned")
    assert unseen.endswith(": 1")


def test_thoughts_are_written_under_the_key_that_the_template_takes(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", MARKED_LAST)
    messages = [*turns("Why?"), {"role": "assistant", "content": "So.", "thinking": "Hm."}]
    assert learned(folder, messages)[1] == ["<think>Hm.</think>So.<|im_end|>"]
    # Some servers write them twice.
    messages[1]["reasoning"] = "Hm."
    assert learned(folder, messages)[1] == ["<think>Hm.</think>So.<|im_end|>"]


#: Templates whose blocks hold the whole turn, in the shapes of Hugging Face's and TRL's own
#: (huggingface/trl, trl/chat_templates/*_training.jinja): after a space, with thoughts, with calls.
MARKED = {
    "annotated": ANNOTATED,
    "calls": CALLS.replace("content is none", "tool_calls").replace(
        "arguments }}", "arguments | tojson }}"
    ),
    "after-a-space": (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %} {% generation %}"
        "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %} {{ m.content }}\n{% endif %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("template", MARKED.values(), ids=MARKED)
def test_what_a_template_marks_is_learned_as_transformers_learns_it(
    template: str, trims: bool, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = tokenizer_folder(tmp_path / "t", template, words=[" A", " So"], trims=trims)
    messages = chats.said("user: A?", "assistant: A, ü. So", "user: So?", "assistant: So")
    words = vocabulary.read(folder)
    (encoded,) = ChatWriter(words).encode([conversation(messages)])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids == theirs["input_ids"]
    assert [*map(int, encoded.learned)] == theirs["assistant_masks"]
    assert any(encoded.learned)


@pytest.mark.parametrize(
    ("bos", "puts", "begins"),
    [("<bos>", False, True), ("<eos>", False, False), ("<eos>", True, True), (None, False, False)],
    ids=["gemma", "gpt2", "opt", "qwen"],
)
def test_without_a_template_a_conversation_begins_as_a_text_does(
    bos: str | None, puts: bool, begins: bool, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path / "t", "", bos=bos)
    if puts:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(str(bos), tokenizer.token_to_id(str(bos)))]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    assert learned(folder, WHY)[0].startswith(f"{bos}User:" if begins else "User:")


# --- nothing is dropped in silence ----------------------------------------------------------------
ASKED = '"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."'
#: What is planted in a row, and the name that is wanted.
PLANTS = {
    "column": (ASKED + '}], "planted": 1', "planted"),
    "key": (ASKED + ', "planted": "x"}]', "planted"),
    "history": (ASKED + '}], "history": [["a", "b"]]', '"history"'),
    "tools": (ASKED + '}], "tools": [{"name": "weather"}]', "tools"),
    "calls": (ASKED + ', "tool_calls": [{"name": "weather"}]}]', "tool_calls"),
    "thoughts": (ASKED + ', "thinking": "Hm."}]', "thinking"),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_in_a_row_is_named(plant: str, kind: str, tmp_path: Path) -> None:
    """In one row of forty, a thing of which neither reader nor template knows."""
    text, name = PLANTS[plant]
    rows: list[dict[str, Any]] = [json.loads("{" + ASKED + "}]}") for _ in range(40)]
    rows[7] = json.loads("{" + text + "}")
    columns = rows[7].keys()
    cells = [{key: json.dumps(value) for key, value in row.items()} for row in rows]
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        schema = pa.schema(dict.fromkeys(columns, pa.string()))
        pq.write_table(pa.Table.from_pylist(cells, schema), file)
    (tmp_path / "planted.md").write_text("about it")
    tokenizer = tokenizer_folder(tmp_path.with_name(f"{tmp_path.name}-t"))
    try:
        found = "\n".join(store_for(str(tmp_path), tokenizer, held_out_every=2).info.notes)
        assert "files that are not used: planted.md" in found
    except InputError as error:
        found = str(error)
    found = found.replace("planted.md", "")
    assert name in found
    assert "columns that" in found or "1 of 40 rows" in found


def test_bad_rows_are_all_counted_shown_with_their_places_or_skipped(
    tmp_path: Path, tokenizer: Path
) -> None:
    row = json.dumps({"messages": chats.said("user: Why?", "assistant: So.")})
    lines = [row] * 120
    for number in (7, 20, 30, 40, 50, 60):
        lines[number] = json.dumps(
            {"messages": [*chats.said("user: Why?"), {"role": "assistant", "content": None}]}
        )
    lines[70] = row.replace("user", "narrator")  # only the template tells
    lines[80] = json.dumps({"messages": []})
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        store_for(str(file), tokenizer)
    first, *shown = str(caught.value).splitlines()
    assert first.startswith("7 of 120 rows")
    assert len(shown) == 5
    assert f"{file}, line 8" in shown[0]
    info = store_for(str(file), tokenizer, skips_bad=True).info
    assert info.num_documents == 112
    assert len(info.notes) == 2


# --- stores ---------------------------------------------------------------------------------------
def opened(folder: Path, name: str = "chats.jsonl") -> TokenStore:
    """Sixty conversations of different lengths, each with its number in it."""
    rows = []
    for i in range(60):
        messages = turns(f"What is {i}?", "N" * (i % 23) + f"{i}.", "Sure?", f"Yes, {i}")
        rows.append({"messages": messages[: 2 + 2 * (i % 2)], "id": i})
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return store_for(str(folder / name), tokenizer_folder(folder / "t"), held_out_every=10)


def feed(store: TokenStore, *, seq_len: int = 160, global_batch: int = 4, **options: Any) -> Feed:
    return feed_of(
        store, **{"seq_len": seq_len, "global_batch": global_batch, "seed": 1, **options}
    )


def test_a_table_and_lines_give_the_same_store_of_whole_conversations(tmp_path: Path) -> None:
    one, other = (opened(tmp_path, name) for name in ("chats.jsonl", "chats.parquet"))
    part, same = (each.conversations(held_out=False) for each in (one, other))
    assert (part.tokens == same.tokens).all()
    assert (part.learned == same.learned).all()
    end = vocabulary.read(tmp_path / "t").tokenizer
    assert one.info.stops == (end.token_to_id("<|im_end|>"),)
    assert one.info.end_of_text == end.token_to_id("<eos>")  # by the model's own configuration
    first = part.tokens[: part.starts[1]].tolist()
    assert end.decode(first, skip_special_tokens=False).startswith("<|im_start|>user\nWhat is 0?")


def test_packed_conversations_come_once_an_epoch_and_see_only_themselves(tmp_path: Path) -> None:
    """They are learned token by token, however the workers change."""
    store = opened(tmp_path)
    part = store.conversations(held_out=False)
    fed = feed(store)
    seen: Counter[int] = Counter()
    for step in range(2 * fed.steps_per_epoch):
        world_size = (2, 1, 4)[step % 3]
        batches = [fed.step(step, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sum(batch.num_labels for batch in batches) == fed.num_labels(step)
        for number, sequence in enumerate(fed.sequences(step)):
            batch, row = batches[number % world_size], number // world_size
            assert batch.positions is not None
            assert batch.num_labels == (batch.labels != IGNORE).sum()
            at = 0
            for member in members_of(fed, int(sequence)):
                seen[member] += 1
                own = slice(part.starts[member], part.starts[member + 1])
                size = own.stop - own.start
                assert (batch.tokens[row, at : at + size] == part.tokens[own]).all()
                assert (batch.positions[row, at : at + size] == np.arange(size)[: 160 - at]).all()
                # Position p predicts token p + 1: of the answers, and of nothing else.
                ids = part.tokens[own].astype(np.int64)
                expected = np.where(part.learned[own], ids, IGNORE)[1:]
                assert (batch.labels[row, at : at + size - 1] == expected).all()
                at += size
                # The last token of one is never asked for the first of the next.
                assert (batch.labels[row, at - 1 : at] == IGNORE).all()
            assert (batch.labels[row, max(0, at - 1) :] == IGNORE).all()
    assert seen == Counter([*range(54)] * 2)
    drawn = [fed.sequences(step) for step in (0, fed.steps_per_epoch)]
    drawn.append(feed(store, seed=2).sequences(0))
    assert len({tuple(each) for each in drawn}) == 3
    # Also where its first token is to be learned.
    whole = replace(part, learned=np.ones_like(part.learned))
    packs = Packs(whole, seq_len=160, padding=0, isolates=True)
    sequences = np.arange(packs.num_sequences)
    assert packs.batch(sequences).num_labels == packs.num_labels(sequences)
    assert packs.num_labels(sequences) == len(part.tokens) - len(part.starts) + 1


def test_what_is_too_long_loses_its_end_and_what_has_no_answer_left_is_out(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fed = feed(store, seq_len=48)
    lengths = np.diff(store.conversations(held_out=False).starts)
    cut = int((lengths > 49).sum()) + int(
        (np.diff(store.conversations(held_out=True).starts) > 49).sum()
    )
    unused = "columns that are not used: id"
    assert fed.notes == [unused, f"cut off at --seq-len 48: {cut} of 60 conversations"]
    # Just enough for one token of the answers to questions of one figure.
    (_, note) = feed(store, seq_len=29).notes
    assert note.endswith("; left out, because no answer is left: 50")
    with pytest.raises(InputError, match=r"54 conversations in .* fewer than the 64 of one step"):
        feed(store, global_batch=64)


def test_without_packing_each_conversation_has_a_sequence_without_positions(
    tmp_path: Path,
) -> None:
    fed = feed(opened(tmp_path), packs=False)
    assert not fed.isolates
    assert fed.steps_per_epoch == -(-54 // 4)
    batch = fed.step(0, rank=0, world_size=1)
    assert batch.positions is None
    assert [len(members_of(fed, each)) for each in fed.sequences(0)] == [1, 1, 1, 1]
    assert batch.num_labels == (batch.labels != IGNORE).sum() == fed.num_labels(0)


def test_mixed_rows_and_sets_without_answers_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "Why?", "completion": "So."}\n{"text": "Once."}\n')
    with pytest.raises(InputError, match="some lines or rows hold text, and others conversations"):
        store_for(str(mixed), tokenizer)
    silent = tmp_path / "silent.jsonl"
    silent.write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n' * 30)
    with pytest.raises(InputError, match="has 0 conversations with an answer"):
        store_for(str(silent), tokenizer)


def test_another_template_is_another_store_and_is_read_from_a_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text(CHATML.replace("<|im_end|>", "</s>"))
    other = store_for(
        str(tmp_path / "chats.jsonl"), tmp_path / "t", held_out_every=10, template=str(template)
    )
    assert other.info.key != store.info.key
    assert other.info.stops != store.info.stops
    with pytest.raises(InputError, match=r"--chat-template .*none.jinja cannot be read"):
        vocabulary.read(tmp_path / "t", template=str(tmp_path / "none.jinja"))


def test_the_end_of_text_is_what_the_models_files_say(tokenizer: Path) -> None:
    words = vocabulary.read(tokenizer)
    assert words.tokenizer.id_to_token(words.end_of_text) == "<eos>"
    assert words.named["bos_token"] == "<bos>"
    (tokenizer / "tokenizer_config.json").unlink()
    assert vocabulary.read(tokenizer).end_of_text == words.tokenizer.token_to_id(
        "</s>"
    )  # by its name
    (tokenizer / "config.json").write_text('{"eos_token_id": [5, 259]}')
    assert vocabulary.read(tokenizer).end_of_text == 259
    assert vocabulary.read(pretrained.tokenizer_file("bytes", "", runs="")).end_of_text == 256


def test_what_serves_a_model_keeps_its_settings_and_makes_no_template_up(tokenizer: Path) -> None:
    """``test_chat_runs`` has transformers serve one."""
    given = {"eos_token_id": 5, "temperature": 0.6, "_from_model_config": True}
    (tokenizer / "generation_config.json").write_text(json.dumps(given))
    files = serving.files(tokenizer / "tokenizer.json", template="", stops=[258])
    assert serving.stops_of(files["generation_config.json"]) == [258, 5]
    generation = json.loads(files["generation_config.json"])
    assert generation["temperature"] == 0.6
    assert "_from_model_config" not in generation
    config = json.loads(files["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    # A run on text with a tokenizer that has no template makes none up.
    plain = pretrained.tokenizer_file("bytes", "", runs="")
    files = serving.files(plain, template="", stops=[])
    assert sorted(files) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 256


def test_packing_is_tight_and_within_its_limit() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    packs = best_fit(lengths, 1024)
    filled = np.bincount(packs, weights=lengths)
    assert filled.max() <= 1024
    assert len(filled) <= 1.01 * -(-lengths.sum() // 1024)
    assert best_fit([1024, 1024, 1], 1024).tolist() == [0, 1, 2]
