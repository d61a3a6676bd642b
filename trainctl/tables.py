"""Tables for people, in which no id, state or option name is ever cut.

On a terminal that is too narrow for one line per row, columns of prose wrap first. Where that does
not suffice, each row becomes a few lines: its first cell, then one line per further column.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.text import Text

_GAP: Final = "  "
#: Prose in a narrower column is tiring to read.
_MIN_PROSE: Final = 24


def layout(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    prose: Sequence[str] = (),
    width: int | None,
) -> "list[Text]":
    """The lines of a table, headings in bold.

    Args:
        columns: headings, one per cell of a row.
        rows: cells; the first one names the row.
        prose: headings of the columns that may wrap.
        width: characters in a line; None where there is no limit.
    """
    from rich.cells import cell_len

    natural = [
        max(cell_len(cells[place]) for cells in (columns, *rows)) for place in range(len(columns))
    ]
    wraps = [column in prose for column in columns]
    fits = _widths(natural, wraps, width)
    return _records(columns, rows, width or 0) if fits is None else _table(columns, rows, fits)


def _widths(natural: list[int], wraps: list[bool], width: int | None) -> list[int] | None:
    """The width of each column; None where they do not fit beside each other."""
    gaps = len(_GAP) * (len(natural) - 1)
    if width is None or sum(natural) + gaps <= width:
        return natural
    left = width - gaps - sum(each for each, may in zip(natural, wraps, strict=True) if not may)
    least = [min(each, _MIN_PROSE) if may else 0 for each, may in zip(natural, wraps, strict=True)]
    if not any(wraps) or left < sum(least):
        return None
    left -= sum(least)
    widths = []
    for each, may, low in zip(natural, wraps, least, strict=True):
        more = min(each - low, left) if may else 0
        left -= more
        widths.append(low + more if may else each)
    return widths


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: list[int]
) -> "list[Text]":
    lines = []
    for style, cells in (("bold", columns), *(("", row) for row in rows)):
        wrapped = [_wrap(cell, size) for cell, size in zip(cells, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            parts = [each[number] if number < len(each) else "" for each in wrapped]
            lines.append(_joined(parts, widths, style))
    return lines


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> "list[Text]":
    from rich.cells import cell_len

    label = max(map(cell_len, columns[1:]), default=0)
    lines = []
    for row in rows:
        lines.append(_joined([row[0]], [0], "bold"))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if not cell:
                continue
            for number, part in enumerate(_wrap(cell, width - label - 2 * len(_GAP))):
                name = "" if number else column
                lines.append(_joined(["", name, part], [0, label, 0], ""))
    return lines


def _wrap(text: str, width: int) -> list[str]:
    """Lines of ``text``; a word that is longer than a line stays whole."""
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _joined(parts: Sequence[str], widths: Sequence[int], style: str) -> "Text":
    from rich.cells import cell_len
    from rich.text import Text

    padded = [
        part + " " * (size - cell_len(part)) for part, size in zip(parts, widths, strict=True)
    ]
    return Text(_GAP.join(padded).rstrip(), style=style)
