"""The clean-up function finds why a job ended and leaves nothing of it, without AWS.

The function in its place, with the state machine around it and real containers below, is in
``tests/rehearsal/test_jobs.py``; here it meets what those cannot do: lost hosts, full disks of
memory, hosts that another job's task runs on.
"""

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from contract import exits, times
from contract.admission import Limits
from contract.instance_types import Prices, instance_type
from contract.job import (
    STOP_ERROR,
    Hold,
    JobSpec,
    JobStatus,
    Life,
    Outcome,
    Placement,
    Priority,
    head_variables,
    overrides,
)
from contract.nodes import GROUP_TAG, Range
from contract.text import dollars
from stacks.jobs.infrastructure import KEEPER
from stacks.jobs.keeper import cluster
from stacks.lambda_functions import stage
from tests.aws.account import Account, model_of, stamp, submitted
from tests.aws.calls import refused
from tests.heads import head
from tests.stacks.conftest import Synth, text

SPEC = JobSpec(run="r1", command=("true",), nodes=Range(1, 2))
HOLD = "heads/r1/j1.hold"
LIFE = "heads/r1/j1.life"
#: Of S3, when it answers nothing of use.
OUTAGES = (
    refused("ServiceUnavailable"),
    EndpointConnectionError(endpoint_url="s3"),
    ReadTimeoutError(endpoint_url="s3"),
)
#: Of a task that has no host.
WAITS = {"lastStatus": "PROVISIONING", "containerInstanceArn": ""}


def test_what_is_packed_needs_nothing_but_lambdas_own_boto3(tmp_path: Path) -> None:
    stage(KEEPER / "index.py", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.py", "contract", "stacks"}
    (tmp_path / "boto3.py").touch()  # stands for Lambda's
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import index; print(index.BUCKET)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],  # without the packages installed here
        env={"BUCKET": "c"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("c\n", "")


def ago(seconds: float) -> datetime:
    return stamp(time.time() - seconds)


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


def test_a_host_has_the_tag_of_its_job_while_it_works_for_it(
    aws: Aws, capsys: pytest.CaptureFixture[str]
) -> None:
    def tags() -> dict[str, str]:
        """What the sweeps since the last look have written."""
        sent, aws.calls = aws.sent("create_tags"), []
        assert all([each["Key"] for each in one["Tags"]] == ["job"] for one in sent)
        return {name: one["Tags"][0]["Value"] for one in sent for name in one["Resources"]}

    aws.launch("i-boots", ago_s=60)
    aws.sweep()
    assert tags() == {"i-h1": "j1", "i-h2": "j1", "i-h4": "j2", "i-shared": "j2"}
    aws.sweep()
    assert tags() == {}, "they have it already"
    # The standing cluster takes one of the hosts, another job the next, the third is idle.
    for name in ("own-1", "own-2", "other-1", "other-head"):
        aws.model.tasks[name]["containerInstanceArn"] = ""
    aws.add("next", startedBy="j3", group="job:j3", host="h2")
    aws.execute("j3")
    aws.add("service", group="service:worker", _service="worker", host="h4")
    aws.sweep()
    assert tags() == {"i-h2": "j3", "i-h4": "", "i-shared": ""}
    # Without the right, hosts are ended all the same.
    aws.fails["create_tags"] = refused("UnauthorizedOperation")
    aws.tasks["next"] |= {"group": "job:j1", "startedBy": "j1"}
    aws.launch("i-never", ago_s=times.HOST_JOINS_S + 60)
    aws.sweep()
    assert "i-never" in aws.terminated
    assert "i-h2 is left to the next sweep: " in capsys.readouterr().out


def test_the_end_of_a_job_ends_its_tasks_and_hosts_and_nobody_elses(aws: Aws) -> None:
    over = ago(times.CONSISTENT_S)
    aws.tasks["own-head"] |= {"desiredStatus": "STOPPED", "lastStatus": "STOPPED"}
    aws.tasks["own-head"]["stoppedAt"] = over  # the event has its host
    # Step Functions heard of a fault, and asked for another one.
    aws.add("twin", family="head", group="job:j1", host="h9")
    found = aws.end(head(3, ContainerInstanceArn="h1"))
    assert found["reason"] == "failed: user code exit 3"
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert sorted(aws.terminated) == ["i-h1", "i-h2", "i-h9"]
    assert "shared" not in aws.states, "another job's task runs there"
    record = aws.objects["ends/r1/j1.json"]
    assert record["exit_code"] == 3
    assert record["reason"] == "failed: user code exit 3"
    assert (record["run"], record["job"], record["attempts"]) == ("r1", "j1", 1)
    assert (record["command"], record["nodes"]) == (["true"], "1:2")
    read = Outcome.from_json(json.dumps(record))
    assert (read.status, read.exit_code, read.attempts) == (JobStatus.FAILED, 3, 1)
    assert found == json.loads(read.to_json()), "the execution's result is what is written down"


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (74, "files lost\x1b]0;x\x07" + "y" * 2000, "files lost?]0;x?" + "y" * 984),
        (74, "failed on node 1: by the attempt before", "files lost"),
        (3, "failed on node 1, rank 1: ValueError: no", "failed on node 1, rank 1: ValueError: no"),
        (3, None, "failed: user code exit 3"),
        (78, "failed: by the attempt before", "failed: asks for more than the job can have"),
        (80, "failed: hung: no step for 10 min 0 s", "failed: hung: no step for 10 min 0 s"),
        (0, "failed: by the attempt before", "succeeded"),
    ],
)
def test_the_outcome_has_the_reason_that_the_head_has_told(
    keeper: ModuleType, aws: Aws, code: int, said: str | None, reason: str
) -> None:
    if said is not None:
        aws.s3.objects["runs/r1/jobs/j1.reason"] = said.encode()
    # Files were tried until the deadline.
    event = ended(head(code)) | ({"Deadline": time.time() - 1} if code == 74 else {})
    found = keeper.handler(event, None)
    assert (found["reason"], found["exit_code"]) == (reason, code)
    assert aws.objects["ends/r1/j1.json"]["reason"] == reason


def test_before_another_attempt_the_hosts_stay_and_nothing_is_recorded(aws: Aws) -> None:
    found = aws.end(head(StopCode="SpotInterruption"))
    assert found["again"] is True
    assert "own-1" not in aws.running(), "workers of a lost head cannot join the next one"
    assert not aws.terminated
    assert not aws.objects
    found = aws.end(head(exits.BAD_HOST, ContainerInstanceArn="shared"))
    assert (found["again"], aws.states) == (True, {"shared": ["DRAINING"]})


@pytest.mark.parametrize(
    "end",
    [
        {"StopCode": "SpotInterruption"},
        {"StopCode": "UserInitiated", "StoppedReason": "stopped by user"},
        {"StopCode": "UserInitiated", "StoppedReason": "[host_lost] it did not answer"},
        {"StopCode": "EssentialContainerExited", "code": 137},
    ],
    ids=["host lost", "trainctl stop", "hung", "killed"],
)
def test_a_job_with_held_hosts_ends_as_its_command_did(aws: Aws, end: dict[str, Any]) -> None:
    order = replace(SPEC, hold_s=600)
    hold = Hold(code=3, since=time.time() - 60, until=time.time() + 540)
    aws.s3.objects["heads/r1/j1.hold"] = hold.to_json().encode()
    aws.s3.objects["runs/r1/jobs/j1.reason"] = b"failed: ValueError: no"
    late = {"Spec": order.to_json(), "Deadline": time.time() - 30, "Began": time.time() - 600}
    found = aws.end(head(**end), **late)
    assert (found["status"], found["exit_code"], found["again"]) == ("failed", 3, False)
    assert found["reason"] == "failed: ValueError: no"
    assert "own-1" not in aws.running()
    assert {"i-h1", "i-h2"} <= {*aws.terminated}


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


