"""A stack with running hosts and tasks is deleted in one go: the order, and what each step does.

The function itself runs in the emulator too (``test_deploy``); here it meets what an emulator does
not do: tasks that take their time, hosts that stay, errors.
"""

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rehearsal.model import Record, Times
from stacks.teardown.custom_resources import HANDLER
from tests.aws.account import Account, model_of, stamp
from tests.clock import FakeClock
from tests.stacks import lambda_functions
from tests.stacks.conftest import POOLS, Synth

ORDER = [
    "AWS::ECS::Service",
    "Custom::StopTasks",
    "AWS::ECS::ClusterCapacityProviderAssociations",
    "AWS::ECS::CapacityProvider",
    "Custom::TerminateHosts",
    "AWS::AutoScaling::AutoScalingGroup",
    "AWS::EC2::LaunchTemplate",
]


def references(value: Any) -> set[str]:
    """Logical ids that a part of a template depends on."""
    if isinstance(value, dict):
        if isinstance(value.get("Ref"), str):
            return {value["Ref"]}
        if "Fn::GetAtt" in value:
            return {value["Fn::GetAtt"][0]}
        return set().union(*(references(each) for each in value.values()))
    if isinstance(value, list):
        return set().union(*(references(each) for each in value))
    return set()


def needs(resources: dict[str, Any], name: str) -> set[str]:
    """Everything that ``name`` needs, so that CloudFormation deletes it before."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        resource = resources.get(waiting.pop(), {})
        direct = references(resource.get("Properties", {})) | {*resource.get("DependsOn", [])}
        waiting += direct - found
        found |= direct
    return found & resources.keys()


@pytest.mark.parametrize("given", [{}, {"preset": "fsdp"}, POOLS])
def test_the_order_of_deletion_is_the_one_that_cannot_hang(
    synth: Synth, given: dict[str, str]
) -> None:
    resources = synth(**given).training["Resources"]
    by_type = {
        kind: {name for name, each in resources.items() if each["Type"] == kind}
        for kind in [*ORDER, "AWS::EC2::PlacementGroup", "AWS::ECS::Cluster"]
    }
    for earlier, later in itertools.pairwise(ORDER):
        assert by_type[earlier], earlier
        for name in by_type[earlier]:
            assert by_type[later] & needs(resources, name), f"{name} must go before {later}"
    # A state machine is only gone when its executions are, and those wait for their tasks.
    (machine,) = (n for n, r in resources.items() if r["Type"].endswith("::StateMachine"))
    (stop,) = by_type["Custom::StopTasks"]
    assert machine in needs(resources, stop)
    # Nor is a name in Cloud Map, before the task that has it.
    (name,) = (n for n, r in resources.items() if r["Type"] == "AWS::ServiceDiscovery::Service")
    assert name in needs(resources, stop)
    # No queued job starts once tasks are ended: to admit one, its function must list executions.
    policies = {n: r for n, r in resources.items() if r["Type"] == "AWS::IAM::Policy"}
    listing = {n for n, r in policies.items() if "states:ListExecutions" in str(r)}
    (admission,) = (each for each in listing if "Admission" in each)
    assert stop in needs(resources, admission)
    # Jobs are stopped by it and recorded by the keeper, with its rights.
    assert listing - {admission} <= needs(resources, stop)
    keeper = {n for n in resources if "Keeper" in n} & needs(resources, stop)
    assert {resources[each]["Type"].rpartition(":")[2] for each in keeper} >= {"Function", "Policy"}
    # Every group, not just one, outlives the function that ends its hosts.
    needed = {each: needs(resources, each) for each in by_type["Custom::TerminateHosts"]}
    assert by_type["AWS::AutoScaling::AutoScalingGroup"] <= set().union(*needed.values())
    # A placement group is "in use" until its hosts are gone, a cluster until they have left it.
    assert by_type["AWS::EC2::PlacementGroup"] <= set().union(*needed.values())
    (whole,) = (each for each in needed if "Cluster" in resources[each]["Properties"])
    assert by_type["AWS::ECS::Cluster"] <= needed[whole]
    # Tasks in another zone save over its routes.
    routes = {n for n, r in resources.items() if r["Type"].endswith("SubnetRouteTableAssociation")}
    assert len(routes) == ("pools" in given)
    assert routes <= needs(resources, stop)


def test_the_function_keeps_its_rights_and_its_log_until_it_has_run(synth: Synth) -> None:
    resources = synth().training["Resources"]
    rights = {
        name
        for name, each in resources.items()
        if "Teardown" in name and each["Type"] in ("AWS::IAM::Policy", "AWS::Logs::LogGroup")
    }
    assert len(rights) == 2
    for name, each in resources.items():
        if each["Type"].startswith("Custom::"):
            assert rights <= needs(resources, name)


#: Status, reason, physical id.
Answer = tuple[str, str | None, str]


#: Seconds that a task and a host take to end.
ENDS_S = 8


class Aws(Account):
    """What the function sees: 150 tasks, and hosts, that take some time to end."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000)
        groups = {"heads": "for-heads", "workers": "for-workers"}
        at = self.clock.at
        model = model_of(
            groups,
            now=self.clock.time,
            after=lambda seconds, *call: at(self.clock.now + seconds, *call),
            agent=SimpleNamespace(terminate=self._end, kill=bool, ended=bool),
            times=Times(shows=0, knows=0, terminates=(ENDS_S, ENDS_S)),
        )
        super().__init__(model)
        self.page = 100
        for number in range(150):
            self.add(f"task/{number}")
        model.stop(model.tasks["task/7"], "by its service")
        group = self.group("heads")
        for name in ("i-1", "i-2"):
            group.instances[name] = {"InstanceId": name, "_leaves": False, "_fate": ""}
            model._join(group, name)
        self.groups_gone = False
        self.stack = ""
        """Status of the stack."""
        self.answers: list[Answer] = []
        self.shown_until = 0.0
        """Until then a list shows an execution that was just stopped."""
        self.recorded: dict[str, Any] = {}

    def add(self, name: str) -> None:
        task: Record = {"taskArn": name, "lastStatus": "RUNNING", "desiredStatus": "RUNNING"}
        task |= {"containerInstanceArn": "", "containers": [{}], "_known": 0, "_shows": 0}
        self.model.tasks[name] = task

    def on_list_task_definitions(self, familyPrefix: str) -> Any:  # noqa: N803
        arn = f"arn:aws:ecs:us-east-1:1:task-definition/{familyPrefix}"
        return {"taskDefinitionArns": [f"{arn}:{number}" for number in (1, 2, 3)]}

    def on_deregister_task_definition(self, **_: Any) -> None:
        """Asked for by ``sent``."""

    def on_describe_auto_scaling_groups(self, **which: Any) -> Any:
        found = super().on_describe_auto_scaling_groups(**which)
        return {"AutoScalingGroups": []} if self.groups_gone else found

    def _end(self, task: Any) -> None:
        self.clock.at(self.clock.now + ENDS_S, self.model.end, task, 143)

    def on_describe_stacks(self, StackName: str) -> Any:  # noqa: N803
        assert StackName == "arn:stack"
        return {"Stacks": [{"StackStatus": self.stack}]}

    def on_list_executions(self, statusFilter: str = "", **page: Any) -> Any:  # noqa: N803
        is_late = self.clock.now < self.shown_until
        return super().on_list_executions("" if is_late else statusFilter, **page)

    def on_stop_execution(self, executionArn: str, **why: str) -> Any:  # noqa: N803
        assert not self.sent("stop_task"), "a job that goes on may start tasks"
        assert why == {"cause": "TrainingStack is deleted"}
        return super().on_stop_execution(executionArn, **why)

    def on_invoke(self, FunctionName: str, Payload: bytes) -> None:  # noqa: N803
        assert FunctionName == "arn:keeper"
        event = json.loads(Payload)
        assert event["detail-type"] == "Step Functions Execution Status Change"
        name = event["detail"]["name"]
        assert self.executions[name]["status"] == "ABORTED"
        self.recorded[name] = event["detail"]

    @property
    def slept(self) -> float:
        return self.clock.now - 1000

    @property
    def stopped(self) -> list[str]:
        """Tasks that were told to stop."""
        return [each["task"] for each in self.sent("stop_task")]


