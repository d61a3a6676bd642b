"""Documents of a text: found where ``--data`` points, and read one after the other.

Text comes as ``.txt`` (documents are separated by empty lines), ``.jsonl`` (a document a line),
``.parquet``, ``.json`` or ``.csv`` (a document a row), all but Parquet also with ``.gz``. A line or
a row may also hold a conversation (``training.data.conversations``). ``training.data.rows`` makes
tokens of them.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from contract.errors import InputError
from contract.text import byte_size, counted, listed
from store import cache, storage
from training.data import PYTHON_HELP, catalog, hub_text, sources
from training.data.conversations import CHECKED, Conversation, columns_of, content_of
from training.data.download import Report

#: A folder is read for the first of these groups that it has: a .txt, .csv or .json beside other
#: files often just describes them.
_TIERS: Final = (
    (".jsonl", ".jsonl.gz", ".parquet"),
    (".txt", ".txt.gz"),
    (".csv", ".csv.gz"),
    (".json", ".json.gz"),
)
#: Endings of the files that are text.
KINDS: Final = (*_TIERS[0], *_TIERS[1])
_ALL_KINDS: Final = tuple(kind for tier in _TIERS for kind in tier)
#: Tables that would be taken for text where they are given by name.
_UNREAD: Final = ("tsv", "xls", "xlsx", "arrow", "feather", "orc", "avro")
_ROWS: Final = ("jsonl", "json", "csv")
_BATCH_DOCUMENTS: Final = 1024
#: Limit of a document, because it is in memory as a whole.
MAX_CHARACTERS: Final = 1 << 28
_TOO_LONG: Final = (
    f"the text has a {{}} of more than {MAX_CHARACTERS:,} characters. In .txt files an empty line "
    "ends a document; or give .jsonl, with a document a line"
)
_READ_BYTES: Final = 4 << 20
_BATCH_ROWS: Final = 1024
#: Characters of a .json file, which is in memory as a whole.
_MAX_JSON: Final = 4 * MAX_CHARACTERS

#: Words for splits in names of files and folders, between any separators, as the Hugging Face
#: library ``datasets`` has them (data_files.py, SPLIT_KEYWORDS).
_SPLIT: Final = re.compile(
    r"(?<![a-z])(train(?:ing)?|validation|valid|dev|val|test(?:ing)?|eval(?:uation)?)(?![a-z])"
)
#: Rows that cannot be used and are shown; all are counted.
_SHOWN: Final = 5

Content = str | Conversation
_Content = TypeVar("_Content")


@dataclass(kw_only=True, slots=True)
class Rows:
    """Options for reading rows, and an account of what was not used."""

    text_field: str = "text"
    """Value of ``--text-field``."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Value of ``--columns``, parsed."""
    skips_bad: bool = False
    """Rows that cannot be used are left out; without it, ``check`` refuses them."""
    num: int = 0
    num_empty: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    """The first ones: place and reason."""
    names: set[str] = field(default_factory=set)
    """Names of all columns."""
    unused: set[str] = field(default_factory=set)
    """Names of columns."""
    files: list[str] = field(default_factory=list)
    """Names of files that are not read."""
    kinds: dict[bool, str] = field(default_factory=dict)
    """A file with text (True), and one with conversations."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers for other notes, by their words."""

    def refuse(self, place: str, error: ValueError) -> None:
        """Take note of a row that cannot be used."""
        self.num_bad += 1
        if len(self.bad) < _SHOWN:
            self.bad.append(f"{place}: {error}")

    def check_kind(self, is_text: bool, file: str) -> None:
        """Take note of a file that holds text, or conversations.

        Raises:
            InputError: another one holds the other.
        """
        self.kinds.setdefault(is_text, file)
        if len(self.kinds) > 1:
            text, chats = self.kinds[True], self.kinds[False]
            raise InputError(
                "some lines or rows hold text, and others conversations: give --data only one of "
                f"the two kinds ({text} has text, {chats} conversations)"
            )

    @property
    def is_refused(self) -> bool:
        """True once a row that cannot be used was read and none may be left out."""
        return bool(self.bad) and not self.skips_bad

    def check(self) -> None:
        """
        Raises:
            InputError: there are rows that cannot be used.
        """
        if self.is_refused:
            lines = "\n  ".join(self.bad)
            raise InputError(
                f"{self.num_bad:,} of {counted(self.num, 'row')} cannot be used; --skip-bad-rows "
                f"leaves them out\n  {lines}"
            )

    def notes(self) -> list[str]:
        """Sentences that describe the unused rows, columns and files."""
        notes = []
        if self.bad:
            notes.append(f"left out, because they cannot be used: {counted(self.num_bad, 'row')}")
        if self.num_empty:
            notes.append(f"left out, because they are empty: {counted(self.num_empty, 'row')}")
        for what, names in (("columns", self.unused), ("files", self.files)):
            if names:
                notes.append(f"{what} that are not used: {listed(sorted(names), most=8)}")
        return notes + [f"{what}: {num:,}" for what, num in sorted(self.counts.items()) if num]


