"""How the commands speak: data on stdout, everything else on stderr."""

import json
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Self

import typer

from contract import exits
from contract.text import duration
from trainctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@cache
def _console(*, stderr: bool) -> "Console":
    """Wraps nothing where it is not a terminal, so that scripts can search the output."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True, highlight=False)


def say(text: str) -> None:
    """A line for people."""
    _console(stderr=True).print(text, markup=False)


def print_json(values: object) -> None:
    """Data for machines."""
    print(json.dumps(values, indent=1, default=str))


def json_object(text: str | bytes | None) -> dict[str, object]:
    """A JSON object, of a run's record or an answer of AWS; empty where there is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def print_text(text: str) -> None:
    """Data for people."""
    _console(stderr=False).print(text, markup=False)


def print_line(line: "Text") -> None:
    """A line for people, whose parts may have colors."""
    _console(stderr=False).print(line)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, prose: Sequence[str] = ()
) -> None:
    """A table for people; ``prose`` names the columns that may wrap on a narrow terminal."""
    from trainctl import tables

    console = _console(stderr=False)
    width = console.width if console.is_terminal else None
    for line in tables.layout(columns, rows, prose=prose, width=width):
        console.print(line)


def confirm(question: str, *, yes: bool, default: bool = True) -> None:
    """Ask; end the command where the answer is no. Raises UsageError without a terminal.

    Args:
        default: what Enter means.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal: pass --yes to skip the prompt")
    if not typer.confirm(question, default=default, err=True):
        raise typer.Exit(exits.OK)


class Progress:
    """A moving line on a terminal; elsewhere a line whenever the text changes."""

    def __init__(self) -> None:
        from rich.status import Status

        notes = _console(stderr=True)
        self._status = Status("", console=notes) if notes.is_terminal else None
        self._last = ""
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._status:
            self._status.stop()

    def update(self, text: str) -> None:
        """Show what is being waited for, and since when."""
        if text != self._last:
            self._began = time.monotonic()
        if self._status:
            self._status.update(f"{text}, {duration(round(time.monotonic() - self._began))}")
        elif text != self._last:
            say(f"{text} ...")
        self._last = text
