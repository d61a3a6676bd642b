"""Conversations as tokens: rows through a model's chat template, with only the answers learned.

What a row holds reaches the template, is named as unused, or the row is refused.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, NamedTuple

from contract.errors import InputError
from training.data.vocabulary import Vocabulary

MESSAGES: Final = ("messages", "conversations", "conversation", "contents")
#: Columns of a question, of what belongs to it, and of the answer.
PAIRS: Final = (
    ("prompt", "", "completion"),
    ("prompt", "", "response"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("instruction", "input", "response"),
    ("question", "context", "answer"),
    ("question", "context", "response"),
    ("query", "", "response"),
    ("inputs", "", "targets"),
    ("input", "", "output"),
)
#: Default columns by what they hold: the first of these that a table has.
_WAYS: Final = (
    *({"messages": name} for name in MESSAGES),
    *(dict(zip(("prompt", "context", "answer"), pair, strict=True)) for pair in PAIRS),
)
#: Columns of what belongs to a conversation, too.
_EXTRAS: Final = {
    **dict.fromkeys(("systemInstruction", "system_prompt", "system"), "system"),
    **dict.fromkeys(("functions", "tools"), "tools"),
}
#: What ``--columns`` can name.
PARTS: Final = ("text", "messages", "prompt", "context", "answer", "system", "tools")
#: Columns and keys that change what is to be learned, and are not known here.
_REFUSED: Final = {
    *("image", "images", "video", "videos", "audio", "audios", "refusal", "history"),
    *("chat_template_kwargs", "enable_thinking", "train_detail", "kto_tag", "desirable"),
    *("mask", "masked", "mask_loss", "loss_mask", "loss_masks", "loss_scale", "loss_weight"),
    *("ignore_loss", "train_mask", "sample_weight", "assistant_masks", "completion_mask"),
}
#: Weights of a message or of a row: 0 or false, and the answer is not learned.
_WEIGHTS: Final = ("weight", "train", "trainable", "train_on_turn")
#: The same of a message only; a table may have columns of these names that mean something else.
_MESSAGE_WEIGHTS: Final = (*_WEIGHTS, "training", "loss")
#: What tables and JSON write for true and false.
_FLAGS: Final = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
#: Columns to look at, besides those that hold a conversation.
CHECKED: Final = _REFUSED | {*_WEIGHTS, "label"}
_ANSWER: Final = "assistant"
#: What the authors of messages are called elsewhere, in lower case.
_ROLES: Final = {
    **{name: name for name in ("system", "user", _ANSWER, "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai"), _ANSWER),
    "developer": "system",
    **dict.fromkeys(("observation", "function", "tool_response", "function_response"), "tool"),
}
#: The content of such a message is calls of tools, as JSON.
_CALLS: Final = ("function_call", "tool_call", "tool_calls")
_CONTENT: Final = ("content", "value", "parts", "text")
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
#: The begin and end of thoughts within a content.
_MARKS: Final = re.compile("(</?think>)")
#: Keys by which templates compare messages.
_IDS: Final = {"id", "tool_call_id"}
#: Characters for private use: placeholders for what a template must write.
_SIGNS: Final = range(0xF0001, 0x110000)
_SIGN: Final = "\U000f0000"
_LEFT_OUT: Final = (
    "the chat template leaves out or repeats {}: give --chat-template one that writes it, or take "
    "it out of the data"
)
_CHANGES: Final = (
    "the chat template mixes earlier messages with an answer: what is learned cannot be told. Give "
    "--chat-template one that does not, or that marks answers with {% generation %}"
)
_SPLIT: Final = "conversations in several rows, as the chat template changes earlier answers"
_UNSEEN: Final = "thoughts of answers that are not learned, left out by the chat template"
_UNASKED: Final = "conversations with headers learned: the chat template has no generation prompt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn."""

    role: str
    """``system``, ``user``, ``assistant``, ``tool``, or what else the template knows."""
    content: str
    calls: tuple[Mapping[str, Any], ...] = ()
    """Calls of tools in OpenAI's form, their arguments an object."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the message, such as the model's thoughts."""
    is_learned: bool = True

    def __post_init__(self) -> None:
        check_characters(self.content)

    @property
    def thoughts(self) -> list[str]:
        """Keys of the model's thoughts."""
        return [key for key in _THOUGHTS if key in self.more and self.role == _ANSWER]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages and tools of one row."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    place: str = field(default="", compare=False)
    """File and row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A conversation as tokens."""

    ids: list[int]
    learned: list[bool]
    """True for tokens of answers and of their ends."""
    stops: frozenset[int]
    """Id of the token that ends the last answer; that of an earlier one may stand inside others."""
    is_further: bool = False
    """It is of the same conversation as the one before."""


