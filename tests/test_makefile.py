"""The commands a newcomer types: `make` explains itself, and installing fails in plain words."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without what an outer make passes on, which names targets and flags of its own.
    inherited = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, answer: str) -> str:
    """A program that answers, whatever it is asked, as a Python would describe itself."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {answer}\n")
    path.chmod(0o755)
    return str(path)


def test_make_alone_lists_targets_and_variables() -> None:
    listing = run("make")
    assert listing.returncode == 0, listing.stderr
    for target in ["demo", "test", "test-fast", "check", "bench", "fashion", "lock", "clean"]:
        assert f"\n  make {target} " in listing.stdout
    for variable in ["WORKERS", "TORCH_INDEX", "PYTHON_BIN", "FASHION"]:
        assert f"\n  {variable} " in listing.stdout


def test_every_target_is_phony_so_that_no_file_can_hide_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"(?m)^\.PHONY: (.*)$", makefile)[0].split())
    assert set(re.findall(r"(?m)^([a-z][a-z-]*):", makefile)) == phony


def test_demo_passes_its_workers_on() -> None:
    plan = run("make", "--dry-run", "demo", "WORKERS=3")
    assert plan.returncode == 0, plan.stderr
    assert "-m training.launch ddp --local --workers 3 --preset digits" in plan.stdout


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("unsupported usable 3.10.13 /bin/p", "Python 3.11, 3.12 or 3.13 is needed"),
        ("unsupported usable 3.14.0 /bin/p", "is Python 3.14.0"),
        ("supported novenv 3.12.1 /bin/p", "apt-get install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_the_remedy(
    answer: str, message: str, tmp_path: Path
) -> None:
    environment = tmp_path / ".venv"
    python = fake_python(tmp_path, answer)
    attempt = run("sh", ".ci/venv", str(environment), PYTHON_BIN=python)
    assert attempt.returncode == 1
    assert message in attempt.stderr
    assert python in attempt.stderr
    assert not environment.exists()


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    attempt = run("sh", ".ci/venv", str(tmp_path / ".venv"), PYTHON_BIN="/no/such/python")
    assert attempt.returncode == 1
    assert "no Python found (tried /no/such/python)" in attempt.stderr


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_after_an_interruption(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    command = ["sh", ".ci/venv", ".venv", "-r", "requirements.txt"]

    def make() -> str:
        done = run(*command, cwd=tmp_path, PYTHON_BIN=sys.executable, TORCH_INDEX="")
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "(new)" in make()
    began = time.monotonic()
    assert make() == ""
    assert time.monotonic() - began < 2

    # Left by somebody who pressed Ctrl-C: the marker, and packages in pieces.
    (tmp_path / ".venv" / "incomplete").touch()
    (tmp_path / ".venv" / "pieces").touch()
    assert "was interrupted" in make()
    assert not (tmp_path / ".venv" / "pieces").exists()
    assert make() == ""

    # A failed installation shows the end of its log, and is done over the next time.
    (tmp_path / "requirements.txt").write_text("./no-such-package\n")
    failed = run(*command, cwd=tmp_path, PYTHON_BIN=sys.executable, TORCH_INDEX="")
    assert failed.returncode == 1
    assert "no-such-package" in failed.stderr
    assert ".venv/install.log" in failed.stderr
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    assert "was interrupted" in make()
