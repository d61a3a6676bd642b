"""A stack with running hosts and tasks is deleted in one go: the order, and what each step does.

The function itself runs in the emulator too (``test_deploy``); here it meets what an emulator does
not do: tasks that take their time, hosts that stay, errors.
"""

import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from stacks.teardown.custom_resources import HANDLER
from tests.stacks import lambda_functions
from tests.stacks.conftest import Synth

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


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_the_order_of_deletion_is_the_one_that_cannot_hang(synth: Synth, preset: str) -> None:
    resources = synth(preset=preset).training["Resources"]
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
    (terminate,) = by_type["Custom::TerminateHosts"]
    assert by_type["AWS::AutoScaling::AutoScalingGroup"] <= needs(resources, terminate)
    # A placement group is "in use" until its hosts are gone, a cluster until they have left it.
    assert by_type["AWS::EC2::PlacementGroup"] <= needs(resources, terminate)
    assert by_type["AWS::ECS::Cluster"] <= needs(resources, terminate)


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


class Aws:
    """What the function sees of AWS: tasks and hosts that end after a number of looks."""

    def __init__(self) -> None:
        self.tasks = {f"task/{number}": 2 for number in range(150)}
        self.told = {"task/7"}
        """Tasks that were told to stop, one of them by its service."""
        self.late: list[str] = []
        """Tasks that start between two looks."""
        self.hosts = {"i-1": 2, "i-2": 2}
        self.instances = ["container-instance/1"]
        self.calls: list[tuple[str, Any]] = []
        self.stack = ""
        """Status of the stack."""
        self.slept = 0.0
        self.answers: list[Answer] = []
        self.jobs: dict[str, str] = {}
        """Executions, and their status."""
        self.shown_until = 0.0
        """Until then, by what was slept, a list shows an execution that was just stopped."""
        self.recorded: dict[str, Any] = {}

    def client(self, _service: str) -> Any:
        return SimpleNamespace(
            get_paginator=lambda_functions.paginators(self),
            stop_task=self._stop_task,
            describe_tasks=self._describe_tasks,
            describe_stacks=self._describe_stacks,
            describe_execution=lambda **which: {"input": f"order of {which['executionArn']}"},
            stop_execution=self._stop_execution,
            invoke=self._invoke,
            delete_auto_scaling_group=lambda **arguments: self.calls.append(("delete", arguments)),
            deregister_container_instance=lambda **arguments: self.calls.append(
                ("deregister", arguments)
            ),
        )

    def _list_executions(self, *, stateMachineArn: str, statusFilter: str) -> Any:  # noqa: N803
        assert (stateMachineArn, statusFilter) == ("arn:machine", "RUNNING")
        shown = [name for name, status in self.jobs.items() if status == "RUNNING"]
        if self.slept < self.shown_until:
            shown += self.recorded
        at = datetime.fromtimestamp(1000, tz=UTC)
        return [
            {"executions": [{"name": each, "executionArn": f"arn:{each}", "startDate": at}]}
            for each in shown
        ]

    def _stop_execution(self, *, executionArn: str, cause: str) -> Any:  # noqa: N803
        assert not self.calls, "a job that goes on may start tasks"
        name = executionArn.removeprefix("arn:")
        assert (self.jobs[name], cause) == ("RUNNING", "TrainingStack is deleted")
        self.jobs[name] = "ABORTED"
        return {"stopDate": datetime.fromtimestamp(1060, tz=UTC)}

    def _invoke(self, *, FunctionName: str, Payload: bytes) -> None:  # noqa: N803
        assert FunctionName == "arn:keeper"
        event = json.loads(Payload)
        assert event["detail-type"] == "Step Functions Execution Status Change"
        name = event["detail"]["name"]
        assert self.jobs[name] == "ABORTED"
        self.recorded[name] = event["detail"]

    def _stop_task(self, *, task: str, **_: Any) -> None:
        self.calls.append(("stop", task))
        self.told.add(task)

    def _list_tasks(self, *, cluster: str, desiredStatus: str) -> Any:  # noqa: N803
        assert cluster == "training"
        names = [each for each in self.tasks if (each in self.told) == (desiredStatus == "STOPPED")]
        if self.slept and self.late:
            self.tasks[self.late.pop()] = 1
        return [{"taskArns": names[:100]}, {"taskArns": names[100:]}]

    def _describe_tasks(self, *, cluster: str, tasks: list[str]) -> Any:
        assert cluster == "training"
        assert len(tasks) <= 100, "ECS describes no more at a time"
        found = []
        for task in tasks:
            self.tasks[task] -= 1
            status = "STOPPED" if self.tasks[task] < 0 else "STOPPING"
            found.append({"taskArn": task, "lastStatus": status})
        return {"tasks": found}

    def _describe_stacks(self, *, StackName: str) -> Any:  # noqa: N803
        assert StackName == "arn:stack"
        return {"Stacks": [{"StackStatus": self.stack}]}

    def _describe_auto_scaling_groups(self, *, AutoScalingGroupNames: list[str]) -> Any:  # noqa: N803
        hosts = [{"InstanceId": host} for host in self.hosts]
        return [
            {
                "AutoScalingGroups": [
                    {"AutoScalingGroupName": name, "Instances": hosts if not number else []}
                    for number, name in enumerate(AutoScalingGroupNames)
                ]
            }
        ]

    def _describe_instances(self, *, Filters: Any) -> Any:  # noqa: N803
        (only,) = Filters
        found = []
        for host in only["Values"]:
            self.hosts[host] -= 1
            state = "terminated" if self.hosts[host] < 0 else "shutting-down"
            found.append({"InstanceId": host, "State": {"Name": state}})
        return [{"Reservations": [{"Instances": found}]}]

    def _list_container_instances(self, **_: Any) -> Any:
        return [{"containerInstanceArns": self.instances}]


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
    assert answered == status
    assert (reason is None) is (status == "SUCCESS")
    if reason:
        assert "-c shared_storage=fsx" in reason
    assert aws.calls == []


