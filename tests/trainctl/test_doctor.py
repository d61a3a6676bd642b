"""``trainctl doctor``: its checks before and after a deploy, and the commands that fix what they
find. ``golden/doctor`` has how they are printed."""

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import NoCredentialsError

from contract import exits
from contract.outputs import CORE_STACK, PUSH_ROLE, REPOSITORIES, SUBNET, TRAINING_STACK
from tests.aws.calls import refused
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, synth
from tests.trainctl.account import OTHERS, OUTPUTS, POOLS, VPC, Account
from tests.trainctl.conftest import Found, Looked
from trainctl.aws.deployment import LOCAL_ACCOUNT
from trainctl.setup import checks, laptop, updates

__all__ = ["synth"]  # a fixture

#: Changes of the account, options, and the checks that are bad, with a part of what fixes each.
Row = tuple[dict[str, Any], str, dict[str, str]]
NOT_DEPLOYED: dict[str, Any] = {"outputs": {}}
ZONE = "g5.12xlarge offered"
MISSING = refused("ImageNotFoundException")
ROLES = {f"role {each}": each.removeprefix("AWSServiceRoleFor").lower() for each in checks.ROLES}
END = datetime(2026, 12, 1, 11, 30, tzinfo=UTC)
ROUTE = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": "active"}
S3 = {"DestinationPrefixListId": "pl-1", "GatewayId": "vpce-1", "State": "active"}
PUBLIC = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-1", "State": "active"}
#: An existing network, in which a deploy needs no share of the account.
IN_NETWORK = f"-c vpc_id={VPC} -c subnet_id={OTHERS} -c availability_zone=us-east-1a"
NETWORK = NOT_DEPLOYED | {"routes": [ROUTE], "num_vpcs": 1000}
FAR = (
    '{"near":{"max_workers":1},'
    '"far":{"subnet_id":"subnet-0123456789abcdef1","availability_zone":"us-east-1c"}}'
)
BLOCK = "cr-0123456789abcdef0"
RESERVED = {"worker_instance_type": "p5.48xlarge", "capacity_reservation_id": BLOCK}
IN_BLOCK = (
    f"-c worker_instance_type=p5.48xlarge -c capacity_reservation_id={BLOCK} -c max_workers=4"
    " -c availability_zone=us-east-1a"
)
BAD: list[Row] = [
    ({}, "", {}),
    (
        {"pools": POOLS, "zones": {"g6.xlarge": ["us-east-1a"]}},
        "",
        {"pool l4 offered": "us-east-1a"},
    ),
    (
        {"fails": {"describe_images": MISSING}},
        "",
        {"image of the head": "", "image of the worker": ""},
    ),
    ({"fails": {"describe_images": refused("AccessDenied")}}, "", {}),
    # What the stacks lack is one check, and the others are made.
    (
        {"outputs": {**OUTPUTS, CORE_STACK: OUTPUTS[CORE_STACK] | {SUBNET: None}}},
        "",
        {ZONE: "", "m5.xlarge offered": ""},
    ),
    # A local AWS has no quotas.
    (
        {"account_id": LOCAL_ACCOUNT, "fails": {"get_service_quota": refused("InvalidAction")}},
        "",
        {},
    ),
    ({"quota": 192.0}, "", {}),
    # Of the largest pool; and of a second head, which ECS starts from zero.
    ({"quota": 384.0, "pools": POOLS}, "", {}),
    ({"quota": 383.0, "pools": POOLS}, "", {"quota G, on demand": "--desired-value 384"}),
    (
        {"quota": 7.0, "max_heads": 3, "default_quotas": {checks.QUOTAS["g", False]: 500.0}},
        "",
        {"quota standard, on demand": "--desired-value 8"},
    ),
    ({"quota": 8.0, "default_quotas": {checks.QUOTAS["g", False]: 500.0}}, "", {}),
    # A zone that offers both types.
    (
        {
            "zones": {
                "g5.12xlarge": ["us-east-1b", "us-east-1c"],
                "m5.xlarge": ["us-east-1a", "us-east-1c"],
            }
        },
        "",
        {ZONE: "availability_zone=us-east-1c"},
    ),
    ({"zones": {"g5.12xlarge": ["us-east-1b"], "m5.xlarge": ["us-east-1a"]}}, "", {ZONE: ""}),
    # Before a deploy.
    (NOT_DEPLOYED, "", {}),
    (
        NOT_DEPLOYED | {"zones": {"g5.12xlarge": ["us-east-1a", "us-east-1b"]}},
        "-c preset=fsdp -c max_heads=2 -c availability_zone=us-east-1c",
        {ZONE: "-c preset=fsdp -c max_heads=2 -c availability_zone=us-east-1a"},
    ),
    ({}, "-c max_workers=1000", {"settings": ""}),
    # No zone is guessed that CloudFormation will choose.
    (
        NOT_DEPLOYED
        | {"zones": {"g5.xlarge": ["us-east-1a", "us-east-1b"], "m5.xlarge": ["us-east-1b"]}},
        "",
        dict.fromkeys(("g5.xlarge offered", "m5.xlarge offered"), "=us-east-1b"),
    ),
    (
        NOT_DEPLOYED | {"zones": {"g5.xlarge": ["us-east-1b"]}},
        "-c availability_zone=us-east-1b",
        {},
    ),
    (
        NOT_DEPLOYED
        | {"bootstrap": None, "num_vpcs": 5, "default_quotas": {checks.VPCS[1]: 5.0}}
        | {"fails": {"get_role": refused("NoSuchEntity")}},
        "-c @aws-cdk/core:bootstrapQualifier=team",
        {"CDK bootstrap": "us-east-1 --qualifier team", "quota VPCs": "vpc", **ROLES},
    ),
    (NOT_DEPLOYED | {"bootstrap": "5"}, "", {"CDK bootstrap": ""}),
    # Beside stacks that are there, which need no second share of the account.
    ({"num_vpcs": 1000}, "-c preset=cpu", {}),
    ({"outputs": {CORE_STACK: OUTPUTS[CORE_STACK]}, "num_vpcs": 1000}, "", {}),
    ({"num_vpcs": 1000, "stack_status": "UPDATE_IN_PROGRESS"}, "", {"stacks": ""}),
    ({"num_vpcs": 1000, "stack_status": "UPDATE_ROLLBACK_FAILED"}, "", {"stacks": ""}),
    (
        {"stack_status": "ROLLBACK_COMPLETE", "bootstrap": None},
        "",
        {"stacks": "", "CDK bootstrap": ""},
    ),
    (
        {"outputs": {CORE_STACK: OUTPUTS[CORE_STACK]}, "stack_status": "DELETE_IN_PROGRESS"},
        "",
        {"stacks": ""},
    ),
    # The zone of a planned deploy is that of the network that is there.
    ({"zones": {"g5.xlarge": ["us-east-1c"]}, "subnet_zone": "us-east-1c"}, "-c preset=ddp", {}),
    (
        {"zones": {"g5.xlarge": ["us-east-1c"]}, "subnet_zone": "us-east-1b"},
        "-c preset=ddp",
        {"g5.xlarge offered": "-c preset=ddp -c availability_zone=us-east-1c"},
    ),
    # An existing network is looked at before hosts start in it.
    (NETWORK, IN_NETWORK, {}),
    (NETWORK, f"{IN_NETWORK} -c vpc_id=vpc-00000001", {"network": f"vpc_id={VPC}"}),
    (NETWORK, f"{IN_NETWORK} -c availability_zone=us-east-1b", {"network": "us-east-1a"}),
    (NETWORK, f"{IN_NETWORK} -c pools={FAR}", {"pool far network": "far"}),
    (NETWORK | {"routes": [S3]}, IN_NETWORK, {"network": ""}),
    (NETWORK | {"routes": [ROUTE | {"State": "blackhole"}]}, IN_NETWORK, {"network": ""}),
    (NETWORK | {"routes": [PUBLIC]}, IN_NETWORK, {"network": ""}),
    (NETWORK | {"dns_off": ("enableDnsSupport",)}, IN_NETWORK, {"network": "dns-support"}),
    (NETWORK | {"dns_off": ("enableDnsHostnames",)}, IN_NETWORK, {"network": "dns-hostnames"}),
    # Reserved capacity, before a launch fails.
    (RESERVED | {"reservation": {"EndDate": END}}, "", {}),
    (RESERVED | {"reservation": {"State": "scheduled", "StartDate": END}}, "", {}),
    (RESERVED | {"reservation": {"State": "expired"}}, "", {BLOCK: ""}),
    (RESERVED | {"reservation": {"InstanceType": "p5e.48xlarge"}}, "", {BLOCK: "=p5e.48xlarge"}),
    (RESERVED | {"reservation": {"AvailabilityZone": "us-east-1b"}}, "", {BLOCK: "us-east-1b"}),
    (RESERVED | {"reservation": {"TotalInstanceCount": 2}}, "", {BLOCK: "max_workers=2"}),
    (NOT_DEPLOYED, IN_BLOCK, {}),
    (
        NOT_DEPLOYED | {"reservation": {"AvailabilityZone": "us-east-1b"}},
        IN_BLOCK,
        {BLOCK: "us-east-1b"},
    ),
    # Credentials: the laptop is checked all the same.
    ({"fails": {"get_caller_identity": NoCredentialsError()}}, "", {"credentials": ""}),
    # One of several deployments.
    ({"outputs": {f"ml-{name}": each for name, each in OUTPUTS.items()}}, "-c deployment=ml", {}),
    ({"outputs": {f"ml-{name}": each for name, each in OUTPUTS.items()}}, "--deployment ml", {}),
]


