"""Pools are more workers of other kinds, and change nothing for the deployment's own."""

import importlib
import json
import time
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import pytest

from contract import times
from contract.admission import Limits
from contract.job import HEAD_STATE, JobSpec, Life, Placement, head_variables, overrides
from contract.nodes import (
    ENV_EFA,
    ENV_POOLS,
    ENV_SPOT,
    ENV_SUBNETS,
    ENV_WORKER_GPUS,
    Range,
    pool_of,
)
from rehearsal.policies import Call, allows
from stacks.jobs.keeper import cluster
from tests.aws.calls import refused
from tests.heads import head
from tests.stacks.conftest import EXISTING, POOLS, Synth, Templates, statements, text, variables
from tests.stacks.test_job_keeper import SPEC, Aws, ago, aws, launch
from tests.stacks.test_roles import Deployed, arn

__all__ = ["aws"]

ZONE: Final = {"availability_zone": "us-west-2a"}
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


def of_head(templates: Templates) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Variables of a job's head, and those of its pools."""
    (task,) = [
        each["ContainerDefinitions"][0]
        for name, each in templates.of_type("AWS::ECS::TaskDefinition").items()
        if name.startswith("JobsTask")
    ]
    own = variables(task)
    return own, json.loads(own[ENV_POOLS])


def test_the_deployments_own_resources_are_the_same_but_for_lists(
    synth: Synth, pools: Templates
) -> None:
    own = synth(preset="ddp", **ZONE)
    assert pools.core == own.core
    before, after = own.training["Resources"], pools.training["Resources"]
    assert before.keys() <= after.keys()
    changed = {name for name, each in before.items() if after[name] != each}
    assert {each for each in changed if not each.startswith(LISTS)} == set()
    (other,) = (after[each]["Properties"] for each in after if each.startswith("Subnet"))
    assert (other["AvailabilityZone"], other["CidrBlock"]) == ("us-west-2c", "10.0.48.0/20")
    # A pool that is removed takes the revisions of its own task with it.
    hosts = [name for name, each in after.items() if each["Type"] == "Custom::TerminateHosts"]
    kept = {name: after[name]["Properties"].get("Definitions") for name in hosts}
    named = {name: given[0]["Ref"] for name, given in kept.items() if given}
    assert len(named) == len({*named.values()}) == 6
    assert {after[each]["Type"] for each in named.values()} == {"AWS::ECS::TaskDefinition"}
    rules = pools.of_type("AWS::Events::Rule").items()
    (refused,) = (each for name, each in rules if "Refused" in name)
    groups = refused["EventPattern"]["detail"]["AutoScalingGroupName"]
    assert groups == [{"prefix": "TrainingStack-"}]


#: Of each pool: type, market, GPUs, whether its hosts are reserved; all by their names.
FACTS: Final = {
    "a10g-spot": ("g5.12xlarge", "spot", "4", False),
    "a10g": ("g5.12xlarge", None, "4", False),
    "l40s-c": ("g6e.24xlarge", None, "4", False),
    "l4-c": ("g6.xlarge", None, "1", False),
    "block": ("p5.48xlarge", "capacity-block", "8", True),
    "odcr": ("p4d.24xlarge", None, "8", True),
}


