"""What ``trainctl doctor`` finds in an empty account is fixed by the commands that it prints.

On a local AWS: the printed command is compared as text, and the call that the AWS CLI makes for it
is made with boto3.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest

from rehearsal.cdk import COMMAND, Cdk
from rehearsal.local_aws import ACCOUNT, REGION, LocalAws, local_aws
from tests.conftest import ROOT
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
    # Without the app, whose templates a bootstrap does not need.
    _, cdk, *words = shlex.split(found["CDK bootstrap"])
    assert cdk == "cdk"
    Cdk(tmp_path, empty_account.environment())(*words, "--app", "")
    assert "CDK bootstrap" not in problems(capsys)
    for role, service in checks.ROLES.items():
        boto3.client("iam").create_service_linked_role(AWSServiceName=service)
        assert f"role {role}" not in problems(capsys)
    assert problems(capsys) == {}


@pytest.mark.usefixtures("empty_account")
def test_hosts_in_use_are_protected_by_the_command() -> None:
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
    assert look().fix == (
        "aws ecs update-capacity-provider --name hosts "
        f"--auto-scaling-group-provider managedTerminationProtection=ENABLED --region {REGION}"
    )
    ecs.update_capacity_provider(
        name="hosts", autoScalingGroupProvider={"managedTerminationProtection": "ENABLED"}
    )
    assert look().state == "ok"
