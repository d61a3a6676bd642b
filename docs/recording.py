"""Draw what a command shows on a terminal as a moving picture (SVG).

    python -m docs.recording make demo > docs/images/demo.svg

The command runs in a pseudo terminal. Each line of its screen is drawn for as long as it stood
there, at a multiple of its real speed; where motion is not wanted, the last screen is shown. What
it writes must be plain lines, colors, and the few movements of a progress bar: any other sequence
is an error, so that the picture is never another screen than the real one.
"""

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

from contract import text

COLUMNS: Final = 100
#: The picture lasts about this long, and then shows the last screen for a while.
PLAYED_S: Final = 14.0
HELD_S: Final = 5.0
#: Screens that stood for less than this, as played, are left out.
SHORTEST_S: Final = 0.25
CELL_WIDTH: Final = 8.4
CELL_HEIGHT: Final = 19
MARGIN: Final = 16
HEADER: Final = 34

#: The eight colors of a terminal on a dark ground, each at 4.5:1 or more; the bright ones alike.
PALETTE: Final = (
    *("#8b949e", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#e6edf3"),
)
_SEQUENCE: Final = re.compile(r"\x1b\[(?P<words>[?0-9;]*)(?P<kind>[A-Za-z])")


@dataclass(frozen=True, slots=True)
class Style:
    """How a character looks; an empty color is that of plain text."""

    color: str = ""
    bold: bool = False
    dim: bool = False


Row = tuple[tuple[str, Style], ...]
"""Characters of a line with their looks."""


class Screen:
    """A terminal without a lower edge: lines are added, never lost."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = Style()

    def rows(self) -> tuple[Row, ...]:
        return tuple(tuple(row) for row in self._rows)

    def feed(self, written: str) -> str:
        """Show what a program writes; return the end of it that is half a sequence.

        Raises:
            ValueError: a sequence that is not known here.
        """
        at = 0
        while at < len(written):
            if written[at] != "\x1b":
                self._put(written[at])
                at += 1
            elif found := _SEQUENCE.match(written, at):
                self._obey(found["kind"], found["words"])
                at = found.end()
            elif re.fullmatch(r"\x1b(\[[?0-9;]*)?", written[at:]):
                return written[at:]
            else:
                raise ValueError(f"not known here: {written[at : at + 8]!r}")
        return ""

    def _put(self, character: str) -> None:
        match character:
            case "\n":
                self._row += 1
                if self._row == len(self._rows):
                    self._rows.append([])
            case "\r":
                self._column = 0
            case _ if character.isprintable():
                row = self._rows[self._row]
                row += [(" ", Style())] * (self._column - len(row))
                row[self._column : self._column + 1] = [(character, self._style)]
                self._column += 1
            case _:
                raise ValueError(f"not known here: {character!r}")

    def _obey(self, kind: str, words: str) -> None:
        match kind, words:
            case "m", _:
                self._style = _styled(self._style, [int(word or 0) for word in words.split(";")])
            case "A", _:
                self._row = max(0, self._row - int(words or 1))
            case "K", "" | "0":
                del self._rows[self._row][self._column :]
            case "K", "2":
                self._rows[self._row].clear()
            case (("h" | "l"), "?25"):
                pass  # the cursor is not drawn
            case _:
                raise ValueError(f"not known here: ESC[{words}{kind}")


def _styled(style: Style, codes: list[int]) -> Style:
    """``style`` after the numbers of one "select graphic rendition"."""
    match codes:
        case []:
            return style
        case [38, 5, number, *rest]:
            return _styled(replace(style, color=_of_256(number)), rest)
        case [38, 2, red, green, blue, *rest]:
            return _styled(replace(style, color=f"#{red:02x}{green:02x}{blue:02x}"), rest)
        case [0, *rest]:
            return _styled(Style(), rest)
        case [1, *rest]:
            return _styled(replace(style, bold=True), rest)
        case [2, *rest]:
            return _styled(replace(style, dim=True), rest)
        case [22, *rest]:
            return _styled(replace(style, bold=False, dim=False), rest)
        case [39, *rest]:
            return _styled(replace(style, color=""), rest)
        case [code, *rest] if 30 <= code <= 37 or 90 <= code <= 97:
            return _styled(replace(style, color=PALETTE[code % 10]), rest)
    raise ValueError(f"not known here: the graphic rendition {codes}")


def _of_256(number: int) -> str:
    """A color of the table of 256: 16 of the palette, a cube of 6 x 6 x 6, and 24 greys."""
    if number < 16:
        return PALETTE[number % 8]
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    levels = (0, 95, 135, 175, 215, 255)
    cube = number - 16
    return "#" + "".join(f"{levels[cube // step % 6]:02x}" for step in (36, 6, 1))


@dataclass(frozen=True, slots=True)
class Frame:
    """What the screen showed from a time on, in seconds since the command was given."""

    time_s: float
    rows: tuple[Row, ...]


def record(command: Sequence[str], *, columns: int = COLUMNS) -> list[Frame]:
    """Run a command on a terminal of its own; return each screen that it showed.

    Raises:
        CalledProcessError: it failed.
        ValueError: it writes what cannot be drawn.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    # What make passes on to another make would change what that one prints.
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "CI"}}
    environment |= {"TERM": "xterm-256color", "COLUMNS": str(columns)}
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    screen, decoder, rest = Screen(), codecs.getincrementaldecoder("utf-8")(), ""
    frames = [Frame(0.0, ())]
    try:
        while written := _read(ours):
            rest = screen.feed(rest + decoder.decode(written))
            frames.append(Frame(time.monotonic() - began, screen.rows()))
    finally:
        os.close(ours)
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return frames


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: no process has the other end
        return b""


