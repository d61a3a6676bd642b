"""Conversations as tokens: rows of data sets through a model's chat template, with only the
answers learned."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from contract.errors import InputError
from training.data.vocabulary import Vocabulary

#: Columns that hold messages, where no other is asked for.
MESSAGES: Final = ("messages", "conversations")
#: Columns of a question, of what belongs to it, and of the answer.
PAIRS: Final = (
    ("prompt", "", "completion"),
    ("prompt", "", "response"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("question", "", "answer"),
)
#: What the authors of messages are called elsewhere.
_ROLES: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_ANSWER: Final = "assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn."""

    role: str
    """``system``, ``user``, ``assistant``, or what else the template knows."""
    content: str

    def __post_init__(self) -> None:
        check_characters(self.content)


Conversation = tuple[Message, ...]


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
    """Where its own text ends, and the template's may follow."""
    limit: int
    """No token that ends it begins here or later."""
    is_annotated: bool = False
    """The template says itself what of it is learned, the token that ends it included."""


def check_characters(text: str) -> None:
    """
    Raises:
        ValueError: JSON wrote a half of a character in it, which no tokenizer takes.
    """
    text.encode()


def columns_of(names: Sequence[str], field: str) -> list[str]:
    """The columns of a table that hold its documents or conversations; none if there are none.

    Args:
        field: what ``--text-field`` asks for.
    """
    if field in names:
        return [field]
    if field != "text":
        return []
    for name in MESSAGES:
        if name in names:
            return [name]
    for pair in PAIRS:
        if pair[0] in names and pair[2] in names:
            return [name for name in (*pair, "system") if name in names]
    return []


def content_of(row: Mapping[str, object], field: str) -> str | Conversation | None:
    """The document or the conversation of a row; None where it is empty.

    Args:
        row: its columns, or some of them, by name.
        field: what ``--text-field`` asks for.

    Raises:
        ValueError: it has none; the message says what is wrong.
    """
    columns = columns_of([*row], field)
    if not columns:
        raise ValueError(f'no text under "{field}", and neither messages nor a pair of texts')
    value = row[columns[0]]
    if len(columns) > 1:
        return _pair(row, columns)
    if value is None or isinstance(value, str):
        if value and columns[0] in MESSAGES and columns[0] != field:
            raise ValueError(
                "messages are written as text: write them as .jsonl or .parquet, where they are "
                "lists of objects"
            )
        check_characters(value or "")
        return value if value and value.strip() else None
    if not isinstance(value, list):
        raise ValueError(f'what is under "{columns[0]}" is neither text nor messages')
    return tuple(_message(each) for each in value) or None


def _pair(row: Mapping[str, object], columns: Sequence[str]) -> Conversation | None:
    texts = {name: row[name] for name in columns if row[name] is not None}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f'what is under "{name}" is no text')
    asked, context, answer = next(p for p in PAIRS if p[0] in row and p[2] in row)
    question = "\n\n".join(str(texts[n]) for n in (asked, context) if texts.get(n))
    if not question.strip() or not str(texts.get(answer, "")).strip():
        return None
    turns = (("system", texts.get("system")), ("user", question), (_ANSWER, texts[answer]))
    return tuple(Message(role=role, content=str(text)) for role, text in turns if text)


def _message(value: object) -> Message:
    values = value if isinstance(value, Mapping) else {}
    role, content = values.get("role", values.get("from")), values.get("content")
    if content is None:
        content = values.get("value")
    if isinstance(content, list):
        content = "".join(map(_text_of, content))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message is no object with a text under role and one under content")
    return Message(role=_ROLES.get(role, role), content=content)


def _text_of(part: object) -> str:
    """The text of a part of a message, which some data sets write in several."""
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError("a message has a part that is no text: only text can be learned")
    return text