def text_files(
    source: str, report: Report | None = None, *, unread: list[str] | None = None
) -> list[Path]:
    """The files of a text on this node, sorted by name.

    Args:
        source: what ``--data`` has.
        report: called while a data set of ``training.data.catalog`` is downloaded.
        unread: takes the names of files that are there and are not read.

    Raises:
        InputError: there is nothing at ``source``, or nothing of a kind that can be read.
    """
    if source == PYTHON_HELP:
        return [_python_help()]
    if catalog.find(source):
        return sources.local_files(source, (), report=report)
    if source.startswith(hub_text.PREFIX):
        found = [*map(str, hub_text.fetch(source, KINDS))]
        return [Path(each) for each in _texts_of(found, source, unread)]
    path = Path(source).expanduser()
    if sources.is_remote(source):
        if _is(source, _ALL_KINDS) or not storage.is_s3(source):
            place, _, name = source.rpartition("/")
            return sources.local_files(place, [name])
        return _s3_files(source.rstrip("/"), unread)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"text {source} does not exist: give a file, a folder or an address")
    # Some programs write a folder of parts that is named like a file.
    there = sorted(each for each in path.rglob("*") if each.is_file())
    # Hidden files are copies that editors and Jupyter keep.
    shown = [str(each) for each in there if "/." not in f"/{each.relative_to(path)}"]
    return [Path(each) for each in _texts_of(shown, source, unread)]


def _texts_of(names: Sequence[str], source: str, unread: list[str] | None) -> list[str]:
    """The names, in their order, of the files that are text.

    Raises:
        InputError: there are none.
    """
    for kinds in _TIERS:
        found = [each for each in names if _is(each, kinds)]
        if not found:
            continue
        tables = [each.rpartition("/")[2] for each in names if kind_of(each) in _UNREAD]
        if tables and not {*kinds} <= {*KINDS}:
            raise InputError(
                f"{source} holds {listed(tables)}, a table of another kind beside its description: "
                "write it as .parquet (Dataset.to_parquet)"
            )
        trained = _trained(found)
        if unread is not None:
            kept = set(trained)
            unread += [each.rpartition("/")[2] for each in names if each not in kept]
        return trained
    raise InputError(f"{source} holds no text: files must end in {', '.join(_ALL_KINDS)}")


def _trained(names: Sequence[str]) -> list[str]:
    """The names without those of splits for evaluation, where others are for training: as the
    Hugging Face Hub names files and folders."""
    inside = len(os.path.commonprefix([each.split("/")[:-1] for each in names]))  # noqa: RUF071
    splits = [_SPLIT.findall("/".join(each.split("/")[inside:]).lower()) for each in names]
    is_trained = [all(word.startswith("train") for word in each) for each in splits]
    # A name of both kinds, such as train_test_split, is none for evaluation.
    if not any(each and own for each, own in zip(splits, is_trained, strict=True)):
        return [*names]
    return [name for name, own in zip(names, is_trained, strict=True) if own]


def _is(name: str, kinds: tuple[str, ...]) -> bool:
    return name.lower().endswith(kinds)


def kind_of(name: str) -> str:
    """The kind of a file by its name, a path or an address: the last of its suffixes in lower case,
    without that of what is packed."""
    plain = name.partition("?")[0].rpartition("/")[2].lower().removesuffix(".gz")
    return plain.rpartition(".")[2]


