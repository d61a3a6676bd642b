"""Fixtures of the command line: the account that the commands find, and the commands."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import boto3
import pytest
import typer
from botocore.exceptions import ProfileNotFound

from contract import exits
from tests.conftest import ROOT
from tests.stacks.conftest import context, synthesized
from tests.trainctl.account import Account
from trainctl import reference
from trainctl.__main__ import app, main
from trainctl.setup import laptop, updates
from trainctl.setup.checks import Place
from trainctl.watch import follow, polling
from training import recipes
from training.command import NOT_FOR_JOBS, parser

#: To build all commands takes longer than to give one.
BUILT_ONCE = functools.cache(typer.main.get_command)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-goldens", action="store_true", help="write the golden files")


@pytest.fixture(autouse=True)
def _commands_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.main, "get_command", BUILT_ONCE)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    """An account with both stacks, whose clients every command gets."""
    found = Account()

    def session(profile_name: str | None, region_name: str | None, **_: Any) -> Any:
        if profile_name == "unknown":
            raise ProfileNotFound(profile="unknown")
        region = region_name or found.region
        return SimpleNamespace(
            region_name=region,
            client=lambda _service, **_options: found,
            get_credentials=lambda: found.credentials,
        )

    monkeypatch.setattr(boto3, "Session", session)
    for name in ("SHORTEST_S", "LONGEST_S"):
        monkeypatch.setattr(polling, name, 0.0)
    monkeypatch.setattr(follow, "LAST_LINES_S", 0.0)
    monkeypatch.setattr("shutil.which", lambda _name, **_: None)
    return found


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with a user's own code, and what is no code."""
    folder = tmp_path / "code"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "old.py").write_text("")
    (folder / "mine.py").write_text("print(1)\n")
    (folder / "empty").mkdir()
    return folder


class Said(NamedTuple):
    """What has been printed."""

    out: str
    err: str


@functools.cache
def commands() -> dict[str, Any]:
    """The commands of ``trainctl`` by their words."""
    return dict(reference.walk(typer.main.get_command(app), ()))


def foreign_options(words: list[str], said: str) -> set[str]:
    """Options that an error names and that the command does not have.

    Not those of other commands that it names: ``trainctl wait JOB --x``, ``aws``, ``make``.
    """
    if "error: " not in said:
        return set()
    known = {*re.findall(r"--[a-z][\w-]*", " ".join(words))}
    for name, command in commands().items():
        if words[: len(name.split())] == name.split():
            known |= {option for each in command.params for option in each.opts}
            known |= {option for each in command.params for option in each.secondary_opts}
    if words[:1] in (["submit"], ["tune"], ["plan"], ["run"]):
        for recipe in recipes.ALL:
            known |= {*parser(recipe)._option_string_actions} - {*NOT_FOR_JOBS}
        # Of torchrun, in its command.
        known |= {"--nproc-per-node"}
    other = (
        r"(trainctl|aws|make|python\S*|npx cdk) ([^;:.()\n]|\.(?! [A-Z]))*|-- .*|unknown option \S*"
    )
    named = re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(other, "", said.partition("error: ")[2]))
    return {*named} - known


class Cli:
    """The command line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, command: str, *more: str, code: int = exits.OK) -> Said:
        """Give a command, which must end with this exit code; what has been printed by then.

        Args:
            command: its first words, with spaces between.
            more: words that follow, which may have spaces.
        """
        words = [*command.split(), *more]
        found = main(words)
        said = Said(*self._capsys.readouterr())
        assert found == code, said.err
        assert foreign_options(words, said.err) == set()
        return said

    def refuses(self, *words: str, code: int = exits.BAD_INPUT) -> str:
        """Give a command that must fail; what has been printed on stderr."""
        return self(*words, code=code).err

    def json(self, *words: str) -> Any:
        """What a command prints with ``--json``."""
        return json.loads(self(*words, "--json").out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def laptop_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has; the app is synthesized in this process."""

    def synthesize(place: Place, folder: Path) -> None:
        settings = {"preset": context()["preset"], **place.context}
        made = synthesized(tuple(sorted(settings.items()))).folder
        shutil.copytree(made, folder, dirs_exist_ok=True)

    monkeypatch.setattr(laptop, "_printed", lambda *_: "v22.1.0")
    monkeypatch.setattr(updates, "synthesize", synthesize)


@pytest.fixture
def in_us_west_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout whose cdk.json names the region."""
    (tmp_path / "stacks").mkdir()
    file = json.loads((ROOT / "cdk.json").read_text())
    file["context"]["region"] = "us-west-2"
    (tmp_path / "cdk.json").write_text(json.dumps(file))
    monkeypatch.chdir(tmp_path)


#: The checks of ``trainctl doctor`` by name.
Found = dict[str, dict[str, str]]
Looked = Callable[..., tuple[int, Found]]


@pytest.fixture
def looked(account: Account, capsys: pytest.CaptureFixture[str]) -> Looked:
    """``trainctl doctor``: its exit code, and the checks."""
    del account  # where it looks

    def look(*options: str) -> tuple[int, Found]:
        code = main(["doctor", "--json", *options])
        return code, {each["what"]: each for each in json.loads(capsys.readouterr().out)}

    return look
