"""Output of the commands: data on stdout, everything else on stderr."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, Self

import typer

from contract import exits
from contract.text import duration
from trainctl.aws.errors import UsageError
from training.record.colors import colored

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


#: C0 but tab and line feed, DEL, C1, and what changes the direction of text.
_CONTROL: Final = re.compile(
    r"(?!\x1b\[[\d;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
#: A color: it changes nothing but how text looks.
_COLOR: Final = re.compile(r"\x1b\[[\d;]*m")
#: The words of a command for a deployment.
_COMMAND: Final = re.compile(
    r"\btrainctl ((cluster|data|runs) (up|status|down|put|ls|rm)|submit|plan|ls|show|logs|wait|stop"
    r"|cost|runs|checkpoints|report|download|export|generate|predict|open|shell|doctor|top|ui)\b"
)
_options = ""
#: Characters between two columns of a table.
_GAP: Final = 2
#: Prose in a narrower column is tiring to read.
_MIN_PROSE: Final = 24


@cache
def _console(*, stderr: bool) -> "Console":
    """Wraps nothing where it is not a terminal, so that scripts can search the output."""
    from rich.console import Console

    # A range such as 1:b: or a line of a log is no emoji.
    own = Console(stderr=stderr, soft_wrap=True, highlight=False, emoji=False)
    notes = own if stderr else _console(stderr=True)
    # One for both on a terminal: it prints above the line of Progress, not into it.
    return notes if own.file.isatty() and notes.file.isatty() else own


def visible(text: str) -> str:
    """A text without colors, and with its other control characters shown (``^[``) and not sent to
    the terminal: any job may have written it. Where a progress bar returns to the start of its
    line, a new line begins."""
    return _COLOR.sub("", _with_colors(text))


def _with_colors(text: str) -> str:
    return _CONTROL.sub(_shown, text.replace("\r", "\n"))


def _shown(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"^{chr(code ^ 64)}" if code < 128 else f"<U+{code:04X}>"


def say(text: str) -> None:
    """A line for people."""
    _console(stderr=True).print(colored(addressed(text)))


def addressed(text: str) -> str:
    """A text, visible, whose commands of trainctl have the options that name the deployment."""
    return _COMMAND.sub(lambda found: found[0] + _options, visible(text))


def set_options(options: str) -> None:
    """Set the options of ``addressed``, each with a space before it."""
    global _options
    _options = options


def print_json(values: object) -> None:
    """Data for machines."""
    print(json.dumps(values, indent=1, default=str))


def print_text(text: str, *, on_stderr: bool = False) -> None:
    """Data for people. A terminal gets the colors of a text that has any."""
    _console(stderr=on_stderr).print(colored(_with_colors(text)))


def clear() -> None:
    """Clear the terminal, where stdout is one."""
    _console(stderr=False).clear()


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    prose: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table for people, in which nothing is ever cut.

    On a terminal that is too narrow for one line per row, optional columns are left out and columns
    of prose wrap; where that does not suffice, all columns do.

    Args:
        columns: headings, one per cell of a row.
        rows: cells; the first one names the row.
        prose: headings of the columns that may wrap.
        optional: headings of the columns that may be left out, in this order.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    console = _console(stderr=False)
    rows = [[*map(visible, row)] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    if not console.is_terminal:  # a row is a line, for scripts
        for row in (columns, *rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            print_text((" " * _GAP).join(cells).rstrip())
        return

    least = {
        name: min(width, _MIN_PROSE) if name in prose else width
        for name, width in zip(columns, widths, strict=True)
    }

    def fits() -> bool:
        return sum(least.values()) + _GAP * (len(least) - 1) <= console.width

    for name in optional:
        if not fits():
            del least[name]
    kept = [number for number, name in enumerate(columns) if name in least]
    rows = [[row[number] for number in kept] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for name in least:
        table.add_column(Text(name), no_wrap=fits() and name not in prose, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def confirm(question: str, *, yes: bool, default: bool = True) -> None:
    """Ask; end the command where the answer is no. Raises UsageError without a terminal.

    Args:
        default: what Enter means.
    """
    if yes:
        return
    if not (sys.stdin and sys.stdin.isatty()):  # None if the command was started without one (<&-)
        raise UsageError(
            f"stdin is not a terminal to answer {question!r}: pass --yes to skip the question"
        )
    if not typer.confirm(question, default=default, err=True):
        raise typer.Exit(exits.OK)


class ProgressLine:
    """A moving line on a terminal; elsewhere a line whenever the text changes, and each minute of a
    wait."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """``clock``: Unix time in seconds."""
        from rich.live import Live
        from rich.spinner import Spinner

        notes = _console(stderr=True)
        # Only a terminal needs print() to go above the line; a file must still get it.
        line = Live(
            Spinner("dots", self, style="status.spinner"),
            console=notes,
            transient=True,
            redirect_stdout=_console(stderr=False) is notes,
        )
        self._live = line if notes.is_interactive else None
        self._clock = clock
        self._text, self._since, self._said = "", 0.0, 0.0
        self._line: Callable[[float], str] | None = None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live:
            self._live.stop()

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask without the line; Enter means no. As ``confirm``."""
        self.__exit__()
        confirm(question, yes=yes, default=False)
        self.__enter__()

    def update(self, text: str, *, line: Callable[[float], str] | None = None) -> None:
        """Show what happens.

        Args:
            line: what a terminal shows at a moment, in Unix time; by default the text, and for how
                long it has been shown.
        """
        now, is_new = self._clock(), text != self._text
        if is_new:
            self._since = now
        if not self._live and (is_new or (line is None and now - self._said >= 60)):
            say(f"{text} ..." if is_new else f"{text}, {duration(int(now - self._since))} ...")
            self._said = now
        self._text, self._line = text, line

    def __rich__(self) -> "Text":
        """The line as it is now: rich draws it several times a second, so that its clock moves."""
        from rich.text import Text

        if not self._text:
            return Text()
        now = self._clock()
        shown = f"{self._text}, {duration(int(now - self._since))}"
        if self._line:
            shown = self._line(now)
        return Text(visible(shown), no_wrap=True, overflow="ellipsis")
