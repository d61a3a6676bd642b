"""``trainctl`` itself and what all commands share: help, version, the one boundary for errors.

``golden/aws`` has the errors of a bad account; here, bad input and a bad account change nothing.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.exceptions import Boto3Error, RetriesExceededError
from botocore.stub import Stubber

from contract import exits
from contract.job import ORDER_VERSION
from tests.conftest import ROOT
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli, Looked, commands
from trainctl import reference
from trainctl.__main__ import main
from trainctl.aws.errors import explained
from training import recipes
from training.settings import fields_of

IDENTITY = "get_caller_identity"
NO_SHAPE = json.dumps({"order": ORDER_VERSION, "preset": "x"})


COMMANDS = commands()


@pytest.mark.parametrize("words", ["", "cluster", "local", *COMMANDS])
def test_every_command_has_help(words: str, cli: Cli) -> None:
    said = cli(*words.split(), "--help")
    assert f"trainctl {words}" in said.out
    assert said.err == ""


def ended(words: str, stdout: Any) -> tuple[int, str]:
    """Exit code and stderr of a program."""
    command = [sys.executable, "-m", *words.split()]
    found = subprocess.run(
        command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    return found.returncode, found.stderr


@pytest.mark.parametrize(
    "words",
    [
        "trainctl --help",
        "trainctl settings ddp",
        "training.launch ddp --help",
        "training.plan fsdp --model new:6.9b",
    ],
)
def test_output_that_nobody_reads_any_more_ends_a_command_quietly(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        assert ended(words, closed) == (exits.CLOSED_PIPE, "")


@pytest.mark.parametrize("words", ["trainctl settings ddp", "training.plan fsdp --model new:6.9b"])
def test_output_to_a_full_disk_is_an_error(words: str) -> None:
    with open("/dev/full", "w") as full:
        code, said = ended(words, full)
    assert (code, "Traceback" in said) == (exits.FAILED, False)


def test_a_command_that_was_started_without_stdout_ends_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with exits.on_closed_pipe():
        pass


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_of_reference_is_that_of_the_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # it changes the commands that it shows
    assert (ROOT / "docs" / name).read_text() == reference.PAGES[name](), (
        "commands or settings have changed: python -m trainctl.reference"
    )


def test_the_help_names_values_and_not_types_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as above
    shown = set(re.findall(r"<[^<>\n]*>", reference.page()))
    assert shown == {"<head|nodes|auto>", "<high|normal|low>", "<user|run|month>"}, (
        "give the option a metavar"
    )


def test_every_option_for_a_fraction_has_a_largest_value() -> None:
    """Without one, ``inf`` and ``1e400`` pass."""
    options = [each for command in COMMANDS.values() for each in command.params]
    fractions = [each for each in options if "float" in str(each.type_descriptor.annotation)]
    assert len(fractions) > 5
    assert [each.name for each in fractions if each.min is None or each.max is None] == []


def test_version_is_the_projects(cli: Cli) -> None:
    assert cli("--version").out == f"trainctl {metadata.version('ecs-train')}\n"


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"trainctl": "trainctl.__main__:main"}
    (entry,) = metadata.entry_points(group="console_scripts", name="trainctl")
    assert entry.load() is main


@pytest.mark.parametrize(
    ("variables", "option", "region"),
    [
        ({"AWS_REGION": "eu-north-1"}, [], "eu-north-1"),
        ({"AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "eu-west-3"}, [], "eu-north-1"),
        ({"AWS_REGION": "eu-north-1"}, ["--region", "us-west-2"], "us-west-2"),
    ],
)
def test_the_region_is_the_one_that_aws_own_tools_would_use(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    looked: Looked,
    variables: dict[str, str],
    option: list[str],
    region: str,
) -> None:
    account.region = None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, found = looked(*option)
    assert found["credentials"]["found"].endswith(region)


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_settings_lists_every_option_in_full_with_the_defaults_of_a_preset(
    recipe: str, cli: Cli
) -> None:
    found = recipes.by_name(recipe)
    options = {
        f"--{name.replace('_', '-')}"
        for name, field in fields_of(found.config).items()
        if field.metadata["cli"]
    }
    for preset in found.presets:
        shown = cli("settings", recipe, "--preset", preset).out
        listed = cli.json("settings", recipe, "--preset", preset)
        assert listed.keys() == options
        for option, each in listed.items():
            assert option in shown
            assert each["help"] in shown
        for name, value in found.presets[preset].items():
            assert listed[f"--{name.replace('_', '-')}"]["default"] == value


def test_an_upload_or_a_download_that_fails_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_text("text")
    client = boto3.client(
        "s3", region_name="eu-west-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    with Stubber(client) as stubber:
        stubber.add_client_error("put_object", "AccessDenied", "no right to", 403)
        with pytest.raises(boto3.exceptions.S3UploadFailedError) as caught:
            client.upload_file(str(file), "bucket", "data/data.txt")
    known = explained(caught.value)
    assert "PutObject: no right to" in str(known), "AWS's own words"
    assert "data.txt" not in str(known)
    assert explained(RetriesExceededError(Boto3Error("timed out"))) is not None