@pytest.mark.parametrize(("name", "facts"), FACTS.items())
def test_each_pool_has_its_type_market_place_and_task(
    pools: Templates, name: str, facts: tuple[Any, ...]
) -> None:
    data = of_pool(pools, "AWS::EC2::LaunchTemplate", name)["LaunchTemplateData"]
    group = of_pool(pools, "AWS::AutoScaling::AutoScalingGroup", name)
    task = of_pool(pools, "AWS::ECS::TaskDefinition", name)
    (container,) = task["ContainerDefinitions"]
    told, market = variables(container), data.get("InstanceMarketOptions", {}).get("MarketType")
    is_reserved = "CapacityReservationSpecification" in data
    assert (data["InstanceType"], market, told[ENV_WORKER_GPUS], is_reserved) == facts
    assert ("Placement" in data) is not is_reserved
    place = f"TrainingStack-pool-{name}" + "_us-west-2c" * name.endswith("-c")
    assert group["AutoScalingGroupName"] == task["Family"] == place
    assert of_pool(pools, "AWS::ECS::CapacityProvider", name)["Name"] == f"cp-{place}"
    assert pool_of(f"arn:aws:ecs:us-west-2:1:task-definition/{place}:12") == name
    assert text(group["VPCZoneIdentifier"][0]).startswith("<Subnet") is name.endswith("-c")
    assert told[ENV_SPOT] == str(int(market == "spot"))
    assert (ENV_EFA in told) is (name in ("l40s-c", "block")), "one node of p4d needs none"
    assert text(container["Image"]).endswith(":mine") is (name == "odcr")


#: Of what a pool is made of: type -> the property with its name.
NAMED: Final = {
    "AWS::AutoScaling::AutoScalingGroup": "AutoScalingGroupName",
    "AWS::ECS::CapacityProvider": "Name",
    "AWS::ECS::TaskDefinition": "Family",
}