def draw(command: str, frames: Sequence[Frame]) -> str:
    """The picture of a recording.

    Args:
        command: as a person types it; the first line.
        frames: screens in the order of their times; the last one stays.
    """
    seconds = frames[-1].time_s
    speed = max(1.0, seconds / PLAYED_S)
    total_s = seconds / speed + HELD_S
    played = [*_lasting(Frame(frame.time_s / speed, frame.rows) for frame in frames)]
    height = max(len(_filled(frame.rows)) for frame in played) + 1
    prompt: Row = (
        ("$", Style(dim=True)),
        (" ", Style()),
        *((c, Style(bold=True)) for c in command),
    )
    parts, rules = [_line(prompt, 0)], []
    for number, (row, line, start_s, end_s) in enumerate(_intervals(played)):
        drawn = _line(line, row + 1)
        if not drawn:
            continue
        stays = end_s is None
        end = "" if end_s is None else f" {100 * end_s / total_s:.2f}% {{ visibility: hidden }}"
        rules.append(
            f"@keyframes k{number} {{ 0% {{ visibility: hidden }} "
            f"{100 * start_s / total_s:.2f}% {{ visibility: visible }}{end} }}"
        )
        kind = "" if stays else " past"
        parts.append(f'<g class="row{kind}" style="animation-name: k{number}">{drawn}</g>')
    shown = f"{text.duration(round(seconds))} on this machine" + (
        f", played {speed:.0f} times as fast" if speed > 1.5 else ""
    )
    wide = round(COLUMNS * CELL_WIDTH + 2 * MARGIN)
    high = HEADER + height * CELL_HEIGHT + MARGIN
    style = (
        "text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', "
        "monospace; fill: #e6edf3; white-space: pre } .b { font-weight: 700 } "
        ".d { fill: #9aa4af } .about { font-size: 12px; fill: #9aa4af }\n"
        f".row {{ animation-duration: {total_s:.2f}s; animation-iteration-count: infinite; "
        "animation-timing-function: step-end } .past { visibility: hidden }\n"
        "@media (prefers-reduced-motion: reduce) { .row { animation: none } }\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">\n'
        f"<title>{escape(command)}: what it shows</title>\n<style>\n{style}"
        + "\n".join(rules)
        + f'\n</style>\n<rect width="{wide}" height="{high}" rx="8" fill="#0d1117"/>\n'
        f'<text class="about" x="{MARGIN}" y="22">{escape(shown)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _lasting(frames: Iterable[Frame]) -> Iterable[Frame]:
    """Without the screens that are replaced at once; times are those of the first."""
    kept: Frame | None = None
    for frame in frames:
        if kept is None:
            kept = frame
        elif frame.time_s - kept.time_s < SHORTEST_S:
            kept = Frame(kept.time_s, frame.rows)
        else:
            yield kept
            kept = frame
    if kept is not None:
        yield kept


def _filled(rows: Sequence[Row]) -> Sequence[Row]:
    """Without the empty lines at the end."""
    filled = [number for number, row in enumerate(rows) if row]
    return rows[: filled[-1] + 1] if filled else ()


def _intervals(frames: Iterable[Frame]) -> list[tuple[int, Row, float, float | None]]:
    """Row number, line, and from when to when it stood there; None: to the end."""
    found: list[tuple[int, Row, float, float | None]] = []
    now: dict[int, tuple[Row, float]] = {}
    for frame in frames:
        rows = dict(enumerate(frame.rows))
        for number in {*now, *rows}:
            line = rows.get(number, ())
            before, since = now.get(number, ((), 0.0))
            if line == before:
                continue
            if before:
                found.append((number, before, since, frame.time_s))
            now[number] = (line, frame.time_s)
    found += [(number, line, since, None) for number, (line, since) in now.items() if line]
    return sorted(found, key=lambda each: (each[0], each[2]))


def _line(row: Row, number: int) -> str:
    """A line as text elements, one for each stretch of equal looks; empty for blanks."""
    parts, column = [], 0
    y = HEADER + (number + 1) * CELL_HEIGHT - 5
    while column < len(row):
        style = row[column][1]
        end = next((n for n in range(column, len(row)) if row[n][1] != style), len(row))
        words = "".join(character for character, _ in row[column:end])
        start = column + len(words) - len(words.lstrip())
        if words := words.strip():
            css = " ".join(["b"] * style.bold + ["d"] * style.dim)
            parts.append(
                f'<text x="{MARGIN + start * CELL_WIDTH:.1f}" y="{y}" '
                f'textLength="{len(words) * CELL_WIDTH:.1f}"'
                + (f' class="{css}"' if css else "")
                + (f' style="fill: {style.color}"' if style.color else "")
                + f">{escape(words)}</text>"
            )
        column = end
    return "".join(parts)


def main() -> int:
    command = sys.argv[1:]
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    sys.stdout.write(draw(" ".join(command), record(command)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