def bad(found: Found) -> set[str]:
    return {what for what, each in found.items() if each["state"] == "bad"}


@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize(("changes", "options", "fixes"), BAD)
def test_doctor_finds_what_is_bad_and_how_to_fix_it(
    account: Account, looked: Looked, changes: dict[str, Any], options: str, fixes: dict[str, str]
) -> None:
    for name, value in changes.items():
        if name in vars(account):
            setattr(account, name, value)
        else:
            account.shape[name] = value
    code, found = looked(*options.split())
    assert (code, bad(found)) == (exits.FAILED if fixes else exits.OK, {*fixes})
    for what, fix in fixes.items():
        assert fix in found[what]["fix"], found[what]


@pytest.mark.parametrize(
    ("worker", "spot", "code"),
    [
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p5.48xlarge", True, "L-C4BD4855"),
        ("p4d.24xlarge", False, "L-417A185B"),
        ("g5.12xlarge", True, "L-3819A6DF"),
    ],
)
def test_each_type_counts_against_its_own_quota(
    account: Account, looked: Looked, worker: str, spot: bool, code: str
) -> None:
    account.shape |= {"worker_instance_type": worker, "spot": spot}
    account.quota = 0.0
    _, found = looked()
    asked = [each["fix"] for name, each in found.items() if name.startswith("quota")]
    assert any(f"--quota-code {code} " in fix for fix in asked), asked


