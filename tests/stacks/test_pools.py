"""Pools are more workers of other kinds, and change nothing for the deployment's own."""

import json
from typing import Any, Final

import pytest

from contract.nodes import ENV_EFA, ENV_POOLS, ENV_SPOT, ENV_SUBNETS, ENV_WORKER_GPUS
from rehearsal.policies import Call, allows
from tests.stacks.conftest import POOLS, Synth, Templates, statements, text, variables
from tests.stacks.test_roles import Deployed, arn

ZONE: Final = {"availability_zone": "us-west-2a"}
NAMES: Final = ("a10g-spot", "a10g", "l40s-c", "l4-c", "block", "odcr")
#: Beginnings of the ids of resources of the default deployment that list all pools.
LISTS: Final = (
    *("ClusterCapacityProviders", "ClusterTeardownRole", "ClusterTeardownStopTasks"),
    *("Dashboard7", "JobsKeeper", "JobsRoleDefaultPolicy", "JobsTask"),
)


@pytest.fixture
def pools(synth: Synth) -> Templates:
    return synth(**POOLS)


def of_pool(templates: Templates, kind: str, name: str) -> dict[str, Any]:
    """Properties of the one resource of a type that belongs to a pool."""
    part = f"{name.replace('-', '')}Pool"
    (found,) = [each for id_, each in templates.of_type(kind).items() if part in id_]
    return found


def data(templates: Templates, name: str) -> dict[str, Any]:
    found: dict[str, Any] = of_pool(templates, "AWS::EC2::LaunchTemplate", name)
    return dict(found["LaunchTemplateData"])


def test_the_deployments_own_resources_are_the_same_but_for_lists(
    synth: Synth, pools: Templates
) -> None:
    own = synth(preset="ddp", **ZONE)
    assert pools.core == own.core
    before, after = own.training["Resources"], pools.training["Resources"]
    assert before.keys() <= after.keys()
    changed = {name for name, each in before.items() if after[name] != each}
    assert {each for each in changed if not each.startswith(LISTS)} == set()
    more = sorted(after[name]["Type"] for name in after.keys() - before.keys())
    each_has = {"AutoScalingGroup", "LaunchTemplate", "InstanceProfile", "CapacityProvider"}
    each_has |= {"TaskDefinition"}
    assert {kind: more.count(kind) for kind in {*more}} == {
        **{kind: 6 for kind in more if kind.rpartition(":")[2] in each_has},
        "Custom::TerminateHosts": 6,
        "AWS::EC2::PlacementGroup": 4,  # not with reserved capacity
        "AWS::EC2::Subnet": 1,
        "AWS::EC2::SubnetRouteTableAssociation": 1,
    }