def _s3_files(source: str, unread: list[str] | None) -> list[Path]:
    """The files of a text in S3, sorted by their keys and brought into the node's cache.

    Raises:
        InputError: there is no text at ``source``, it may not be read, or the disk is too small.
        UnreachableError: S3 does not answer.
    """
    with storage.reading(source):
        found = storage.find(source)
    texts = _texts_of(sorted(found), source, unread)
    places = {each: storage.join(source, each).rpartition("/")[::2] for each in texts}
    missing = sum(
        max(0, found[each] - sources.bytes_here(folder, name))
        for each, (folder, name) in places.items()
    )
    # Tokens of two or four bytes are about as large as the text, or half.
    if (free := storage.bytes_free(cache.cache_dir().absolute())) < 2 * missing:
        raise InputError(
            f"{source} has {byte_size(missing)} of text that is not here yet, which takes about as "
            f"much again as tokens, and {cache.cache_dir()} has {byte_size(free)} free: use "
            "hosts with a larger disk (root_volume_gib), or train on a part of the text"
        )
    return [sources.local_files(folder, [name])[0] for folder, name in places.values()]


def _python_help() -> Path:
    """The help texts that come with Python, some 80 documents: real text without a download."""
    from pydoc_data.topics import topics

    lines = [json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)]
    content = "".join(lines).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]  # each version of Python has its own
    return storage.cached(f"text/python-help-{digest}.jsonl", lambda: content)


def documents(files: Sequence[Path], rows: Rows, report: Report | None) -> Iterator[Content]:
    """The documents or conversations of all files, in order; only one is in memory.

    Args:
        rows: takes what is not used, and the rows that hold neither.

    Raises:
        InputError: a file cannot be read.
    """
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        is_table = kind_of(file.name) == "parquet"  # is read here and there
        try:
            with ExitStack() as stack:
                raw = stack.enter_context(file.open("rb"))
                for number, (place, row) in enumerate(_rows_of(raw, file, rows, stack)):
                    rows.num += 1
                    if content := _content(row, rows, f"{file}, {place}"):
                        rows.check_kind(isinstance(content, str), str(file))
                        yield content
                    # Of a table too: who hears nothing for an hour ends this process.
                    if report and not (is_table and number % _BATCH_ROWS):
                        report(done + (0 if is_table else raw.tell()), total)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file} is not UTF-8 text ({error.reason} at byte {error.start:,} of a block)"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{file} cannot be read: {error}; fetch it again") from None
        done += file.stat().st_size
        if report:
            report(done, total)


def _rows_of(
    raw: IO[bytes], file: Path, rows: Rows, stack: ExitStack
) -> Iterator[tuple[str, object]]:
    """The rows of a file with the place of each in it: objects, documents, or what is neither."""
    kind, name = kind_of(file.name), str(file)
    if kind == "parquet":
        return _of_parquet(raw, name, rows)
    plain = file.name.partition("?")[0].lower()
    is_packed = plain.endswith(".gz")
    content: Any = stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_packed else raw
    # A name without a suffix is that of a text, unless it looks like rows.
    is_named = "." in plain.removesuffix(".gz")
    if kind not in (*_ROWS, "txt") and (is_named or content.peek(64).lstrip()[:1] in (b"{", b"[")):
        raise InputError(
            f"{file} is of a kind that is not known: name it by what it holds, with one of "
            f"{', '.join(_ALL_KINDS)} at its end"
        )
    # Some programs begin with a byte-order mark.
    text = stack.enter_context(io.TextIOWrapper(content, "utf-8-sig"))
    match kind:
        case "jsonl":
            return _of_json_lines(_lines(text), name)
        case "json":
            return _of_json(text, name)
        case "csv":
            return _of_csv(_lines(text), name, rows)
        case _:
            return (("", each) for each in _paragraphs(_lines(text)))


