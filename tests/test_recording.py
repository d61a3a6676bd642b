"""The picture of a command on a terminal is what the terminal showed, and nothing else."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from docs import recording
from docs.recording import Frame, Screen, Style
from tests.conftest import ROOT

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = ROOT / "docs" / "images" / "demo.svg"


def shown(written: str) -> list[str]:
    """The screen's lines after a program has written."""
    screen = Screen()
    assert screen.feed(written) == ""
    return ["".join(character for character, _ in row).rstrip() for row in screen.rows()]


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo\r\n", ["one", "two", ""]),
        ("10 %\r100 %", ["100 %"]),
        ("100 %\r99", ["990 %"]),
        ("long line\r\x1b[2Kshort", ["short"]),
        ("long line\r\x1b[4C", None),
        ("long line\rlo\x1b[K", ["lo"]),
        ("bar\r\n\x1b[1A\x1b[2Kline\r\nbar", ["line", "bar"]),
        ("\x1b[?25lno cursor\x1b[?25h", ["no cursor"]),
        ("\x1b[1;38;5;197mcolored\x1b[0m", ["colored"]),
        ("a bell\x07", None),
        ("\x1b]0;a title\x07", None),
        ("\x1b[48;5;1mon red", None),
    ],
)
def test_lines_are_what_a_terminal_shows_and_the_rest_is_refused(
    written: str, lines: list[str] | None
) -> None:
    if lines is None:
        with pytest.raises(ValueError, match="not known here"):
            shown(written)
    else:
        assert shown(written) == lines


def test_a_sequence_may_come_in_two_parts() -> None:
    screen = Screen()
    rest = screen.feed("plain \x1b[1;3")
    assert rest == "\x1b[1;3"
    assert screen.feed(rest + "2mgreen") == ""
    assert screen.rows()[0][-1] == ("n", Style(color=recording.PALETTE[2], bold=True))


def elements(picture: str) -> list[tuple[str, str]]:
    """Class and words of each line after the first one, in the order of the picture."""
    return [
        (group.get("class", ""), " ".join(str(each.text) for each in group))
        for group in ElementTree.fromstring(picture).findall(f"{SVG}g")
    ]


def test_each_line_is_drawn_once_for_as_long_as_it_stood_there() -> None:
    def rows(*lines: str) -> tuple[recording.Row, ...]:
        return tuple(tuple((character, Style()) for character in line) for line in lines)

    frames = [
        Frame(0.0, ()),
        Frame(1.0, rows("50 % & <more>")),
        Frame(2.0, rows("epoch 1", "60 %")),
        Frame(2.01, rows("epoch 1", "61 %")),
        Frame(28.0, rows("epoch 1", "done")),
    ]
    picture = recording.draw("make it", frames)
    assert elements(picture) == [
        ("row past", "50 % & <more>"),
        ("row", "epoch 1"),
        ("row past", "61 %"),
        ("row", "done"),
    ]
    # Twice as fast, and then five seconds of the last screen: 1 s is 0.5 of 19.
    assert "28 s on this machine, played 2 times as fast" in picture
    assert f"{100 * 0.5 / 19:.2f}% {{ visibility: visible }}" in picture


def test_a_command_is_recorded_on_a_terminal_of_its_own() -> None:
    script = (
        "import os, sys, time\n"
        "print('wide', os.get_terminal_size().columns, sys.stdout.isatty())\n"
        "time.sleep(0.4)\n"
        "print('\\x1b[1mdone', '\\u2713', file=sys.stderr)\n"
    )
    frames = recording.record([sys.executable, "-c", script], columns=77)
    last = ["".join(character for character, _ in row) for row in frames[-1].rows]
    assert last == ["wide 77 True", "done \u2713", ""]
    assert frames[-1].time_s > 0.4
    with pytest.raises(subprocess.CalledProcessError):
        recording.record([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_committed_recording_is_of_the_demo_and_ends_with_its_results() -> None:
    picture = PICTURE.read_text(encoding="utf-8")
    assert "<title>make demo: what it shows</title>" in picture
    lasting = [words for kind, words in elements(picture) if kind == "row"]
    assert [line for line in lasting if line.startswith("epoch 8: ")]
    assert [line for line in lasting if re.match(r"run +demo \(succeeded\)", line)]
    # Nothing of the machine that it was made on, and nothing fetched.
    assert not [line for line in lasting if re.search(r"(^| )/", line)]
    assert picture.count("http") == 1
