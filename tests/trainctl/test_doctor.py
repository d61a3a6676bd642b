"""``trainctl doctor``: its checks before and after a deploy, and the commands that fix what they
find."""

import json
import re
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError

from contract import exits
from contract.outputs import CORE_STACK, PUSH_ROLE, REPOSITORIES, SUBNET, TRAINING_STACK
from tests.aws.calls import refused
from tests.conftest import ROOT
from tests.trainctl.account import OTHERS, POOLS, VPC, Account
from tests.trainctl.conftest import Cli, Found, Looked
from trainctl import checks, laptop
from trainctl.aws.deployment import LOCAL_ACCOUNT

ZONE = "availability_zone=us-east-1a"


def bad(found: Found) -> set[str]:
    return {what for what, each in found.items() if each["state"] == "bad"}


# --- with stacks ----------------------------------------------------------------------------------
def test_doctor_finds_nothing_where_all_is_well(account: Account, looked: Looked) -> None:
    code, found = looked()
    assert code == 0
    assert {each["state"] for each in found.values()} == {"ok"}
    assert found["quota G, on demand"]["found"].endswith("takes 192")
    assert found["quota standard, on demand"]["found"].endswith("takes 4")
    assert "image of the worker" in found
    assert not {"quota VPCs", "Node.js"} & found.keys()
    account.shape["spot"] = True
    account.shape["max_heads"] = 3
    _, found = looked()
    assert "quota G, spot" in found
    surplus = "takes 8, with the second head host that ECS starts from zero"
    assert found["quota standard, on demand"]["found"].endswith(surplus)


def test_each_pool_is_checked_where_it_is(account: Account, looked: Looked) -> None:
    account.shape["pools"] = POOLS
    account.zones = {"g6.xlarge": ["us-east-1a"], "g6e.12xlarge": ["us-east-1a"]}
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"pool l4 offered"})
    assert "not in us-east-1c" in found["pool l4 offered"]["found"]
    assert found["quota G, spot"]["found"].endswith("takes 8")
    assert found["quota G, on demand"]["found"].endswith("takes 384"), "of the largest pool"
    assert "role AWSServiceRoleForEC2Spot" in found
    assert {"image of the worker", "image of the worker, mine"} <= found.keys()


def test_a_missing_image_is_bad_and_one_that_cannot_be_looked_up_is_unknown(
    account: Account, looked: Looked
) -> None:
    account.fails["describe_images"] = refused("ImageNotFoundException")
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"image of the head", "image of the worker"})
    assert found["image of the worker"]["fix"] == "make images"
    account.fails["describe_images"] = refused("AccessDenied")
    code, found = looked()
    assert (code, found["image of the worker"]["state"]) == (0, "unknown")


def test_what_the_stacks_lack_is_one_check_and_the_others_are_made(
    account: Account, looked: Looked
) -> None:
    del account.outputs[CORE_STACK][SUBNET]
    code, found = looked()
    assert code == exits.FAILED
    assert bad(found) == {"g5.12xlarge offered", "m5.xlarge offered"}
    assert f"have no output {SUBNET}" in found["m5.xlarge offered"]["found"]
    assert found["quota G, on demand"]["state"] == "ok"


