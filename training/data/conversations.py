"""Conversations as tokens: rows of data sets through a model's chat template, with only the
answers learned.

What a row holds reaches the template, is named as unused, or the row is refused: nothing is dropped
in silence.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from contract.errors import InputError
from training.data.vocabulary import Vocabulary

#: Columns that hold messages, where no other is asked for.
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
#: Columns of what else a conversation may have.
_BESIDE: Final = {
    "system": ("system", "system_prompt", "systemInstruction"),
    "history": ("history",),
    "tools": ("tools", "functions"),
    "settings": ("chat_template_kwargs",),
}
#: What ``--columns`` can name.
PARTS: Final = ("text", "messages", "prompt", "context", "answer", *_BESIDE)
#: Columns and keys that change what is to be learned in a way that is not known here.
_REFUSED: Final = frozenset(
    ["image", "images", "video", "videos", "audio", "audios", "refusal", "train_detail", "kto_tag"]
)
#: The same, and one that may say that an answer is not wanted.
CHECKED: Final = _REFUSED | {"label"}
_ANSWER: Final = "assistant"
#: What the authors of messages are called elsewhere, in lower case.
_ROLES: Final = {
    **{name: name for name in ("system", "user", _ANSWER, "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai"), _ANSWER),
    **dict.fromkeys(("observation", "function", "tool_response", "function_response"), "tool"),
}
#: The content of such a message is calls of tools, as JSON.
_CALLS: Final = ("function_call", "tool_call", "tool_calls")
_CONTENT: Final = ("content", "value", "parts", "text")
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
#: 0 or false: the answer is not learned.
_WEIGHTS: Final = ("weight", "train", "training", "loss")
#: What a call without words has for a content, and whether its arguments are text: templates
#: differ, and the first form that one writes is taken.
_FORMS: Final = (("", False), (None, False), ("", True), (None, True))


_LEFT_OUT: Final = (
    "the chat template leaves out {}: give --chat-template one that writes it, or take it out of "
    "the data"
)
_CHANGES: Final = (
    "the chat template writes earlier messages in another way once others follow: what is learned "
    "cannot be told. Give --chat-template one that does not, or that marks answers with "
    "{% generation %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn."""

    role: str
    """``system``, ``user``, ``assistant``, ``tool``, or what else the template knows."""
    content: str
    calls: tuple[Mapping[str, Any], ...] = ()
    """Calls of tools in OpenAI's form, their arguments an object."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else it has, such as thoughts."""
    is_learned: bool = True
    """If it is an answer."""

    def __post_init__(self) -> None:
        check_characters(self.content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a row holds."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    place: str = field(default="", compare=False)
    """File and row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A conversation as tokens."""

    ids: list[int]
    learned: list[bool]
    """Whether the model learns to predict the token: those of answers, and the tokens that end
    them."""
    stops: frozenset[int]
    """Ids of the tokens that end answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """Where an answer stands, in characters of the text that the template wrote."""

    begin: int
    end: int
    """Where what is learned ends, but for a token that ends it."""


def check_characters(text: str) -> None:
    """
    Raises:
        ValueError: JSON wrote a half of a character in it, which no tokenizer takes.
    """
    text.encode()


def columns_given(text: str) -> dict[str, str]:
    """``--columns``: names of columns by what they hold.

    Raises:
        InputError: it is not written so, or names something else.
    """
    pairs = [each.partition("=")[::2] for each in text.split(",") if text]
    if bad := [part for part, name in pairs if part not in PARTS or not name]:
        raise InputError(
            f"--columns is {text!r}, with {bad[0]!r}: write prompt=COLUMN,answer=COLUMN, of "
            f"{', '.join(PARTS)}"
        )
    return dict(pairs)


def columns_of(
    names: Sequence[str], field: str, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The columns of a table by what they hold (``PARTS``); none if it holds nothing to learn.

    Args:
        field: what ``--text-field`` asks for.
        given: what ``--columns`` asks for.
    """
    found = dict(given or {})
    if found:
        pass
    elif field in names:
        found["messages" if field in MESSAGES else "text"] = field
    elif field == "text":
        own = [name for name in MESSAGES if name in names]
        pairs = [pair for pair in PAIRS if pair[0] in names and pair[2] in names]
        if own:
            found["messages"] = own[0]
        elif pairs:
            found = dict(zip(("prompt", "context", "answer"), pairs[0], strict=True))
    is_whole = {"text", "messages"} & found.keys() or {"prompt", "answer"} <= found.keys()
    if not is_whole or not {*(given or {}).values()} <= {*names}:
        return {}
    for part, others in _BESIDE.items():
        free = [name for name in others if name in names and name not in found.values()]
        if free:
            found.setdefault(part, free[0])
    return {part: name for part, name in found.items() if name in names}


def content_of(
    row: Mapping[str, Any],
    field: str,
    given: Mapping[str, str] | None = None,
    *,
    unused: set[str] | None = None,
) -> str | Conversation | None:
    """The document or the conversation of a row; None where it is empty.

    Args:
        row: its columns, or some of them, by name.
        field: what ``--text-field`` asks for.
        given: what ``--columns`` asks for.
        unused: takes the names of columns that are not used.

    Raises:
        ValueError: it has none, or what cannot be used; the message says what is wrong.
    """
    columns = columns_of([*row], field, given)
    if not columns:
        wanted = f"the columns of --columns {given}" if given else f'text under "{field}"'
        raise ValueError(
            f"no {wanted}, and neither messages nor a pair of texts, but {', '.join(map(str, row))}"
            ": --columns prompt=NAME,answer=NAME tells what they hold"
        )
    text = (row[columns["text"]] or "") if "text" in columns else None
    is_text = isinstance(text, str)
    used = {columns["text"]} if is_text else {*columns.values()}
    if unused is not None:
        unused.update(map(str, row.keys() - used))
    if isinstance(text, str):
        check_characters(text)
        return text if text.strip() else None
    for name in sorted(_REFUSED & row.keys() - used):
        if row[name]:
            raise ValueError(f'what is under "{name}" is no text: only text can be learned')
    if row.get("label") is False and "label" not in used:
        raise ValueError('"label" is false: answers that are not wanted cannot be learned')
    return _conversation({part: row[name] for part, name in columns.items()})


def _conversation(parts: Mapping[str, Any]) -> Conversation | None:
    turns: list[object] = []
    for pair in _list(parts, "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("what is under history is no list of questions with their answers")
        turns += _pair(*pair)
    if "prompt" in parts:
        asked, answer = parts["prompt"], parts["answer"]
        if context := _text(parts.get("context") or ""):
            asked = f"{_text(asked or '')}\n\n{context}".strip()
        if not all(each.strip() if isinstance(each, str) else each for each in (asked, answer)):
            return None
        turns += _pair(asked, answer)
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
    settings = parts.get("settings") or {}
    return Conversation(
        messages=tuple(messages),
        tools=tuple(_function(each) for each in _list(parts, "tools")),
        settings=_json(settings, "chat_template_kwargs"),
    )


def _pair(asked: object, answer: object) -> list[object]:
    found: list[object] = []
    for role, each in (("user", asked), (_ANSWER, answer)):
        found += each if isinstance(each, list) else [{"role": role, "content": each}]
    return found


def _list(parts: Mapping[str, Any], name: str) -> list[Any]:
    value = _json(parts.get(name) or [], name)
    if not isinstance(value, list):
        raise ValueError(f"what is under {name} is no list")
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
    if role != _ANSWER and more.get("train"):
        raise ValueError("train is set, and only answers are learned")
    weights = {key: more.pop(key) for key in _WEIGHTS if key in more}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise ValueError(f"{key} is {weight!r}: it can be 0 or 1")
    content = next((more.pop(key) for key in _CONTENT if key in more), "")
    calls = more.pop("tool_calls", None) or more.pop("function_call", None) or []
    if name in _CALLS:
        content, calls = "", content
    if role == "tool" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    calls = _json(calls, "tool_calls")
    message = Message(
        role=role,
        content=_text(content),
        calls=tuple(_call(each) for each in (calls if isinstance(calls, list) else [calls])),
        more=more,
        is_learned=all(weights.values()),
    )
    is_empty = all(value.get(key) is None for key in _CONTENT)
    if is_empty and not message.calls and not more.keys() & {*_THOUGHTS}:
        raise ValueError("has neither a content nor tool_calls")
    return message


def _call(value: object) -> Mapping[str, Any]:
    call = _function(value)
    function = call["function"]
    arguments = _json(function.get("arguments") or {}, "arguments")
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
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    part = value if isinstance(value, Mapping) else {}
    kept = {key for key in part if key not in ("type", "role") and part[key] is not None}
    if len(kept) != 1 or not kept <= {"text", "parts"}:
        what = part.get("type") or ", ".join(sorted(map(str, kept))) or type(value).__name__
        raise ValueError(f"has a part that is no text ({what}): only text can be learned")
    return _text(part[kept.pop()])


class ChatWriter:
    """Writes conversations with a model's chat template."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Late: it takes seconds, and text needs nothing of it.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._vocabulary = vocabulary
        self._render: Any = render_jinja_template
        self._is_annotated = "endgeneration" in vocabulary.template
        self._form: tuple[str | None, bool] = _FORMS[0]
        self.unused: set[str] = set()
        """Keys of messages that the template does not write."""

    def text(self, conversation: Conversation, *, asks: bool = False) -> str:
        """The text that the template makes of a conversation.

        Args:
            asks: end with what comes before an answer.

        Raises:
            InputError: the template refuses it.
        """
        return self._rendered(conversation, asks=asks)[0]

    def encode(
        self,
        conversations: Iterable[Conversation],
        refuse: Callable[[str, ValueError], None] | None = None,
    ) -> Iterator[Encoded]:
        """Tokens of each conversation, and which of them are learned.

        Args:
            refuse: takes the place of a conversation that cannot be written, and the reason.

        Raises:
            InputError: the template refuses one, or leaves out, repeats or changes a part of it.
        """
        written = []
        for each in conversations:
            try:
                written.append(self._written(each))
            except ValueError as error:
                if refuse is None:
                    raise
                refuse(each.place, error)
        encodings = self._vocabulary.tokenizer.encode_batch(
            [text for text, _ in written], add_special_tokens=False
        )
        for (text, answers), encoding in zip(written, encodings, strict=True):
            yield self._marked(text, answers, encoding)

    def _rendered(self, conversation: Conversation, *, asks: bool) -> tuple[str, list[Any]]:
        try:
            texts, spans = self._render(
                conversations=[[self._turn(each) for each in conversation.messages]],
                tools=[*conversation.tools] or None,
                chat_template=self._vocabulary.template,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=self._is_annotated and not asks,
                **{**self._vocabulary.named, **conversation.settings},
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
        turn = {"role": message.role, "content": message.content, **message.more}
        if message.role == "developer" and not self._names("developer"):
            turn["role"] = "system"
        if message.calls:
            empty, as_text = self._form
            turn["content"] = message.content or empty
            turn["tool_calls"] = calls = [{**call} for call in message.calls]
            for call in calls if as_text else []:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"] = {**call["function"], "arguments": arguments}
        return turn

    def _names(self, key: str) -> bool:
        """True if the template has a key of messages, or a role, in it."""
        return bool(re.search(rf"[.'\"]{re.escape(key)}\b", self._vocabulary.template))

    def _check(self, conversation: Conversation) -> None:
        """Check that the template writes all messages, calls, thoughts and tools.

        Raises:
            InputError: it leaves one out.
        """
        template = self._vocabulary.template
        wanted: dict[str, str] = {}

        def mark(what: str) -> str:
            sign = chr(0xE000 + len(wanted))
            wanted[sign] = what
            return sign

        marked = []
        for number, message in enumerate(conversation.messages, start=1):
            place = f"message {number} ({message.role})"
            if message.role not in (*_ROLES.values(), "developer") and not self._names(
                message.role
            ):
                raise InputError(
                    f"{place}: this role is not known here and not in the chat template; rename "
                    f"it to one of {', '.join(dict.fromkeys(_ROLES.values()))}"
                )
            for key in message.more:
                is_thought = key in _THOUGHTS
                if any(map(self._names, _THOUGHTS if is_thought else (key,))):
                    continue
                if is_thought and message.role == _ANSWER:
                    raise InputError(_LEFT_OUT.format(f"{key} of {place}"))
                self.unused.add(key)
            calls = [
                {**each, "function": {**each["function"], "name": mark(f"tool_calls of {place}")}}
                for each in message.calls
            ]
            is_checked = message.role != _ANSWER and message.content.strip()
            content = mark(place) if is_checked else message.content
            marked.append(replace(message, content=content, calls=tuple(calls)))
        self.unused.update(
            key
            for key in conversation.settings
            if not re.search(rf"\b{re.escape(key)}\b", template)
        )
        if conversation.tools and not re.search(r"\btools\b", template):
            raise InputError(_LEFT_OUT.format("tools"))
        failure: InputError | None = None
        for self._form in _FORMS:
            try:
                text = self.text(replace(conversation, messages=tuple(marked)))
            except InputError as error:
                failure = failure or error
            else:
                missing = [what for sign, what in wanted.items() if sign not in text]
                if not missing:
                    return
                failure = InputError(_LEFT_OUT.format(missing[0]))
            if not any(each.calls for each in marked):
                break
        assert failure is not None
        raise failure

    def _written(self, conversation: Conversation) -> tuple[str, list[_Answer]]:
        """The text of a conversation, and where its answers stand."""
        self._check(conversation)
        messages = conversation.messages
        text, spans = self._rendered(conversation, asks=False)
        if self._is_annotated:
            return text, self._annotated(messages, text, spans)

        def shown(*messages: Message, asks: bool = False) -> str:
            return self.text(replace(conversation, messages=messages), asks=asks)

        def beside(number: int, message: Message) -> list[str]:
            """What stands before and after the mark in another message in place of one."""
            try:
                written = shown(*messages[:number], message, *messages[number + 1 :])
            except InputError:  # a result without its call, for instance
                return []
            return written.split(mark)

        # Stands for an answer where the template writes it: no text has it.
        mark = next(each for each in map(chr, range(0xE000, 0x110000)) if each not in text)
        answers = []
        for number, message in enumerate(messages):
            content = message.content.strip()
            # The first message has nothing before it that could ask.
            if message.role != _ANSWER or not message.is_learned or not number:
                continue
            if not content and not message.calls and not message.more.keys() & {*_THOUGHTS}:
                continue
            earlier, later = messages[:number], messages[number + 1 :]
            before, asked = shown(*earlier), shown(*earlier, asks=True)
            # With nothing but words: calls and thoughts may stand on both sides of them.
            plain = beside(number, Message(role=_ANSWER, content=mark))
            head, tail = plain if len(plain) == 2 else ("", "")
            if text.startswith(before):
                # A template may ask with more than it writes before an answer that is there, and
                # may begin in another way when it asks.
                common = os.path.commonprefix([text, asked])  # noqa: RUF071 - these are no paths
                begin = max(len(common), len(before))
            elif head and text.startswith(head) and head.endswith(asked.removeprefix(before)):
                begin = len(head)  # thoughts of earlier answers are gone once others follow
            else:
                raise InputError(_CHANGES)
            if content:
                found = _place(text, content, beside(number, replace(message, content=mark)), 0)
                if found is None:
                    raise InputError(
                        f"the chat template leaves out, repeats or changes an answer "
                        f"({content[:40]!r})"
                    )
                begin = min(begin, found[0])
            # The turn ends where the text up to it does, or where that of another answer does.
            for each in (message, replace(message, more={})):
                after = shown(*earlier, each)
                if len(after) > begin and text.startswith(after):
                    end = len(after.rstrip())
                    break
            else:
                is_whole = all(
                    each.content.strip() in tail for each in later if each.role != _ANSWER
                )
                if not tail or not is_whole or not text.endswith(tail):
                    raise InputError(_CHANGES)
                end = len(text) - len(tail)
            answers.append(_Answer(begin=begin, end=end))
        return text, answers

    def _annotated(
        self, messages: Sequence[Message], text: str, spans: Sequence[tuple[int, int]]
    ) -> list[_Answer]:
        """The answers that the template marks itself."""
        learned = [each.is_learned for each in messages if each.role == _ANSWER]
        if all(learned):
            learned = [True] * len(spans)
        elif len(learned) != len(spans):
            raise InputError(
                f"the chat template marks {len(spans)} parts of {len(learned)} answers with "
                "{% generation %}: which of them have the weight 0 cannot be told"
            )
        answers = [
            _Answer(begin=begin, end=end)
            for (begin, end), is_learned in zip(spans, learned, strict=True)
            if is_learned and text[begin:end].strip()
        ]
        if answers and messages[-1].role == _ANSWER and learned[-1]:
            # All that follows the last answer belongs to its turn, marked or not.
            answers[-1] = replace(answers[-1], end=len(text.rstrip()))
        return answers

    def _marked(self, text: str, answers: Sequence[_Answer], encoding: Any) -> Encoded:
        """Tokens, those of the answers marked."""
        ids: list[int] = [*encoding.ids]
        begins = [begin for begin, _ in encoding.offsets]
        ends = [end for _, end in encoding.offsets]
        special = self._vocabulary.special
        learned = [False] * len(ids)
        stops: set[int] = set()
        at = 0
        is_ended = True
        for answer in answers:
            # A token may begin before an answer: the space before its first word.
            while at < len(ids) and ends[at] <= answer.begin:
                at += 1
            stop = None
            while at < len(ids) and begins[at] < answer.end:
                learned[at] = True
                if text[begins[at] : ends[at]].strip():
                    stop = at if ids[at] in special else None
                at += 1
            if stop is None:
                stop = self._stop(text, answer, ids, begins, at)
            is_ended = stop is not None or bool(text[answer.end :].strip())
            if stop is not None:
                learned[stop] = True
                stops.add(ids[stop])
        if not is_ended:  # the model would never stop
            ids[at:], learned[at:] = [self._vocabulary.end_of_text], [True]
            stops.add(self._vocabulary.end_of_text)
        return Encoded(ids=ids, learned=learned, stops=frozenset(stops))

    def _stop(
        self, text: str, answer: _Answer, ids: Sequence[int], begins: Sequence[int], at: int
    ) -> int | None:
        """The place of the token that ends an answer: the template's for it, or that with which the
        next turn begins."""
        for place in range(at, len(ids)):
            if text[answer.end : begins[place]].strip():
                return None
            if ids[place] in self._vocabulary.special:
                return place
        return None


def _place(text: str, content: str, around: Sequence[str], before: int) -> tuple[int, int] | None:
    """Where an answer stands, which a template may have taken the thoughts from.

    Its words may also stand in what the template writes before it or in another answer, so it is
    not searched for: it ends where the text that follows it begins. What precedes it is no such
    sign, because templates write thoughts, or a place for them, as an answer has them.

    Args:
        content: of the answer.
        around: what the template writes before and after another answer in its place.
        before: length of the text up to its turn.
    """
    if len(around) != 2 or not text.endswith(around[1]):
        return None
    end = len(text[: len(text) - len(around[1])].rstrip())
    for each in (content, content.rpartition("</think>")[2].strip()):
        if each and text.endswith(each, before, end):
            return end - len(each), end
    return None