@pytest.mark.parametrize("code", [0, 1, exits.STORAGE])
def test_what_ecs_says_of_a_head_that_has_ended_is_no_matter_of_a_hold(aws: Aws, code: int) -> None:
    aws.s3.objects[HOLD] = b'{"code": 3, "since": 9e9, "until": 9e9}'
    found = aws.end(head(code), Spec=replace(SPEC, hold_s=600).to_json())
    assert (found["exit_code"], found["again"]) == (code, code == exits.STORAGE)


@pytest.mark.parametrize("when", ["before its tasks are listed", "before they are stopped"])
def test_a_head_that_was_started_unseen_and_holds_its_hosts_has_ended_the_job(
    aws: Aws, keeper: ModuleType, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    hold = Hold(code=3, since=time.time(), until=time.time() + 600)

    def write(*_: float, **__: Any) -> None:
        aws.s3.objects[HOLD] = hold.to_json().encode()
        if when == "before its tasks are listed":  # which no list has at first
            aws.tasks["unseen"] = aws.tasks["own-head"] | {"taskArn": "unseen"}

    if when == "before its tasks are listed":
        monkeypatch.setattr(keeper.time, "sleep", write)
    else:
        aws.fails["stop_task"] = write
    unseen = {"Error": "ECS.AmazonECSException", "Cause": "Rate exceeded"}
    found = aws.end({}, **unseen, Spec=replace(SPEC, hold_s=600).to_json())
    assert (found["status"], found["exit_code"], found["again"]) == ("failed", 3, False)
    assert "unseen" not in aws.running()


def test_an_order_that_is_not_understood_is_cleaned_up_after_all_the_same(aws: Aws) -> None:
    found = aws.end(head(2), Spec='{"run": "r1"}')
    assert (found["status"], found["again"]) == ("failed", False)
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert not aws.objects, "it is not known whose run it was"
    newer = json.dumps(json.loads(SPEC.to_json()) | {"of_another_deployment": 1})
    aws.end(head(2), Spec=newer)
    assert aws.objects.keys() == {"ends/r1/j1.json"}


#: Ends after which a job is tried again.
LOST = (
    head(StopCode="SpotInterruption"),
    head(exits.STORAGE),
    head(exits.KILLED, StopCode="EssentialContainerExited"),
    head(StopCode="TaskFailedToStart", StoppedReason="EMPTY CAPACITY PROVIDER"),
)


@pytest.mark.parametrize("hold_s", [0, 600])
@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize("task", LOST, ids=str)
def test_s3_that_does_not_answer_ends_no_job(
    aws: Aws, task: dict[str, Any], outage: Exception, hold_s: int
) -> None:
    aws.fails |= {"get_object": outage, "put_object": outage}
    found = aws.end(task, Spec=replace(SPEC, hold_s=hold_s).to_json(), Asked=time.time())
    assert found["again"]
    assert aws.running() == {"other-head", "other-1", "standing"}


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize("fails", ["get_object", "put_object", "both"])
def test_the_end_of_a_job_waits_for_s3_and_its_hosts_do_not(
    aws: Aws, outage: Exception, fails: str
) -> None:
    """Step Functions calls the function again (``test_lives``)."""
    order = replace(paid(ANNA), hold_s=600).to_json()
    aws.fails |= dict.fromkeys(["get_object", "put_object"] if fails == "both" else [fails], outage)
    with pytest.raises(type(outage)):
        aws.end(head(3, ContainerInstanceArn="h1"), Spec=order)
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert {"i-h1", "i-h2"} <= {*aws.terminated}
    aws.fails.clear()
    assert aws.end(head(3), Spec=order)["status"] == "failed"
    assert len(aws.sent("publish")) == 1


def test_an_abort_ends_its_tasks_before_anything_else_is_asked(aws: Aws) -> None:
    aws.execute("j1", "ABORTED", 0)
    aws.fails["describe_execution"] = ReadTimeoutError(endpoint_url="states")
    with pytest.raises(ReadTimeoutError):
        aws.abort()
    assert aws.running() == {"other-head", "other-1", "standing"}


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


def test_an_aborted_execution_leaves_nothing_and_is_recorded(aws: Aws) -> None:
    aws.execute("j1", "ABORTED", error=STOP_ERROR, cause="stopped by user")  # trainctl stop
    # Its second attempt was under way.
    queued = {"type": "WaitStateEntered", "timestamp": stamp(1_800_000_000)}
    heads = [submitted("own-head", stamp(1_800_000_000 + 60 * minute)) for minute in (1, 3)]
    aws.history["j1"] = [queued, *heads]
    aws.abort()
    assert aws.running() == {"other-head", "other-1", "standing"}
    record = aws.objects["ends/r1/j1.json"]
    assert (record["status"], record["reason"]) == ("stopped", "stopped by user")
    assert record["attempts"] == 2
    assert (record["began"], record["ended"]) == (1_800_000_000, 1_800_000_060)
    assert record["deadline"] == 1_800_000_060 + SPEC.max_seconds, "from its first head on"
    assert aws.sent("get_execution_history")[0]["maxResults"] == 1000, "days have many events"


def test_a_job_that_is_aborted_in_the_queue_has_a_record_without_a_deadline(aws: Aws) -> None:
    aws.execute("j1", "ABORTED", error=STOP_ERROR, cause="stopped by user")
    aws.history["j1"] = [{"type": "WaitStateEntered", "timestamp": stamp(1_800_000_000)}]
    aws.abort()
    record = aws.objects["ends/r1/j1.json"]
    assert (record["status"], record["attempts"], record["deadline"]) == ("stopped", 0, None)


def test_a_record_that_s3_does_not_show_now_is_asked_for_again(
    keeper: ModuleType, aws: Aws
) -> None:
    aws.end(head(3))
    aws.fails["get_object"] = refused("SlowDown")
    with pytest.raises(ClientError, match="SlowDown"):
        keeper.write_record("j1", SPEC, keeper.Outcome(status="failed", reason="failed: x"))


def test_s3_has_little_time_to_answer_in_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.QUICK == {}
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "keeper")
    found = importlib.reload(cluster).QUICK["config"]
    most = found.retries["total_max_attempts"] * (found.connect_timeout + found.read_timeout)
    assert 10 * most < times.KEEPER_TIMEOUT_S


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


def test_each_of_many_jobs_that_were_aborted_at_once_has_its_record(aws: Aws) -> None:
    names = [f"k{number}" for number in range(130)]
    aws.page = 1000
    # One that an earlier version has recorded, and one that nobody has heard of.
    aws.s3.objects["runs/r1/jobs/old.json"] = aws.s3.objects["ends/r1/cut.json"] = b"{}"
    known = aws.objects.keys()
    for ago_s in (times.SWEEP_GRACE_S - 60, times.CLOSED_S + 60, times.SWEEP_GRACE_S + 60):
        assert aws.objects.keys() == known, "their own clean-up comes first, and long ago it has"
        for name in (*names, "old", "cut"):
            aws.execute(name, "ABORTED", ago_s, cause="the bill", input=paid(ANNA).to_json())
        aws.sweep()
    assert {f"ends/r1/{name}.json" for name in names} == aws.objects.keys() - known
    assert {each["Subject"].partition(": ")[2] for each in aws.sent("publish")} == {*names, "cut"}


