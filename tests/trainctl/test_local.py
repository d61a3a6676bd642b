"""``trainctl local``: the rehearsal is loaded when a command needs it, and not before; ``up`` names
all that is missing at once, and starts after any kind of end of an earlier one."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from contract import exits
from rehearsal import cdk, children, cycle, image_builds, local_aws
from rehearsal.engine import Engine
from tests.trainctl.conftest import Cli


@pytest.mark.parametrize("command", ["up", "status", "env", "down"])
def test_without_the_rehearsal_a_command_is_one_error(
    command: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "rehearsal", None)  # as where it is not installed
    said = cli("local", command, code=exits.FAILED)
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


class FakeEngine(Engine):
    """A Docker Engine with nothing in it."""

    def __call__(self, *arguments: str, **options: Any) -> str:
        del arguments, options
        return ""

    def make_network(self, name: str) -> str:
        del name
        return "127.0.0.1"

    def labelled(self, kind: str, name: str) -> list[str]:
        del kind, name
        return []

    def remove(self, name: str) -> int:
        del name
        return 0


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a checkout in which nothing is installed, beside a Docker Engine."""
    engine = FakeEngine(client="docker", address="unix:///nowhere")
    monkeypatch.setattr(cycle, "find_engine", lambda: engine)
    monkeypatch.setattr(cycle, "check_space", lambda *_, **__: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cycle, "ROOT", tmp_path)
    monkeypatch.setattr(cdk, "ROOT", tmp_path)
    monkeypatch.setattr(cdk, "COMMAND", tmp_path / "node_modules" / ".bin" / "cdk")
    monkeypatch.setattr(local_aws, "PYTHON", tmp_path / ".venv-aws" / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv(children.NAME, "")  # which `up` sets
    return tmp_path


def install(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_everything_that_is_missing_is_named_at_once_with_one_command(
    checkout: Path, cli: Cli
) -> None:
    parts = {".venv-aws/bin/python", "node_modules/.bin/cdk", "aws_cdk"}
    said = cli.refuses("local up", code=exits.FAILED)
    assert all(part in said for part in parts)

    install(checkout / ".venv-aws" / "bin" / "python")
    said = cli.refuses("local up", code=exits.FAILED)
    assert {part for part in parts if part in said} == parts - {".venv-aws/bin/python"}

    install(checkout / "node_modules" / ".bin" / "cdk")
    (checkout / ".venv" / "lib" / "python3.12" / "site-packages" / "aws_cdk").mkdir(parents=True)
    cycle.check_installed()


class LastStageEndsError(BaseException):
    """The process ends here: Ctrl-C, or a kill that leaves everything as it is."""


@pytest.mark.parametrize("answers", [True, False], ids=["the local AWS answers", "it is gone"])
def test_the_same_command_continues_a_start_that_ended_in_its_last_stage(
    answers: bool,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    state = checkout / ".rehearsal" / "aws" / "state"
    starts: list[Path] = []

    def start(folder: Path, **_: object) -> local_aws.LocalAws:
        state.mkdir(parents=True)  # it would load what an earlier one has left
        starts.append(folder)
        return local_aws.LocalAws(endpoint="http://aws", log=folder / "log", pid=0)

    monkeypatch.setattr(local_aws, "start_detached", start)
    monkeypatch.setattr(image_builds, "registry_program", lambda: None)
    monkeypatch.setattr(image_builds, "build", lambda *_, **__: {"head": "h"})
    for name, found in (("check_installed", None), ("content_tag", "content-1")):
        monkeypatch.setattr(cycle, name, Mock(return_value=found))
    monkeypatch.setattr(cycle, "is_healthy", lambda _: answers)
    for stage in ("deploy", "_repository"):
        monkeypatch.setattr(cycle.Rehearsal, stage, Mock())
    monkeypatch.setattr(cycle.Rehearsal, "_push", Mock(side_effect=[LastStageEndsError, None]))

    with pytest.raises(LastStageEndsError):
        cycle.up()
    assert state.exists(), "what is up stays"
    assert "submit ddp" in cli("local up").out
    assert len(starts) == (1 if answers else 2)
    assert cycle.Rehearsal.here().state()["image_tag"] == "content-1"

    # What is up stays up.
    monkeypatch.setattr(cycle, "is_healthy", lambda _: True)
    cli.refuses("local up", code=exits.FAILED)
    assert cycle.Rehearsal.here().is_up()
