"""``.ci/run`` continues after the stages that have passed, with stand-ins for what it starts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOOLS = ("node", "npm", "ip", "docker", "dockerd", "debootstrap", "docker-registry", "apt-get")
STAGES = ["check", "test-slow", "test-engine"]


class Checkout:
    """A repository with one commit, in which `make` only writes down its target."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        (self.folder / ".ci").mkdir(parents=True)
        for name in ("run", "beside"):
            shutil.copy(ROOT / ".ci" / name, self.folder / ".ci")
        shutil.copy(ROOT / ".gitignore", self.folder)
        self.calls = folder / "calls"
        programs = folder / "bin"
        programs.mkdir()
        for name in TOOLS:
            self.program(programs / name, "exit 0")
        self.program(
            programs / "make", f'echo "$@" >>{self.calls}; [ ! -e {folder}/no-$1 ] || exit 3'
        )
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        self.program(self.folder / ".venv" / "bin" / "python", "exit 0")
        self.environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self.git("init", "-q")
        self.commit()

    @staticmethod
    def program(path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def git(self, *words: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *named, *words], cwd=self.folder, check=True)

    def commit(self) -> None:
        self.git("add", ".")
        self.git("commit", "-q", "--allow-empty", "-m", "one")

    def run(self, **variables: str) -> tuple[int, list[str], str]:
        """Exit code, stages that were run, and what it printed."""
        self.calls.write_text("")
        done = subprocess.run(
            [".ci/run"],
            cwd=self.folder,
            env=os.environ | self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        called = self.calls.read_text().split("\n")
        return done.returncode, [each for each in called if each in STAGES], done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_second_run_of_a_commit_continues_after_the_stages_that_passed(
    checkout: Checkout, tmp_path: Path
) -> None:
    fails = tmp_path / "no-test-engine"
    fails.touch()
    code, stages, said = checkout.run()
    assert (code, stages) == (3, STAGES[:3])
    assert "ci: FAILED in containers after " in said
    fails.unlink()
    code, stages, said = checkout.run()
    assert (code, stages) == (0, STAGES[2:])
    assert "=== slow: has passed on this commit (CI_FRESH=1 runs it again)" in said
    # Wall and CPU seconds of what ran.
    for stage in ("install", "images", "containers"):
        assert any(line.split()[:1] == [stage] and "CPU s" in line for line in said.splitlines())
    assert checkout.run(CI_FRESH="1")[1] == STAGES
    checkout.commit()
    assert checkout.run()[1] == STAGES


def test_a_changed_tree_is_run_whole_and_proves_nothing(checkout: Checkout) -> None:
    assert checkout.run()[:2] == (0, STAGES)
    assert checkout.run()[:2] == (0, [])
    changed = checkout.folder / "new.py"
    changed.touch()
    assert checkout.run()[:2] == (0, STAGES)
    changed.unlink()
    assert checkout.run()[:2] == (0, STAGES)
