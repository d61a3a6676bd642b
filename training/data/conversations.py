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
#: Columns and keys that change what is to be learned, and that are not known here.
_REFUSED: Final = {
    *("image", "images", "video", "videos", "audio", "audios", "refusal"),
    *("history", "chat_template_kwargs", "train_detail", "kto_tag"),
}
#: The same, and one that may say that an answer is not wanted.
CHECKED: Final = _REFUSED | {"label"}
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
#: 0 or false: the answer is not learned.
_WEIGHTS: Final = ("weight", "train", "training", "loss")
#: What a call without words has for a content, and whether its arguments are text: templates
#: differ, and the first form that one writes is taken.
_FORMS: Final = (("", False), (None, False), ("", True), (None, True))


#: Characters for private use: placeholders for what a template must write.
_SIGNS: Final = range(0xE000, 0x110000)
_LEFT_OUT: Final = (
    "the chat template leaves out or repeats {}: give --chat-template one that writes it, or take "
    "it out of the data"
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
    """Other fields of the message, such as the model's thoughts."""
    is_learned: bool = True

    def __post_init__(self) -> None:
        check_characters(self.content)


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
    """Mask of the tokens that the model learns to predict: True for tokens of answers, and for
    those that end an answer."""
    stops: frozenset[int]
    """Ids of the tokens that end answers."""


#: Begin and end of what is learned of an answer, in characters of the text that the template wrote.
#: A token that ends it may follow.
_Span = tuple[int, int]


def check_characters(text: str) -> None:
    """
    Raises:
        ValueError: JSON wrote a half of a character in it, which no tokenizer takes.
    """
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
    for name in sorted(CHECKED & row.keys() - used):
        if row[name] is False if name == "label" else row[name]:
            raise ValueError(f'what is under "{name}" cannot be learned')
    return _conversation({part: row[name] for part, name in columns.items()})


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
    value = _json(parts.get(name) or [], name)
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
    content = next((more.pop(key) for key in _CONTENT if key in more), "")
    calls = more.pop("tool_calls", None) or more.pop("function_call", None) or []
    if name in _CALLS:
        content, calls = "", content
    calls = _json(calls, "tool_calls")
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


def _take_weight(role: str, more: dict[str, Any]) -> bool:
    """Remove the weights of a message; return False if it is an answer of weight 0."""
    if role != _ANSWER and more.get("train"):
        raise ValueError("train is set, and only answers are learned")
    weights = [more.pop(key) for key in _WEIGHTS if key in more]
    if any(each not in (0, 1) for each in weights):
        raise ValueError(f"its weight is {weights[0]!r}: it can be 0 or 1")
    return role != _ANSWER or all(weights)


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


def _begin(text: str, *, before: str, asked: str, head: str, question: str) -> int:
    """Start of an answer in the text of its conversation.

    Args:
        before: text of the messages before the answer.
        asked: the same, with the request for an answer.
        head: what ``text`` begins with, up to the words of the answer; empty if not known.
        question: content of the message before.

    Raises:
        InputError: the request is not there.
    """
    # A template may ask with more than it writes before an answer that is there, and may begin in
    # another way when it asks.
    if text.startswith(before):
        common = os.path.commonprefix([text, asked])  # noqa: RUF071 - these are no paths
        if len(common) < len(asked):  # <think> and <tool_call> have nothing in common
            common = common[: max(map(common.rfind, ">\n]: ")) + 1]
        return max(len(common), len(before))

    # Templates drop the thoughts of earlier answers once others follow, ...
    request = asked.removeprefix(before)
    if not head:
        raise InputError(_CHANGES)
    if head.endswith(request):
        return len(head)

    # ... and those of this turn, between calls, too: there the end of the request may be missing,
    # or something else in place of the thoughts. The question does not follow the request.
    if asked.startswith(before):
        for size in range(len(request) - 1, len(request) // 2, -1):
            if head.endswith(request[:size]):
                return len(head)
        at = head.rfind(request)
        if at >= max(0, head.rfind(question.strip())):
            return at + len(request)
    raise InputError(_CHANGES)


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
        turn = {"role": message.role, "content": message.content, **message.more}
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
        signs: dict[str, str] = {}

        def sign(what: str) -> str:
            signs[found := chr(_SIGNS[0] + len(signs))] = what
            return found

        messages = []
        for number, message in enumerate(conversation.messages, start=1):
            place = f"message {number} ({message.role})"
            if message.role not in _ROLES.values() and not self._names(message.role):
                raise InputError(
                    f"{place}: this role is not known here and not in the chat template; rename "
                    f"it to one of {', '.join(dict.fromkeys(_ROLES.values()))}"
                )
            for key in message.more:
                names = _THOUGHTS if key in _THOUGHTS else (key,)
                if not any(map(self._names, names)):
                    if key in _THOUGHTS and message.role == _ANSWER:
                        raise InputError(_LEFT_OUT.format(f"{key} of {place}"))
                    self.unused.add(key)
            calls = [
                {**each, "function": {**each["function"], "name": sign(f"tool_calls of {place}")}}
                for each in message.calls
            ]
            content = sign(place) if message.content.strip() else ""
            messages.append(replace(message, content=content, calls=tuple(calls)))
        if conversation.tools and not re.search(r"\btools\b", self._vocabulary.template):
            raise InputError(_LEFT_OUT.format("tools"))
        failure = InputError("")
        for self._form in _FORMS if any(each.calls for each in messages) else _FORMS[:1]:
            try:
                text = self.text(replace(conversation, messages=tuple(messages)))
            except InputError as error:
                failure = error
                continue
            missing = next((what for each, what in signs.items() if each not in text), "")
            if not missing:
                return
            failure = InputError(_LEFT_OUT.format(missing))
        raise failure

    def _written(self, conversation: Conversation) -> tuple[str, list[_Span]]:
        """The text of a conversation, and the begin and end of each answer to learn in it."""
        self._check(conversation)
        messages = conversation.messages
        text, spans = self._rendered(conversation, asks=False)
        answers = [span for span in spans if text[slice(*span)].strip()]
        if answers and all(each.is_learned for each in messages):
            if messages[-1].role == _ANSWER:  # what follows belongs to its turn, marked or not
                answers[-1] = (answers[-1][0], len(text.rstrip()))
            return text, answers
        return text, [
            self._span(conversation, number, text)
            for number, each in enumerate(messages)
            # The first message has nothing before it that could ask.
            if number and each.role == _ANSWER and each.is_learned
            if each.content.strip() or each.calls or each.more
        ]

    def _span(self, conversation: Conversation, number: int, text: str) -> _Span:
        """Begin and end of an answer in the text of its conversation.

        Raises:
            InputError: the template leaves the answer out, repeats or changes it, or writes the
                messages before it in another way once others follow.
        """
        messages = conversation.messages
        earlier, message, later = messages[:number], messages[number], messages[number + 1 :]

        def shown(*messages: Message, asks: bool = False) -> str:
            return self.text(replace(conversation, messages=messages), asks=asks)

        before, asked = shown(*earlier), shown(*earlier, asks=True)

        # What is around the words of another answer in its place. No text has the mark.
        mark = next(each for each in map(chr, _SIGNS) if each not in text)
        try:
            head, *tails = shown(*earlier, Message(role=_ANSWER, content=mark), *later).split(mark)
        except InputError:  # results want their calls
            head, tails = "", [mark]
        if len(tails) != 1:
            raise InputError(_LEFT_OUT.format(f"message {number + 1} ({_ANSWER})"))
        has_tail = text.endswith(tails[0])
        rest = text.removesuffix(tails[0])

        begin = _begin(
            text,
            before=before,
            asked=asked,
            head=head if text.startswith(head) else "",
            question=earlier[-1].content,
        )

        # The turn ends where the text up to it does, or where that of another answer does.
        for each in (message, replace(message, more={})):
            after = shown(*earlier, each)
            if len(after) > begin and text.startswith(after):
                end = len(after.rstrip())
                break
        else:
            questions = (each.content.strip() for each in later if each.role != _ANSWER)
            if not has_tail or not all(each in tails[0] for each in questions):
                raise InputError(_CHANGES)
            end = len(rest)

        # Its words end where the rest begins, perhaps without the thoughts among them.
        if has_tail and not message.calls:
            written, content = rest.rstrip(), message.content.strip()
            shapes = (content, content.rpartition("</think>")[2].strip())
            shape = next(filter(written.endswith, shapes), None)
            if shape is None:
                raise InputError(f"the chat template changes an answer ({content[:40]!r})")
            begin = min(begin, len(written) - len(shape))
        return begin, end

    def _marked(self, text: str, answers: Sequence[_Span], encoding: Any) -> Encoded:
        """Tokens, those of the answers marked."""
        ids: list[int] = [*encoding.ids]
        begins = [begin for begin, _ in encoding.offsets]
        ends = [end for _, end in encoding.offsets]
        special = self._vocabulary.special
        learned = [False] * len(ids)
        stops: set[int] = set()
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
                # The template's token for it, or that with which the next turn begins.
                later = (at for at in range(at, len(ids)) if ids[at] in special)
                stop = next(later, None)
                if stop is not None and text[end : begins[stop]].strip():
                    stop = None
            is_ended = stop is not None or bool(text[end:].strip())
            if stop is not None:
                learned[stop] = True
                stops.add(ids[stop])
        if not is_ended:  # the model would never stop
            ids[at:], learned[at:] = [self._vocabulary.end_of_text], [True]
            stops.add(self._vocabulary.end_of_text)
        return Encoded(ids=ids, learned=learned, stops=frozenset(stops))
