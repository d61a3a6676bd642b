"""Control characters in what others have written are shown, and not sent to the terminal."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trainctl import output
from trainctl.aws.logs import LogLine
from trainctl.watch.job_log import show


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("\x1b]52;c;cm0=\x07", "^[]52;c;cm0=^G"),  # the clipboard
        ("\x1b]0;root\x1b\\", "^[]0;root^[\\"),  # the title
        ("\x1b[2J\x1b[31mred\x1b[0m", "^[[2Jred"),  # clear, and colors where no terminal is
        ("\x9b2J\x7f\x00", "<U+009B>2J^?^@"),
        ("\u202egpj\u2066", "<U+202E>gpj<U+2066>"),  # read from the right
        ("10%\r20%", "10%\n20%"),
        ("a\tb\nü 漢", "a\tb\nü 漢"),
    ],
)
def test_control_characters_of_others_are_shown_and_not_sent(
    sent: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output.say(sent)
    output.print_text(sent)
    head: Any = SimpleNamespace(id="1", is_head=True)
    show([LogLine(task=head, at=0, text=sent, id="e")])
    output.print_table(("name",), ((sent,),))
    out, err = capsys.readouterr()
    plain = shown.expandtabs()
    assert err.expandtabs() == f"{plain}\n"
    assert out.expandtabs() == f"{plain}\n{plain}\nname\n{plain}\n"


def test_a_terminal_shows_the_colors_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    monkeypatch.setattr(output, "_console", lambda **_: terminal)
    output.print_text("\x1b[32mgreen\x1b[0m \x1b[2J")
    assert terminal.file.getvalue() == "\x1b[32mgreen\x1b[0m ^[[2J\n"  # type: ignore[attr-defined]
