"""``trainctl submit -f job.toml``: the same order as by options, and mistakes with their names."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli

RECIPE = """
recipe = "ddp"
run = "first"
nodes = "1:2"
max-hours = 3.5
wait_minutes = 10
spot = false

[settings]
epochs = 5
data = "s3://bucket/data"
flip = false
lr = 1e-3

[env]
LEVEL = 3
NAME = "a b"

[secret]
HF_TOKEN = "training/key"
"""
BY_OPTIONS = [
    *("ddp", "--run", "first", "--nodes", "1:2", "--max-hours", "3.5", "--wait-minutes", "10"),
    *("--on-demand", "--epochs=5", "--data=s3://bucket/data", "--no-flip", "--lr=0.001"),
    *("--env", "LEVEL=3", "--env", "NAME=a b", "--secret", "HF_TOKEN=training/key"),
]


def plan(cli: Cli, *words: str) -> Any:
    # First: after "--" comes the user's own command.
    return json.loads(cli("plan --json", *words).out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize("kind", ["file", "of Windows", "pipe"])
def test_a_file_asks_for_what_its_options_do(file: Path, cli: Cli, kind: str) -> None:
    if kind == "of Windows":
        file.write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())
    reader, writer = os.pipe()
    os.write(writer, RECIPE.encode())
    os.close(writer)
    by_file = plan(cli, "-f", f"/dev/fd/{reader}" if kind == "pipe" else str(file))
    os.close(reader)
    assert by_file == plan(cli, *BY_OPTIONS)
    assert (by_file["run"], by_file["max_hours"], by_file["spot"]) == ("first", 3.5, False)
    assert by_file["variables"] == {"LEVEL": "3", "NAME": "a b"}


@pytest.mark.usefixtures("account")
def test_the_command_line_wins_over_the_file(file: Path, cli: Cli) -> None:
    of_line = ("--nodes", "1", "--env", "LEVEL=4", "--epochs", "7", "--flip")
    found = plan(cli, "--file", str(file), *of_line)
    assert found["nodes"] == {"low": 1, "high": 1}
    assert found["variables"] == {"LEVEL": "4", "NAME": "a b"}
    words = found["command"]
    assert words[-5:] == ["--data=s3://bucket/data", "--lr=0.001", "--epochs", "7", "--flip"]
    assert "--epochs=5" not in words
    assert "--no-flip" not in words
    # Another recipe has other settings.
    other = plan(cli, "-f", str(file), "fsdp")["command"]
    assert other[3] == "fsdp"
    assert not any("epochs" in word for word in other)


def test_own_code_lies_beside_its_file_and_is_submitted(
    account: Account,
    code: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    file = code.parent / "job.toml"
    file.write_text(
        'code = "code"\ncommand = ["python", "mine.py", "--lr", "1"]\nrun = "mine"\nnodes = 2\n'
        'yes = true\nkeep_files = ["*.pt", "out"]\nskip-files = "data"\n'
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cli("submit -f", str(file))
    (spec,) = account.orders
    assert (spec.command, str(spec.nodes)) == (("python", "mine.py", "--lr", "1"), "2")
    assert spec.code
    assert (spec.keep_files, spec.skip_files) == (("*.pt", "out"), ("data",))
    found = plan(cli, "-f", str(file), "--run", "other", "--", "python", "-m", "mine")
    assert found["command"] == ["python", "-m", "mine"]


@pytest.mark.parametrize(
    "text",
    [
        "recipe = ",
        "max_hour = 3",
        "xyz = 3",
        "workers = 3",
        "file = 'other.toml'",
        "max_hours = 'long'",
        "max_hours = true",
        "run = [1]",
        "spot = 'yes'",
        "on = 'moon'",
        "settings = 3",
        "recipe = 'ddp'\nsettings.epochs = [1]",
        "recipe = 'ddp'\nsettings.epoch = 1",
        "recipe = 'pdd'",
        "recipe = 'ddp'\ncommand = ['a']",
        "recipe = 'ddp'\ncode = '.'",
        "command = ['python', 'a.py']",
        "command = 'python a.py'",
        "env.A = true",
    ],
)
def test_a_mistake_in_a_file_is_refused(
    account: Account, tmp_path: Path, cli: Cli, text: str
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert "Traceback" not in cli.refuses("submit -f", str(file), "--yes")
    assert account.changes == []


@pytest.mark.usefixtures("account")
def test_the_files_of_the_documentation_are_accepted(code: Path, cli: Cli) -> None:
    found = [
        re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
        for page in ("jobs.md", "tutorials/team.md")
    ]
    (of_recipe, of_code), (of_team,) = found
    file = code / "job.toml"
    file.write_text(of_recipe.replace("training/hf-token", "training/key"))
    assert plan(cli, "-f", str(file))["command"][-2:] == ["--data=fashion-mnist", "--epochs=10"]
    file.write_text(of_team)
    assert "--preset=tuned" in plan(cli, "-f", str(file))["command"]
    (code / "train.py").touch()
    file.write_text(of_code)
    assert plan(cli, "-f", str(file))["command"] == ["torchrun", "train.py"]