def test_the_variables_of_the_workflows_are_ready_to_be_pasted(
    account: Account, looked: Looked, cli: Cli
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
    assert f"\n  gh variable set AWS_PUSH_ROLE --body {role}\n" in cli("doctor").out


def test_on_a_local_aws_what_it_has_not_is_skipped(account: Account, looked: Looked) -> None:
    account.account_id = LOCAL_ACCOUNT
    refused_there = ("get_service_quota", "describe_instance_type_offerings")
    account.fails = {each: refused("InvalidAction") for each in refused_there}
    code, found = looked()
    assert code == exits.OK
    assert {each["state"] for each in found.values()} == {"ok"}


def test_a_quota_that_is_too_small_comes_with_the_request_for_more(
    account: Account, looked: Looked
) -> None:
    account.quota = 8.0
    code, found = looked("--profile", "work")
    assert code == exits.FAILED
    assert bad(found) == {"quota G, on demand"}
    assert found["quota G, on demand"]["fix"] == (
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code "
        f"{checks.QUOTAS['g', False]} --desired-value 192 --region us-east-1 --profile work"
    )
    account.quota = 192.0
    assert looked()[0] == 0, "just enough"
    # A quota that was never changed is AWS's default.
    account.default_quotas[checks.QUOTAS["g", False]] = 500.0
    _, found = looked()
    assert found["quota G, on demand"]["found"].startswith("500 vCPUs")


def test_a_zone_without_the_type_names_one_that_offers_both(
    account: Account, looked: Looked
) -> None:
    account.zones = {
        "g5.12xlarge": ["us-east-1b", "us-east-1c"],
        "m5.xlarge": ["us-east-1a", "us-east-1c"],
    }
    code, found = looked()
    assert code == exits.FAILED
    assert bad(found) == {"g5.12xlarge offered"}
    assert found["g5.12xlarge offered"]["fix"] == (
        'make destroy && make deploy ARGS="-c preset=ddp -c availability_zone=us-east-1c"'
    )
    account.zones["m5.xlarge"] = ["us-east-1a"]
    _, found = looked()
    assert found["g5.12xlarge offered"]["fix"] == "", "no command fixes it"
    assert (
        "no zone of us-east-1 offers m5.xlarge and g5.12xlarge"
        in (found["g5.12xlarge offered"]["found"])
    )


# --- before a deploy ------------------------------------------------------------------------------
@pytest.mark.usefixtures("laptop_is_ready")
def test_without_stacks_doctor_checks_whether_they_can_be_deployed(
    account: Account, looked: Looked
) -> None:
    account.outputs = {}
    code, found = looked()
    assert (code, bad(found)) == (0, set())
    assert found["stacks"]["state"] == "next"
    assert "CoreStack is not deployed" in found["stacks"]["found"]
    assert found["stacks"]["fix"] == "make deploy"
    assert found["settings"]["found"] == "preset ddp, head m5.xlarge, up to 2 x g5.xlarge"
    assert found["g5.xlarge offered"]["found"] == "in every zone of us-east-1"
    assert found["quota G, on demand"]["found"].endswith("takes 8")
    assert {"credentials", "Node.js", "CDK bootstrap"} <= found.keys()
    assert "quota VPCs" in found
    assert "image of the head" not in found
    network = ("vpc_id=vpc-0123456789abcdef0", "subnet_id=subnet-0123456789abcdef0")
    _, found = looked(*(word for each in network for word in ("-c", each)), "-c", ZONE)
    assert not {"quota VPCs", "quota addresses"} & found.keys()
    assert "CDK bootstrap" in found


@pytest.mark.usefixtures("laptop_is_ready")
def test_settings_are_read_as_the_app_reads_them(
    account: Account, looked: Looked, cli: Cli
) -> None:
    account.outputs = {}
    account.zones = {"g5.12xlarge": ["us-east-1a", "us-east-1b"]}
    given = ("-c", "preset=fsdp", "-c", "max_heads=2", "-c", "availability_zone=us-east-1c")
    code, found = looked(*given)
    assert (code, bad(found)) == (exits.FAILED, {"g5.12xlarge offered"})
    assert found["stacks"]["fix"] == (
        'make deploy ARGS="-c preset=fsdp -c max_heads=2 -c availability_zone=us-east-1c"'
    )
    # Two heads and a worker, 48 vCPUs each: the second head is what ECS starts from zero.
    assert "takes 144, with the second head host" in found["quota G, on demand"]["found"]
    assert found["g5.12xlarge offered"]["fix"] == (
        'make deploy ARGS="-c preset=fsdp -c max_heads=2 -c availability_zone=us-east-1a"'
    )
    code, found = looked("-c", "max_workers=1000")
    assert (code, bad(found)) == (exits.FAILED, {"settings"})
    assert "max_workers is 1000: it must be 1 to 128" in found["settings"]["found"]
    code, found = looked("-c", "region=eu-west-3")
    assert found["credentials"]["found"].endswith("eu-west-3")
    assert "-c preset: give a setting as name=value" in cli.refuses("doctor", "-c", "preset")


NAT = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": "active"}
S3 = {"DestinationPrefixListId": "pl-1", "GatewayId": "vpce-1", "State": "active"}
PUBLIC = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": "igw-1", "State": "active"}


@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize(
    ("given", "routes", "off", "state", "said", "fix"),
    [
        ({}, [NAT, S3], (), "ok", f"{OTHERS} in us-east-1a", ""),
        ({}, [NAT], (), "ok", "no gateway endpoint for S3: data may be billed per GB", ""),
        ({"vpc_id": "vpc-00000001"}, [NAT], (), "bad", f"{OTHERS} is in {VPC}", f"vpc_id={VPC}"),
        ({"availability_zone": "us-east-1b"}, [NAT], (), "bad", "is in us-east-1a", "us-east-1a"),
        ({}, [S3], (), "bad", "no working route to 0.0.0.0/0", ""),
        ({}, [NAT | {"State": "blackhole"}], (), "bad", "no working route to 0.0.0.0/0", ""),
        ({}, [PUBLIC], (), "bad", "hosts get no public address", ""),
        ({}, [NAT], ("enableDnsSupport",), "bad", "no DNS names", "--enable-dns-support"),
        ({}, [NAT], ("enableDnsHostnames",), "bad", "no DNS names", "--enable-dns-hostnames"),
    ],
)
def test_an_existing_network_is_looked_at_before_hosts_start_in_it(
    account: Account,
    looked: Looked,
    given: dict[str, str],
    routes: list[dict[str, str]],
    off: tuple[str, ...],
    state: str,
    said: str,
    fix: str,
) -> None:
    account.outputs, account.routes, account.dns_off = {}, routes, off
    settings = {"vpc_id": VPC, "subnet_id": OTHERS, "availability_zone": "us-east-1a", **given}
    words = [word for each in settings.items() for word in ("-c", "=".join(each))]
    _, found = looked(*words)
    network = found["network"]
    assert network["state"] == state
    assert said in network["found"]
    assert fix in network["fix"]
    assert not {"quota VPCs", "quota addresses"} & found.keys()


@pytest.mark.usefixtures("laptop_is_ready")
def test_a_pools_own_subnet_is_looked_at_too(account: Account, looked: Looked) -> None:
    account.routes = [NAT]
    elsewhere = {"subnet_id": f"{OTHERS[:-1]}1", "availability_zone": "us-east-1c"}
    pools = json.dumps({"far": elsewhere, "near": {"max_workers": 1}})
    given = (f"vpc_id={VPC}", f"subnet_id={OTHERS}", "availability_zone=us-east-1a")
    _, found = looked(*(word for each in (*given, f"pools={pools}") for word in ("-c", each)))
    far = found["pool far network"]
    assert (far["state"], far["fix"]) == ("bad", "change pool far in cdk.json")
    assert far["found"] == f"{elsewhere['subnet_id']} is in us-east-1a"
    assert "pool near network" not in found


RESERVED = "cr-0123456789abcdef0"


@pytest.mark.parametrize(
    ("is_deployed", "of_aws", "state", "said", "fix"),
    [
        (True, {"EndDate": datetime(2026, 12, 1, 11, 30, tzinfo=UTC)}, "ok", "12-01 11:30 UTC", ""),
        (False, {}, "ok", "4 hosts in us-east-1a, active", ""),
        (True, {"InstanceType": "p5e.48xlarge"}, "bad", "of p5e.48", "instance_type=p5e.48xlarge"),
        (True, {"AvailabilityZone": "us-east-1b"}, "bad", "start in us-east-1a", "us-east-1b"),
        (False, {"AvailabilityZone": "us-east-1b"}, "bad", "start in us-east-1a", "us-east-1b"),
        (True, {"TotalInstanceCount": 2}, "bad", "max_workers is 4", "max_workers=2"),
        (True, {"State": "expired"}, "bad", "expired", ""),
        (
            *(
                True,
                {"State": "scheduled", "StartDate": datetime(2026, 11, 30, 11, 30, tzinfo=UTC)},
            ),
            *("next", "scheduled, from 2026-11-30 11:30 UTC", ""),
        ),
    ],
)
@pytest.mark.usefixtures("laptop_is_ready")
def test_reserved_capacity_is_looked_at_before_a_launch_fails(
    account: Account,
    looked: Looked,
    is_deployed: bool,
    of_aws: dict[str, Any],
    state: str,
    said: str,
    fix: str,
) -> None:
    account.reservation = of_aws
    account.shape |= {"worker_instance_type": "p5.48xlarge", "capacity_reservation_id": RESERVED}
    given = {"worker_instance_type": "p5.48xlarge", "capacity_reservation_id": RESERVED}
    given |= {"max_workers": "4", "availability_zone": "us-east-1a"}
    if not is_deployed:
        account.outputs = {}
    words = [word for each in given.items() for word in ("-c", "=".join(each))]
    check = looked(*([] if is_deployed else words))[1][RESERVED]
    assert check["state"] == state
    assert said in check["found"]
    assert fix in check["fix"]


@pytest.mark.usefixtures("laptop_is_ready")
def test_a_deploy_is_checked_beside_the_stacks_that_are_there(
    account: Account, looked: Looked
) -> None:
    code, found = looked("-c", "preset=cpu")
    assert (code, bad(found)) == (0, set())
    assert found["settings"]["found"].startswith("preset cpu")
    assert not {"quota VPCs", "image of the head"} & found.keys()
    # TrainingStack was destroyed, the network is there.
    account.outputs = {CORE_STACK: account.outputs[CORE_STACK]}
    _, found = looked()
    assert f"{TRAINING_STACK} is not deployed" in found["stacks"]["found"]
    assert "quota VPCs" not in found


@pytest.mark.usefixtures("laptop_is_ready")
def test_no_zone_is_guessed_that_cloudformation_will_choose(
    account: Account, looked: Looked
) -> None:
    account.outputs = {}
    account.zones = {
        "g5.xlarge": ["us-east-1a", "us-east-1b"],
        "m5.xlarge": ["us-east-1b", "us-east-1c"],
    }
    code, found = looked()
    offers = {"g5.xlarge offered", "m5.xlarge offered"}
    assert (code, bad(found)) == (exits.FAILED, offers)
    for what in offers:
        assert found[what]["found"].startswith("not in every zone of us-east-1, and the deploy may")
        assert "give one of us-east-1b with -c availability_zone=" in found[what]["found"]
        fix = 'make deploy ARGS="-c availability_zone=us-east-1b"'
        assert found[what]["fix"] == fix
    code, found = looked("-c", "availability_zone=us-east-1b")
    assert (code, bad(found)) == (0, set())


@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize("stacks", [(CORE_STACK,), (CORE_STACK, TRAINING_STACK)])
def test_the_zone_of_a_planned_deploy_is_that_of_the_network_that_is_there(
    account: Account, looked: Looked, stacks: tuple[str, ...]
) -> None:
    account.outputs = {stack: account.outputs[stack] for stack in stacks}
    account.zones = {"g5.xlarge": ["us-east-1c"]}
    account.subnet_zone = "us-east-1c"
    code, found = looked("-c", "preset=ddp")
    assert (code, bad(found)) == (0, set())
    assert found["g5.xlarge offered"]["found"] == "in us-east-1c"
    account.subnet_zone = "us-east-1b"
    _, found = looked("-c", "preset=ddp")
    assert found["g5.xlarge offered"]["fix"] == (
        'make destroy && make deploy ARGS="-c preset=ddp -c availability_zone=us-east-1c"'
    )


@pytest.mark.usefixtures("laptop_is_ready")
def test_each_obstacle_to_a_first_deploy_comes_with_its_command(
    account: Account, looked: Looked
) -> None:
    account.outputs = {}
    account.bootstrap, account.num_vpcs = None, 5
    account.default_quotas = {checks.VPCS[1]: 5.0}
    account.fails["get_role"] = refused("NoSuchEntity")
    code, found = looked()
    roles = {f"role {each}" for each in checks.ROLES}
    assert (code, bad(found)) == (exits.FAILED, {"CDK bootstrap", "quota VPCs", *roles})
    assert found["role AWSServiceRoleForECS"]["fix"].startswith(
        "aws iam create-service-linked-role --aws-service-name ecs.amazonaws.com"
    )
    assert found["CDK bootstrap"]["fix"] == "npx cdk bootstrap aws://123456789012/us-east-1"
    assert found["quota VPCs"]["fix"].startswith(
        "aws service-quotas request-service-quota-increase --service-code vpc"
    )
    _, found = looked("-c", "@aws-cdk/core:bootstrapQualifier=team")
    assert account.sent("get_parameter")[-1]["Name"] == "/cdk-bootstrap/team/version"
    assert found["CDK bootstrap"]["fix"].endswith("/us-east-1 --qualifier team")
    account.bootstrap = "5"
    _, found = looked()
    assert found["CDK bootstrap"]["found"] == "version 5, and the stacks need 6"


@pytest.mark.usefixtures("laptop_is_ready")
def test_a_stack_that_cannot_be_used_is_a_problem_and_the_account_is_checked_all_the_same(
    account: Account, looked: Looked
) -> None:
    account.stack_status, account.bootstrap = "ROLLBACK_COMPLETE", None
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"stacks", "CDK bootstrap"})
    assert "ROLLBACK_COMPLETE" in found["stacks"]["found"]
    # Nothing is left of them: the next deploy makes all of it.
    assert found["stacks"]["fix"] == "make deploy"
    assert "quota VPCs" in found


