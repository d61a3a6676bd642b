"""Sweeps of the keeper, and ends of jobs, whose calls fail: all else is done."""

import json
import time
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

from contract import exits, times
from contract.admission import Limits
from contract.job import head_variables, overrides
from contract.nodes import Range
from tests.aws.calls import refused
from tests.heads import head
from tests.stacks.test_job_keeper import ANNA, SPEC, Aws, ago, aws, ended, paid, with_deadline

__all__ = ["aws"]

HOLD = "heads/r1/j1.hold"
#: Of S3, when it answers nothing of use.
OUTAGES = (
    refused("ServiceUnavailable"),
    EndpointConnectionError(endpoint_url="s3"),
    ReadTimeoutError(endpoint_url="s3"),
)


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
    assert aws.end(head(StopCode="SpotInterruption"), replace(SPEC, hold_s=600))["again"]


def test_an_order_that_is_not_understood_is_cleaned_up_after_all_the_same(
    keeper: ModuleType, aws: Aws
) -> None:
    found = keeper.handler(ended(head(2), Spec='{"run": "r1"}'), None)
    assert (found["status"], found["again"]) == ("failed", False)
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert not aws.objects, "it is not known whose run it was"
    newer = json.dumps(json.loads(SPEC.to_json()) | {"of_another_deployment": 1})
    keeper.handler(ended(head(2), Spec=newer), None)
    assert aws.objects.keys() == {"ends/r1/j1.json"}


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize("fails", ["get_object", "list_executions"])
def test_a_sweep_that_is_not_answered_does_all_else(
    aws: Aws, outage: Exception, fails: str
) -> None:
    aws.execute("j1", "FAILED", times.SWEEP_GRACE_S + 60, input=paid(ANNA).to_json())
    aws.end(head(3), paid(ANNA))
    aws.add("left", startedBy="j1", group="job:j1", host="h9")
    held = replace(SPEC, capacity_wait_s=60, hold_s=600).to_json()
    given = head_variables(job="j", deadline=str(int(time.time()) + 9000), spec=held)
    aws.tasks["other-head"] |= {"overrides": overrides(given), "startedAt": ago(50)}
    aws.fails[fails] = outage
    with pytest.raises(RuntimeError, match="left to the next sweep: records: "):
        aws.sweep()
    assert aws.running() == {"other-head", "other-1", "standing"}
    assert len(aws.sent("publish")) == 1


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
    if is_killed:
        with pytest.raises(SystemExit):
            aws.end(head(3), paid(ANNA))
        aws.fails.clear()
    for code in (3, 0):  # the first record counts, also where a person redrives the execution
        found = aws.end(head(code), paid(ANNA))
        assert (found["status"], found["again"]) == ("failed", False)
    assert len(aws.sent("publish")) == 1


def test_one_host_that_takes_no_mark_keeps_no_other_one(aws: Aws) -> None:
    aws.fails["put_attributes"] = refused("InvalidParameterException")
    aws.join("away", agentConnected=False)
    aws.join("idle")
    aws.launch("i-late", ago_s=9000)
    assert aws.sweep()["released"] == ["idle", "i-late"]


def test_no_task_keeps_the_sweep_from_the_others(aws: Aws) -> None:
    aws.tasks["own-head"]["overrides"] = with_deadline("never")
    for name in ("own-1", "other-1"):
        aws.tasks[name]["overrides"] = with_deadline(-500)
    aws.fails["stop_task"] = lambda task, **_: task == "own-1" and refused("Throttling")
    # The others are ended all the same, and the alarm hears of it.
    with pytest.raises(RuntimeError, match=r"left to the next sweep: own-1: .*Throttling"):
        aws.sweep()
    assert aws.running() == {"own-1", "own-2", "other-head", "standing"}
    aws.fails.clear()
    aws.execute("j1", "FAILED", input="")
    aws.sweep()
    assert aws.running() == {"other-head", "standing"}


def test_a_refused_resumption_stops_no_sweep(aws: Aws) -> None:
    group = aws.group("workers")
    group.record |= {"SuspendedProcesses": [{"ProcessName": "Launch"}], "DesiredCapacity": 9}
    aws.fails["resume_processes"] = refused("AccessDenied")
    aws.sweep()
    assert group.desired == len(group.instances), "what follows it is done"


def test_an_order_that_is_not_understood_holds_a_head_and_gets_none(
    keeper: ModuleType, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are hosts for three heads and four workers."""
    monkeypatch.setattr(keeper, "LIMITS", Limits(max_heads=3, max_workers=4))
    aws.executions.clear()
    aws.execute("first", input=replace(SPEC, nodes=Range(1, 1)).to_json())
    aws.execute("second", input='{"of": "another version"}')
    aws.execute("third")

    def admitted(spec: str, began: float) -> Any:
        return aws.sweep(Action="admit", Job="third", Spec=spec, Began=began)

    order = replace(SPEC, nodes=Range(3, 3)).to_json()
    assert admitted(order, time.time() - 60)["status"] == "running"
    found = admitted("{}", 0)
    assert (found["status"], found["reason"]) == ("failed", "failed: its order is not understood")
