"""What ``trainctl doctor`` finds in an empty account is fixed by the commands that it prints.

On a local AWS, as far as that can carry them out; the arguments of the others are checked against
AWS's own service models (``test_doctor``).
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from rehearsal.cdk import COMMAND, Cdk
from rehearsal.local_aws import ACCOUNT, REGION, LocalAws, local_aws
from tests.conftest import ROOT
from tests.trainctl import aws_command
from trainctl import checks
from trainctl.__main__ import main
from trainctl.aws.account import Account
from trainctl.aws.clients import Clients

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def empty_account(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalAws]:
    """A local AWS of its own, that nothing has been deployed to; boto3 is sent there."""
    if not (ROOT / ".venv-aws").is_dir() or not COMMAND.exists():
        pytest.skip("no AWS emulator or no CDK: `make venv-aws node` installs them")
    with local_aws(tmp_path_factory.mktemp("aws")) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def carry_out(command: str, *, aws: LocalAws, folder: Path) -> None:
    """Do what a printed command does."""
    if command.startswith("aws "):
        found = aws_command.read(command)
        assert found.region == REGION
        call = getattr(boto3.client(found.service), found.operation)  # type: ignore[call-overload]
        call(**found.arguments)
        return
    program, cdk, *words = shlex.split(command)
    assert (program, cdk) == ("npx", "cdk"), command
    # Without the app, whose templates a bootstrap does not need.
    Cdk(folder, aws.environment())(*words, "--app", "")


def problems(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Name and fix of each check that fails."""
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    return {each["what"]: each["fix"] for each in found if each["state"] == "bad"}


def test_the_commands_turn_their_checks_green(
    empty_account: LocalAws, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = problems(capsys)
    assert found == {
        "CDK bootstrap": f"npx cdk bootstrap aws://{ACCOUNT}/{REGION}",
        **{
            f"role {role}": "aws iam create-service-linked-role --aws-service-name "
            f"{service} --region {REGION}"
            for role, service in checks.ROLES.items()
        },
    }
    for what, command in found.items():
        carry_out(command, aws=empty_account, folder=tmp_path)
        assert what not in problems(capsys)
    assert problems(capsys) == {}
    with pytest.raises(ClientError, match="has been taken"):
        carry_out(command, aws=empty_account, folder=tmp_path)


def test_hosts_in_use_are_protected_by_the_command(empty_account: LocalAws, tmp_path: Path) -> None:
    groups, ecs = boto3.client("autoscaling"), boto3.client("ecs")
    groups.create_auto_scaling_group(
        AutoScalingGroupName="hosts", MinSize=0, MaxSize=1, AvailabilityZones=[f"{REGION}a"]
    )
    (group,) = groups.describe_auto_scaling_groups()["AutoScalingGroups"]
    ecs.create_capacity_provider(
        name="hosts",
        autoScalingGroupProvider={
            "autoScalingGroupArn": group["AutoScalingGroupARN"],
            "managedTerminationProtection": "DISABLED",
        },
    )
    place = checks.Place(account=Account(Clients(boto3.Session())), region=REGION)
    deployment: Any = SimpleNamespace(output=lambda _: "hosts")

    def look() -> checks.Finding:
        return checks.protection(place, deployment, "")

    assert look().state == "bad"
    carry_out(look().fix, aws=empty_account, folder=tmp_path)
    assert look().state == "ok"
