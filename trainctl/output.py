"""How the commands speak: data on stdout, everything else on stderr."""

import json
import sys
import time
from collections.abc import Callable, Sequence
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

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """``clock``: Unix time in seconds."""
        from rich.status import Status

        notes = _console(stderr=True)
        self._status = Status(self, console=notes) if notes.is_terminal else None
        self._clock = clock
        self._text = self._figures = ""
        self._since = 0.0

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._status:
            self._status.stop()

    def update(self, text: str, *, figures: str = "", since: float | None = None) -> None:
        """Show what happens, and for how long it has.

        Args:
            figures: what else is known by now; shown on a terminal only.
            since: Unix time at which it began; when it was first shown by default.
        """
        if text != self._text:
            self._since = self._clock()
            if not self._status:
                say(f"{text} ...")
        self._text, self._figures = text, figures
        if since is not None:
            self._since = since

    def __rich__(self) -> "Text":
        """The line as it is now: rich draws it several times a second, so that its clock moves."""
        from rich.text import Text

        if not self._text:
            return Text()
        lasts = duration(round(self._clock() - self._since))
        return Text(", ".join(filter(None, (self._text, lasts, self._figures))))