def test_each_pool_has_its_type_market_and_place(pools: Templates) -> None:
    types = [data(pools, each)["InstanceType"] for each in NAMES]
    assert types == [
        *("g5.12xlarge", "g5.12xlarge", "g6e.24xlarge", "g6.xlarge", "p5.48xlarge", "p4d.24xlarge")
    ]
    markets = [data(pools, each).get("InstanceMarketOptions", {}) for each in NAMES]
    kinds = [each.get("MarketType") for each in markets]
    assert kinds == ["spot", None, None, None, "capacity-block", None]
    reserved = [each for each in NAMES if "CapacityReservationSpecification" in data(pools, each)]
    assert reserved == ["block", "odcr"]
    places = [text(data(pools, each).get("Placement")) for each in NAMES]
    assert len({*places[:4]}) == 4, "a cluster placement group each"
    assert places[4:] == ["None", "None"]
    assert [data(pools, each)["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for each in NAMES] == [
        *(200, 200, 500, 200, 200, 200)
    ]
    groups = [of_pool(pools, "AWS::AutoScaling::AutoScalingGroup", each) for each in NAMES]
    assert [each["MaxSize"] for each in groups] == ["4", "4", "2", "2", "2", "1"]
    assert [each["AutoScalingGroupName"] for each in groups] == [
        f"TrainingStack-pool-{each}" for each in NAMES
    ]
    subnets = [text(each["VPCZoneIdentifier"][0]) for each in groups]
    assert [each.startswith("<Subnet") for each in subnets] == [
        name.endswith("-c") for name in NAMES
    ]
    (other,) = [
        each
        for each in pools.of_type("AWS::EC2::Subnet").values()
        if "Tags" not in each or each["AvailabilityZone"] == "us-west-2c"
    ]
    assert (other["AvailabilityZone"], other["CidrBlock"]) == ("us-west-2c", "10.0.48.0/20")


def test_a_task_of_a_pool_is_made_for_its_hosts(pools: Templates) -> None:
    tasks = [of_pool(pools, "AWS::ECS::TaskDefinition", each) for each in NAMES]
    assert [each["Family"] for each in tasks] == [f"TrainingStack-pool-{each}" for each in NAMES]
    containers = [each["ContainerDefinitions"][0] for each in tasks]
    told = [variables(each) for each in containers]
    assert [each[ENV_WORKER_GPUS] for each in told] == ["4", "4", "4", "1", "8", "8"]
    assert [each[ENV_SPOT] for each in told] == ["1", "0", "0", "0", "0", "0"]
    # One node needs no EFA.
    assert [each.get(ENV_EFA) for each in told] == [None, None, "2", None, "32", None]
    assert [text(each["Image"]).endswith(":mine") for each in containers] == [False] * 5 + [True]


def test_the_head_of_a_job_is_told_of_each_pool(pools: Templates) -> None:
    (task,) = [
        each["ContainerDefinitions"][0]
        for name, each in pools.of_type("AWS::ECS::TaskDefinition").items()
        if name.startswith("JobsTask")
    ]
    found = json.loads(variables(task)[ENV_POOLS])
    assert [*found] == [*NAMES]
    own = variables(task)
    for name, each in found.items():
        assert {*each} == {*each} & own.keys(), "each takes the place of one of its own"
        assert (each[ENV_SUBNETS] != own[ENV_SUBNETS]) is (name[-2:] == "-c")
    assert found["block"][ENV_WORKER_GPUS] == "8"


def test_the_keeper_and_the_head_may_do_with_pools_what_they_do_with_the_others(
    pools: Templates,
) -> None:
    deployed = Deployed(pools)
    group = arn("autoscaling", "autoScalingGroup:x:autoScalingGroupName/{}")
    family = arn("ecs", "task-definition/{}:3")
    cluster = deployed.id("Cluster", "AWS::ECS::Cluster")
    only = {"ecs_cluster": arn("ecs", f"cluster/{cluster}")}
    own, other = "TrainingStack-pool-a10g", "Other-TrainingStack-pool-a10g"
    keeper, head = deployed.role("JobsKeeperRole"), deployed.role("JobsRole")
    for name, may in ((own, True), (other, False)):
        for action in ("SetDesiredCapacity", "TerminateInstanceInAutoScalingGroup"):
            assert deployed.may(keeper, f"autoscaling:{action}", group.format(name)) is may
        assert deployed.may(head, "ecs:RunTask", family.format(name), **only) is may
        tag = {"aws:ResourceTag/aws:autoscaling:groupName": name}
        end = Call(
            caller="",
            action="ec2:TerminateInstances",
            resource=arn("ec2", "instance/i-1"),
            keys=tag,
        )
        assert allows(end, identity=deployed.roles[keeper]) is may


def test_eighteen_pools_are_within_what_aws_takes(synth: Synth) -> None:
    pools = {
        f"a-pool-of-hosts-{number:02}": {"worker_instance_type": "g5.12xlarge", "max_workers": 4}
        for number in range(18)
    }
    found = synth(**ZONE, pools=json.dumps(pools)).training
    assert len(found["Resources"]) < 500
    assert len(json.dumps(found)) < 1_000_000
    for name, each in found["Resources"].items():
        given = each.get("Properties", {})
        if each["Type"] == "AWS::IAM::Policy":
            assert len(json.dumps(statements(given["PolicyDocument"]))) < 10_240, name
        if environment := given.get("Environment"):
            assert len(text(environment)) < 4096, name