@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize(
    ("status", "fix"),
    [
        ("UPDATE_IN_PROGRESS", ""),
        ("UPDATE_ROLLBACK_FAILED", "make deploy"),
        ("shape", "make deploy"),
    ],
)
def test_stacks_that_are_there_need_no_second_share_of_the_account(
    account: Account, looked: Looked, status: str, fix: str
) -> None:
    account.num_vpcs = 1000
    if status == "shape":
        del account.shape["preset"]
    else:
        account.stack_status = status
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"stacks"})
    assert found["stacks"]["fix"] == fix


@pytest.mark.usefixtures("laptop_is_ready")
def test_a_deploy_or_a_destroy_on_its_way_is_waited_for(account: Account, looked: Looked) -> None:
    del account.outputs[TRAINING_STACK]
    account.stack_status = "DELETE_IN_PROGRESS"
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"stacks"})
    said = "CoreStack is being changed (DELETE_IN_PROGRESS): wait until that has ended"
    assert (found["stacks"]["found"], found["stacks"]["fix"]) == (said, "")
    assert "quota VPCs" not in found


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


def test_a_command_line_that_is_installed_without_the_app_says_so(
    account: Account, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "stacks.settings", None)
    account.outputs = {}
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"settings"})
    assert "python -m trainctl doctor there" in found["settings"]["found"]


