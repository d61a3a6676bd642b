"""Text as rows of token ids on disk, packed without padding.

A store is built once from plain text: documents are tokenized one after the other, each ends with
the end-of-text token, and one document in so many is held out. Training reads fixed windows of the
one long row (``training.data.feed``), so every token is predicted exactly once an epoch and
none is padding. Conversations lie in the same row, with where each begins and which of its tokens
are learned beside it (``training.data.conversations``).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from contract.text import counted
from store import cache, storage
from training.data import vocabulary
from training.data.conversations import ChatWriter, Conversation, Encoded, parse_columns
from training.data.documents import Rows, batches, documents, text_files
from training.data.download import Report
from training.data.vocabulary import Vocabulary
from training.record import fields

STORE_FILE: Final = "store.json"
TRAIN_FILE: Final = "train.bin"
_HELD_OUT_FILE: Final = "held-out.bin"
#: Suffixes of two more files per part of conversations: 1 for each learned token (uint8), and the
#: start of each conversation, followed by the end of the last one (int64).
_LEARNED: Final = ".learned"
_STARTS: Final = ".starts"
#: Version of the files and of the tokenization: part of each key.
_FORMAT: Final = 3
#: The same of conversations only.
_CHAT_FORMAT: Final = 3
_DTYPES: Final = ("uint16", "uint32")

Tokens = npt.NDArray[np.int64]
_Encode = Callable[[Sequence[str | Conversation]], Iterator[Encoded]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """Description of a store: ``store.json``, written after all other files."""

    key: str
    """Hash of the text's files, the tokenizer and the split: the same key, the same tokens."""
    tokenizer: str
    """SHA-256 of the tokenizer's file."""
    vocab_size: int
    end_of_text: int
    """Id of the token that ends each document."""
    dtype: str
    num_documents: int
    num_train_tokens: int
    num_held_out_tokens: int
    num_train_conversations: int = 0
    """0: the store is of text."""
    num_held_out_conversations: int = 0
    num_left_out: int = 0
    """Conversations without an answer to learn."""
    stops: tuple[int, ...] = ()
    """Ids of the tokens that end answers."""
    notes: tuple[str, ...] = ()
    """Sentences that describe the unused parts of the data."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the description of the store in a folder.

        Raises:
            InputError: it is no store.
        """
        try:
            info = fields.from_json(cls, dict(json.loads((folder / STORE_FILE).read_bytes())))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{folder} is no token store ({error}): build it again") from None
        numbers = [info.vocab_size, info.end_of_text, *info.stops]
        numbers += [info.num_train_tokens, info.num_held_out_tokens]
        numbers += [info.num_train_conversations, info.num_held_out_conversations]
        # numpy would take the bytes of a file for addresses in memory, if dtype asked for objects.
        if info.dtype not in _DTYPES or min(numbers) < 0:
            raise InputError(f"{folder} is no token store ({STORE_FILE}): build it again")
        return info

    @property
    def is_chat(self) -> bool:
        return self.num_train_conversations > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPart:
    """The training or the held-out part of a store of conversations, memory-mapped."""

    tokens: npt.NDArray[Any]
    """Ids, one conversation after the other."""
    learned: npt.NDArray[np.uint8]
    """1 for tokens that are learned, as long as ``tokens``."""
    starts: npt.NDArray[np.int64]
    """Start of each conversation, and the end of the last one."""