@pytest.mark.parametrize(
    ("detail", "abort", "status", "reason"),
    [
        ({}, {}, "stopped", "its execution was aborted"),
        ({}, {"cause": "budget"}, "stopped", "its execution was aborted: budget"),
        ({}, {"error": "Bill", "cause": "x"}, "stopped", "its execution was aborted: Bill: x"),
        ({"status": "TIMED_OUT"}, {}, "deadline", "deadline"),
    ],
)
def test_an_abort_is_blamed_on_trainctl_only_where_it_was_trainctl(
    aws: Aws, detail: Any, abort: dict[str, str], status: str, reason: str
) -> None:
    aws.execute("j1", "ABORTED", 0, **abort)
    aws.abort(**detail)
    record = aws.objects["ends/r1/j1.json"]
    assert (record["status"], record["reason"]) == (status, reason)
    assert record["attempts"] is None, "this history cannot be read, and none is guessed"


# --- the message about an end ---------------------------------------------------------------------
ANNA, SLACK = "anna@example.com", "training/notify/slack"


def paid(notify: str) -> JobSpec:
    machines = (instance_type(each) for each in ("m5.large", "g5.xlarge"))
    head, worker = machines
    prices = Prices.of(region="us-east-1", head=head, worker=worker, spot=False)
    return replace(SPEC, notify=notify, prices=prices)


def test_the_end_of_a_job_is_mailed_once_with_reason_cost_result_and_command(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper.notices, "BUCKET", "b")
    monkeypatch.setattr(keeper.notices, "STATE_MACHINE", "arn:stateMachine:lab-TrainingStack-jobs")
    order, now = paid(ANNA), time.time()
    began = {"Began": now - 7200, "Deadline": now - 3600 + order.max_seconds}
    given = {"Spec": order.to_json(), **began}
    aws.s3.objects["runs/r1/jobs/j1.reason"] = b"failed on node 1: ValueError: no"
    assert aws.end(head(StopCode="SpotInterruption"), **given)["again"]
    assert not aws.sent("publish"), "only an attempt has ended"
    for _ in range(2):  # the function is tried again
        aws.end(head(3), **given)
    (mail,) = aws.sent("publish")
    assert mail["Subject"] == "failed: j1"
    assert mail["MessageAttributes"]["to"]["StringValue"] == ANNA
    assert order.prices
    hour = order.prices.usd_per_hour(2)
    assert hour
    assert mail["Message"].splitlines() == [
        "Job j1 has ended: failed on node 1: ValueError: no, 2 h 0 min after its submission.",
        f"cost    at most {dollars(hour * (1 + times.JOB_TAIL_S / 3600))} at list prices; "
        "trainctl cost j1 --deployment lab",
        "result  s3://b/runs/r1/",
        "look    trainctl show j1 --deployment lab",
    ]


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


