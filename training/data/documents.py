"""The documents of a text: found where ``--data`` points, and read one after the other.

Text comes as ``.txt`` (documents are separated by empty lines), ``.jsonl`` (a document a line),
``.parquet``, ``.json`` or ``.csv`` (a document a row), all but Parquet also with ``.gz``. A line or
a row may also hold a conversation (``training.data.conversations``). ``training.data.text`` makes
tokens of them.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

from contract.errors import InputError
from contract.text import byte_size
from training import storage
from training.data import PYTHON_HELP, catalog, hub_text, rows, sources
from training.data.rows import MAX_CHARACTERS, READ_BYTES, TOO_LONG, Content
from training.storage import UnreachableError

#: Endings of the files that are text.
KINDS: Final = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".parquet")
#: Of a folder, those of the first kinds that it has are read: many have others that describe them.
_TIERS: Final = (KINDS, (".csv", ".csv.gz"), (".json", ".json.gz"))
_ALL_KINDS: Final = tuple(kind for tier in _TIERS for kind in tier)
#: Tables that would be taken for text where they are given by name.
_UNREAD: Final = ("tsv", "xls", "xlsx", "arrow", "feather", "orc", "avro")
_ROWS: Final = ("jsonl", "json", "csv")
_BATCH_DOCUMENTS: Final = 1024

_Content = TypeVar("_Content")

Report = Callable[[int, int], None]
"""Is called with the bytes read so far and the bytes to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file in S3 that is read through the network, and never kept as a whole."""

    address: str
    size: int
    """Bytes."""
    etag: str
    """Tells one content from another. A file that is replaced while it is read is an error."""

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    def open(self) -> IO[bytes]:
        """
        Raises:
            InputError: it is gone or has been replaced, which reading also finds.
            UnreachableError: S3 does not answer, which reading also finds.
        """
        with self.reading():
            fs = storage.filesystem(self.address)
            found: Any = fs.open(self.address, "rb", block_size=READ_BYTES)
            # From here on, S3 itself refuses to read on in another content (If-Match).
            if self.etag and found.details["ETag"] != self.etag:
                raise self._replaced()
        return io.BufferedReader(_RemoteReads(self, found))

    @contextmanager
    def reading(self) -> Iterator[None]:
        try:
            with storage.reading(self.address):
                yield
        except FileNotFoundError:
            raise self._replaced() from None
        except UnreachableError as error:
            if type(error.__cause__).__name__ == "FileExpired":  # s3fs's, for a failed If-Match
                raise self._replaced() from None
            raise

    def _replaced(self) -> InputError:
        return InputError(
            f"{self} has been replaced since the run began, or removed: start the run again"
        )

    def __str__(self) -> str:
        return self.address


class _RemoteReads(io.RawIOBase):
    """Tells a store that does not answer from a file whose content is damaged."""

    def __init__(self, file: RemoteFile, content: Any) -> None:
        self._file, self._content = file, content

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._file.reading():
            return int(self._content.readinto(buffer))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._content.seek(offset, whence))

    def tell(self) -> int:
        return int(self._content.tell())

    def close(self) -> None:
        self._content.close()
        super().close()


def text_files(source: str, report: Report | None = None) -> list[Path]:
    """The files of a text on this node, sorted by name.

    Args:
        source: what ``--data`` has.
        report: called while a data set of ``training.data.catalog`` is downloaded.

    Raises:
        InputError: there is nothing at ``source``, or nothing of a kind that can be read.
    """
    if source == PYTHON_HELP:
        return [_python_help()]
    if catalog.find(source):
        return sources.local_files(source, (), report=report)
    if source.startswith(hub_text.PREFIX):
        files = hub_text.fetch(source, KINDS)
        if not files:
            raise InputError(f"{source} holds no text: files must end in {', '.join(KINDS)}")
        return files
    path = Path(source).expanduser()
    if kind_of(source) in _UNREAD and not path.is_dir():
        raise InputError(f"text {source} is a table of another kind: write it as .parquet")
    if sources.is_remote(source):
        if _is(source, _ALL_KINDS) or not storage.is_s3(source):
            place, _, name = source.rpartition("/")
            return sources.local_files(place, [name])
        return _s3_files(source.rstrip("/"))
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"text {source} does not exist: give a file, a folder or an address")
    # Some programs write a folder of parts that is named like a file.
    names = _texts_of([str(each) for each in sorted(path.rglob("*")) if each.is_file()], source)
    return [Path(each) for each in names]


def _texts_of(names: Iterable[str], source: str) -> list[str]:
    """The names, in their order, of the files that are text.

    Raises:
        InputError: there are none.
    """
    for kinds in _TIERS:
        if found := [each for each in names if _is(each, kinds)]:
            return found
    raise InputError(f"{source} holds no text: files must end in {', '.join(_ALL_KINDS)}")


def _is(name: str, kinds: tuple[str, ...]) -> bool:
    return name.lower().endswith(kinds)


def kind_of(name: str) -> str:
    """The kind of a file by its name, a path or an address: the last of its suffixes in lower case,
    without that of what is packed."""
    plain = name.partition("?")[0].rpartition("/")[2].lower().removesuffix(".gz")
    return plain.rpartition(".")[2]


def remote_files(source: str) -> list[RemoteFile]:
    """The files of a text in S3, sorted by their keys.

    Raises:
        InputError: there is nothing at ``source``, or nothing of a kind that can be read, or it
            may not be read.
        UnreachableError: S3 does not answer.
    """
    with storage.given(source):
        found = storage.filesystem(source).find(source.rstrip("/"), detail=True)
    return [
        RemoteFile(address=f"s3://{key}", size=int(each["size"]), etag=str(each["ETag"]))
        for key, each in ((key, found[key]) for key in _texts_of(sorted(found), source))
    ]


def _s3_files(source: str) -> list[Path]:
    files = remote_files(source)
    places = [each.address.rpartition("/") for each in files]
    missing = sum(
        max(0, each.size - sources.bytes_here(folder, name))
        for each, (folder, _, name) in zip(files, places, strict=True)
    )
    # Tokens of two or four bytes are about as large as the text, or half.
    if (free := sources.bytes_free()) < 2 * missing:
        raise InputError(
            f"{source} has {byte_size(missing)} of text that is not here yet, which takes about as "
            f"much again as tokens, and {sources.cache_dir()} has {byte_size(free)} free: give "
            "--stream, which keeps only a small part of it on the disk at a time (only text: "
            "conversations need hosts with a larger disk)"
        )
    return [sources.local_files(folder, [name])[0] for folder, _, name in places]


def _python_help() -> Path:
    """The help texts that come with Python, some 80 documents: real text without a download."""
    from pydoc_data.topics import topics

    lines = [json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)]
    content = "".join(lines).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]  # each version of Python has its own
    file = sources.cache_dir() / "text" / f"python-help-{digest}.jsonl"
    if not file.exists():
        storage.write_bytes(str(file), content)
    return file


def documents(
    files: Sequence[Path | RemoteFile], field: str, report: Report | None
) -> Iterator[Content]:
    """The documents or conversations of all files, in order; only one is in memory.

    Raises:
        InputError: a file cannot be read, or a line or a row holds neither.
    """
    total = sum(map(_size, files))
    done = 0
    for file in files:
        is_table = kind_of(file.name) == "parquet"  # is read here and there
        try:
            with ExitStack() as stack:
                raw = stack.enter_context(_open(file))
                for document in _contents(raw, file, field, stack):
                    yield document
                    if report and not is_table:
                        report(done + raw.tell(), total)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file} is not UTF-8 text ({error.reason} at byte {error.start:,} of a block)"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{file} cannot be read: {error}; fetch it again") from None
        done += _size(file)
        if report:
            report(done, total)


def _contents(
    raw: IO[bytes], file: Path | RemoteFile, field: str, stack: ExitStack
) -> Iterator[Content]:
    kind, name = kind_of(file.name), str(file)
    if kind == "parquet":
        return rows.of_parquet(raw, name, field)
    is_packed = file.name.partition("?")[0].lower().endswith(".gz")
    content = stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_packed else raw
    # Of rows: some programs put a byte-order mark before them.
    encoding = "utf-8-sig" if kind in _ROWS else "utf-8"
    text = stack.enter_context(io.TextIOWrapper(cast("IO[bytes]", content), encoding))
    match kind:
        case "jsonl":
            return rows.of_json_lines(_lines(text), name, field)
        case "json":
            return rows.of_json(text, name, field)
        case "csv":
            return rows.of_csv(_lines(text), name, field)
        case _:
            return _paragraphs(_lines(text))


def batches(contents: Iterable[_Content]) -> Iterator[list[_Content]]:
    """As many at a time as the tokenizer works on with all processors."""
    batch: list[_Content] = []
    for each in contents:
        batch.append(each)
        if len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _size(file: Path | RemoteFile) -> int:
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def _open(file: Path | RemoteFile) -> IO[bytes]:
    return file.open() if isinstance(file, RemoteFile) else file.open("rb")


def _lines(text: IO[str]) -> Iterator[str]:
    while line := text.readline(MAX_CHARACTERS + 1):
        if len(line) > MAX_CHARACTERS:
            raise InputError(TOO_LONG.format("line"))
        yield line


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Blocks of lines between empty lines, without the line feed at their end."""
    block: list[str] = []
    size = 0
    for line in lines:
        size = size + len(line) if block else len(line)
        if size > MAX_CHARACTERS:
            raise InputError(TOO_LONG.format("document"))
        if "\0" in line:
            raise InputError("the text holds zero bytes: it is binary, or not UTF-8")
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block).rstrip("\n")
            block = []
    if block:
        yield "".join(block).rstrip("\n")
