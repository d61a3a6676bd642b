"""Sweeps of the keeper, and ends of jobs, whose calls fail: all else is done."""

import json
import time
from dataclasses import replace
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

from contract import exits, times
from contract.admission import Limits
from contract.instance_types import Prices, instance_type
from contract.job import (
    JobSpec,
    head_variables,
    overrides,
)
from contract.nodes import GROUP_TAG, Range
from tests.aws.account import Account, model_of, stamp
from tests.aws.calls import refused
from tests.heads import head

SPEC = JobSpec(run="r1", command=("true",), nodes=Range(1, 2))
HOLD = "heads/r1/j1.hold"
#: Of S3, when it answers nothing of use.
OUTAGES = (
    refused("ServiceUnavailable"),
    EndpointConnectionError(endpoint_url="s3"),
    ReadTimeoutError(endpoint_url="s3"),
)


def ago(seconds: float) -> datetime:
    return stamp(time.time() - seconds)


ANNA, SLACK = "anna@example.com", "training/notify/slack"


class Aws(Account):
    """The account as the function sees it. Nothing happens by itself while a test looks."""

    keeper: ModuleType

    def __init__(self) -> None:
        groups = {"heads": "for-heads", "workers": "for-workers", "S-pool-l4": "cp-S-pool-l4"}
        idle: Any = {"after": lambda *_: None, "refusal": lambda _: "no capacity"}
        super().__init__(model_of(groups, now=time.time, **idle))
        self.s3.may_list = False  # as the function's rights are
        self.tasks, self.hosts = self.model.tasks, self.model.hosts

    def add(self, name: str, *, host: str = "", family: str = "worker", **task: Any) -> None:
        """Add a task, on a host that has joined long ago."""
        self.tasks[name] = {
            "taskArn": name,
            "lastStatus": "RUNNING",
            "desiredStatus": "RUNNING",
            "createdAt": ago(0),
            "taskDefinitionArn": f"arn:task-definition/{family}:3",
            "capacityProviderName": "for-workers",
            "containers": [{}],
            **{"_family": family, "_known": 0, "_shows": 0},
            **task,
        }
        if host:
            if host not in self.hosts:
                self.join(**{host: 9000})
            self.tasks[name]["containerInstanceArn"] = host
            self.hosts[host]["_tasks"].append(self.tasks[name])

    def wait(self, name: str, **task: Any) -> None:
        """Add a task of the standing cluster that waits for a host."""
        waits = {"lastStatus": "PROVISIONING", "group": "service:worker", "_service": "worker"}
        self.add(name, **waits | task)

    def launch(
        self, *names: str, ago_s: float, of: str = "workers", kind: str = "g5.xlarge"
    ) -> None:
        """Instances of a group that are not in the cluster."""
        group = self.group(of)
        for name in names:
            group.instances[name] = {
                "InstanceId": name,
                "LaunchTime": ago(ago_s),
                "Tags": [{"Key": "x", "Value": "y"}, {"Key": GROUP_TAG, "Value": of}],
                "InstanceType": kind,
                **{"_leaves": False, "_fate": ""},
            }
            group.desired += 1

    def join(self, of: str = "workers", /, **hosts: float) -> None:
        """Have hosts that have joined the cluster so many seconds ago, instead of those before."""
        for name, ago_s in hosts.items():
            self.launch(f"i-{name}", ago_s=ago_s, of=of)
            self.model._join(self.group(of), f"i-{name}")
            host = self.hosts.pop(next(arn for arn in self.hosts if arn.endswith(f"/{name}")))
            self.hosts[name] = host | {"containerInstanceArn": name, "registeredAt": ago(ago_s)}

    def execute(self, job: str, status: str = "RUNNING", ended_s: float = 400, **more: Any) -> None:
        """Add an execution, which began after all others."""
        dates = {"startDate": stamp(len(self.executions)), "stopDate": ago(ended_s)}
        place = {"name": job, "executionArn": f"arn:aws:states:us-east-1:1:execution:jobs:{job}"}
        self.executions[job] = {**place, **dates, "status": status, **more}

    def sweep(self, **event: Any) -> Any:
        return self.keeper.handler(event, None)

    def end(self, task: dict[str, Any], **more: Any) -> Any:
        """What the function answers the state machine about the end of a head."""
        return self.keeper.handler(ended(task, **more), None)

    def abort(self, **detail: Any) -> Any:
        return self.keeper.handler(aborted(**detail), None)

    def running(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task["desiredStatus"] == "RUNNING"}

    @property
    def objects(self) -> dict[str, Any]:
        """Records."""
        found = self.s3.objects.items()
        return {key: json.loads(body) for key, body in found if key.endswith(".json")}

    @property
    def states(self) -> dict[str, list[str]]:
        """What hosts were told to be."""
        found: dict[str, list[str]] = {}
        for each in self.sent("update_container_instances_state"):
            found.setdefault(each["containerInstances"][0], []).append(each["status"])
        return found

    @property
    def terminated(self) -> list[str]:
        groups = self.model.groups.values()
        instances = [each for group in groups for each in group.instances.values()]
        return [each["InstanceId"] for each in instances if each["_leaves"]]

    @property
    def replaced(self) -> list[str]:
        """Of the terminated ones: those that their group starts another one for."""
        sent = self.sent("terminate_instance_in_auto_scaling_group")
        kept = [each["InstanceId"] for each in sent if not each["ShouldDecrementDesiredCapacity"]]
        return [each for each in self.terminated if each in kept]

    @property
    def ended_at_once(self) -> list[str]:
        """Of the terminated ones: those that EC2 ends without waiting for ECS's draining."""
        return [name for each in self.sent("terminate_instances") for name in each["InstanceIds"]]


