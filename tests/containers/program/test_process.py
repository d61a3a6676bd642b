"""A command ends with all that it has started, and its exit code is what a shell would print."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from containers.program.process import Program
from contract import exits

PROGRAM = """
import os, signal, sys, time
def save(*_):
    open(sys.argv[1], "a").write("saved")
    sys.exit()
signal.signal(signal.SIGTERM, save if sys.argv[2] == "kind" else signal.SIG_IGN)
open(sys.argv[1], "w").write(f"{os.getppid()} began ")
time.sleep(60)
open(sys.argv[1], "a").write("not killed")
"""


def behind_a_shell(file: Path, kind: str) -> Program:
    """A program that a shell waits for, once it runs."""
    run = 'python="$1"; shift; "$python" -c "$@" && true'
    words = ("sh", "-c", run, "sh", sys.executable, PROGRAM, str(file), kind)
    shell = Program(words, folder=None, environment=os.environ)
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return shell


def test_a_program_behind_a_shell_is_told_to_end_and_waited_for(tmp_path: Path) -> None:
    shell = behind_a_shell(tmp_path / "file", "kind")
    until = time.monotonic() + 60
    shell.terminate()
    shell.wait(lambda: until)
    assert shell.end(lambda: until) == 128 + signal.SIGTERM
    assert (tmp_path / "file").read_text().endswith(" began saved")
    assert shell.left() == set()


@pytest.mark.parametrize("within_s", [0.5, 0])
def test_a_program_behind_a_shell_that_does_not_end_is_killed(
    tmp_path: Path, within_s: float
) -> None:
    shell = behind_a_shell(tmp_path / "file", "stubborn")
    until = time.monotonic() + within_s
    shell.terminate()
    shell.wait(lambda: until)
    shell.end(lambda: until)
    assert shell.left() == set()
    assert (tmp_path / "file").read_text().endswith(" began ")


def test_a_command_that_has_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    shell = behind_a_shell(tmp_path / "file", "kind")
    number, began = (tmp_path / "file").read_text().split()
    os.kill(int(number), signal.SIGKILL)
    shell.wait(lambda: math.inf)
    assert shell.left(), "the program goes on"
    assert shell.end() == exits.KILLED
    assert shell.left() == set()
    assert (tmp_path / "file").read_text() == f"{number} {began} "


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -TERM $$", 143)])
def test_a_signal_counts_as_in_a_shell(script: str, code: int) -> None:
    command = Program(("sh", "-c", script), folder=None, environment=os.environ)
    command.wait(lambda: math.inf)
    assert (command.poll(), command.end()) == (code, code)
