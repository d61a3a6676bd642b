"""The documents of a text: found where ``--data`` points, and read one after the other.

Text comes as ``.txt`` (documents are separated by empty lines), ``.jsonl`` (a document a line) or
``.parquet`` (a document a row), the first two also with ``.gz``. A line or a row may also hold a
conversation (``training.data.conversations``). ``training.data.text`` makes tokens of them.
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
from training.data import PYTHON_HELP, catalog, hub_text, sources
from training.data.conversations import Conversation, columns_of, content_of
from training.storage import UnreachableError

#: Endings of the files that are text.
KINDS: Final = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".parquet")
_BATCH_ROWS: Final = 1024
_BATCH_DOCUMENTS: Final = 1024
#: Are read at a time.
_READ_BYTES: Final = 4 << 20
#: Of a document, which is in memory as a whole.
_MAX_CHARACTERS: Final = 1 << 28
_TOO_LONG: Final = (
    f"the text has a {{}} of more than {_MAX_CHARACTERS:,} characters. In .txt files an empty line "
    "ends a document; or give .jsonl, with a document a line"
)

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
            found: Any = fs.open(self.address, "rb", block_size=_READ_BYTES)
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
    if sources.is_remote(source):
        if source.endswith(KINDS) or not storage.is_s3(source):
            place, _, name = source.rpartition("/")
            return sources.local_files(place, [name])
        return _s3_files(source.rstrip("/"))
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"text {source} does not exist: give a file, a folder or an address")
    files = sorted(each for each in path.rglob("*") if each.name.endswith(KINDS))
    if not files:
        raise InputError(f"{source} holds no text: files must end in {', '.join(KINDS)}")
    return files


def remote_files(source: str) -> list[RemoteFile]:
    """The files of a text in S3, sorted by their keys.

    Raises:
        InputError: there is nothing at ``source``, or nothing of a kind that can be read, or it
            may not be read.
        UnreachableError: S3 does not answer.
    """
    with storage.given(source):
        found = storage.filesystem(source).find(source.rstrip("/"), detail=True)
    files = [
        RemoteFile(address=f"s3://{key}", size=int(each["size"]), etag=str(each["ETag"]))
        for key, each in sorted(found.items())
        if key.endswith(KINDS)
    ]
    if not files:
        raise InputError(f"{source} holds no text: files must end in {', '.join(KINDS)}")
    return files


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
) -> Iterator[str | Conversation]:
    """The documents or conversations of all files, in order; only one is in memory.

    Raises:
        InputError: a file cannot be read, or a line or a row holds neither.
    """
    total = sum(map(_size, files))
    done = 0
    for file in files:
        if file.name.endswith(".parquet"):
            yield from _parquet_rows(file, field)
            done += _size(file)
            if report:
                report(done, total)
            continue
        with ExitStack() as stack:
            raw = stack.enter_context(_open(file))
            is_packed = file.name.endswith(".gz")
            content = stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_packed else raw
            text = stack.enter_context(io.TextIOWrapper(cast("IO[bytes]", content), "utf-8"))
            lines = _lines(text)
            try:
                is_json = file.name.removesuffix(".gz").endswith(".jsonl")
                found: Iterator[str | Conversation] = (
                    _json_lines(lines, file, field) if is_json else _paragraphs(lines)
                )
                for document in found:
                    yield document
                    if report:
                        report(done + raw.tell(), total)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{file} is not UTF-8 text ({error.reason} at byte {error.start:,} of a block)"
                ) from None
            except (OSError, EOFError, zlib.error) as error:
                raise InputError(f"{file} cannot be read: {error}; fetch it again") from None
        done += _size(file)


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
    while line := text.readline(_MAX_CHARACTERS + 1):
        if len(line) > _MAX_CHARACTERS:
            raise InputError(_TOO_LONG.format("line"))
        yield line


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Blocks of lines between empty lines, without the line feed at their end."""
    block: list[str] = []
    size = 0
    for line in lines:
        size = size + len(line) if block else len(line)
        if size > _MAX_CHARACTERS:
            raise InputError(_TOO_LONG.format("document"))
        if "\0" in line:
            raise InputError("the text holds zero bytes: it is binary, or not UTF-8")
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block).rstrip("\n")
            block = []
    if block:
        yield "".join(block).rstrip("\n")


def _parquet_rows(file: Path | RemoteFile, field: str) -> Iterator[str | Conversation]:
    """What some columns of a table hold, a thousand rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _open(file) as content:
            yield from _rows_of(pq.ParquetFile(content, buffer_size=_READ_BYTES), file, field)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _rows_of(table: Any, file: Path | RemoteFile, field: str) -> Iterator[str | Conversation]:
    columns = columns_of(table.schema_arrow.names, field)
    if not columns:
        raise InputError(
            f"{file} has no column {field!r} but {', '.join(table.schema_arrow.names)}: give "
            "--text-field one of them"
        )
    number = 0
    for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
        for row in batch.to_pylist():
            number += 1
            if content := _content(row, field, f"{file}, row {number}"):
                yield content


def _json_lines(
    lines: Iterable[str], file: Path | RemoteFile, field: str
) -> Iterator[str | Conversation]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{file}, line {number}: no JSON object")
        if content := _content(row, field, f"{file}, line {number}"):
            yield content


def _content(row: dict[str, Any], field: str, where: str) -> str | Conversation | None:
    try:
        return content_of(row, field)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