class ChatWriter:
    """Writes conversations with a model's chat template."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Late: it takes seconds, and text needs nothing of it.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._vocabulary = vocabulary
        self._render: Any = render_jinja_template
        self._is_annotated = "endgeneration" in vocabulary.template

    def text(self, conversation: Conversation, *, asks: bool = False) -> str:
        """The text that the template makes of a conversation.

        Args:
            asks: end with what comes before an answer.

        Raises:
            InputError: the template refuses it.
        """
        return self._rendered(conversation, asks=asks)[0]

    def encode(self, conversations: Iterable[Conversation]) -> Iterator[Encoded]:
        """Tokens of each conversation, and which of them are learned.

        Raises:
            InputError: the template refuses one, or leaves out, repeats or changes an answer.
        """
        written = [self._written(each) for each in conversations]
        encodings = self._vocabulary.tokenizer.encode_batch(
            [text for text, _ in written], add_special_tokens=False
        )
        for (text, answers), encoding in zip(written, encodings, strict=True):
            yield self._marked(text, answers, encoding)

    def _rendered(self, conversation: Conversation, *, asks: bool) -> tuple[str, list[Any]]:
        turns = [{"role": each.role, "content": each.content} for each in conversation]
        try:
            texts, spans = self._render(
                conversations=[turns],
                chat_template=self._vocabulary.template,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=self._is_annotated and not asks,
                **self._vocabulary.named,
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise InputError(
                f"the chat template refuses a conversation of {len(turns)} messages by "
                f"{', '.join(each.role for each in conversation[:8])}: {error}"
            ) from None
        return texts[0], [*spans[0]] if spans else []

    def _written(self, conversation: Conversation) -> tuple[str, list[_Answer]]:
        """The text of a conversation, and where its answers stand."""
        text, spans = self._rendered(conversation, asks=False)
        if self._is_annotated:
            return text, [
                _Answer(begin=begin, end=end, limit=end, is_annotated=True) for begin, end in spans
            ]
        # Stands for an answer where the template writes it: no text has it.
        mark = next(each for each in map(chr, range(0xE000, 0x110000)) if each not in text)
        answers = []
        for number, message in enumerate(conversation):
            # The first message has nothing before it that could ask.
            if message.role != _ANSWER or not number or not (content := message.content.strip()):
                continue
            before = self.text(conversation[:number])
            if not text.startswith(before):
                raise InputError(
                    "the chat template writes earlier messages in another way once others follow: "
                    "what is learned cannot be told. Give --chat-template one that does not, or "
                    "that marks answers with {% generation %}"
                )
            marked = self.text(
                (
                    *conversation[:number],
                    replace(message, content=mark),
                    *conversation[number + 1 :],
                )
            )
            found = _place(text, content, marked.split(mark), len(before))
            if found is None:
                raise InputError(
                    f"the chat template leaves out, repeats or changes an answer ({content[:40]!r})"
                )
            # A template may ask with more than it writes before an answer that is there, and
            # may begin in another way when it asks.
            asked = self.text(conversation[:number], asks=True)
            common = os.path.commonprefix([text, asked])  # noqa: RUF071 - these are no paths
            begin = max(len(common), len(before))
            after = self.text(conversation[: number + 1])
            answers.append(
                _Answer(
                    begin=min(begin, found[0]),
                    end=found[1],
                    limit=len(after) if text.startswith(after) else len(text),
                )
            )
        return text, answers

    def _marked(self, text: str, answers: Sequence[_Answer], encoding: Any) -> Encoded:
        """Tokens, those of the answers marked."""
        ids: list[int] = [*encoding.ids]
        begins = [begin for begin, _ in encoding.offsets]
        learned = [False] * len(ids)
        stops: set[int] = set()
        at = 0
        is_ended = True
        for answer in answers:
            while at < len(ids) and begins[at] < answer.begin:
                at += 1
            while at < len(ids) and begins[at] < answer.end:
                learned[at] = True
                at += 1
            if answer.is_annotated:
                stops |= {*ids[at - 1 : at]} & self._vocabulary.special
                continue
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
        """The place of the token that ends an answer, if the template writes one."""
        for place in range(at, len(ids)):
            if begins[place] >= answer.limit or text[answer.end : begins[place]].strip():
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
