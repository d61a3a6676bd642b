"""Rows of data sets' files, Parquet, JSON, JSON Lines or CSV: a document or a conversation each."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from contract.errors import InputError
from training.data.conversations import MESSAGES, Conversation, columns_of, content_of

#: Of a document, which is in memory as a whole.
MAX_CHARACTERS: Final = 1 << 28
TOO_LONG: Final = (
    f"the text has a {{}} of more than {MAX_CHARACTERS:,} characters. In .txt files an empty line "
    "ends a document; or give .jsonl, with a document a line"
)
READ_BYTES: Final = 4 << 20
"""Are read at a time."""

_BATCH_ROWS: Final = 1024
#: Of JSON that ends too early, the decoder's error stands no farther from the end.
_LONGEST_WORD: Final = 16

Content = str | Conversation


def of_parquet(content: IO[bytes], name: str, field: str) -> Iterator[Content]:
    """What some columns of a table hold, a thousand rows at a time.

    Args:
        content: the file.
        name: what an error calls it.
        field: what ``--text-field`` asks for.

    Raises:
        InputError: it is no table, or has no such column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(content, buffer_size=READ_BYTES)
        columns = _columns(table.schema_arrow.names, name, field)
        batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
        yield from _contents((row for each in batches for row in each.to_pylist()), name, field)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read: {error}") from None


def of_csv(lines: Iterable[str], name: str, field: str) -> Iterator[Content]:
    """What some columns of a table hold whose first row names them. The same of the rest.

    Raises:
        InputError: it is no such table, or has no such column.
    """
    csv.field_size_limit(MAX_CHARACTERS)
    table = csv.reader(lines, strict=True)
    try:
        names = next(table, [])
        if (column := _columns(names, name, field)[0]) in MESSAGES and column != field:
            raise InputError(
                f"{name} has messages written as text: write them as .jsonl or .parquet, where "
                "they are lists of objects"
            )
        for values in table:
            where = f"{name}, line {table.line_num}"
            if not values:  # an empty line
                continue
            if len(values) != len(names):
                raise InputError(f"{where}: {len(values)} values for {len(names)} columns")
            if content := _content(dict(zip(names, values, strict=True)), field, where):
                yield content
    except csv.Error as error:
        raise InputError(f"{name}, line {table.line_num}: no CSV: {error}") from None


def of_json(text: IO[str], name: str, field: str) -> Iterator[Content]:
    """What the objects of a list hold, or of one after the other; one is in memory at a time.

    Raises:
        InputError: it is no JSON, or an object holds neither document nor conversation.
    """
    yield from _contents(_values(text, name), name, field)


def of_json_lines(lines: Iterable[str], name: str, field: str) -> Iterator[Content]:
    """What the objects hold that each have a line.

    Raises:
        InputError: a line has none, or one that holds neither document nor conversation.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if content := _content(row, field, f"{name}, line {number}"):
            yield content


def _columns(names: Sequence[str], name: str, field: str) -> list[str]:
    if columns := columns_of(names, field):
        return columns
    raise InputError(
        f"{name} has no column {field!r} but {', '.join(names)}: give --text-field one of them"
    )


def _contents(rows: Iterable[Any], name: str, field: str) -> Iterator[Content]:
    for number, row in enumerate(rows, start=1):
        if content := _content(row, field, f"{name}, row {number}"):
            yield content


def _content(row: Any, field: str, where: str) -> Content | None:
    if not isinstance(row, Mapping):
        raise InputError(f"{where}: no JSON object")
    try:
        return content_of(row, field)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _values(text: IO[str], name: str) -> Iterator[Any]:
    """The values of a list, or those that follow each other."""
    decoder, rest, at, number = json.JSONDecoder(), "", 0, 1
    is_list: bool | None = None
    while True:
        while at < len(rest) and (rest[at].isspace() or (is_list and rest[at] == ",")):
            at += 1
        if at < len(rest) and is_list is None:
            is_list = rest[at] == "["
            at += is_list
            continue
        if is_list and rest[at : at + 1] == "]":
            is_list, at = None, at + 1  # and another list may follow
            continue
        wrong = "the list does not end" if is_list else ""
        if at < len(rest):
            try:
                value, at = decoder.raw_decode(rest, at)
            except (ValueError, RecursionError) as error:
                wrong = f"row {number} is no JSON: {getattr(error, 'msg', error)}"
                if not _is_cut(error, len(rest)):
                    raise InputError(f"{name}: {wrong}") from None
            else:
                yield value
                number += 1
                continue
        if len(rest) - at > MAX_CHARACTERS:
            raise InputError(TOO_LONG.format("row"))
        # Twice as much each time, or a long row would be parsed again and again.
        more = text.read(max(READ_BYTES, len(rest) - at))
        if not more and wrong:
            raise InputError(f"{name}: {wrong}")
        if not more:
            return
        rest, at = rest[at:] + more, 0


def _is_cut(error: Exception, length: int) -> bool:
    """Whether what could not be decoded may only lack its end."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string") or error.pos + _LONGEST_WORD > length
    )
