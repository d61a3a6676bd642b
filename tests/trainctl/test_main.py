"""``trainctl`` itself and what all commands share: help, version, the one boundary for errors.

Here are also ``shell`` and ``version``, and that a bad account or bad input changes nothing.
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
from botocore.exceptions import (
    ConfigParseError,
    EndpointConnectionError,
    NoCredentialsError,
    SSOTokenLoadError,
)
from botocore.stub import Stubber

from contract import exits
from contract import outputs as stack_outputs
from contract.job import ORDER_VERSION
from tests.aws.calls import refused
from tests.conftest import ROOT
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli, commands
from trainctl import reference
from trainctl.__main__ import main
from trainctl.aws.errors import explained
from training import recipes
from training.settings import fields_of

IDENTITY = "get_caller_identity"
NO_SHAPE = json.dumps({"order": ORDER_VERSION, "preset": "x"})


# --- help -----------------------------------------------------------------------------------------
COMMANDS = commands()


@pytest.mark.parametrize(
    "words", [[], ["cluster"], ["local"], *map(str.split, COMMANDS)], ids=" ".join
)
def test_every_command_has_help(words: list[str], cli: Cli) -> None:
    said = cli(*words, "--help")
    assert "Usage: trainctl" in said.out
    assert said.err == ""


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
        ended = subprocess.run(
            [sys.executable, "-m", *words.split()],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (exits.CLOSED_PIPE, b"")


@pytest.mark.parametrize("words", ["trainctl settings ddp", "training.plan fsdp --model new:6.9b"])
def test_output_to_a_full_disk_is_an_error_in_a_sentence(words: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", *words.split()],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (
        exits.FAILED,
        ["error: [Errno 28] No space left on device"],
    )
    assert "Traceback" not in ended.stderr


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
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    option: list[str],
    region: str,
) -> None:
    account.region = None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    main(["doctor", "--json", *option])
    checks = json.loads(capsys.readouterr().out)
    assert checks[0]["found"].endswith(region)


# --- bad input and a bad account ------------------------------------------------------------------
STATUS = ["cluster", "status"]


@pytest.mark.parametrize(
    ("argv", "change", "code", "message"),
    [
        (["begin"], {}, 2, "No such command 'begin'"),
        (["cluster", "up", "--timeout-minutes", "0"], {}, 2, "0.1"),
        (
            ["submit", "ddp", "--max-hours", "nan"],
            {},
            2,
            "must be a number from 0.001 to 336",
        ),
        (
            ["submit", "ddp", "--max-cost", "0"],
            {},
            2,
            "be a number from 0.01 to 1,000,000",
        ),
        (["submit", "ddp", "--max-cost", "inf"], {}, 2, "--max-cost is inf: it must be a number"),
        (["submit", "ddp", "--wait-minutes", "inf"], {}, 2, "--wait-minutes is inf: it must be"),
        (["submit", "ddp", "--grace", "181"], {}, 2, "it must be a whole number from 0 to 180"),
        ([*STATUS, "--profile", "unknown"], {}, 2, "aws configure list-profiles"),
        (STATUS, {"region": None}, 2, "no region is set: set AWS_REGION, or run aws configure"),
        (STATUS, {"region": None, "credentials": None}, 2, "without an account: make local"),
        (STATUS, {"fails": {IDENTITY: NoCredentialsError()}}, 2, "aws sso login"),
        (
            STATUS,
            {"fails": {IDENTITY: SSOTokenLoadError(error_msg="x")}},
            1,
            "login has expired",
        ),
        (STATUS, {"fails": {IDENTITY: refused("ExpiredToken")}}, 1, "login has expired"),
        (
            STATUS,
            {"fails": {IDENTITY: refused("SignatureDoesNotMatch", "x", "Signature expired: 2026")}},
            1,
            "this machine's clock is wrong: Signature expired",
        ),
        (
            STATUS,
            {"fails": {IDENTITY: ConfigParseError(path="/home/me/.aws/config")}},
            2,
            "check its configuration (aws configure list;",
        ),
        (
            STATUS,
            {"fails": {IDENTITY: ValueError("Invalid endpoint: here")}},
            2,
            "Invalid endpoint",
        ),
        (STATUS, {"fails": {IDENTITY: PermissionError(13, "denied", "key")}}, 1, "denied: 'key'"),
        (
            STATUS,
            {"fails": {IDENTITY: refused("InvalidClientTokenId")}},
            1,
            "does not know these credentials",
        ),
        (
            STATUS,
            {"fails": {IDENTITY: refused("AccessDenied", "GetCallerIdentity", "no right to")}},
            1,
            "not allowed: GetCallerIdentity: no right to",
        ),
        (
            STATUS,
            {"fails": {IDENTITY: EndpointConnectionError(endpoint_url="http://10.0.0.1")}},
            79,
            "AWS does not answer",
        ),
        (
            STATUS,
            {"fails": {IDENTITY: refused("Throttling", "GetCallerIdentity", "slow down")}},
            79,
            "AWS refused GetCallerIdentity: slow down (Throttling)",
        ),
        (STATUS, {"outputs": {}}, 1, "CoreStack is not deployed in account 1234"),
        (
            STATUS,
            {"outputs": {stack_outputs.CORE_STACK: {}}},
            1,
            "TrainingStack is not deployed",
        ),
        (
            ["cluster", "up"],
            {"stack_status": "UPDATE_IN_PROGRESS"},
            1,
            "is being changed (UPDATE_IN_PROGRESS)",
        ),
        (["plan", "ddp"], {"stack_status": "DELETE_FAILED"}, 1, "is not usable"),
        (
            STATUS,
            {
                "stack_status": "ROLLBACK_COMPLETE",
                "outputs": {stack_outputs.CORE_STACK: {}, stack_outputs.TRAINING_STACK: {}},
            },
            1,
            "CoreStack is not usable (ROLLBACK_COMPLETE)",
        ),
        (
            ["cluster", "up"],
            {"outputs": {stack_outputs.CORE_STACK: {}, stack_outputs.TRAINING_STACK: {}}},
            1,
            "have no output ClusterShape",
        ),
        (
            ["cluster", "up"],
            {
                "outputs": {
                    stack_outputs.CORE_STACK: {},
                    stack_outputs.TRAINING_STACK: {stack_outputs.SHAPE: NO_SHAPE},
                }
            },
            1,
            "ClusterShape is not understood",
        ),
        (["shell"], {}, 1, "no head runs: trainctl cluster up"),
        (["shell", "--task", "77"], {}, 2, "0 tasks begin with '77'; there are: none"),
        (
            ["shell"],
            {"wanted": {"head-service": 1, "worker-service": 0}},
            1,
            "session-manager-plugin is not installed",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_and_changes_nothing(
    argv: list[str],
    change: dict[str, Any],
    code: int,
    message: str,
    account: Account,
    cli: Cli,
) -> None:
    for name, value in change.items():
        setattr(account, name, value)
    captured = cli(*argv, code=code)
    assert message in " ".join(captured.err.replace("│", " ").split()), captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert account.changes == []


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
            (line,) = [line for line in shown.splitlines() if line.split()[0] == option]
            assert line.rstrip().endswith(each["help"])
        for name, value in found.presets[preset].items():
            assert listed[f"--{name.replace('_', '-')}"]["default"] == value


def test_an_upload_that_aws_refuses_is_explained_by_aws_own_error(tmp_path: Path) -> None:
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
    assert str(known).startswith("not allowed: PutObject: no right to. Ask the owner")


def test_a_download_that_breaks_off_is_explained() -> None:
    known = explained(RetriesExceededError(Boto3Error("timed out")))
    assert "the transfer was interrupted" in str(known)
    assert str(known).endswith("Run the command again")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("open", "the standing cluster is down: trainctl cluster up, or name a job (trainctl ls)"),
    ],
)
@pytest.mark.usefixtures("account")
def test_a_shared_message_offers_what_its_command_takes(cli: Cli, words: str, said: str) -> None:
    assert cli.refuses(words, code=exits.FAILED) == f"error: {said}\n"


@pytest.mark.parametrize("words", ["report", "download", "export --to x", "checkpoints"])
@pytest.mark.usefixtures("account")
def test_a_folder_is_no_run_and_no_option_says_otherwise(cli: Cli, words: str) -> None:
    assert "(no slash: it is no folder)\n" in cli.refuses(*words.split(), "runs/demo")