def test_a_pool_that_moves_to_another_zone_is_another_one(
    synth: Synth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ECS refuses to give up the old capacity provider while a task uses it, before anything is
    taken from a host, and takes no group that is another provider's (containers-roadmap 632)."""
    names, parts = list[set[str]](), list[set[str]]()
    for zone in "abc":  # from the deployment's own, and home again
        pool = {"worker_instance_type": "g5.12xlarge", "availability_zone": f"us-west-2{zone}"}
        found = synth(**ZONE, pools=json.dumps({"mine": pool}))
        names.append({str(of_pool(found, kind, "mine")[key]) for kind, key in NAMED.items()})
        named = {each for each in found.training["Resources"] if "minePool" in each}
        ends = {each for each in found.of_type("Custom::TerminateHosts") if "mine" in each}
        # The definition of its task has one id in all zones: it is never changed, but replaced.
        parts.append(ends | {each for each in named if "PoolTask" not in each})
        # The keeper knows the hosts by these names.
        (given,) = (
            each["Environment"]["Variables"]
            for name, each in found.of_type("AWS::Lambda::Function").items()
            if name.startswith("JobsKeeper")
        )
        for name in ("STACK", "POOLS", "PLACES"):
            monkeypatch.setenv(name, text(given.get(name, "")))
        importlib.reload(cluster)
        assert {*cluster.GROUPS.items()} >= {(min(names[-1]), max(names[-1]))}
    for own in (names, parts):
        assert len(set().union(*own)) == sum(map(len, own)), "none is there twice"
    assert len(parts[0]) > 4


def test_the_head_of_a_job_is_told_of_each_pool(pools: Templates) -> None:
    own, found = of_head(pools)
    assert [*found] == [*FACTS]
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
        assert deployed.may(keeper, "autoscaling:SetDesiredCapacity", group.format(name)) is may
        assert deployed.may(head, "ecs:RunTask", family.format(name), **only) is may
        tag = {"aws:ResourceTag/aws:autoscaling:groupName": name}
        end = Call(
            caller="",
            action="ec2:TerminateInstances",
            resource=arn("ec2", "instance/i-1"),
            keys=tag,
        )
        assert allows(end, identity=deployed.roles[keeper]) is may
        for key in ("job", "Name"):  # the keeper writes the one tag, on hosts of its groups only
            marks = replace(end, action="ec2:CreateTags", keys=tag | {"aws:TagKeys": key})
            assert allows(marks, identity=deployed.roles[keeper]) is (may and key == "job")
            assert not allows(marks, identity=deployed.roles[head])


def test_each_pool_in_an_existing_network_has_the_subnet_that_it_names(synth: Synth) -> None:
    wanted = {"one": "c", "two": "c", "own": "b"}  # and their zones
    pools = {
        name: {"availability_zone": f"eu-west-1{zone}", "subnet_id": f"subnet-{number:017}"}
        for number, (name, zone) in enumerate(wanted.items())
    }
    found = synth(**EXISTING | {"pools": json.dumps(pools)})
    for name, given in pools.items():
        group = of_pool(found, "AWS::AutoScaling::AutoScalingGroup", name)
        assert group["VPCZoneIdentifier"] == [given["subnet_id"]]
        assert of_head(found)[1][name][ENV_SUBNETS] == given["subnet_id"]


def test_eighteen_pools_are_within_what_aws_takes(synth: Synth) -> None:
    pools = {
        f"a-pool-of-hosts-{number:02}": {
            **{"worker_instance_type": "g5.12xlarge", "max_workers": 4},
            "availability_zone": f"us-west-2{'abcd'[number % 4]}",
        }
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


def test_a_job_that_has_begun_counts_in_the_pool_that_it_was_granted(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_heads=3, max_workers=2, max_jobs_per_user=1, pools={"l4": 2})
    monkeypatch.setattr(keeper, "LIMITS", limits)
    aws.executions.clear()
    first = replace(SPEC, nodes=Range(2, 2), submitter="anna").to_json()
    both = replace(SPEC, submitter="bert", pools=("default", "l4")).to_json()
    for job, order in (("first", first), ("second", both)):
        aws.execute(job, input=order)
    event = {"Action": "admit", "Job": "first", "Spec": first, "Began": time.time()}
    for pool, status in (("l4", "running"), ("default", "queued")):
        answer = json.dumps({"Payload": {"nodes": "2", "pools": [pool]}})
        entered = {"name": HEAD_STATE, "input": answer}
        aws.history["second"] = [{"stateEnteredEventDetails": entered}]
        assert aws.sweep(**event)["status"] == status


#: Of a task that has no host.
WAITS: Final = {"lastStatus": "PROVISIONING", "containerInstanceArn": ""}
LIFE: Final = "heads/r1/j1.life"
#: A job that may try another pool, whose head trains for three minutes or so; and a program on it.
LADDER = replace(SPEC, nodes=Range(2, 2), pools=("l4", "default"), recipe="ddp")
PROGRAM = replace(LADDER, recipe="")


def of_ladder(aws: Aws, spec: JobSpec, *, began_s: float, hosts: int) -> None:
    """One of its two workers waits; ``hosts``: that boot in its pool."""
    aws.group("S-pool-l4").activities = [launch("Failed", "no l4 here", at=time.time())]
    order = overrides(head_variables(job="j", deadline="9" * 10, spec=spec.to_json()))
    began = ago(began_s)
    aws.tasks["own-head"] |= {"overrides": order, "startedAt": began, "createdAt": began}
    aws.tasks["own-1"] |= WAITS | {"createdAt": ago(100), "capacityProviderName": "cp-S-pool-l4"}
    for number in range(hosts):
        aws.launch(f"i-boots-{number}", ago_s=60, of="S-pool-l4")


@pytest.mark.parametrize(
    ("spec", "began_s", "hosts", "then", "moves"),
    [
        (LADDER, 200, 1, "", True),  # the one host is that of the other worker
        (LADDER, 200, 2, "", False),  # one more boots
        (LADDER, 9000, 1, "", True),  # it has lost one since
        (LADDER, 200, 1, "complete", True),  # it waits for the one that it has lost
        (replace(LADDER, pools=("l4",)), 200, 1, "", False),
        (replace(LADDER, nodes=Range(1, 2)), 200, 1, "", False),  # it has what it needs
        (PROGRAM, 9000, 1, "", False),  # it goes on with one
        (PROGRAM, 100, 1, "", True),
        (PROGRAM, 200, 1, "", False),  # no report has come, such as in an outage of S3
        (PROGRAM, 200, 1, "complete", False),  # it goes on, too
        (PROGRAM, 200, 1, "S3 is down", False),  # it may
        (PROGRAM, 200, 1, "S3 was down", False),  # seed 602995
        (replace(PROGRAM, on=Placement.NODES), 9000, 1, "", True),
        # A host comes while the sweep decides by its list.
        (LADDER, 200, 1, "a host comes", False),
        (LADDER, 200, 1, "it ends", False),
    ],
)
def test_a_job_leaves_a_pool_that_ec2_refuses_a_host_in(
    aws: Aws, spec: JobSpec, began_s: float, hosts: int, then: str, moves: bool
) -> None:
    of_ladder(aws, spec, began_s=began_s, hosts=hosts)
    changes = {
        "a host comes": ("own-1", {"lastStatus": "PENDING", "containerInstanceArn": "h6"}),
        "it ends": ("own-head", {"desiredStatus": "STOPPED"}),
    }
    if then in changes:
        name, change = changes[then]
        aws.fails["describe_scaling_activities"] = lambda **_: aws.tasks[name].update(change)
    if then == "complete":
        aws.s3.objects[LIFE] = Life(at=time.time(), is_complete=True).to_json().encode()
    if then == "S3 was down":
        old = Life(at=time.time() - 3 * times.HEAD_REPORTS_S - 5, is_complete=False)
        aws.s3.objects[LIFE] = old.to_json().encode()
    if then == "S3 is down":
        aws.fails["get_object"] = refused("ServiceUnavailable")
    # The event of the refusal.
    aws.sweep(**{"detail-type": "EC2 Instance Launch Unsuccessful"})
    head_task = aws.tasks["own-head"]
    assert bool(aws.sent("stop_task")) is moves
    if moves:
        assert head_task["stoppedReason"] == "[no_capacity] no capacity: no l4 here"
        assert "i-own-host" not in aws.terminated, "its host waits for the next head"
        waiting = [each for each in aws.tasks.values() if each["lastStatus"] == "PROVISIONING"]
        assert not waiting, "no host comes for what waited in this pool"


@pytest.mark.parametrize(
    ("ran_s", "asked_s", "code", "again"),
    [
        (200, 300, 143, ("no_capacity", 2)),
        (200, 9000, 143, None),  # it has waited for long enough
        (9000, 9300, 143, ("host_lost", 1)),  # it has trained, and waits as long again
        (2000, 2100, 75, None),  # it has waited itself
        (4000, 9300, 75, ("host_lost", 1)),
    ],
)
def test_its_next_attempt_is_in_the_next_pool_and_the_hosts_of_this_one_are_released(
    aws: Aws,
    ran_s: float,
    asked_s: float,
    code: int,
    again: tuple[str, int] | None,
) -> None:
    now = time.time()
    task = head(
        code,
        StoppedReason="[no_capacity] no capacity: no l4 here",
        StopCode="UserInitiated",
        StartedAt=(now - ran_s) * 1000,
        StoppedAt=now * 1000,
        ContainerInstanceArn="own-host",
    )
    del aws.tasks["own-head"]
    aws.model.hosts["own-host"]["_tasks"].clear()
    aws.model.hosts["own-host"]["registeredAt"] = ago(60)
    found = aws.end(task, LADDER, Attempt=3, InARow=3, Asked=now - asked_s)
    if again is None:
        assert (found["again"], found["status"]) == (False, "no_capacity")
        assert {"i-own-host", "i-h2"} <= aws.terminated
        return
    assert (found["again"], found["pools"]) == (True, ["default", "l4"])
    assert (found["status"], found["in_a_row"]) == again
    assert found["reason"] == "no capacity: no l4 here (pool l4); pool default is next"
    assert "i-h2" in aws.terminated
    assert "i-own-host" not in aws.terminated, "the head's own host waits for the next head"