def test_a_command_line_that_is_installed_without_the_app_fails(
    account: Account, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stacks.settings", None)
    account.outputs = {}
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"settings"})


@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize(
    ("change", "state"),
    [("max_workers=2", "ok"), ("vpc_cidr=10.7.0.0/16", "bad"), ("bucket=acme-training", "bad")],
)
def test_a_change_that_needs_a_destroy_first_is_bad(
    account: Account, looked: Looked, synth: Synth, change: str, state: str
) -> None:
    before = synth()
    account.templates = {CORE_STACK: before.core, TRAINING_STACK: before.training}
    found = looked("-c", change)[1]["update"]
    assert (found["state"], "make destroy && make deploy" in found["fix"]) == (
        state,
        state == "bad",
    )
    account.templates.pop(CORE_STACK)
    assert looked("-c", change)[1]["update"]["state"] == "ok"


def test_the_last_boot_is_reported_with_its_reason_if_it_failed(
    account: Account, looked: Looked
) -> None:
    assert looked()[1]["last boot"]["state"] == "ok"
    for number, failed in enumerate(["", "its GPUs do not answer"]):
        boot = {"id": f"i-{number}", "type": "p4d", "driver": "580", "steps": {"image": 61}}
        account.s3.put_object(
            Bucket="bucket",
            Key=f"hosts/i-{number}.json",
            Body=json.dumps(boot | {"failed": failed}).encode(),
        )
        account.now += timedelta(seconds=1)
        found = looked()[1]["last boot"]
        assert found["state"] == ("bad" if failed else "ok")
        reason = f"failed {failed}, " if failed else ""
        assert found["found"] == f"id i-{number}, type p4d, driver 580, {reason}image 61 s"


@pytest.mark.slow
def test_the_app_is_synthesized_with_the_settings_given(tmp_path: Path) -> None:
    place = Mock(context={"vpc_cidr": "10.7.0.0/16"}, region="us-east-1")
    updates.synthesize(place, tmp_path)
    assert "10.7.0.0/16" in (tmp_path / f"{CORE_STACK}.template.json").read_text()


@pytest.mark.parametrize(
    ("version", "state"), [("", "bad"), ("v18.19.0", "bad"), ("v20.1.0", "ok"), ("v24.0.0", "ok")]
)
def test_node_js(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(laptop, "_printed", lambda *_: version)
    assert laptop.node().state == state
    assert version in laptop.node().found


@pytest.mark.usefixtures("in_us_west_2")
def test_a_region_of_cdk_json_is_where_a_deploy_goes(account: Account, looked: Looked) -> None:
    account.outputs = {}
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"region"})
    assert found["region"]["fix"].endswith("us-west-2")


def test_the_variables_of_the_workflows_are_ready_to_be_pasted(
    account: Account, looked: Looked
) -> None:
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    names = {name for text in texts for name in re.findall(r"\bvars\.(\w+)", text)}
    assert "images by CI" not in looked()[1], "no role"
    account.outputs[CORE_STACK][PUSH_ROLE] = role = "arn:aws:iam::123456789012:role/CoreStack-Push"
    code, found = looked()
    assert (code, found["images by CI"]["state"]) == (0, "next")
    lines = found["images by CI"]["fix"].splitlines()
    given = dict(line.removeprefix("gh variable set ").split(" --body ") for line in lines)
    assert given.keys() == names - {"TORCH_CPU_INDEX"}, "which has a default"
    assert (given["AWS_PUSH_ROLE"], given["AWS_REGION"]) == (role, "us-east-1")
    assert given["WORKER_REPOSITORY"] == account.outputs[CORE_STACK][REPOSITORIES["worker"]]