Call = Callable[..., Answer]


@pytest.fixture
def aws() -> Aws:
    return Aws()


@pytest.fixture
def call(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Call:
    """What CloudFormation is answered to a request."""
    module = lambda_functions.answering(HANDLER, aws, monkeypatch)

    def answer(kind: str, action: str, **more: Any) -> Answer:
        context = lambda_functions.context(lambda: 900 - aws.slept)
        properties = {"Action": action, "Cluster": "training", "Groups": ["heads", "workers"]}
        properties |= {"SharedStorage": "none", "Machine": "arn:machine", "Keeper": "arn:keeper"}
        event = {"RequestType": kind, "LogicalResourceId": "Teardown", "StackId": "arn:stack"}
        module.handler({**event, "ResourceProperties": properties, **more}, context)
        return aws.answers[-1]

    return answer


@pytest.mark.parametrize("kind", ["Create", "Update"])
@pytest.mark.parametrize("action", ["StopTasks", "TerminateHosts"])
def test_nothing_is_ended_while_the_stack_lives(
    aws: Aws, call: Call, kind: str, action: str
) -> None:
    assert call(kind, action) == ("SUCCESS", None, "Teardown")
    assert aws.calls == []


@pytest.mark.parametrize(
    ("old", "new", "stack", "status"),
    [
        ("fsx", "none", "UPDATE_IN_PROGRESS", "FAILED"),
        ("fsx", "none", "UPDATE_ROLLBACK_IN_PROGRESS", "SUCCESS"),  # of an update that added it
        ("fsx", "fsx", "UPDATE_IN_PROGRESS", "SUCCESS"),
        ("none", "fsx", "UPDATE_IN_PROGRESS", "SUCCESS"),  # also the rollback of the first
        (None, "none", "UPDATE_IN_PROGRESS", "SUCCESS"),
    ],
)
def test_only_a_rollback_drops_the_shared_file_system(
    aws: Aws, call: Call, old: str | None, new: str, stack: str, status: str
) -> None:
    aws.stack = stack
    answered, reason, _ = call(
        "Update",
        "TerminateHosts",
        ResourceProperties={"Action": "TerminateHosts", "SharedStorage": new},
        OldResourceProperties={"SharedStorage": old} if old else {},
    )
    assert (answered, reason is None) == (status, status == "SUCCESS")
    assert {name for name, _ in aws.calls} <= {"describe_stacks"}


def test_jobs_that_wait_are_ended_and_recorded_before_any_task(aws: Aws, call: Call) -> None:
    """One that queues or pauses would keep its machine, and the name of it, for up to an hour."""
    for name in ("queued", "paused"):
        one = {"name": name, "executionArn": f"arn:{name}", "startDate": stamp(940)}
        aws.executions[name] = {**one, "status": "RUNNING", "input": f"order of {name}"}
    aws.shown_until = 1010
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert aws.recorded.keys() == {"queued", "paused"}
    detail = {"name": "queued", "status": "ABORTED", "input": "order of queued"}
    assert aws.recorded["queued"] == detail | {"startDate": 940_000, "stopDate": 1_000_000}
    assert aws.slept >= 10, "it is over when no list shows them"
    assert len(aws.stopped) == 149


def test_every_task_is_stopped_once_and_waited_for(aws: Aws, call: Call) -> None:
    aws.clock.at(1003, aws.add, "task/late")
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert {each["lastStatus"] for each in aws.model.tasks.values()} == {"STOPPED"}
    assert sorted(aws.stopped) == sorted({*aws.model.tasks} - {"task/7"})


def test_tasks_that_only_stop_are_waited_for(aws: Aws, call: Call) -> None:
    for task in aws.model.tasks.values():
        aws.model.stop(task, "by its service")
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert (aws.stopped, aws.slept) == ([], 10)


def test_hosts_are_ended_without_waiting_for_their_tasks(aws: Aws, call: Call) -> None:
    assert call("Delete", "TerminateHosts")[0] == "SUCCESS"
    assert not aws.model.hosts, "not even from the cluster's list"
    ended = [each["AutoScalingGroupName"] for each in aws.sent("delete_auto_scaling_group")]
    assert ended == ["heads", "workers"]
    assert aws.slept == 10


def test_a_pool_that_is_removed_ends_its_own_hosts_and_no_others(aws: Aws, call: Call) -> None:
    own = "arn:aws:ecs:us-east-1:1:task-definition/pool-l4:3"
    given = {"Action": "TerminateHosts", "Groups": ["workers"], "Definitions": [own]}
    group = aws.group("workers")
    group.instances["i-3"] = {"InstanceId": "i-3", "_leaves": False, "_fate": ""}
    assert call("Delete", "TerminateHosts", ResourceProperties=given)[0] == "SUCCESS"
    assert group.instances == {}
    assert {each["ec2InstanceId"] for each in aws.model.hosts.values()} == {"i-1", "i-2"}
    assert not aws.sent("deregister_container_instance")
    # What a deploy has kept for running jobs; the newest goes with the stack's resource.
    forgotten = [each["taskDefinition"] for each in aws.sent("deregister_task_definition")]
    assert forgotten == [f"{own[:-1]}{number}" for number in (1, 2)]


def test_what_does_not_end_is_named_before_the_function_is_cut_off(aws: Aws, call: Call) -> None:
    aws.model.times = Times(terminates=(10_000, 10_000))
    status, reason, _ = call("Delete", "TerminateHosts")
    assert status == "FAILED"
    assert reason == "TimeoutError: 2 hosts still there: i-1, i-2"
    assert 860 <= aws.slept <= 880, "15 minutes, less the time to answer"
    # A second try, when the groups are gone, waits for them again.
    aws.groups_gone = True
    assert call("Delete", "TerminateHosts")[1] == reason


def test_an_error_is_answered_or_cloudformation_would_wait_an_hour(aws: Aws, call: Call) -> None:
    aws.fails["list_tasks"] = TypeError("no such task")
    status, reason, _ = call("Delete", "StopTasks")
    assert (status, str(reason).partition(":")[0]) == ("FAILED", "TypeError")