@pytest.fixture
def aws(keeper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Aws:
    account = Aws()
    account.keeper = keeper
    monkeypatch.setattr(keeper.boto3, "client", account.client)
    monkeypatch.setattr(keeper.time, "sleep", lambda _: None)
    # Of two jobs and of the standing cluster; one host has tasks of both jobs.
    account.add("own-head", family="head", group="job:j1", host="h1")
    account.add("own-1", startedBy="j1", group="job:j1", host="h2")
    account.add("own-2", startedBy="j1", group="job:j1", host="shared")
    account.add("other-head", family="head", group="job:j2", host="h4")
    account.add("other-1", startedBy="j2", group="job:j2", host="shared")
    account.add("standing", family="worker", group="service:worker", _service="worker", host="h6")
    account.execute("j1")
    account.execute("j2")
    return account


def ended(task: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What the state machine gives the function."""
    now = time.time()
    return {
        "Action": "end",
        "Job": "j1",
        "Spec": SPEC.to_json(),
        "Attempt": 1,
        "Began": now - 60,
        "Deadline": now + 600,
        "Cause": json.dumps(task),
        "Error": "States.TaskFailed",
        **more,
    }


@pytest.mark.parametrize(
    ("key", "mark"),
    [
        (HOLD, "x"),
        (HOLD, "[]"),
        (HOLD, '{"code": "3", "since": 9e9, "until": 9e9}'),
        (HOLD, '{"code": 3, "since": 1, "until": 2}'),  # of an attempt before
        *((HOLD, f'{{"code": {code}, "since": 9e9, "until": 9e9}}') for code in exits.NOT_HELD),
        # Where every job may write.
        ("runs/r1/jobs/j1.hold", '{"code": 3, "since": 9e9, "until": 9e9}'),
    ],
)
def test_a_mark_that_is_no_hold_holds_nothing(aws: Aws, key: str, mark: str) -> None:
    aws.s3.objects[key] = mark.encode()
    order = replace(SPEC, hold_s=600).to_json()
    assert aws.end(head(StopCode="SpotInterruption"), Spec=order)["again"]


def test_an_order_that_is_not_understood_is_cleaned_up_after_all_the_same(aws: Aws) -> None:
    found = aws.end(head(2), Spec='{"run": "r1"}')
    assert (found["status"], found["again"]) == ("failed", False)
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert not aws.objects, "it is not known whose run it was"
    newer = json.dumps(json.loads(SPEC.to_json()) | {"of_another_deployment": 1})
    aws.end(head(2), Spec=newer)
    assert aws.objects.keys() == {"ends/r1/j1.json"}


def aborted(**detail: Any) -> dict[str, Any]:
    """What EventBridge gives the function."""
    return {
        "detail-type": "Step Functions Execution Status Change",
        "detail": {
            "name": "j1",
            "status": "ABORTED",
            "input": SPEC.to_json(),
            "startDate": 1_800_000_000_000,
            "stopDate": 1_800_000_060_000,
            **detail,
        },
    }


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize("fails", ["get_object", "list_executions"])
def test_a_sweep_that_is_not_answered_does_all_else(
    aws: Aws, outage: Exception, fails: str
) -> None:
    aws.execute("j1", "FAILED", times.SWEEP_GRACE_S + 60, input=paid(ANNA).to_json())
    aws.end(head(3), Spec=paid(ANNA).to_json())
    aws.add("left", startedBy="j1", group="job:j1", host="h9")
    held_head = {"overrides": ordered(60, hold_s=600), "startedAt": ago(50)}
    aws.tasks["other-head"] |= held_head
    aws.fails[fails] = outage
    with pytest.raises(RuntimeError, match="left to the next sweep: records: "):
        aws.sweep()
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert len(aws.sent("publish")) == 1


def paid(notify: str) -> JobSpec:
    machines = (instance_type(each) for each in ("m5.large", "g5.xlarge"))
    head, worker = machines
    prices = Prices.of(region="us-east-1", head=head, worker=worker, spot=False)
    return replace(SPEC, notify=notify, prices=prices)


@pytest.mark.parametrize("is_killed", [False, True], ids=["answer lost", "killed"])
def test_an_end_is_reported_whose_record_was_written_without_an_answer(
    aws: Aws, is_killed: bool
) -> None:
    """botocore asks again, and its second request finds the object of the first."""

    def write(Key: str, **given: Any) -> Any:  # noqa: N803
        if Key not in aws.s3.objects:
            aws.s3.put_object(Key=Key, **given)
            if is_killed:
                raise SystemExit
            return refused("PreconditionFailed")
        return None

    aws.fails["put_object"] = write
    order = paid(ANNA).to_json()
    if is_killed:
        with pytest.raises(SystemExit):
            aws.end(head(3), Spec=order)
        aws.fails.clear()
    for code in (3, 0):  # the first record counts, also where a person redrives the execution
        found = aws.end(head(code), Spec=order)
        assert (found["status"], found["again"]) == ("failed", False)
    assert len(aws.sent("publish")) == 1


def started_with(**variables: str) -> dict[str, Any]:
    listed = [{"name": name, "value": value} for name, value in variables.items()]
    return {"containerOverrides": [{"environment": listed}]}


def test_one_host_that_takes_no_mark_keeps_no_other_one(aws: Aws) -> None:
    aws.fails["put_attributes"] = refused("InvalidParameterException")
    aws.join(away=9000, idle=9000)
    aws.launch("i-late", ago_s=9000)
    aws.hosts["away"]["agentConnected"] = False
    assert aws.sweep()["released"] == ["idle", "i-late"]


def test_no_task_keeps_the_sweep_from_the_others(aws: Aws) -> None:
    aws.tasks["own-head"]["overrides"] = started_with(TRAIN_DEADLINE="never")
    late = str(int(time.time()) - 500)
    for name in ("own-1", "other-1"):
        aws.tasks[name]["overrides"] = started_with(TRAIN_DEADLINE=late)
    aws.fails["stop_task"] = lambda task, **_: task == "own-1" and refused("Throttling")
    # The others are ended all the same, and the alarm hears of it.
    with pytest.raises(RuntimeError, match=r"left to the next sweep: own-1: .*Throttling"):
        aws.sweep()
    assert aws.running() == {"own-1", "own-2", "other-head", "standing"}
    aws.fails.clear()
    aws.execute("j1", "FAILED", input="")
    aws.sweep()
    assert aws.running() == {"other-head", "standing"}


def ordered(wait_s: int, **more: Any) -> dict[str, Any]:
    """A head's overrides: its order."""
    spec = replace(SPEC, capacity_wait_s=wait_s, **more).to_json()
    return overrides(head_variables(job="j", deadline=str(int(time.time()) + 9000), spec=spec))


def test_a_refused_resumption_stops_no_sweep(aws: Aws) -> None:
    group = aws.group("workers")
    group.record |= {"SuspendedProcesses": [{"ProcessName": "Launch"}], "DesiredCapacity": 9}
    aws.fails["resume_processes"] = refused("AccessDenied")
    aws.sweep()
    assert group.desired == len(group.instances), "what follows it is done"


def admitted(keeper: ModuleType, job: str, nodes: Range, *, waited_s: float = 60) -> dict[str, Any]:
    """What the function answers the state machine."""
    spec = replace(SPEC, nodes=nodes).to_json()
    event = {"Action": "admit", "Job": job, "Spec": spec, "Began": time.time() - waited_s}
    found: dict[str, Any] = keeper.handler(event, None)
    return found


@pytest.fixture
def queue(keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """Hosts for three heads and four workers; ``first`` and ``second`` run."""
    monkeypatch.setattr(keeper, "LIMITS", Limits(max_heads=3, max_workers=4))
    aws.executions.clear()
    for job, nodes in (("first", Range(1, 1)), ("second", Range(1, 2))):
        aws.execute(job, input=replace(SPEC, nodes=nodes).to_json())
    return aws


def test_an_order_that_is_not_understood_holds_a_head_and_gets_none(
    keeper: ModuleType, queue: Aws
) -> None:
    queue.executions["second"]["input"] = '{"of": "another version"}'
    queue.execute("third")
    assert admitted(keeper, "third", Range(3, 3))["status"] == "running"
    event = {"Action": "admit", "Job": "third", "Spec": "{}", "Began": 0}
    found = keeper.handler(event, None)
    assert (found["status"], found["reason"]) == ("failed", "failed: its order is not understood")