#: Begin and end of what is learned of an answer, in characters of the text; its end may follow.
_Span = tuple[int, int]


def check_characters(text: str) -> None:
    """Raise ValueError if JSON wrote a half of a character in it, which no tokenizer takes."""
    text.encode()


def parse_columns(text: str) -> dict[str, str]:
    """``--columns``: names of columns by what they hold.

    Raises:
        InputError: it is not written so, or they hold nothing to learn.
    """
    found = dict(each.partition("=")[::2] for each in text.split(",") if text)
    is_whole = {"text", "messages"} & found.keys() or {"prompt", "answer"} <= found.keys()
    if found and (not is_whole or not all(found.values()) or not found.keys() <= {*PARTS}):
        raise InputError(
            f"--columns is {text!r}: write prompt=COLUMN,answer=COLUMN or messages=COLUMN, of "
            f"{', '.join(PARTS)}"
        )
    return found


def columns_of(
    names: Sequence[str], field: str, mapping: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The columns of a table by what they hold (``PARTS``); none if it holds nothing to learn.

    Args:
        field: value of ``--text-field``.
        mapping: value of ``--columns``, parsed.
    """
    asked = {"messages" if field in MESSAGES else "text": field}
    for way in [mapping] if mapping else [asked, *(_WAYS if field == "text" else ())]:
        if all(name in names for part, name in way.items() if part != "context" or mapping):
            extras = {part: name for name, part in _EXTRAS.items() if name in names}
            return {part: name for part, name in {**extras, **way}.items() if name in names}
    return {}


def content_of(
    row: Mapping[str, Any],
    field: str,
    mapping: Mapping[str, str] | None = None,
    *,
    unused: set[str] | None = None,
) -> str | Conversation | None:
    """The document or the conversation of a row; None where it is empty.

    Args:
        row: its columns, or some of them, by name.
        field: value of ``--text-field``.
        mapping: value of ``--columns``, parsed.
        unused: takes the names of columns that are not used.

    Raises:
        ValueError: it has none, or what cannot be used; the message says what is wrong.
    """
    columns = columns_of([*row], field, mapping)
    if not columns and {"chosen", "rejected"} <= row.keys():
        raise ValueError(
            "it holds a preference (chosen, rejected), and answers are learned one by one: "
            "--columns messages=chosen, or prompt=prompt,answer=chosen, learns those chosen"
        )
    if not columns:
        wanted = f"the columns of --columns {mapping}" if mapping else f'text under "{field}"'
        raise ValueError(
            f"no {wanted}, and neither messages nor a pair of texts, but {', '.join(map(str, row))}"
            ": --columns prompt=NAME,answer=NAME tells what they hold"
        )
    text = (row[columns["text"]] or "") if "text" in columns else None
    used = {columns["text"]} if isinstance(text, str) else {*columns.values()}
    if unused is not None:
        unused.update(name for name in row if name not in used and row[name] not in (None, "", []))
    if isinstance(text, str):
        check_characters(text)
        return text if text.strip() else None
    # Of the known ones, 1 and true change nothing.
    for name in sorted(CHECKED & row.keys() - used - _classes(row)):
        is_known = name == "label" or name in _WEIGHTS
        if _flag(row[name]) is False if is_known else row[name] not in (None, "", [], {}):
            raise ValueError(f'what is under "{name}" cannot be learned')
    return _conversation({part: row[name] for part, name in columns.items()})


def _classes(row: Mapping[str, Any]) -> set[str]:
    """``label`` as the number of a class, beside other columns than those of TRL's KTO."""
    is_kto = {*row} == {"prompt", "completion", "label"}
    return {"label"} if str(row.get("label"))[:1].isdecimal() and not is_kto else set()


def _flag(value: object) -> bool | None:
    """A truth as tables write it; None if it is something else."""
    return _FLAGS.get(str(value).strip().lower().removesuffix(".0"))


def _conversation(parts: Mapping[str, Any]) -> Conversation | None:
    turns: list[Any] = []
    if "prompt" in parts:
        asked, answer = parts["prompt"], parts["answer"]
        if context := _text(parts.get("context") or ""):
            asked = f"{_text(asked or '')}\n\n{context}".strip()
        for role, each in (("user", asked), (_ANSWER, answer)):
            if not each or (isinstance(each, str) and not each.strip()):
                return None
            turns += each if isinstance(each, list) else [{"role": role, "content": each}]
    else:
        turns += _list(parts, "messages" if "messages" in parts else "text")
    if not turns:
        return None
    if system := _text(parts.get("system") or ""):
        turns.insert(0, {"role": "system", "content": system})
    messages = []
    for number, turn in enumerate(turns, start=1):
        try:
            messages.append(_message(turn))
        except ValueError as error:
            author = isinstance(turn, Mapping) and (turn.get("role") or turn.get("from"))
            named = f" ({author})" if author else ""
            raise ValueError(f"message {number}{named}: {error}") from None
    tools = tuple(_function(each) for each in _list(parts, "tools"))
    return Conversation(messages=tuple(messages), tools=tools)


def _list(parts: Mapping[str, Any], name: str) -> list[Any]:
    value = _json(parts.get(name) or [], name) or []  # null as JSON
    if not isinstance(value, list):
        raise ValueError(f"what is under {name} is no list{' and no text' * (name == 'text')}")
    return value


def _json(value: object, name: str) -> Any:
    """A value that some tables have as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError(f"what is under {name} is text, and no JSON ({value!r:.50})") from None


def _message(value: object) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError("is no object with a role and a content")
    more = {key: each for key, each in value.items() if each not in (None, "", [], {})}
    role = more.pop("role", None) or more.pop("from", None)
    if not isinstance(role, str):
        raise ValueError("has no role")
    name = role.strip().lower()
    role = _ANSWER if name in _CALLS else _ROLES.get(name, role)
    for key in sorted(_REFUSED & more.keys()):
        raise ValueError(f"{key} is not known here, and would change what is learned")
    is_learned = _take_weight(role, more)
    _drop_copies(more)
    content = next((more.pop(key) for key in _CONTENT if key in more), "")
    calls = more.pop("tool_calls", None) or more.pop("function_call", None) or []
    if name in _CALLS:
        content, calls = "", content
    calls = _json(calls, "tool_calls") or []
    message = Message(
        role=role,
        content=_text(content),
        calls=tuple(_call(each) for each in (calls if isinstance(calls, list) else [calls])),
        more=more,
        is_learned=is_learned,
    )
    is_empty = all(value.get(key) is None for key in _CONTENT)
    if is_empty and not message.calls and more.keys().isdisjoint(_THOUGHTS):
        raise ValueError("has neither a content nor tool_calls")
    return message


def _drop_copies(more: dict[str, Any]) -> None:
    """Remove thoughts that stand under a second name, as some servers write them."""
    keys = [key for key in _THOUGHTS if key in more]
    for key in keys[1:]:
        if more[key] == more[keys[0]]:
            del more[key]


def _take_weight(role: str, more: dict[str, Any]) -> bool:
    """Remove the weights of a message; return False if it is an answer of weight 0."""
    weights = {key: more.pop(key) for key in _MESSAGE_WEIGHTS if key in more}
    flags = {key: _flag(each) for key, each in weights.items()}
    for key, flag in flags.items():
        if flag is None:
            raise ValueError(f"its {key} is {weights[key]!r}: it can be 0 or 1")
        if flag and role != _ANSWER and key.startswith("train"):
            raise ValueError(f"{key} is set, and only answers are learned")
    return role != _ANSWER or all(flags.values())


def _call(value: object) -> Mapping[str, Any]:
    call = _function(value)
    function = call["function"]
    arguments = _json(function.get("arguments") or {}, "arguments") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError("a call has arguments that are no object")
    return {**call, "function": {**function, "arguments": arguments}}


def _function(value: object) -> Mapping[str, Any]:
    """A tool or a call of one, in OpenAI's form."""
    found = value if isinstance(value, Mapping) else {}
    if isinstance(found.get("name"), str):
        found = {"type": "function", "function": found}
    inside = found.get("function")
    if not isinstance(inside, Mapping) or not isinstance(inside.get("name"), str):
        raise ValueError("a tool or a call of one is no object with a name")
    return found


def _text(value: object) -> str:
    """The text of a content, which some data sets write in several parts."""
    if isinstance(value, str | list):
        return value if isinstance(value, str) else "".join(map(_text, value))
    part = value if isinstance(value, Mapping) else {}
    kept = {key for key in part if key not in ("type", "role") and part[key] is not None}
    if len(kept) != 1 or not kept <= {"text", "parts"}:
        what = part.get("type") or ", ".join(sorted(map(str, kept))) or type(value).__name__
        raise ValueError(f"has a part that is no text ({what}): only text can be learned")
    return _text(part[kept.pop()])


class _Thing(NamedTuple):
    """Something that a row holds, and the sign in its place."""

    sign: str
    name: str
    number: int
    """Number of its message; -1: the tools."""
    is_thought: bool = False
    is_needed: bool = True


def _signed(conversation: Conversation) -> tuple[Conversation, list[_Thing]]:
    """A conversation with a sign in place of each of its texts, and what these stand for."""
    things: list[_Thing] = []

    def plant(text: str, name: str, number: int, is_thought: bool, is_needed: bool) -> str:
        parts = _MARKS.split(text)
        for at in range(0, len(parts), 2):
            if words := parts[at].strip():
                sign, is_last = chr(_SIGNS[len(things)]), at + 1 == len(parts)
                kind = (is_thought, is_needed) if is_last else (True, is_needed)
                things.append(_Thing(sign, name if is_last else "thoughts", number, *kind))
                parts[at] = parts[at].replace(words, sign)
        return "".join(parts)

    def leaves(value: Any, *thing: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: leaves(each, *thing) for key, each in value.items()}
        if isinstance(value, list):
            return [leaves(each, *thing) for each in value]
        return plant(value, *thing) if isinstance(value, str) else value

    messages = []
    for number, message in enumerate(conversation.messages):
        more, thoughts = {**message.more}, message.thoughts
        for key in sorted(more.keys() - _IDS):
            more[key] = leaves(more[key], key, number, key in thoughts, key in thoughts)
        calls = []
        for call in message.calls:
            own = {key: call["function"][key] for key in ("name", "arguments")}
            own = call["function"] | leaves(own, "tool_calls", number, False, True)
            calls.append({**call, "function": own})
        content = plant(message.content, "content", number, False, True)
        messages.append(replace(message, content=content, calls=tuple(calls), more=more))
    tools = []
    for each in conversation.tools:
        own = {key: each["function"].get(key) for key in ("name", "description")}
        own = {key: leaves(own[key], "tools", -1, False, key == "name") for key in own}
        tools.append({**each, "function": each["function"] | own})
    return Conversation(messages=tuple(messages), tools=tuple(tools)), things


class _Form(NamedTuple):
    """How messages are handed to a template."""

    empty: str | None = ""
    """Content of a call without words."""
    as_text: bool = False
    """Arguments of calls are JSON."""
    thoughts: str = ""
    """Key of the model's thoughts; empty: as in the data."""


#: Templates differ, and the first form that one writes is taken.
_FORMS: Final = tuple(_Form(*each) for each in product(("", None), (False, True)))


def _learned(conversation: Conversation) -> list[int]:
    """Numbers of the messages that are learned."""
    return [
        number
        for number, each in enumerate(conversation.messages)
        # The first message has nothing before it that could ask.
        if number and each.role == _ANSWER and each.is_learned
        if each.content.strip() or each.calls or each.more
    ]


def _cut(text: str, spans: Iterable[_Span]) -> str:
    return "".join(text[slice(*span)] for span in spans)


def _common(one: str, other: str) -> int:
    """Characters with which both begin."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - these are no paths


class ChatWriter:
    """Writes conversations with a model's chat template."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Late: it takes seconds, and text needs nothing of it.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._vocabulary = vocabulary
        self._render: Any = render_jinja_template
        self._is_annotated = "endgeneration" in vocabulary.template
        self._form = _Form()
        self._asks = True
        self._rest = self._rest_of_texts()
        self.unused: set[str] = set()
        """Keys of messages that the template does not write."""
        self.counts: Counter[str] = Counter()
        """Numbers for the user, by their words."""

    def text(self, conversation: Conversation, *, asks: bool = False) -> str:
        """The text that the template makes of a conversation; where it ``asks``, up to an answer.

        Raises:
            InputError: the template refuses it.
        """
        return self._rendered(conversation, asks=asks)[0]

    def encode(
        self,
        conversations: Iterable[Conversation],
        refuse: Callable[[str, ValueError], None] | None = None,
    ) -> Iterator[Encoded]:
        """Tokens of each conversation, and which are learned: a row for each way in which the
        template writes its answers.

        Args:
            refuse: takes the place of a conversation that cannot be written, and the reason.

        Raises:
            InputError: the template refuses one, or leaves out, repeats or changes a part of it.
        """
        written: list[tuple[str, list[_Span], bool]] = []
        for each in conversations:
            try:
                rows = self._written(each)
            except ValueError as error:
                if refuse is None:
                    raise
                refuse(each.place, error)
            else:
                written += [(*row, number > 0) for number, row in enumerate(rows)]
        encodings = self._vocabulary.tokenizer.encode_batch(
            [text for text, _, _ in written], add_special_tokens=False
        )
        for (text, answers, is_further), encoding in zip(written, encodings, strict=True):
            yield replace(self._marked(text, answers, encoding), is_further=is_further)

    def _rendered(
        self, conversation: Conversation, *, asks: bool = False
    ) -> tuple[str, list[_Span]]:
        try:
            texts, spans = self._render(
                conversations=[[self._turn(each) for each in conversation.messages]],
                tools=[*conversation.tools] or None,
                chat_template=self._vocabulary.template,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=self._is_annotated and not asks,
                **self._vocabulary.named,
            )
            check_characters(texts[0])
        except Exception as error:  # a template is a program, and raises what it likes
            roles = [each.role for each in conversation.messages]
            raise InputError(
                f"the chat template refuses a conversation of {len(roles)} messages by "
                f"{', '.join(roles[:8])}: {error}"
            ) from None
        return texts[0], [*spans[0]] if spans else []

    def _turn(self, message: Message) -> dict[str, Any]:
        """A message as the template takes it."""
        form = self._form
        turn = {"role": message.role, "content": message.content, **message.more}
        if form.thoughts and message.thoughts:
            turn[form.thoughts] = turn.pop(message.thoughts[0])
        if message.calls:
            turn["content"] = message.content or form.empty
            turn["tool_calls"] = calls = [{**call} for call in message.calls]
            for call in calls if form.as_text else []:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"] = {**call["function"], "arguments": arguments}
        return turn

    def _rest_of_texts(self) -> str:
        """The end of each text that belongs to no message, asked or not."""
        said = [Message(role=role, content=_SIGN) for role in ("user", _ANSWER)]
        try:
            asked, text = (self.text(Conversation(messages=tuple(said[:num]))) for num in (1, 2))
            self._asks = asked != self.text(Conversation(messages=(said[0],)), asks=True)
        except InputError:
            return ""
        # A question ends with its first special token, and so does an answer.
        names = map(self._vocabulary.tokenizer.id_to_token, self._vocabulary.special)
        end = re.search("|".join(map(re.escape, names)), asked.rpartition(_SIGN)[2])
        rest = end.string[end.end() :] if end else ""
        return rest if rest.strip() and text.endswith(rest) else ""

    def _written(self, conversation: Conversation) -> list[tuple[str, list[_Span]]]:
        """Texts of a conversation, and the begin and end of each answer to learn in them. An
        earlier answer that changes once others follow has a text that ends with it."""
        answers = self._checked(conversation)
        rows: list[tuple[str, list[_Span]]] = [(self.text(conversation), [])]
        for number in reversed(_learned(conversation)):
            text, spans = self._answer(conversation, number)
            message, learned = conversation.messages[number], _cut(text, spans)
            thoughts = (str(message.more[key]) for key in message.thoughts)
            for each in (*_MARKS.split(message.content)[::2], *thoughts):
                words = each.strip()
                # The template's own words may be the same.
                if words and learned.count(words) <= answers[number].count(words):
                    raise InputError(f"the chat template changes an answer ({words[:40]!r})")
            whole = text[: spans[-1][1]]
            found = next((own for each, own in rows if each.startswith(whole)), None)
            if found is None:
                rows.append((text, found := []))
            found[:0] = spans
        rows = [row for row in rows if row[1]] or rows
        self.counts[_SPLIT] += len(rows) > 1
        self.counts[_UNASKED] += not (self._asks or self._rest or self._is_annotated)
        return rows[::-1]

    def _answer(self, conversation: Conversation, number: int) -> tuple[str, list[_Span]]:
        """The text that ends with an answer, and its parts: those that the template marks, else
        what follows the request for it."""
        messages = conversation.messages
        earlier = replace(conversation, messages=messages[:number])
        text, spans = self._rendered(replace(conversation, messages=messages[: number + 1]))
        end = len(text.removesuffix(self._rest).rstrip())
        num_earlier = len(self._rendered(earlier)[1]) if spans else 0
        if spans := [span for span in spans[num_earlier:] if text[slice(*span)].strip()]:
            # What follows belongs to its turn, marked or not.
            begin, marked = spans.pop()
            return text, [*spans, (begin, max(marked, end))]

        asked = self.text(earlier, asks=True)
        begin = _common(text, asked)
        if begin < len(asked):
            # It may ask with more than it writes (<think> beside <tool_call>), or begin otherwise.
            begin = max(text.rfind(each, 0, begin) for each in ">\n]: ") + 1
            before = self.text(earlier).removesuffix(self._rest)
            if text.startswith(before):
                begin = max(begin, len(before))
            elif request := asked.removeprefix(before):
                # Earlier messages are written in another way: it follows the last of them.
                last = replace(messages[number - 1], content=_SIGN)
                turns = (*earlier.messages[:-1], last, messages[number])
                whole = self.text(replace(earlier, messages=turns))
                answer = whole.partition(_SIGN)[2].partition(request)[2]
                if answer and text.endswith(answer):
                    begin = len(text) - len(answer)
        return text, [(min(begin, end), end)]

    def _checked(self, conversation: Conversation) -> Mapping[int, str]:
        """Choose the first form in which the template writes all that a conversation holds; return
        each answer that is learned, by its number, with signs in place of texts.

        Raises:
            InputError: there is none.
        """
        signed, things = _signed(conversation)
        for number, role in enumerate((each.role for each in signed.messages), start=1):
            named = rf"[.'\"]{re.escape(role)}\b"
            if role not in _ROLES.values() and not re.search(named, self._vocabulary.template):
                raise InputError(
                    f"message {number} ({role}): this role is not known here and not in the chat "
                    f"template; rename it to one of {', '.join(dict.fromkeys(_ROLES.values()))}"
                )
        keys = ("", *_THOUGHTS) if any(each.is_thought for each in things) else ("",)
        forms = _FORMS if any(each.calls for each in signed.messages) else _FORMS[:1]
        failures: list[InputError] = []
        for self._form in (form._replace(thoughts=name) for name in keys for form in forms):
            try:
                return self._account(signed, things)
            except InputError as error:
                failures.append(error)
        raise max(failures, key=lambda each: "refuses" not in str(each))

    def _account(self, signed: Conversation, things: Sequence[_Thing]) -> dict[int, str]:
        """Look for each thing of a conversation in what is learned of it.

        Raises:
            InputError: the template leaves one out of the answer that it belongs to, or of what
                comes before, or repeats it.
        """
        answers: dict[int, str] = {}
        unseen: set[str] = set()
        unused: set[str] = set()
        numbers = _learned(signed)
        for number in numbers:
            text, spans = self._answer(signed, number)
            learned = answers[number] = _cut(text, spans)
            for thing in things:
                is_own = thing.number == number
                if not thing.is_needed and thing.number <= number:
                    unused.update({thing.name} if thing.sign not in text else ())
                elif thing.number > number or (thing.sign in text and not is_own):
                    if thing.sign in learned:
                        raise InputError(_CHANGES)
                elif is_own and text.count(thing.sign) == learned.count(thing.sign) == 1:
                    continue
                elif thing.is_thought and not is_own:
                    # Templates take them out; those that are learned end a text.
                    unseen.update({thing.sign} if thing.number not in numbers else ())
                else:
                    of = f" of message {thing.number + 1} ({signed.messages[thing.number].role})"
                    raise InputError(_LEFT_OUT.format(thing.name + of * (thing.number >= 0)))
        self.counts[_UNSEEN] += len(unseen)
        self.unused |= unused
        return answers

    def _marked(self, text: str, answers: Sequence[_Span], encoding: Any) -> Encoded:
        """Tokens, those of the answers marked."""
        ids: list[int] = [*encoding.ids]
        begins = [begin for begin, _ in encoding.offsets]
        ends = [end for _, end in encoding.offsets]
        special = self._vocabulary.special
        learned = [False] * len(ids)
        stop = None
        at = 0
        is_ended = True
        for begin, end in answers:
            # A token may begin before an answer: the space before its first word.
            while at < len(ids) and ends[at] <= begin:
                at += 1
            stop = None
            while at < len(ids) and begins[at] < end:
                learned[at] = True
                if text[begins[at] : ends[at]].strip():
                    stop = at if ids[at] in special else None
                at += 1
            if stop is None:
                # The token with which the next turn begins.
                stop = next((at for at in range(at, len(ids)) if ids[at] in special), None)
                if stop is not None and text[end : begins[stop]].strip():
                    stop = None
            is_ended = stop is not None or bool(text[end:].strip())
            if stop is not None:
                learned[stop] = True
        if not is_ended:  # the model would never stop
            stop = at
            ids[at:], learned[at:] = [self._vocabulary.end_of_text], [True]
        stops = {ids[stop]} if stop is not None else ()
        return Encoded(ids=ids, learned=learned, stops=frozenset(stops))
