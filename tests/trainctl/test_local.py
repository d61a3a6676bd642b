"""``trainctl local``: the rehearsal is loaded when a command needs it, and not before."""

import sys

import pytest

from contract import exits
from trainctl.__main__ import main


@pytest.mark.parametrize("command", ["up", "status", "env", "down"])
def test_without_the_rehearsal_one_line_tells_how_to_install_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rehearsal", None)  # as where it is not installed
    assert main(["local", command]) == exits.FAILED
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("error: trainctl local needs the rehearsal")
    assert "make venv-dev" in line
    assert said.out == ""