def test_a_job_that_had_no_host_or_was_stopped_is_reported_too(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LIMITS", Limits(max_heads=3, max_workers=4))
    order = replace(paid(ANNA), nodes=Range(9, 9))
    aws.sweep(Action="admit", Job="refused", Spec=order.to_json(), Began=time.time())
    aws.abort(name="j2", input=order.to_json(), status="TIMED_OUT")
    aws.execute("j1", "ABORTED", error=STOP_ERROR, cause="stopped by user")
    aws.history["j1"] = []
    for _ in range(2):  # an event may come twice
        aws.abort(input=order.to_json())
    refused_, timed_out, stopped = (each["Message"] for each in aws.sent("publish"))
    assert "it needs 9 worker nodes" in refused_
    assert "cost    at most $0 at" in refused_
    assert "has ended: deadline" in timed_out
    assert "cost    unknown" in timed_out
    assert "has ended: stopped by user" in stopped


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
    told = {"SecretString": f"{secret}\n"}
    monkeypatch.setattr(aws, "on_get_secret_value", lambda **_: told, raising=False)
    monkeypatch.setattr(keeper.notices, "urlopen", urlopen)
    order = paid(SLACK).to_json()
    aws.end(head(0), Spec=order)
    (request,) = called
    assert (request.full_url, request.get_method()) == (secret, "POST")
    assert "Job j1 has ended: succeeded" in json.loads(request.data)["text"]
    told["SecretString"] = json.dumps({"url": secret})
    aws.end(head(0), Spec=order, Job="j0")
    assert called.pop().full_url == secret
    for job, told["SecretString"] in (
        ("j2", f"{secret}/bad"),
        ("j3", "http://hooks.example/T0KEN"),
    ):
        assert aws.end(head(0), Spec=order, Job=job)["status"] == "succeeded"
    assert len(called) == 2, "nothing goes out without TLS"
    said = capsys.readouterr().out
    assert "j2: no message to training/notify/slack: ValueError" in said
    assert "T0KEN" not in said + json.dumps(aws.objects)


def test_a_mail_that_cannot_be_sent_keeps_no_task_and_no_host(aws: Aws) -> None:
    aws.fails["publish"] = refused("InternalError")
    found = aws.end(head(3, ContainerInstanceArn="h1"), Spec=paid(ANNA).to_json())
    assert found["status"] == "failed"
    assert aws.objects
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert {"i-h1", "i-h2"} <= {*aws.terminated}


def started_with(**variables: str) -> dict[str, Any]:
    listed = [{"name": name, "value": value} for name, value in variables.items()]
    return {"containerOverrides": [{"environment": listed}]}


def test_the_sweep_ends_what_nobody_looks_after(aws: Aws) -> None:
    assert aws.sweep() == {"stopped": [], "released": []}
    assert not aws.sent("describe_execution"), "a list has all that run"
    aws.execute("j1", "FAILED", input="")
    assert sorted(aws.sweep()["stopped"]) == ["own-1", "own-2", "own-head"]
    assert aws.running() == {"other-head", "other-1", "standing"}
    del aws.executions["j2"]  # older than Step Functions' memory
    assert sorted(aws.sweep()["stopped"]) == ["other-1", "other-head"]
    assert aws.running() == {"standing"}


def test_the_sweep_ends_hosts_that_have_had_no_task_for_a_while(aws: Aws) -> None:
    idle = times.IDLE_HOST_S
    aws.join(surplus=idle + 60, new=idle - 60)
    # Their last tasks ended a moment ago, and long ago.
    for name, seconds in (("used", 60), ("left", idle + 60)):
        aws.add(name, host=name, stoppedAt=ago(seconds))
        aws.tasks[name] |= {"lastStatus": "STOPPED", "desiredStatus": "STOPPED"}
    workers = aws.group("workers")
    workers.desired += 5
    assert aws.sweep() == {"stopped": [], "released": ["left", "surplus"]}
    assert sorted(aws.terminated) == ["i-left", "i-surplus"]
    assert workers.desired == workers.there, "no host comes without a task for it"
    # What stops a standing cluster does not wait.
    aws.sweep(Action="release")
    assert sorted(aws.terminated) == ["i-left", "i-new", "i-surplus", "i-used"]


@pytest.mark.parametrize("status", ["STOPPED", "DEACTIVATING"])
def test_a_task_that_ends_does_not_hide_one_that_no_list_has_yet(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The numbers may have left the one out by now: the one that they have is the other."""
    waited: list[float] = []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: sum(waited))
    monkeypatch.setattr(keeper.time, "sleep", waited.append)
    now = ago(0)
    aws.add("ended", host="h", lastStatus=status, desiredStatus="STOPPED", startedAt=now)
    if status == "STOPPED":
        aws.tasks["ended"]["stoppedAt"] = now
    stock = aws.describe_container_instances
    counts = {"pendingTasksCount": 1, "runningTasksCount": 0}

    def describe(**which: Any) -> Any:
        return {
            "containerInstances": [host | counts for host in stock(**which)["containerInstances"]]
        }

    monkeypatch.setattr(aws, "describe_container_instances", describe)
    keeper.release({"h"})
    assert (aws.terminated, aws.states) == ([], {})
    assert sum(waited) <= times.CONSISTENT_S


def test_a_host_goes_once_its_numbers_show_that_its_task_has_ended(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: sum(waited))
    task = aws.tasks["own-1"]
    task |= {"desiredStatus": "STOPPED", "stoppedAt": ago(0)}

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if sum(waited) >= 3:
            task["lastStatus"] = "STOPPED"

    monkeypatch.setattr(keeper.time, "sleep", sleep)
    keeper.release({"h2"})
    assert (aws.terminated, sum(waited)) == (["i-h2"], 3)


def test_a_task_that_waits_holds_the_hosts_of_its_own_group_only(aws: Aws) -> None:
    aws.join(of_worker=9000)
    aws.join("heads", of_head=9000)
    aws.group("heads").desired = aws.group("workers").desired = 9
    aws.wait("waiting")
    assert aws.sweep()["released"] == ["of_head"]
    assert (aws.group("heads").desired, aws.group("workers").desired) == (0, 9)
    aws.tasks["waiting"].pop("capacityProviderName")  # it may come to any host
    aws.join("heads", other=9000)
    aws.group("heads").desired = 9
    assert "other" not in aws.sweep()["released"]
    assert aws.group("heads").desired == 9


def test_each_instance_that_does_not_join_the_cluster_in_time_is_terminated(aws: Aws) -> None:
    late = times.HOST_JOINS_S + 60
    aws.launch("i-0", "i-1", "i-kept", ago_s=late)
    aws.launch("i-head", ago_s=late, of="heads")
    aws.launch("i-boots", ago_s=late - 120)
    aws.launch("i-metal", ago_s=late, kind="g4dn.metal")  # they are still starting
    aws.launch("i-p5", ago_s=late, kind="p5.48xlarge")
    aws.wait("waiting")
    # ECS's draining, which knows no task of it, keeps it for two days.
    aws.model.terminate("i-kept", lowers=True)
    aws.fails["terminate_instance_in_auto_scaling_group"] = lambda InstanceId, **_: (  # noqa: N803
        refused("Throttling") if InstanceId == "i-0" else None
    )
    assert sorted(aws.sweep()["released"]) == ["i-1", "i-head", "i-kept"]
    assert aws.replaced == ["i-1", "i-kept"], "a task waits for another one"
    assert sorted(aws.ended_at_once) == ["i-1", "i-head", "i-kept"]
    aws.launch("i-p5", ago_s=times.SLOW_HOST_JOINS_S + 60, kind="p5.48xlarge")
    assert aws.sweep()["released"] == ["i-p5"]


def test_a_group_that_asks_for_none_already_keeps_no_instance(aws: Aws) -> None:
    """A scale-in lowers what it asks for, and ends no instance that is protected."""
    aws.launch("i-late", ago_s=9000)
    aws.join(idle=9000)
    aws.group("workers").desired = 0
    aws.sweep()
    assert sorted(aws.terminated) == ["i-idle", "i-late"]


def test_a_host_that_cannot_take_the_task_that_waits_is_replaced(aws: Aws) -> None:
    """It joined with seven of its eight GPUs, say; its group is full and starts no other."""
    late = times.HOST_JOINS_S + 60
    aws.join(unfit=late, new=times.HOST_JOINS_S - 60)
    aws.join("heads", of_head=late)
    aws.wait("waits", createdAt=ago(times.SWEEP_EVERY_S))
    aws.wait("asked-now", capacityProviderName="for-heads")
    assert aws.sweep()["released"] == ["unfit"]
    assert aws.terminated == aws.replaced == ["i-unfit"]
    # It ran a task until a moment ago.
    ended: Any = {"lastStatus": "STOPPED", "desiredStatus": "STOPPED", "stoppedAt": ago(0)}
    aws.add("done", host="used", **ended)
    assert "used" not in aws.sweep()["released"]


#: Of a task and its host, what ails it and for how long, in seconds; and whether that is the end.
AILMENTS: list[tuple[dict[str, Any], dict[str, Any], str, float, bool]] = [
    ({"lastStatus": "PROVISIONING"}, {}, "did not start", times.TASK_STARTS_S + 1, True),
    ({"lastStatus": "PENDING"}, {}, "did not start", times.TASK_STARTS_S + 1, True),
    ({"lastStatus": "ACTIVATING"}, {}, "did not start", times.TASK_STARTS_S + 1, True),
    ({"lastStatus": "PENDING"}, {}, "did not start", times.TASK_STARTS_S - 60, False),
    # ECS tells of another task's time there, and of its own as it was before it ran.
    ({"lastStatus": "PENDING", "taskArn": "other"}, {}, "did not start", 9000, False),
    ({}, {}, "did not start", 9000, False),
    ({"healthStatus": "UNHEALTHY"}, {}, "did not answer its health check", 290, True),
    ({"healthStatus": "UNHEALTHY"}, {}, "did not answer its health check", 90, False),
    ({"healthStatus": "HEALTHY"}, {}, "did not answer its health check", 9000, False),
    # It trains, maybe, and ECS never hears of its end.
    ({}, {"agentConnected": False}, "lost its agent", times.AGENT_LOST_S + 1, True),
    ({}, {"agentConnected": False}, "lost its agent", times.AGENT_LOST_S - 60, False),
    # The last that ECS has heard; the agent may come back.
    (
        {"healthStatus": "UNHEALTHY"},
        {"agentConnected": False},
        "did not answer its health check",
        290,
        False,
    ),
]


@pytest.mark.parametrize(("task", "host", "what", "seconds", "is_over"), AILMENTS)
def test_a_task_that_does_not_start_or_answer_is_stopped_with_its_host(
    keeper: ModuleType,
    aws: Aws,
    task: dict[str, Any],
    host: dict[str, Any],
    what: str,
    seconds: float,
    is_over: bool,
) -> None:
    """A Docker that hangs, and a node that does: ECS replaces neither."""
    aws.tasks["own-1"] |= task
    seen = f"{time.time() - seconds:.0f} own-1 {what}"
    mark = {"name": "train.ailing-since", "value": seen}
    aws.hosts["h2"] |= {"attributes": [mark], **host}
    aws.sweep()
    ended = aws.tasks["own-1"]
    assert (ended["desiredStatus"] == "STOPPED") is is_over
    assert aws.states.get("h2", []) == ["DRAINING", "DRAINING"] * is_over
    assert aws.terminated == ["i-h2"] * is_over
    if is_over:
        assert ended["stoppedReason"] == f"[host_lost] the node {what} on i-h2"
        started = {"StartedAt": (time.time() - 60) * 1000} if "healthStatus" in task else {}
        stopped = head(
            137, StopCode="UserInitiated", StoppedReason=ended["stoppedReason"], **started
        )
        for in_a_row in (1, 3):
            later = {"deadline": time.time() + 60, "patience": 0.0}
            found = keeper.verdict(stopped, "", **later, attempt=3, in_a_row=in_a_row)
            assert found.status is JobStatus.HOST_LOST
            assert found.reason.startswith(f"failed: the node {what} on i-h2")
            # A program may hang its node; what never ran is its host's.
            assert found.again is (in_a_row < 3 or not started)


@pytest.mark.parametrize(
    ("reported_s", "seen_s", "fails", "is_over"),
    [
        (times.HEAD_SILENT_S + 1, 290, None, True),
        (times.HEAD_SILENT_S + 1, 90, None, False),  # it may report again once S3 answers it
        (times.HEAD_SILENT_S - 60, 290, None, False),
        (9000, 290, None, False),  # the head before it
        (None, 290, None, False),  # of an earlier version
        *((times.HEAD_SILENT_S + 1, 290, each, False) for each in OUTAGES),
    ],
)
def test_a_head_that_does_not_report_any_more_is_dead_though_it_runs_for_ecs(
    aws: Aws, reported_s: float | None, seen_s: float, fails: Exception | None, is_over: bool
) -> None:
    aws.tasks["own-head"] |= {"overrides": ordered(60), "startedAt": ago(5000)}
    aws.tasks["own-head"] |= {"healthStatus": "HEALTHY", "createdAt": ago(5100)}
    if reported_s:
        life = Life(at=time.time() - reported_s, is_complete=True)
        aws.s3.objects[LIFE] = life.to_json().encode()
    aws.fails["get_object"] = fails
    seen = f"{time.time() - seen_s:.0f} own-head did not report for 20 minutes"
    aws.hosts["h1"]["attributes"] = [{"name": "train.ailing-since", "value": seen}]
    aws.sweep()
    task = aws.tasks["own-head"]
    assert (task["desiredStatus"] == "STOPPED") is is_over
    assert aws.terminated == ["i-h1"] * is_over
    assert task.get("stoppedReason", "").startswith("[host_lost] the node did not") is is_over


def test_a_sweep_marks_what_it_sees_first_and_takes_the_mark_away_again(aws: Aws) -> None:
    aws.tasks["own-1"] |= {"taskArn": "arn:task/c/own-1", "healthStatus": "UNHEALTHY"}
    aws.tasks["arn:task/c/own-1"] = aws.tasks.pop("own-1")
    aws.sweep()
    (mark,) = aws.hosts["h2"]["attributes"]
    since, _, what = mark["value"].partition(" ")
    assert (mark["targetId"], mark["targetType"]) == ("h2", "container-instance")
    assert what == "own-1 did not answer its health check"
    assert abs(time.time() - float(since)) < 5
    assert len(mark["value"]) + 32 < 128, "ECS takes no longer value; ids have 32 letters"
    aws.tasks["arn:task/c/own-1"]["healthStatus"] = "HEALTHY"
    aws.sweep()
    assert aws.hosts["h2"]["attributes"] == [], "two sweeps in a row count, not two"


def test_a_task_that_does_not_end_keeps_its_host_no_longer_than_it_may_save(aws: Aws) -> None:
    """A process that no signal ends: ECS's draining would wait for two days."""
    aws.tasks["own-1"] |= {"desiredStatus": "STOPPED", "startedAt": ago(0)}
    late = times.STOP_TIMEOUT_S + 60
    for of, seconds, is_over in (
        ("own-1", times.STOP_TIMEOUT_S - 60, False),
        ("another", late, False),  # that was seen there before
        ("own-1", late, True),
    ):
        seen = f"{time.time() - seconds:.0f} {of} did not end"
        mark = {"name": "train.ailing-since", "value": seen}
        aws.hosts["h2"] |= {"attributes": [mark], "status": "DRAINING"}
        aws.sweep()
        assert aws.ended_at_once == ["i-h2"] * is_over


def test_one_host_that_takes_no_mark_keeps_no_other_one(aws: Aws) -> None:
    aws.fails["put_attributes"] = refused("InvalidParameterException")
    aws.join(away=9000, idle=9000)
    aws.launch("i-late", ago_s=9000)
    aws.hosts["away"]["agentConnected"] = False
    assert aws.sweep()["released"] == ["idle", "i-late"]


def test_a_host_that_stays_disconnected_is_ended_at_once(aws: Aws) -> None:
    aws.join(away=60, back=60)
    for name, seconds in (("away", times.DISCONNECTED_S + 1), ("back", times.DISCONNECTED_S - 60)):
        mark = {"name": "train.disconnected-since", "value": f"{time.time() - seconds:.0f}"}
        aws.hosts[name] |= {"agentConnected": False, "attributes": [mark]}
    assert aws.sweep()["released"] == ["away"]
    assert aws.ended_at_once == ["i-away"]


def test_a_host_whose_release_has_failed_half_way_ends_though_a_task_waits(
    keeper: ModuleType, aws: Aws
) -> None:
    aws.join(h=9000, free=9000)
    aws.wait("waiting")
    aws.fails["terminate_instance_in_auto_scaling_group"] = refused("Throttling")
    keeper.release({"h"})
    assert (aws.states["h"], aws.terminated) == (["DRAINING"], [])
    aws.fails.clear()
    assert aws.sweep()["released"] == ["h"], "no task can come to it"
    assert aws.terminated == ["i-h"]


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


def test_a_task_of_no_job_and_no_service_is_ended(aws: Aws) -> None:
    then = ago(times.CONSISTENT_S)
    aws.add("stray", group="family:worker", host="h7", createdAt=then)
    aws.add("pretends", group="service:worker", host="h9", createdAt=then)
    aws.add("new", group="service:worker", host="h10")  # no list of the service has it yet
    aws.add("foreign", group="family:x", family="x", host="h8", createdAt=then)
    aws.tasks["stray"]["overrides"] = {"containerOverrides": [{"environment": [{}]}]}
    assert aws.sweep()["stopped"] == ["stray", "pretends"]
    assert aws.tasks["stray"]["stoppedReason"] == "it belongs to no job and no service"


def held(run: str) -> JobSpec:
    return replace(SPEC, run=run, hold_s=600)


def test_the_sweep_ends_what_is_over_its_time_for_that_reason(keeper: ModuleType, aws: Aws) -> None:
    waiting = {
        "lastStatus": "PROVISIONING",
        "createdAt": ago(90),
        "containerInstanceArn": "",
    }
    for name, wait_s in (("own-head", 60), ("other-head", 600)):
        spec = replace(SPEC, capacity_wait_s=wait_s).to_json()
        variables = head_variables(job="j", deadline=str(int(time.time()) + 900), spec=spec)
        aws.tasks[name] |= waiting | {"overrides": overrides(variables)}
    aws.tasks["own-1"] |= waiting  # a worker's place is its head's to wait for, and ends with it
    # Long over its deadline, and a moment over it.
    for name, late_s in (("own-2", 500), ("other-1", 100)):
        deadline = str(int(time.time()) - late_s)
        aws.tasks[name]["overrides"] = started_with(TRAIN_DEADLINE=deadline)
    # Hosts that were held for as long as their job wanted, hosts that are held, and those of an
    # attempt after one that had left a hold.
    for name, job, over_s, age_s in (
        ("held", "j3", 200, 1000),
        ("still", "j4", 60, 1000),
        ("another", "j5", 200, 800),
    ):
        variables = head_variables(job=job, deadline="9999999999", spec=held(job).to_json())
        aws.add(
            name,
            host=name,
            family="head",
            group=f"job:{job}",
            overrides=overrides(variables),
            createdAt=ago(age_s),
        )
        aws.add(f"{name}-1", startedBy=job, group=f"job:{job}", host=f"{name}-1")
        aws.execute(job)
        hold = Hold(code=1, since=time.time() - 900, until=time.time() - over_s)
        aws.s3.objects[f"heads/{job}/{job}.hold"] = hold.to_json().encode()
    # ECS still lists the head of the attempt before, too.
    aws.add("before", family="head", group="job:j5", createdAt=ago(1000))
    aws.tasks["before"]["overrides"] = aws.tasks["another"]["overrides"]
    assert aws.sweep()["stopped"] == ["own-head", "own-1", "own-2", "held", "held-1"]
    assert "deadline" in aws.tasks["own-2"]["stoppedReason"]
    task = head(StopCode="UserInitiated", StoppedReason=aws.tasks["own-head"]["stoppedReason"])
    later = time.time() + 60
    found = keeper.verdict(task, "", deadline=later, patience=later, attempt=1, in_a_row=1)
    reason = "no capacity: no host within 60 s"
    assert (found.status, found.reason) == (JobStatus.NO_CAPACITY, reason)


#: What EC2 Auto Scaling says of launches that fail, and whether to wait is in vain: from its guide,
#: "Troubleshoot EC2 instance launch failures", and errors that people report.
REFUSALS: dict[str, bool] = {
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 failed.": True,
    "You have requested more vCPU capacity than your current vCPU limit of 64 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 failed.": False,
    "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you "
    "requested (us-east-1a). Launching EC2 instance failed.": False,
    "Could not launch On-Demand Instances. InsufficientInstanceCapacity - Try later.": False,
    "There is no Spot capacity available that matches your request.": False,
    "Max spot instance count exceeded. Launching EC2 instance failed.": False,
    "Your requested instance type (p5.48xlarge) is not supported in your requested Availability "
    "Zone (us-east-1f). Launching EC2 instance failed.": True,
    "Unsupported - The requested configuration is currently not supported.": True,
    "You are not authorized to perform this operation. Encoded authorization failure: x": True,
    "Client.InternalError: Client error on launch": True,
    "The capacity reservation ID 'cr-1' was not found.": True,  # expired: aws-parallelcluster 6870
    "The requested reservation does not have sufficient compatible and available capacity for "
    "this request. Launching EC2 instance failed.": False,
    "The image id '[ami-1]' does not exist. Launching EC2 instance failed.": True,
    "The security group sg-1 does not exist. Launching EC2 instance failed.": True,
}


def launch(status: str, message: str = "", *, ago_s: float = 30) -> dict[str, Any]:
    """A scaling activity."""
    return {
        "Description": "Launching a new EC2 instance.  Status Reason: why",
        "StartTime": ago(ago_s),
        "StatusCode": status,
        "StatusMessage": message,
    }


def ordered(wait_s: int, **more: Any) -> dict[str, Any]:
    """A head's overrides: its order."""
    spec = replace(SPEC, capacity_wait_s=wait_s, **more).to_json()
    return overrides(head_variables(job="j", deadline=str(int(time.time()) + 9000), spec=spec))


@pytest.mark.parametrize(("said", "in_vain"), REFUSALS.items())
def test_the_reason_is_awss_own_and_a_job_that_waits_in_vain_ends(
    keeper: ModuleType, aws: Aws, said: str, in_vain: bool
) -> None:
    then = ago(90)
    aws.group("heads").activities = [
        launch("Successful") | {"Description": "Terminating EC2 instance: i-1"},
        launch("Failed", said),
    ]
    waits = WAITS | {"createdAt": then}
    waits["capacityProviderName"] = "for-heads"
    for name, wait_s in (("own-head", 60), ("other-head", 600)):
        aws.tasks[name] |= waits | {"overrides": ordered(wait_s)}
    stopped = ["own-head", "other-head"] if in_vain else ["own-head"]
    assert aws.sweep()["stopped"] == stopped
    task = head(StopCode="UserInitiated", StoppedReason=aws.tasks["own-head"]["stoppedReason"])
    found = aws.end(task)
    assert (found["status"], found["reason"]) == ("no_capacity", f"no capacity: {said}")
    assert aws.objects["ends/r1/j1.json"]["reason"] == f"no capacity: {said}"
    # ECS has given up before: the state machine asks again, or not.
    given_up = head(StopCode="TaskFailedToStart", StoppedReason="EMPTY CAPACITY PROVIDER")
    event = ended(given_up, Job="j2", Asked=time.time() - 60)
    found = keeper.handler(event, None)
    assert (found["reason"], found["again"]) == (f"no capacity: {said}", not in_vain)
    # Another try of the same, as this one failed later: by now AWS tells something else.
    aws.group("heads").activities = [launch("Successful")]
    assert keeper.handler(event, None)["again"] is not in_vain


@pytest.mark.parametrize(
    "newest",
    [
        launch("Successful"),
        launch("InProgress"),
        launch("Failed", "You are not authorized to perform this operation.", ago_s=300),
    ],
    ids=["a host came", "one is coming", "it was so for another job"],
)
def test_a_launch_that_did_not_fail_for_this_job_is_no_reason(
    aws: Aws, newest: dict[str, Any]
) -> None:
    aws.group("heads").activities = [newest, launch("Failed", "You are not authorized", ago_s=300)]
    then = ago(90)
    aws.tasks["own-head"] |= {
        "lastStatus": "PROVISIONING",
        "containerInstanceArn": "",
        "createdAt": then,
    }
    aws.tasks["own-head"] |= {"overrides": ordered(60), "capacityProviderName": "for-heads"}
    aws.sweep()
    assert (
        aws.tasks["own-head"]["stoppedReason"] == "[no_capacity] no capacity: no host within 60 s"
    )


@pytest.mark.parametrize(
    ("began_s", "worker", "is_complete", "is_over"),
    [
        (90, WAITS, False, True),
        (90, {"lastStatus": "PENDING"}, False, False),  # one has come
        (4000, WAITS, False, False),  # it has trained
        (90, WAITS, True, False),  # and so it has by its own word
    ],
)
def test_a_head_ends_whose_workers_can_never_come(
    aws: Aws, began_s: float, worker: dict[str, Any], is_complete: bool, is_over: bool
) -> None:
    aws.s3.objects[LIFE] = Life(at=time.time(), is_complete=is_complete).to_json().encode()
    said = "current vCPU limit of 0 allows"
    aws.group("workers").activities = [launch("Failed", said)]
    now = ago(0)
    began = now - timedelta(seconds=began_s)
    aws.tasks["own-head"] |= {"overrides": ordered(1800), "startedAt": began, "createdAt": began}
    aws.tasks["own-1"] |= {"createdAt": now - timedelta(seconds=60), **worker}
    aws.tasks["own-2"] |= WAITS | {"createdAt": now}
    assert aws.sweep()["stopped"] == ["own-head", "own-1", "own-2"] * is_over
    if is_over:
        assert aws.tasks["own-head"]["stoppedReason"] == f"[no_capacity] no capacity: {said}"
    # A head that has waited for its workers itself.
    found = aws.end(head(75), Asked=time.time() - 60)
    assert found["reason"] == f"no capacity: {said}"


#: A job that may try another pool, whose head trains for three minutes or so; and a program on it.
LADDER = replace(SPEC, nodes=Range(2, 2), pools=("l4", "default"), recipe="ddp")
PROGRAM = replace(LADDER, recipe="")


def of_ladder(aws: Aws, spec: JobSpec = LADDER, *, began_s: float = 200, hosts: int = 0) -> None:
    """One of its two workers waits; ``hosts``: that boot in its pool."""
    aws.group("S-pool-l4").activities = [launch("Failed", "no l4 here")]
    order = overrides(head_variables(job="j", deadline="9" * 10, spec=spec.to_json()))
    began = ago(began_s)
    aws.tasks["own-head"] |= {"overrides": order, "startedAt": began, "createdAt": began}
    aws.tasks["own-1"] |= WAITS | {"createdAt": ago(100), "capacityProviderName": "cp-S-pool-l4"}
    aws.launch(*(f"i-boots-{number}" for number in range(hosts)), ago_s=60, of="S-pool-l4")


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
        (PROGRAM, 200, 1, "", True),
        (PROGRAM, 200, 1, "complete", False),  # it goes on, too
        (PROGRAM, 200, 1, "S3 is down", False),  # it may
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
        "a host comes": ("own-1", {"lastStatus": "PENDING", "containerInstanceArn": "h9"}),
        "it ends": ("own-head", {"desiredStatus": "STOPPED"}),
    }
    if then in changes:
        name, change = changes[then]
        aws.fails["describe_scaling_activities"] = lambda **_: aws.tasks[name].update(change)
    if then == "complete":
        aws.s3.objects[LIFE] = Life(at=time.time(), is_complete=True).to_json().encode()
    if then == "S3 is down":
        aws.fails["get_object"] = OUTAGES[0]
    # The event of the refusal.
    aws.sweep(**{"detail-type": "EC2 Instance Launch Unsuccessful"})
    head_task = aws.tasks["own-head"]
    assert bool(aws.sent("stop_task")) is moves
    if moves:
        assert head_task["stoppedReason"] == "[no_capacity] no capacity: no l4 here"
        assert "h1" not in aws.states, "its host waits for the next head"
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
        ContainerInstanceArn="h1",
    )
    del aws.tasks["own-head"]
    aws.hosts["h1"]["_tasks"].clear()
    aws.hosts["h1"]["registeredAt"] = ago(60)
    given = {"Spec": LADDER.to_json(), "Attempt": 3, "InARow": 3, "Asked": now - asked_s}
    found = aws.end(task, **given)
    if again is None:
        assert (found["again"], found["status"]) == (False, "no_capacity")
        assert {"i-h1", "i-h2"} <= {*aws.terminated}
        return
    assert (found["again"], found["pools"]) == (True, ["default", "l4"])
    assert (found["status"], found["in_a_row"]) == again
    assert found["reason"] == "no capacity: no l4 here (pool l4); pool default is next"
    assert "i-h2" in aws.terminated
    assert "i-h1" not in aws.terminated, "the head's own host waits for the next head"