def batches(contents: Iterable[_Content]) -> Iterator[list[_Content]]:
    """Group contents, so that the tokenizer has work for all processors."""
    batch: list[_Content] = []
    for each in contents:
        batch.append(each)
        if len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _lines(text: IO[str]) -> Iterator[str]:
    while line := text.readline(MAX_CHARACTERS + 1):
        if len(line) > MAX_CHARACTERS:
            raise InputError(_TOO_LONG.format("line"))
        yield line


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Blocks of lines between empty lines, without the line feed at their end."""
    block: list[str] = []
    size = 0
    for line in lines:
        size = size + len(line) if block else len(line)
        if size > MAX_CHARACTERS:
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


# --- rows -----------------------------------------------------------------------------------------
def _of_parquet(content: IO[bytes], name: str, rows: Rows) -> Iterator[tuple[str, object]]:
    """Read the columns of a Parquet table, a thousand rows at a time.

    Args:
        content: the file.
        name: what an error calls it.

    Raises:
        InputError: it is no table, or has no such column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(content, buffer_size=_READ_BYTES)
        names = table.schema_arrow.names
        columns = _columns(names, name, rows)
        if rows.text_field not in columns:
            columns += CHECKED.intersection(names).difference(columns)
        rows.unused |= {*names} - {*columns}
        batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
        values = (row for each in batches for row in each.to_pylist())
        # Its objects have the keys of others, too, as nulls.
        yield from _numbered(row | _without_nulls(row) for row in values)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_without_nulls, value)]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _of_csv(lines: Iterable[str], name: str, rows: Rows) -> Iterator[tuple[str, object]]:
    """Read a CSV table, whose first row names the columns.

    Raises:
        InputError: it is no such table, or has no such column.
    """
    csv.field_size_limit(MAX_CHARACTERS)
    table = csv.reader(lines, strict=True)
    try:
        names = next(table, [])
        _columns(names, name, rows)
        for values in table:
            if not values:  # an empty line
                continue
            row: object = dict(zip(names, values, strict=False))
            if len(values) != len(names):
                row = ValueError(f"{len(values)} values for {len(names)} columns")
            yield f"line {table.line_num}", row
    except csv.Error as error:
        raise InputError(f"{name}, line {table.line_num}: no CSV: {error}") from None


def _of_json(text: IO[str], name: str) -> Iterator[tuple[str, object]]:
    """Read the objects of a list, or one object per line: some data sets call such files .json. All
    of the file is in memory.

    Raises:
        InputError: it is too large or no JSON.
    """
    content = text.read(_MAX_JSON + 1)
    if len(content) > _MAX_JSON:
        raise InputError(f"{name} has more than a billion characters: write it as .jsonl")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip()[:1] == "[":
            raise InputError(f"{name} is no JSON: {error}") from None
        yield from _of_json_lines(io.StringIO(content), name)
        return
    yield from _numbered(values if isinstance(values, list) else [values])


def _of_json_lines(lines: Iterable[str], name: str) -> Iterator[tuple[str, object]]:
    """Read the objects of lines.

    Raises:
        InputError: it is one list.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip()[0] == "[":
            raise InputError(
                f"{name} begins with a JSON list: name it .json, or write an object per line"
            )
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield f"line {number}", None if isinstance(row, str) else row  # text, of whatever


def _columns(names: Sequence[str], name: str, rows: Rows) -> list[str]:
    rows.names.update(names)
    if not names:
        raise InputError(f"{name} is empty: its first row must name the columns")
    if columns := columns_of(names, rows.text_field, rows.columns):
        return [*columns.values()]
    wanted = ", ".join(rows.columns.values()) or rows.text_field
    raise InputError(
        f"{name} has no column {wanted!r} but {', '.join(names)}: give --text-field one of them, "
        "or --columns prompt=NAME,answer=NAME"
    )


def _numbered(values: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"row {number}", row) for number, row in enumerate(values, start=1))


def _content(row: object, rows: Rows, where: str) -> Content | None:
    if isinstance(row, str):
        return row
    try:
        if isinstance(row, ValueError):
            raise row
        if not isinstance(row, Mapping):
            raise ValueError("no JSON object")
        rows.names.update(map(str, row))
        content = content_of(row, rows.text_field, rows.columns, unused=rows.unused)
    except ValueError as error:
        rows.refuse(where, error)
        return None
    rows.num_empty += content is None
    return replace(content, place=where) if isinstance(content, Conversation) else content
