"""What the clean-up function writes, sends and reads: of one event each, without AWS.

``test_lives`` plays what it decides: it notices what is stopped, kept, tried again, admitted, lost
or left. Here is what a life cannot weigh: reasons, records and messages, what others write, and
what AWS refuses. ``tests/rehearsal/test_jobs.py`` has the function in its place.
"""

import importlib
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from contract import exits, times
from contract.instance_types import Prices, instance_type
from contract.job import (
    STOP_ERROR,
    STOPPED_BY_USER,
    Hold,
    JobSpec,
    JobStatus,
    Outcome,
)
from contract.job_outcome import AILING_SINCE, DISCONNECTED_SINCE, refusal
from contract.nodes import ENV_DEADLINE, GROUP_TAG, Range
from stacks.jobs.keeper import cluster
from tests.aws.account import Account, model_of, stamp, submitted
from tests.aws.calls import refused
from tests.heads import head

SPEC = JobSpec(run="r1", command=("true",), nodes=Range(1, 2))
RECORD, REASON = "ends/r1/j1.json", "runs/r1/jobs/j1.reason"


def test_s3_has_little_time_to_answer_in_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.QUICK == {}
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "keeper")
    found = importlib.reload(cluster).QUICK["config"]
    most = found.retries["total_max_attempts"] * (found.connect_timeout + found.read_timeout)
    assert 10 * most < times.KEEPER_TIMEOUT_S


def ago(seconds: float) -> datetime:
    return stamp(time.time() - seconds)


class Aws(Account):
    """The account as the function sees it. Nothing happens by itself while a test looks."""

    keeper: ModuleType

    def __init__(self) -> None:
        idle: Any = {"after": lambda *_: None, "refusal": lambda _: "no capacity"}
        groups = {"heads": "for-heads", "workers": "for-workers", "S-pool-l4": "cp-S-pool-l4"}
        super().__init__(model_of(groups, now=time.time, **idle))
        self.s3.may_list = False  # as the function's rights are
        self.tasks = self.model.tasks

    def add(self, name: str, *, host: str = "", family: str = "worker", **task: Any) -> None:
        """Add a task, on a host that has joined long ago."""
        self.tasks[name] = {
            "taskArn": name,
            "lastStatus": "RUNNING",
            "desiredStatus": "RUNNING",
            "createdAt": ago(0),
            "taskDefinitionArn": f"arn:task-definition/{family}:3",
            "capacityProviderName": "for-workers",
            "containerInstanceArn": host,
            "containers": [{}],
            **{"_family": family, "_known": 0, "_shows": 0},
            **task,
        }
        if host:
            if host not in self.model.hosts:
                self.join(host)
            self.model.hosts[host]["_tasks"].append(self.tasks[name])

    def join(self, name: str, *, ago_s: float = 9000, **more: Any) -> None:
        """Add a host that has no task."""
        hosts = self.model.hosts
        self.launch(f"i-{name}", ago_s=ago_s)
        self.model._join(self.group("workers"), f"i-{name}")
        joined = hosts.pop(next(arn for arn in hosts if arn.endswith(f"/{name}")))
        own = {"containerInstanceArn": name, "registeredAt": ago(ago_s)}
        hosts[name] = {**joined, **own, **more}

    def launch(
        self, name: str, *, ago_s: float, of: str = "workers", kind: str = "g5.xlarge"
    ) -> None:
        """Add an instance of a group that is not in the cluster."""
        self.group(of).desired += 1
        self.group(of).instances[name] = {
            "InstanceId": name,
            "LaunchTime": ago(ago_s),
            "Tags": [{"Key": GROUP_TAG, "Value": of}],
            "InstanceType": kind,
            **{"_leaves": False, "_fate": ""},
        }

    def execute(self, job: str, status: str = "RUNNING", ended_s: float = 400, **more: Any) -> None:
        """Add an execution, which began after all others."""
        dates = {"startDate": stamp(len(self.executions)), "stopDate": ago(ended_s)}
        place = {"name": job, "executionArn": f"arn:aws:states:us-east-1:1:execution:jobs:{job}"}
        self.executions[job] = {**place, **dates, "status": status, **more}

    def sweep(self, **event: Any) -> Any:
        return self.keeper.handler(event, None)

    def end(self, task: dict[str, Any], spec: JobSpec = SPEC, **more: Any) -> Any:
        """What the function answers the state machine about the end of a head."""
        return self.keeper.handler(ended(task, Spec=spec.to_json(), **more), None)

    def running(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task["desiredStatus"] == "RUNNING"}

    @property
    def objects(self) -> dict[str, Any]:
        """Records."""
        found = self.s3.objects.items()
        return {key: json.loads(body) for key, body in found if key.endswith(".json")}

    @property
    def terminated(self) -> set[str]:
        groups = self.model.groups.values()
        instances = [each for group in groups for each in group.instances.values()]
        return {each["InstanceId"] for each in instances if each["_leaves"]}