class TokenStore:
    """Token ids of a text, memory-mapped: a set larger than the memory costs none of it."""

    def __init__(self, folder: Path, info: StoreInfo) -> None:
        self.folder, self.info = folder, info
        self.train = self._map(TRAIN_FILE, info.num_train_tokens)
        self.held_out = self._map(_HELD_OUT_FILE, info.num_held_out_tokens)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a store that ``build`` has written.

        Raises:
            InputError: there is none, or its files do not have the sizes that it names.
        """
        return cls(folder, StoreInfo.read(folder))

    def conversations(self, *, held_out: bool) -> ChatPart:
        """Open the training or the held-out part of a store of conversations."""
        name, tokens = (_HELD_OUT_FILE, self.held_out) if held_out else (TRAIN_FILE, self.train)
        info = self.info
        num = info.num_held_out_conversations if held_out else info.num_train_conversations
        return ChatPart(
            tokens=tokens,
            learned=self._map(name + _LEARNED, len(tokens), "uint8"),
            starts=self._map(name + _STARTS, num + 1, "int64"),
        )

    def _map(self, name: str, count: int, kind: str = "") -> npt.NDArray[Any]:
        path, dtype = self.folder / name, np.dtype(kind or self.info.dtype)
        size = path.stat().st_size if path.exists() else -1
        if size != count * dtype.itemsize:
            raise InputError(
                f"{path} has {size:,} bytes instead of {count * dtype.itemsize:,}: the store is "
                f"damaged; remove {self.folder}, the next run builds it again"
            )
        return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)

    @property
    def largest_id(self) -> int:
        """Largest id of all tokens; computing it reads them once."""
        return max(int(each.max(initial=0)) for each in (self.train, self.held_out))

    def prompts(self, *, num: int, length: int) -> list[list[int]]:
        """Prompts for a model to continue.

        For text, the first tokens of the first held-out documents that have twice as many. For
        conversations, what precedes the first answer of each.
        """
        if self.info.is_chat:
            part = self.conversations(held_out=True)
            found = []
            for first, end in pairwise(part.starts[: num + 1].tolist()):
                before = int(part.learned[first:end].argmax())
                if before:
                    found.append(part.tokens[first : first + before].tolist())
            return found
        ends = np.flatnonzero(self.held_out[: 10**6] == self.info.end_of_text)
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        chosen = starts[ends - starts >= 2 * length][:num]
        return [self.held_out[first : first + length].tolist() for first in chosen.tolist()]


# --- building -----------------------------------------------------------------------------------
def store_for(
    source: str,
    tokenizer_file: Path,
    *,
    held_out_every: int = 20,
    field: str = "text",
    columns: str = "",
    skips_bad: bool = False,
    validation: str = "",
    template: str = "",
    shared: str | None = None,
    report: Report | None = None,
) -> TokenStore:
    """The store of a text, from the node's cache or built now; one process of a node builds it.

    Args:
        source: a file or folder of ``.txt`` (documents are separated by empty lines), ``.jsonl``
            (a document a line), ``.parquet``, ``.json`` or ``.csv`` (a document a row), all but
            Parquet also with ``.gz``; the address of one such file, ``http(s)://``, of a file or
            a folder, ``s3://``, or of a data set of the Hugging Face Hub
            (``training.data.hub_text``); or ``python-help``.
        tokenizer_file: a ``tokenizer.json``, or its folder.
        held_out_every: one document in so many is held out.
        field: of a line or a row, the one that holds the document or the messages.
        columns: which columns hold what, as ``--columns`` has it.
        skips_bad: rows that cannot be used are left out.
        validation: another source, all of which is held out, and nothing of ``source``.
        template: a file with another chat template than the tokenizer's.
        shared: address of a folder in which the nodes of a cluster share stores.
        report: called with the bytes read and the bytes there are.

    Raises:
        InputError: there is no text, it is no text, or the tokenizer cannot be used.
    """
    rows = Rows(text_field=field, columns=parse_columns(columns), skips_bad=skips_bad)
    files = text_files(source, report, unread=rows.files)
    apart = text_files(validation, report, unread=rows.files) if validation else []
    words = vocabulary.read(tokenizer_file, template=template)
    contents = documents(files, rows, report)
    first = next(contents, None)
    is_chat = isinstance(first, Conversation)
    key = _key_of(files, apart, tokenizer_file, held_out_every, rows, words, is_chat=is_chat)
    folder = _place_of(key)
    with cache.locked(folder.with_name(f"{key}.lock")):
        if not _is_there(folder, shared):
            build(
                contents if first is None else chain([first], contents),
                words,
                folder,
                key=key,
                tokenizer_digest=_sha256(tokenizer_file),
                held_out_every=held_out_every,
                is_chat=is_chat,
                rows=rows,
                validation=documents(apart, rows, report) if apart else None,
            )
            if shared:
                uri = storage.join(shared, "tokens", folder.name)
                # The last one marks the rest as complete.
                storage.upload_folder(folder, uri, last=STORE_FILE)
    return TokenStore.open(folder)


def open_store(key: str, *, shared: str | None) -> TokenStore | None:
    """The store of a key, from the node's cache or from where the nodes share them; or None."""
    folder = _place_of(key)
    with cache.locked(folder.with_name(f"{key}.lock")):
        return TokenStore.open(folder) if _is_there(folder, shared) else None


def _place_of(key: str) -> Path:
    """Folder of a store on this node."""
    return cache.cache_dir() / "tokens" / key


def _is_there(folder: Path, shared: str | None) -> bool:
    """True if a store is on this node, or could be fetched from where the nodes share them."""
    if shared is None or (folder / STORE_FILE).exists():
        return (folder / STORE_FILE).exists()
    uri = storage.join(shared, "tokens", folder.name)
    if not storage.exists(storage.join(uri, STORE_FILE)):
        return False
    with storage.staged_folder(str(folder)) as part:
        storage.fetch_folder(uri, part)
    return True


