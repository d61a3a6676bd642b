"""How the commands speak: data on stdout, everything else on stderr."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

#: Wraps nothing where it is not a terminal, so that scripts can search what is said.
notes = Console(stderr=True, soft_wrap=True, highlight=False)
_data = Console(soft_wrap=True, highlight=False)


def say(text: str) -> None:
    """A line for people."""
    notes.print(text, markup=False)


def print_json(values: Any) -> None:
    """Data for machines."""
    print(json.dumps(values, indent=1, default=str))


def print_text(text: str) -> None:
    """Data for people."""
    _data.print(text, markup=False)


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table for people; at a width of its own where stdout is no terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    (_data if sys.stdout.isatty() else Console(width=200, highlight=False)).print(table)