def test_jobs_that_wait_are_ended_and_recorded_before_any_task(aws: Aws, call: Call) -> None:
    """One that queues or pauses would keep its machine, and the name of it, for up to an hour."""
    aws.jobs, aws.shown_until = {"queued": "RUNNING", "paused": "RUNNING", "over": "SUCCEEDED"}, 10
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert aws.jobs == {"queued": "ABORTED", "paused": "ABORTED", "over": "SUCCEEDED"}
    assert aws.recorded.keys() == {"queued", "paused"}
    detail = {"name": "queued", "status": "ABORTED", "input": "order of arn:queued"}
    assert aws.recorded["queued"] == detail | {"startDate": 1_000_000, "stopDate": 1_060_000}
    assert aws.slept >= 10, "it is over when no list shows them"
    assert len(aws.calls) == 149


def test_every_task_is_stopped_and_waited_for(aws: Aws, call: Call) -> None:
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert aws.calls == [("stop", task) for task in aws.tasks if task != "task/7"]
    assert aws.slept == 10


def test_a_task_that_starts_meanwhile_is_stopped_too(aws: Aws, call: Call) -> None:
    aws.late = ["task/late"]
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert ("stop", "task/late") in aws.calls
    assert aws.tasks["task/late"] < 0, "and waited for"
    assert len(aws.calls) == len({*aws.calls}) == 150, "each is told once"


def test_tasks_that_only_stop_are_waited_for(aws: Aws, call: Call) -> None:
    aws.told = {*aws.tasks}
    assert call("Delete", "StopTasks")[0] == "SUCCESS"
    assert (aws.calls, aws.slept) == ([], 10)


def test_hosts_are_ended_without_waiting_for_their_tasks(aws: Aws, call: Call) -> None:
    assert call("Delete", "TerminateHosts")[0] == "SUCCESS"
    forced = {"cluster": "training", "containerInstance": "container-instance/1", "force": True}
    assert aws.calls == [
        ("delete", {"AutoScalingGroupName": "heads", "ForceDelete": True}),
        ("delete", {"AutoScalingGroupName": "workers", "ForceDelete": True}),
        ("deregister", forced),
    ]
    assert aws.slept == 10


def test_what_does_not_end_is_named_before_the_function_is_cut_off(aws: Aws, call: Call) -> None:
    aws.hosts = dict.fromkeys(aws.hosts, 10_000)
    status, reason, _ = call("Delete", "TerminateHosts")
    assert status == "FAILED"
    assert reason == "TimeoutError: hosts still there: i-1, i-2"
    assert 860 <= aws.slept <= 880, "15 minutes, less the time to answer"


def test_an_error_is_answered_or_cloudformation_would_wait_an_hour(aws: Aws, call: Call) -> None:
    aws.tasks = {"unknown": "no number"}  # type: ignore[dict-item]
    status, reason, _ = call("Delete", "StopTasks")
    assert status == "FAILED"
    assert reason is not None
    assert reason.startswith("TypeError: ")