def test_a_head_without_a_host_stays_in_its_pool(aws: Aws) -> None:
    given_up = head(StopCode="TaskFailedToStart", StoppedReason="EMPTY CAPACITY PROVIDER")
    found = aws.end(given_up, Spec=LADDER.to_json(), Asked=time.time() - 60)
    assert (found["again"], found["pools"]) == (True, ["l4", "default"])


def test_what_aws_has_suspended_is_resumed_and_what_a_person_has_is_not(
    aws: Aws, capsys: pytest.CaptureFixture[str]
) -> None:
    """AWS suspends the launches of a group that has started no host for a day."""
    by_person = "User suspended at 2026-11-26T10:00:00Z"
    for group, reason in (("heads", by_person), ("workers", "launches have failed")):
        found = [{"ProcessName": "Launch", "SuspensionReason": reason}]
        aws.group(group).record["SuspendedProcesses"] = found
    aws.sweep()
    assert [each["AutoScalingGroupName"] for each in aws.sent("resume_processes")] == ["workers"]
    assert f"heads: Launch is suspended: {by_person}" in capsys.readouterr().out


def test_a_refused_resumption_stops_no_sweep(aws: Aws) -> None:
    group = aws.group("workers")
    group.record |= {"SuspendedProcesses": [{"ProcessName": "Launch"}], "DesiredCapacity": 9}
    aws.fails["resume_processes"] = refused("AccessDenied")
    aws.sweep()
    assert group.desired == len(group.instances), "what follows it is done"