def build(
    contents: Iterable[str | Conversation],
    words: Vocabulary,
    folder: Path,
    *,
    key: str,
    tokenizer_digest: str,
    held_out_every: int,
    is_chat: bool,
    rows: Rows,
    validation: Iterable[str | Conversation] | None = None,
) -> None:
    """Write a store to ``folder``, which appears whole or not at all.

    Args:
        rows: the account of ``contents`` and ``validation``.
        validation: all of it is held out, and nothing of ``contents``.

    Raises:
        InputError: there is too little, text among conversations or the other way about, or rows
            that cannot be used.
    """
    dtype = np.dtype(np.uint16 if words.size <= 2**16 else np.uint32)
    encode = _chats(ChatWriter(words), rows) if is_chat else _texts(words)
    # Every N-th row of the contents is held out, or all of the validation set.
    of_contents = held_out_every if validation is None else math.inf
    number = num_left_out = 0
    is_held_out = False
    stops: set[int] = set()
    with storage.staged_folder(str(folder)) as part:
        with ExitStack() as stack:
            train, held_out = (
                _Output(part / name, dtype, stack, is_chat=is_chat)
                for name in (TRAIN_FILE, _HELD_OUT_FILE)
            )
            for source, every in ((contents, of_contents), (validation or (), 1)):
                for batch in batches(source):
                    if rows.is_refused and not is_chat:
                        continue  # read to the end for its other bad rows, and refused
                    for row in encode(batch):
                        if is_chat and not any(row.learned):
                            num_left_out += 1
                            continue
                        if not row.is_further:
                            is_held_out = number % every == every - 1
                            number += 1
                        (held_out if is_held_out else train).add(row.ids, row.learned)
                        stops |= row.stops
        rows.check()
        if not train.num_rows or not held_out.num_rows:
            found = counted(number, "conversation" if is_chat else "document")
            found += " with an answer" * is_chat
            wanted = f"one in {held_out_every} is to be held out: give more text"
            if validation is not None:
                wanted = f"--validation has {held_out.num_rows}: give both some"
            raise InputError(
                f"the text has {found}, and {wanted}. In .txt files an empty line ends a document"
            )
        info = StoreInfo(
            key=key,
            tokenizer=tokenizer_digest,
            vocab_size=words.size,
            end_of_text=words.end_of_text,
            dtype=dtype.name,
            num_documents=number,
            num_train_tokens=train.num_tokens,
            num_held_out_tokens=held_out.num_tokens,
            num_train_conversations=train.num_conversations,
            num_held_out_conversations=held_out.num_conversations,
            num_left_out=num_left_out,
            stops=tuple(sorted(stops)),
            notes=tuple(rows.notes()),
        )
        (part / STORE_FILE).write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")


class _Output:
    """Writes one part of a store."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], stack: ExitStack, *, is_chat: bool
    ) -> None:
        def opened(ending: str) -> IO[bytes]:
            return stack.enter_context(path.with_name(path.name + ending).open("wb"))

        self._tokens = opened("")
        self._chat_files = (opened(_LEARNED), opened(_STARTS)) if is_chat else None
        self._dtype = dtype
        self.num_tokens = self.num_rows = 0
        if self._chat_files:
            self._chat_files[1].write(np.int64(0).tobytes())

    @property
    def num_conversations(self) -> int:
        return self.num_rows if self._chat_files else 0

    def add(self, ids: Sequence[int], learned: Sequence[bool]) -> None:
        self._tokens.write(np.array(ids, self._dtype).tobytes())
        self.num_tokens += len(ids)
        self.num_rows += 1
        if self._chat_files:
            self._chat_files[0].write(np.array(learned, np.uint8).tobytes())
            self._chat_files[1].write(np.int64(self.num_tokens).tobytes())


def _texts(words: Vocabulary) -> _Encode:
    """Tokens of documents, with what the tokenizer puts before each, and the end of text."""

    def encode(batch: Sequence[str | Conversation]) -> Iterator[Encoded]:
        for encoding in words.tokenizer.encode_batch([*batch]):
            ids = [*encoding.ids]
            if ids[-1:] != [words.end_of_text]:
                ids.append(words.end_of_text)
            yield Encoded(ids=ids, learned=[], stops=frozenset())

    return encode


def _chats(writer: ChatWriter, rows: Rows) -> _Encode:
    """Tokens of conversations."""

    def encode(batch: Sequence[str | Conversation]) -> Iterator[Encoded]:
        chats = (each for each in batch if not isinstance(each, str))
        yield from writer.encode(chats, rows.refuse)
        rows.unused |= {f"{key} of a message" for key in writer.unused}
        rows.counts = writer.counts

    return encode


def _key_of(
    files: Sequence[Path],
    apart: Sequence[Path],
    tokenizer_file: Path,
    held_out_every: int,
    rows: Rows,
    words: Vocabulary,
    *,
    is_chat: bool,
) -> str:
    """Hash of all that decides the tokens of a store."""
    parts = [f"{_FORMAT}", f"{held_out_every}", rows.text_field, _sha256(tokenizer_file)]
    parts += [f"{each.name}:{_sha256(each)}" for each in files]
    parts += [f"held out:{each.name}:{_sha256(each)}" for each in apart]
    parts += [f"column:{part}={name}" for part, name in sorted(rows.columns.items())]
    parts += ["skips bad rows"] if rows.skips_bad else []
    parts += [f"chat:{_CHAT_FORMAT}:{words.digest_of_template()}"] if is_chat else words.marks
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _sha256(file: Path) -> str:
    """Hash of a file, or of the tokenizer of a folder.

    Raises:
        InputError: it cannot be read.
    """
    path = vocabulary.tokenizer_file(file)
    try:
        return storage.sha256(str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