# --- the laptop -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        ("", "bad", "not found: install Node.js 22 or 24"),
        ("v18.19.0", "bad", "v18.19.0 is too old"),
        ("v20.1.0", "ok", "past its support"),
        ("v24.0.0", "ok", "v24.0.0"),
    ],
)
def test_node_js(monkeypatch: pytest.MonkeyPatch, version: str, state: str, said: str) -> None:
    monkeypatch.setattr(laptop, "_printed", lambda *_: version)
    found = laptop.node()
    assert found.state == state
    assert said in found.found


@pytest.mark.parametrize(
    ("error", "said", "fix"),
    [
        (NoCredentialsError(), "No AWS account is set up here", "make local"),
        (refused("ExpiredToken"), "the AWS login has expired", "aws sso login"),
    ],
)
def test_without_credentials_the_laptop_is_checked_all_the_same(
    account: Account, looked: Looked, error: Exception, said: str, fix: str
) -> None:
    account.fails["get_caller_identity"] = error
    code, found = looked()
    assert code == exits.FAILED
    assert said in found["credentials"]["found"]
    assert fix in found["credentials"]["found"]
    assert "Node.js" in found


@pytest.mark.usefixtures("in_us_west_2")
def test_a_region_of_cdk_json_is_where_a_deploy_goes(account: Account, looked: Looked) -> None:
    account.outputs = {}
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"region"})
    assert found["region"]["fix"] == "export AWS_REGION=us-west-2"


# --- the commands that fix ------------------------------------------------------------------------
def test_commands_for_people_say_what_to_type(account: Account, cli: Cli) -> None:
    account.without_images = {"head"}
    printed = cli("doctor", "--profile", "work", "--region", "eu-north-1", code=exits.FAILED)
    assert "\n  AWS_PROFILE=work AWS_REGION=eu-north-1 make images\n" in printed.out
    assert "1 check failed.\n" in printed.err


@pytest.mark.parametrize("how", ["option", "variable", "setting"])
def test_one_of_several_deployments_is_found_by_its_name(
    account: Account, looked: Looked, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    _, found = looked("-c", "deployment=ml") if how == "setting" else looked("--deployment", "ml")
    assert "ml-CoreStack is not deployed" in found["stacks"]["found"]
    account.outputs = {f"ml-{stack}": values for stack, values in account.outputs.items()}
    words = {"option": ("--deployment", "ml"), "variable": (), "setting": ("-c", "deployment=ml")}
    if how == "variable":
        monkeypatch.setenv("TRAIN_DEPLOYMENT", "ml")
    code, found = looked(*words[how])
    assert (code, found["stacks"]["state"]) == (0, "ok")