def test_what_ecs_said_of_a_task_that_it_did_not_start_is_read(
    keeper: ModuleType, aws: Aws
) -> None:
    event = {"Job": "j1", "Spec": SPEC.to_json(), "Attempt": 1, "Began": 0, "Deadline": 2**40}
    event |= {"Error": "AmazonECS.Unknown", "Asked": time.time()}
    failures = [{"Arn": "a", "Reason": "RESOURCE:GPU"}]
    for cause in ({"Failures": failures, "Tasks": []}, failures):
        found = keeper.handler({"Action": "end", **event, "Cause": json.dumps(cause)}, None)
        assert (found["status"], found["again"]) == ("no_capacity", True)
    other = {"Failures": [{"Reason": "the role may not"}], "Tasks": []}
    for said in (json.dumps(other), "the role may not"):
        found = keeper.handler({"Action": "end", **event, "Cause": said}, None)
        assert "AmazonECS.Unknown: the role may not" in found["reason"]
    assert aws.objects, "that was the job's end"


# --- admission ------------------------------------------------------------------------------------
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


def test_a_user_has_few_jobs_at_a_time_and_the_others_are_passed_by(
    keeper: ModuleType, queue: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(keeper.time, "sleep", waited.append)
    limits = Limits(max_heads=2, max_workers=2, max_jobs_per_user=1)
    monkeypatch.setattr(keeper, "LIMITS", limits)
    queue.executions.clear()
    for job, user in (("first", "anna"), ("second", "anna"), ("third", "bert")):
        queue.execute(job, input=replace(SPEC, nodes=Range(1, 1), submitter=user).to_json())
        queue.history[job] = []
    assert admitted(keeper, "second", Range(1, 1))["status"] == "queued"
    assert admitted(keeper, "third", Range(1, 1))["status"] == "running"
    assert waited == [3 * times.CONSISTENT_S], "until each list shows who has ended"
    # The second has its turn, and room beside what has passed it by: not before that has ended.
    queue.executions["first"]["status"] = "SUCCEEDED"
    assert admitted(keeper, "second", Range(2, 2))["status"] == "running"
    queue.history["third"] = [{"stateEnteredEventDetails": {"name": "Head"}}]
    assert admitted(keeper, "second", Range(1, 1))["status"] == "running"
    assert admitted(keeper, "second", Range(2, 2))["status"] == "queued"


def test_a_job_of_a_higher_priority_overtakes_those_that_wait_and_none_that_has_begun(
    keeper: ModuleType, queue: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(keeper.time, "sleep", waited.append)
    monkeypatch.setattr(keeper, "LIMITS", Limits(max_heads=3, max_workers=2))
    queue.executions.clear()
    jobs = (("first", "low", 1), ("second", "normal", 1), ("third", "high", 2))
    for minutes, (job, level, nodes) in enumerate(jobs, start=-9):
        spec = replace(SPEC, nodes=Range(nodes, nodes), priority=Priority(level))
        began = datetime.now(tz=UTC) + timedelta(minutes=minutes)
        queue.execute(job, input=spec.to_json(), startDate=began)
        queue.history[job] = []
    event = {"Action": "admit", "Began": time.time() - 60}

    def status(job: str) -> str:
        given = {"Job": job, "Spec": queue.executions[job]["input"]}
        return str(keeper.handler(event | given, None)["status"])

    assert [*map(status, ("first", "second"))] == ["queued", "queued"], "the third is before them"
    assert waited == []
    assert status("third") == "running"
    assert waited == [3 * times.CONSISTENT_S], "until those that did not know of it have begun"
    queue.history["first"] = [{"stateEnteredEventDetails": {"name": "Head"}}]
    assert status("third") == "queued"
    # Of its own user it overtakes none that has begun, where that has as many as it may.
    for limit, expected in ((1, "queued"), (2, "running")):
        limits = Limits(max_heads=3, max_workers=3, max_jobs_per_user=limit)
        monkeypatch.setattr(keeper, "LIMITS", limits)
        assert status("third") == expected
    monkeypatch.setattr(keeper, "LIMITS", Limits(max_heads=3, max_workers=2))
    # A job that has waited for half a day is before it.
    queue.executions["first"]["startDate"] -= timedelta(seconds=times.COUNTS_AS_HIGH_S)
    del queue.history["first"][:]
    assert (status("first"), status("third")) == ("running", "queued")


def test_a_priority_is_no_way_around_the_limit_of_a_user_and_nobody_waits_for_it(
    keeper: ModuleType, queue: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper.time, "sleep", lambda _: None)
    limits = Limits(max_heads=2, max_workers=2, max_jobs_per_user=1)
    monkeypatch.setattr(keeper, "LIMITS", limits)
    queue.executions.clear()
    jobs = (("first", "anna", "low"), ("second", "bert", "normal"), ("third", "anna", "high"))
    for minutes, (job, user, level) in enumerate(jobs, start=-9):
        spec = replace(SPEC, nodes=Range(1, 1), submitter=user, priority=Priority(level))
        began = datetime.now(tz=UTC) + timedelta(minutes=minutes)
        queue.execute(job, input=spec.to_json(), startDate=began)
        queue.history[job] = []
    queue.history["first"] = [{"stateEnteredEventDetails": {"name": "Head"}}]

    def status(job: str) -> str:
        order = queue.executions[job]["input"]
        event = {"Action": "admit", "Job": job, "Spec": order, "Began": time.time() - 60}
        return str(keeper.handler(event, None)["status"])

    assert (status("third"), status("second")) == ("queued", "running")
    queue.executions["first"]["status"] = "SUCCEEDED"
    assert (status("third"), status("second")) == ("running", "running")


def test_what_a_later_job_was_granted_counts_and_not_what_it_asked_for(
    keeper: ModuleType, queue: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one of two pools has begun in the one that the first job does not want."""
    monkeypatch.setattr(keeper.time, "sleep", lambda _: None)
    limits = Limits(max_heads=3, max_workers=2, max_jobs_per_user=1, pools={"l4": 2})
    monkeypatch.setattr(keeper, "LIMITS", limits)
    queue.executions.clear()
    queue.execute("first", input=replace(SPEC, nodes=Range(2, 2), submitter="anna").to_json())
    both = replace(SPEC, nodes=Range(1, 2), submitter="bert", pools=("default", "l4"))
    queue.execute("second", input=both.to_json())
    for pools, nodes, status in ((["l4"], "2", "running"), (["default"], "1", "queued")):
        answer = json.dumps({"Payload": {"nodes": nodes, "pools": pools}})
        entered = {"name": "Head", "input": answer}
        queue.history["second"] = [{"stateEnteredEventDetails": entered}]
        assert admitted(keeper, "first", Range(2, 2))["status"] == status
    assert admitted(keeper, "first", Range(1, 1))["status"] == "running", "it has one node of two"


def test_a_job_that_its_user_has_called_off_ends_before_its_turn(
    keeper: ModuleType, queue: Aws
) -> None:
    queue.execute("third")
    spec = replace(SPEC, user_id="AROA1:anna").to_json()
    event = {"Action": "admit", "Job": "third", "Spec": spec, "Began": time.time()}
    queue.s3.objects["stops/AROA1:bert/third"] = b"stop"
    assert keeper.handler(event, None)["status"] == "running"
    queue.s3.objects["stops/AROA1:anna/third"] = b"stop"
    assert keeper.handler(event, None)["status"] == "stopped"
    assert queue.objects["ends/r1/third.json"]["reason"] == "stopped by user"


@pytest.mark.usefixtures("queue")
def test_a_job_that_the_list_does_not_have_yet_waits(keeper: ModuleType) -> None:
    assert admitted(keeper, "third", Range(0, 0))["status"] == "queued"


def test_an_order_that_is_not_understood_holds_a_head_and_gets_none(
    keeper: ModuleType, queue: Aws
) -> None:
    queue.executions["second"]["input"] = '{"of": "another version"}'
    queue.execute("third")
    assert admitted(keeper, "third", Range(3, 3))["status"] == "running"
    event = {"Action": "admit", "Job": "third", "Spec": "{}", "Began": 0}
    found = keeper.handler(event, None)
    assert (found["status"], found["reason"]) == ("failed", "failed: its order is not understood")


@pytest.mark.parametrize(
    ("nodes", "waited_s", "status", "reason"),
    [
        (Range(5, 8), 60, "failed", "needs 5 worker nodes, and the deployment has 4 at most: give"),
        (Range(2, 2), 15 * 24 * 3600, "no_capacity", "it was not its turn within 14 days"),
    ],
)
def test_a_job_that_gets_no_turn_ends_with_a_record(
    keeper: ModuleType, queue: Aws, nodes: Range, waited_s: float, status: str, reason: str
) -> None:
    queue.execute("third")
    found = admitted(keeper, "third", nodes, waited_s=waited_s)
    assert (found["status"], found["again"]) == (status, False)
    record = queue.objects["ends/r1/third.json"]
    assert (record["status"], record["attempts"], record["deadline"]) == (status, 0, None)
    assert reason in record["reason"]


def test_a_job_is_admitted_to_the_pools_that_have_room_for_it(
    keeper: ModuleType, queue: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_heads=4, max_workers=3, pools={"l4": 2})
    monkeypatch.setattr(keeper, "LIMITS", limits)
    queue.execute("third")
    event = {"Action": "admit", "Job": "third", "Began": time.time() - 60}

    def asked(*pools: str) -> dict[str, Any]:
        spec = replace(SPEC, nodes=Range(1, 1), pools=pools)
        found: dict[str, Any] = keeper.handler(event | {"Spec": spec.to_json()}, None)
        return found

    found = asked("default", "l4")
    assert (found["status"], found["pools"], found["nodes"]) == ("running", ["l4"], "1")
    assert asked("default")["status"] == "queued"
    assert "has 0 in pool gone: give fewer --nodes" in asked("gone")["reason"]


# --- the state machine ----------------------------------------------------------------------------
def definition(synth: Synth, **settings: str) -> dict[str, Any]:
    """References in it are in angle brackets."""
    machine = synth(**settings).only("AWS::StepFunctions::StateMachine")
    found: dict[str, Any] = json.loads(text(machine["DefinitionString"]))
    return found


def test_the_head_is_told_what_it_reads_and_what_its_size_is_checked_by(synth: Synth) -> None:
    told = definition(synth)["States"]["Head"]["Arguments"]["Overrides"]
    expected = overrides(
        head_variables(job="{% $job %}", deadline="{% $string($deadline) %}", spec="{% $order %}")
    )

    def renamed(value: Any) -> Any:
        """As Step Functions writes ECS's names."""
        if isinstance(value, dict):
            return {name[:1].upper() + name[1:]: renamed(each) for name, each in value.items()}
        return [renamed(each) for each in value] if isinstance(value, list) else value

    assert told == renamed(expected)