@pytest.fixture
def aws(keeper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """With tasks of two jobs and of the standing cluster; one host has tasks of both jobs."""
    account = Aws()
    account.keeper = keeper
    monkeypatch.setattr(keeper.boto3, "client", account.client)
    monkeypatch.setattr(keeper.time, "sleep", lambda _: None)
    for job, name, hosts in (("j1", "own", ("h2", "shared")), ("j2", "other", ("shared",))):
        account.add(f"{name}-head", family="head", group=f"job:{job}", host=f"{name}-host")
        for number, host in enumerate(hosts, start=1):
            account.add(f"{name}-{number}", startedBy=job, group=f"job:{job}", host=host)
        account.execute(job)
    account.add("standing", group="service:worker", _service="worker", host="h6")
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


# --- the end of an attempt ------------------------------------------------------------------------
def test_the_end_of_a_job_is_written_down_and_ends_what_is_its_own(aws: Aws) -> None:
    found = aws.end(head(3, ContainerInstanceArn="own-host"))
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert aws.terminated == {"i-own-host", "i-h2"}, "another job's task runs on the other one"
    record = aws.objects[RECORD]
    assert (record["job"], record["nodes"]) == ("j1", "1:2")
    assert (record["status"], record["exit_code"], record["attempts"]) == ("failed", 3, 1)
    assert found.items() <= record.items(), "the execution's result is what is written down"


def test_no_task_comes_to_a_bad_host_although_another_jobs_task_runs_there(aws: Aws) -> None:
    aws.end(head(exits.BAD_HOST, ContainerInstanceArn="shared"))
    assert aws.model.hosts["shared"]["status"] == "DRAINING"


#: How a head ended, its last words, and what of them is the reason.
WORDS: list[tuple[int, str, str | None]] = [
    (exits.FILES_LOST, "files lost\x1b]0;x\x07" + "y" * 2000, "files lost?]0;x?" + "y" * 984),
    (3, "failed on node 1, rank 1: ValueError: no", "failed on node 1, rank 1: ValueError: no"),
    (exits.ASKS_TOO_MUCH, "failed: by the attempt before", None),
    (exits.HUNG, "failed: hung: no step for 10 min", "failed: hung: no step for 10 min"),
]


@pytest.mark.parametrize(("code", "said", "reason"), WORDS)
def test_the_reason_is_in_the_heads_own_words_where_it_has_any(
    aws: Aws, code: int, said: str, reason: str | None
) -> None:
    own = aws.end(head(code), Job="silent")["reason"]
    aws.s3.objects[REASON] = said.encode()
    assert aws.end(head(code))["reason"] == (reason or own)


KILLED = head(exits.KILLED)
LATER = Hold(code=3, since=9e9, until=9e9).to_json()


#: How a head ended, the mark in the bucket, and the exit code of its job, None: it is tried again.
HOLDS: list[tuple[dict[str, Any], str, int | None]] = [
    (head(StopCode="SpotInterruption"), LATER, 3),
    (head(StopCode="UserInitiated", StoppedReason=STOPPED_BY_USER), LATER, 3),
    (KILLED, LATER, 3),
    (head(0), LATER, 0),
    (head(exits.STORAGE), LATER, None),
    (KILLED, "x", None),
    (KILLED, LATER.replace("3", '"3"'), None),
    (KILLED, Hold(code=3, since=1, until=2).to_json(), None),  # of an attempt before
    *((KILLED, LATER.replace("3", str(code)), None) for code in exits.NOT_HELD),
]


@pytest.mark.parametrize(("task", "mark", "code"), HOLDS)
def test_a_job_whose_hosts_were_held_has_ended_as_its_command_did(
    aws: Aws, task: dict[str, Any], mark: str, code: int | None
) -> None:
    aws.s3.objects["heads/r1/j1.hold"] = mark.encode()
    # Where every job may write.
    aws.s3.objects["runs/r1/jobs/j1.hold"] = LATER.encode()
    found = aws.end(task, replace(SPEC, hold_s=600))
    assert found["again"] is (code is None)
    assert code in (None, found["exit_code"])


def test_a_head_that_was_started_unseen_may_have_ended_the_job(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(_seconds: float) -> None:  # which no list has at first
        aws.add("unseen", family="head", group="job:j1")
        aws.s3.objects["heads/r1/j1.hold"] = LATER.encode()

    monkeypatch.setattr(keeper.time, "sleep", appear)
    unseen = {"Error": "ECS.AmazonECSException", "Cause": "Rate exceeded"}
    found = aws.end({}, replace(SPEC, hold_s=600), **unseen)
    assert (found["exit_code"], found["again"]) == (3, False)
    assert "unseen" not in aws.running()


#: Of S3, when it answers nothing of use.
OUTAGES = (refused("ServiceUnavailable"), ReadTimeoutError(endpoint_url="s3"))


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize(
    "task",
    [KILLED, head(StopCode="TaskFailedToStart", StoppedReason="EMPTY CAPACITY PROVIDER")],
    ids=str,
)
def test_s3_that_does_not_answer_ends_no_job(
    aws: Aws, task: dict[str, Any], outage: Exception
) -> None:
    aws.fails |= {"get_object": outage, "put_object": outage}
    found = aws.end(task, replace(SPEC, hold_s=600), Asked=time.time())
    assert (found["again"], aws.terminated) == (True, set())
    assert aws.running() == {"other-head", "other-1", "standing"}


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize("fails", ["get_object", "put_object"])
def test_the_end_of_a_job_waits_for_s3_and_its_hosts_do_not(
    aws: Aws, outage: Exception, fails: str
) -> None:
    """Step Functions calls the function again (``test_lives``)."""
    order = replace(paid(ANNA), hold_s=600)
    aws.fails[fails] = outage
    with pytest.raises(type(outage)):
        aws.end(head(3, ContainerInstanceArn="own-host"), order)
    assert aws.terminated == {"i-own-host", "i-h2"}
    aws.fails.clear()
    assert aws.end(head(3), order)["status"] == "failed"
    assert len(aws.sent("publish")) == 1


def test_the_first_record_counts_and_is_asked_for_until_s3_shows_it(aws: Aws) -> None:
    """Another try of the function, or a person who redrives the execution, finds it."""
    aws.end(head(3))
    aws.fails["get_object"] = lambda Key, **_: Key == RECORD and OUTAGES[0]  # noqa: N803
    with pytest.raises(ClientError):
        aws.end(head(0))
    aws.fails.clear()
    found = aws.end(head(0))
    assert (found["status"], found["again"]) == ("failed", False)


# --- EC2 has no host ------------------------------------------------------------------------------
#: What EC2 Auto Scaling answers about launches that fail, and whether to wait is in vain: from its
#: guide, "Troubleshoot EC2 instance launch failures", and errors that people report.
REFUSALS: dict[str, bool] = {
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 failed.": True,
    "You have requested more vCPU capacity than your current vCPU limit of 64 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 failed.": False,
    "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you "
    "requested (us-east-1a). Launching EC2 instance failed.": False,
    "Could not launch On-Demand Instances. InsufficientInstanceCapacity - Try later.": False,
    "Your requested instance type (p5.48xlarge) is not supported in your requested Availability "
    "Zone (us-east-1f). Launching EC2 instance failed.": True,
    "Unsupported - The requested configuration is currently not supported.": True,
    "You are not authorized to perform this operation. Encoded authorization failure: x": True,
    "Client.InternalError: Client error on launch": True,
    "The capacity reservation ID 'cr-1' was not found.": True,  # expired: aws-parallelcluster 6870
    "The requested reservation does not have sufficient compatible and available capacity for "
    "this request. Launching EC2 instance failed.": False,
    "The image id '[ami-1]' does not exist. Launching EC2 instance failed.": True,
}


def launch(status: str, message: str = "", *, at: float = 110) -> dict[str, Any]:
    """A scaling activity."""
    return {
        "Description": "Launching a new EC2 instance.  Status Reason: why",
        "StartTime": stamp(at),
        "StatusCode": status,
        "StatusMessage": message,
    }


@pytest.mark.parametrize(("said", "in_vain"), REFUSALS.items())
def test_a_job_without_a_host_has_awss_reason_and_ends_where_it_waits_in_vain(
    aws: Aws, said: str, in_vain: bool
) -> None:
    aws.group("heads").activities = [launch("Failed", said, at=time.time())]
    given_up = head(StopCode="TaskFailedToStart", StoppedReason="EMPTY CAPACITY PROVIDER")
    asked = time.time() - 60
    found = aws.end(given_up, Asked=asked)
    assert (said in found["reason"], found["again"]) == (True, not in_vain)
    # Another try of the same, as this one failed later: by now AWS answers something else.
    aws.group("heads").activities = [launch("Successful")]
    assert aws.end(given_up, Asked=asked)["again"] is not in_vain


@pytest.mark.parametrize(
    ("newest", "reason"),
    [
        ([launch("Successful") | {"Description": "Terminating i-1"}, launch("Failed", "no")], "no"),
        ([launch("Successful"), launch("Failed", "no")], ""),
        ([launch("Failed", "no", at=90)], ""),  # it was so for another job
    ],
)
def test_the_newest_launch_is_the_reason(newest: list[Any], reason: str) -> None:
    assert refusal(newest, since=100) == reason


# --- an abort, and what was not written down ------------------------------------------------------
BEGAN = 1_800_000_000
BY_TRAINCTL = {"error": STOP_ERROR, "cause": STOPPED_BY_USER}


@pytest.mark.parametrize(
    ("why", "status", "heads", "reason"),
    [
        (BY_TRAINCTL, "stopped", [60, 180], STOPPED_BY_USER),
        (BY_TRAINCTL, "stopped", [], STOPPED_BY_USER),  # in the queue
        ({"cause": "budget"}, "stopped", None, "budget"),
        ({"error": "Bill", "cause": "x"}, "stopped", None, "Bill: x"),
        ({"status": "TIMED_OUT"}, "deadline", None, "deadline"),
    ],
)
def test_an_aborted_execution_leaves_nothing_and_is_recorded(
    aws: Aws, why: dict[str, str], status: str, heads: list[int] | None, reason: str
) -> None:
    """``heads``: when they were started; None: the history cannot be read, and none is guessed."""
    if heads is not None:
        queued = {"type": "WaitStateEntered", "timestamp": stamp(BEGAN)}
        aws.history["j1"] = [queued, *(submitted("t", stamp(BEGAN + each)) for each in heads)]
    aws.executions["j1"] |= {"status": "ABORTED", **why}
    detail = {"name": "j1", "status": aws.executions["j1"]["status"], "input": SPEC.to_json()}
    detail |= {"startDate": BEGAN * 1000, "stopDate": BEGAN * 1000 + 500_000}
    event = {"detail-type": "Step Functions Execution Status Change", "detail": detail}
    # What may not answer is asked when its tasks are ended.
    aws.fails |= dict.fromkeys(["describe_execution", "put_object"], OUTAGES[1])
    with pytest.raises(ReadTimeoutError):
        aws.sweep(**event)
    assert aws.running() == {"other-head", "other-1", "standing"}
    aws.fails.clear()
    aws.sweep(**event)
    record = aws.objects[RECORD]
    assert record["status"] == status
    assert record["reason"].endswith(reason)
    assert (record["reason"] == STOPPED_BY_USER) is (why == BY_TRAINCTL)
    assert record["attempts"] == (None if heads is None else len(heads))
    assert (record["began"], record["ended"]) == (BEGAN, BEGAN + 500)
    assert record["deadline"] == (BEGAN + heads[0] + SPEC.max_seconds if heads else None)


def test_each_of_many_jobs_that_were_aborted_at_once_has_its_record(aws: Aws) -> None:
    names = [f"k{number}" for number in range(130)]
    aws.page = 1000
    # One that an earlier version has recorded, and one whose end was not reported.
    aws.s3.objects["runs/r1/jobs/old.json"] = aws.s3.objects["ends/r1/cut.json"] = b"{}"
    known = aws.objects.keys()
    for ago_s in (times.SWEEP_GRACE_S - 60, times.CLOSED_S + 60, times.SWEEP_GRACE_S + 60):
        assert aws.objects.keys() == known, "their own clean-up comes first, and long ago it has"
        for name in (*names, "old", "cut"):
            aws.execute(name, "ABORTED", ago_s, input=paid(ANNA).to_json())
        aws.sweep()
    assert {f"ends/r1/{name}.json" for name in names} == aws.objects.keys() - known
    assert {each["Subject"].partition(": ")[2] for each in aws.sent("publish")} == {*names, "cut"}


# --- the message about an end ---------------------------------------------------------------------
ANNA, SLACK = "anna@example.com", "training/notify/slack"


def paid(notify: str) -> JobSpec:
    head, worker = (instance_type(each) for each in ("m5.large", "g5.xlarge"))
    prices = Prices.of(region="us-east-1", head=head, worker=worker, spot=False)
    return replace(SPEC, notify=notify, prices=prices)


def test_the_end_of_a_job_is_mailed_once_with_where_to_look(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper.notices, "BUCKET", "b")
    monkeypatch.setattr(keeper.notices, "STATE_MACHINE", "arn:stateMachine:lab-TrainingStack-jobs")
    aws.s3.objects[REASON] = b"failed on node 1: ValueError: no"
    assert aws.end(head(StopCode="SpotInterruption"), paid(ANNA))["again"]
    assert not aws.sent("publish"), "only an attempt has ended"
    for _ in range(2):  # the function is tried again
        aws.end(head(3), paid(ANNA))
    (mail,) = aws.sent("publish")
    assert mail["Subject"] == "failed: j1"
    assert mail["MessageAttributes"]["to"]["StringValue"] == ANNA
    for part in ("failed on node 1: ValueError: no", "s3://b/runs/r1/", "show j1 --deployment lab"):
        assert part in mail["Message"]


def test_a_job_costs_at_most_what_all_its_nodes_do_from_its_admission_on(
    keeper: ModuleType,
) -> None:
    order, outcome = paid(ANNA), Outcome(status=JobStatus.FAILED, reason="x", ended=9000.0)
    assert order.prices
    hour = order.prices.usd_per_hour(2)
    assert hour
    admitted = replace(outcome, deadline=5400.0 + order.max_seconds)
    for ends, usd in (
        (admitted, hour * (1 + times.JOB_TAIL_S / 3600)),
        (outcome, None),
        (replace(outcome, attempts=0), 0),
    ):
        assert keeper.notices.usd_at_most(order, ends) == pytest.approx(usd)


def test_a_webhook_is_called_and_its_address_shown_nowhere(
    keeper: ModuleType,
    aws: Aws,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    called: list[Any] = []

    def urlopen(request: Any, **_: Any) -> Any:
        called.append(request)
        if "/bad" in request.full_url:
            raise ValueError(request.full_url)
        return SimpleNamespace(close=lambda: None)

    secret = "https://hooks.example/T0KEN"
    told: dict[str, str] = {}
    monkeypatch.setattr(aws, "on_get_secret_value", lambda **_: told, raising=False)
    monkeypatch.setattr(keeper.notices, "urlopen", urlopen)
    for job, value in {
        "plain": f"{secret}\n",
        "json": json.dumps({"url": secret}),
        "bad": f"{secret}/bad",
        "open": secret.replace("https", "http"),  # nothing goes out without TLS
    }.items():
        told["SecretString"] = value
        assert aws.end(head(0), paid(SLACK), Job=job)["status"] == "succeeded"
    assert [each.full_url for each in called] == [secret, secret, f"{secret}/bad"]
    assert called[0].get_method() == "POST"
    assert "plain" in json.loads(called[0].data)["text"]
    assert "T0KEN" not in capsys.readouterr().out + json.dumps(aws.objects)


# --- sweeps ---------------------------------------------------------------------------------------
def with_deadline(seconds: float | str) -> dict[str, Any]:
    """Overrides of a task whose job has so many seconds left."""
    at = seconds if isinstance(seconds, str) else f"{time.time() + seconds:.0f}"
    return {"containerOverrides": [{"environment": [{"name": ENV_DEADLINE, "value": at}]}]}


def test_a_sweep_does_what_it_can_and_reports_the_rest(aws: Aws) -> None:
    del aws.executions["j1"]  # older than Step Functions' memory
    aws.tasks["other-1"]["overrides"] = with_deadline(60 - times.SWEEP_GRACE_S)
    then = ago(times.CONSISTENT_S + 1)
    aws.add("stray", createdAt=then)
    aws.add("new")  # no list of its service has it yet
    aws.add("foreign", family="x", createdAt=then)
    aws.fails["stop_task"] = lambda task, **_: task == "own-1" and refused("Throttling")
    with pytest.raises(RuntimeError, match=r"own-1: .*Throttling"):  # for an alarm
        aws.sweep()
    assert aws.running() == {"own-1", "other-head", "other-1", "standing", "new", "foreign"}
    aws.fails.clear()
    for name, left in (("other-1", -60 - times.SWEEP_GRACE_S), ("other-head", "never")):
        aws.tasks[name]["overrides"] = with_deadline(left)
    aws.sweep()
    assert aws.running() == {"standing", "new", "foreign"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One that a sweep looks at."""

    is_over: bool
    """It is terminated."""
    joined_s: float = 9000
    fields: Mapping[str, Any] = field(default_factory=dict)
    seen: tuple[str, float] | None = None
    """What earlier sweeps have seen there, and for how long."""
    task: Mapping[str, Any] | None = None
    ended_s: float = 0
    """Seconds since its task has ended; 0: it has not."""
    waits: str | None = None
    """Capacity provider that a task waits for; "" for any."""


STOPPED, PENDING = {"desiredStatus": "STOPPED"}, {"lastStatus": "PENDING"}
AWAY, DRAINS = {"agentConnected": False}, {"status": "DRAINING"}
UNWELL = {"healthStatus": "UNHEALTHY"}
NO_START, NO_ANSWER = "t did not start", "t did not answer"
NO_AGENT, NO_END = "t lost its agent", "t did not end"
HOSTS = [
    # It has no task.
    Host(is_over=True, joined_s=times.IDLE_HOST_S + 60),
    Host(is_over=False, joined_s=times.IDLE_HOST_S - 60),
    Host(is_over=False, task=STOPPED, ended_s=60),
    # A task waits: for a host of another group, and for one that this one may become.
    Host(is_over=True, waits="for-heads"),
    Host(is_over=False, waits="for-workers", joined_s=times.HOST_JOINS_S - 60),
    Host(is_over=False, waits="", joined_s=times.HOST_JOINS_S - 60),
    # It lacks a GPU, say; or takes no task any more.
    Host(is_over=True, waits="for-workers", joined_s=times.HOST_JOINS_S + 60),
    Host(is_over=True, waits="for-workers", joined_s=times.HOST_JOINS_S - 60, fields=DRAINS),
    # Its agent is away.
    Host(is_over=True, joined_s=60, fields=AWAY, seen=("", times.DISCONNECTED_S + 60)),
    Host(is_over=False, joined_s=60, fields=AWAY, seen=("", times.DISCONNECTED_S - 60)),
    # Its task fares badly there, and ECS replaces neither.
    *(
        Host(is_over=True, task={"lastStatus": each}, seen=(NO_START, times.TASK_STARTS_S + 60))
        for each in ("PENDING", "ACTIVATING")
    ),
    Host(is_over=False, task=PENDING, seen=(NO_START, times.TASK_STARTS_S - 60)),
    Host(is_over=False, task=PENDING, seen=("another did not start", 9000)),
    Host(is_over=True, task=UNWELL, seen=(NO_ANSWER, 290)),
    Host(is_over=False, task=UNWELL, seen=(NO_ANSWER, 90)),
    Host(is_over=False, task=UNWELL, fields=AWAY, seen=(NO_ANSWER, 290)),  # as ECS saw it last
    Host(is_over=True, task={}, fields=AWAY, seen=(NO_AGENT, times.AGENT_LOST_S + 60)),
    Host(is_over=False, task={}, fields=AWAY, seen=(NO_AGENT, times.AGENT_LOST_S - 60)),
    Host(is_over=True, task=STOPPED, seen=(NO_END, times.STOP_TIMEOUT_S + 60)),
    Host(is_over=False, task=STOPPED, seen=(NO_END, times.STOP_TIMEOUT_S - 60)),
]


@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_a_sweep_ends_a_host_that_serves_nothing_any_more(aws: Aws, host: Host) -> None:
    aws.join("x", ago_s=host.joined_s, **host.fields)
    if host.seen:
        what, seconds = host.seen
        name = AILING_SINCE if what else DISCONNECTED_SINCE
        value = f"{time.time() - seconds:.0f} {what}".strip()
        aws.model.hosts["x"]["attributes"] = [{"name": name, "value": value}]
    if host.task is not None:
        aws.add("t", group="job:j1", host="x", **host.task)
    if host.ended_s:
        aws.tasks["t"] |= {"lastStatus": "STOPPED", "stoppedAt": ago(host.ended_s)}
    if host.waits is not None:
        aws.add("waits", _service="worker", capacityProviderName=host.waits)
        since = ago(times.SWEEP_EVERY_S + 60)
        aws.tasks["waits"] |= {"lastStatus": "PROVISIONING", "createdAt": since}
    # As after a scale-in that has spared a protected instance: it can ask for no less.
    aws.group("workers").desired = 0
    aws.sweep()
    assert ("i-x" in aws.terminated) is host.is_over


def test_the_end_of_another_job_leaves_what_a_sweep_has_noted_of_a_silent_head(aws: Aws) -> None:
    """It does not know which heads report: seed 403882."""
    aws.add("t", group="job:j1", host="x", family="job")
    note = {
        "name": AILING_SINCE,
        "value": f"{time.time() - 90:.0f} t did not answer",
    }
    aws.model.hosts["x"]["attributes"] = [note]
    aws.sweep(Action="release")
    assert aws.model.hosts["x"]["attributes"] == [note]
    aws.sweep()
    assert note not in aws.model.hosts["x"]["attributes"], "it reports again"


@pytest.mark.parametrize(("looks", "is_over"), [(3, True), (10**6, False)])
def test_a_host_goes_once_its_counts_show_that_its_task_has_ended(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch, looks: int, is_over: bool
) -> None:
    """Until then the one that they have may be another one, which no list has yet."""
    now, stock = itertools.count(), aws.on_describe_container_instances
    monkeypatch.setattr(keeper.time, "monotonic", now.__next__)

    def describe(**which: Any) -> Any:
        (host,) = stock(**which)["containerInstances"]
        lags = {"pendingTasksCount": 1} if next(now) < looks else {}
        return {"containerInstances": [host | lags]}

    monkeypatch.setattr(aws, "on_describe_container_instances", describe)
    aws.tasks["own-1"] |= {**STOPPED, "lastStatus": "STOPPED", "stoppedAt": ago(0)}
    aws.sweep(Action="release", Hosts=["h2"])
    assert ("i-h2" in aws.terminated) is is_over


def test_a_host_has_the_tag_of_its_job_while_it_works_for_it(aws: Aws) -> None:
    def written() -> dict[str, str]:
        aws.calls.clear()
        aws.sweep()
        sent = [(each["Resources"], each["Tags"]) for each in aws.sent("create_tags")]
        return {name: tag["Value"] for (name,), (tag,) in sent if tag["Key"] == "job"}

    hosts = {"own-host": "j1", "h2": "j1", "shared": "j2", "other-host": "j2"}
    assert written() == {f"i-{host}": job for host, job in hosts.items()}
    assert not aws.sent("describe_execution"), "a list has all that run"
    assert written() == {}, "they have it already"
    aws.tasks["own-1"]["containerInstanceArn"] = ""
    assert written() == {"i-h2": ""}


def test_an_instance_that_has_not_joined_in_time_is_terminated_and_replaced_if_a_task_waits(
    aws: Aws,
) -> None:
    late = times.HOST_JOINS_S + 60
    aws.launch("i-late", ago_s=late)
    aws.launch("i-head", ago_s=late, of="heads")
    aws.launch("i-boots", ago_s=late - 120)
    aws.launch("i-metal", ago_s=late, kind="g4dn.metal")  # it is still starting
    aws.launch("i-p5", ago_s=times.SLOW_HOST_JOINS_S + 60, kind="p5.48xlarge")
    waits = {"lastStatus": "PROVISIONING", "group": "service:worker", "_service": "worker"}
    aws.add("waits", **waits)
    aws.fails["create_tags"] = refused("UnauthorizedOperation")  # which keeps no host
    assert sorted(aws.sweep()["released"]) == ["i-head", "i-late", "i-p5"]
    sent = aws.sent("terminate_instance_in_auto_scaling_group")
    lowers = {each["InstanceId"]: each["ShouldDecrementDesiredCapacity"] for each in sent}
    assert lowers == {"i-late": False, "i-head": True, "i-p5": False}
    # ECS's draining, which knows no task of theirs, would keep them for two days.
    at_once = [name for each in aws.sent("terminate_instances") for name in each["InstanceIds"]]
    assert {*at_once} == {*lowers}


def test_what_aws_has_suspended_is_resumed_and_what_a_person_has_is_not(aws: Aws) -> None:
    """AWS suspends the launches of a group that has started no host for a day."""
    by_person = "User suspended at 2026-11-26T10:00:00Z"
    for group, reason in (("heads", by_person), ("workers", "launches have failed")):
        found = [{"ProcessName": "Launch", "SuspensionReason": reason}]
        aws.group(group).record |= {"SuspendedProcesses": found, "DesiredCapacity": 9}
    asked: list[str] = []

    def refuse(AutoScalingGroupName: str, **_: Any) -> Exception:  # noqa: N803
        asked.append(AutoScalingGroupName)
        return refused("AccessDenied")

    aws.fails["resume_processes"] = refuse
    aws.sweep()
    assert asked == ["workers"]
    assert aws.group("workers").desired == len(aws.group("workers").instances), "all else is done"


# --- admission ------------------------------------------------------------------------------------
def test_a_job_that_a_look_ended_before_a_deploy_stays_ended(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was lost, so the state machine asks again; by then the pool is back."""
    aws.execute("third")
    asked = {"Action": "admit", "Job": "third", "Began": time.time() - 60}
    order = replace(SPEC, nodes=Range(5, 8))
    assert aws.sweep(**asked, Spec=order.to_json())["status"] == "failed"
    monkeypatch.setattr(aws.keeper, "admitted", lambda *_: ((), Range(1, 1)))
    found = aws.sweep(**asked, Spec=SPEC.to_json())
    assert found["status"] == "failed"
    assert "needs 5 worker nodes" in found["reason"]


@pytest.mark.parametrize(
    ("order", "waited_s", "status", "reason"),
    [
        (replace(SPEC, nodes=Range(5, 8)), 60, "failed", "needs 5 worker nodes"),
        (replace(SPEC, nodes=Range(5, 8), pools=("l4", "gone")), 60, "failed", "0 in pool gone"),
        (SPEC, times.QUEUE_S + 60, "no_capacity", "14 days"),
        (replace(SPEC, user_id="AROA1:anna"), 60, "stopped", STOPPED_BY_USER),
        (replace(SPEC, user_id="AROA1:bert"), 60, "queued", "queued"),
        (None, 60, "failed", "its order is not understood"),
    ],
)
def test_a_job_that_gets_no_turn_ends_with_a_record(
    aws: Aws, order: JobSpec | None, waited_s: float, status: str, reason: str
) -> None:
    """It is behind two that run, and one head may run at a time."""
    for job in ("j1", "j2"):
        aws.executions[job]["input"] = SPEC.to_json()
    aws.execute("third")
    aws.s3.objects["stops/AROA1:anna/third"] = b"stop"
    given = {"Job": "third", "Spec": order.to_json() if order else "{}"}
    found = aws.sweep(Action="admit", Began=time.time() - waited_s, **given)
    assert found["status"] == status
    assert reason in found["reason"]
    has_ended = order is not None and status != "queued"
    assert [*aws.objects] == ["ends/r1/third.json"] * has_ended
    if has_ended:
        record = aws.objects["ends/r1/third.json"]
        assert (record["attempts"], record["deadline"]) == (0, None)
