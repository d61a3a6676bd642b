"""What has just changed is not in every answer yet. Imported inside ``.venv-aws`` only.

ECS's lists of tasks, and what Step Functions tells of executions, follow what happened after a
while. Here it is up to ``DELAY_S``, or what ``REHEARSAL_DELAY_S`` says: a part of it for each task
and execution, which ``REHEARSAL_SEED`` decides together with its ARN.
"""

import hashlib
import json
import os
import time
from datetime import datetime
from typing import Any

from rehearsal.ministack.internals import ecs, stepfunctions
from rehearsal.ministack.switches import Strict, is_strict

DELAY_S = 1.0
#: Of an execution that has ended and that does not show yet.
ENDS = ("stopDate", "output", "error", "cause")

Record = dict[str, Any]


def delay_s(arn: str) -> float:
    """How long it takes until a change of this task or execution shows."""
    if not is_strict(Strict.CONSISTENCY):
        return 0
    most = float(os.environ.get("REHEARSAL_DELAY_S") or DELAY_S)
    digest = hashlib.sha256(f"{os.environ.get('REHEARSAL_SEED', '')} {arn}".encode()).digest()
    return most * digest[0] / 255


def is_new(arn: str, changed: object) -> bool:
    """Whether what changed at a time does not show yet; False for what has not changed."""
    if isinstance(changed, str) and changed:
        changed = datetime.fromisoformat(changed).timestamp()
    return isinstance(changed, int | float) and time.time() - changed < delay_s(arn)


# --- tasks ----------------------------------------------------------------------------------------
def list_tasks(request: Record) -> Any:
    """ListTasks, without what has just started; what was just told to stop is still there."""
    status, headers, body = _stock["ListTasks"](request)
    if status >= 400:
        return status, headers, body
    answer = json.loads(body)
    wants_stopped = request.get("desiredStatus") == "STOPPED"
    arns = [arn for arn in answer["taskArns"] if not is_new(arn, _changed(arn, wants_stopped))]
    if not wants_stopped:
        ended = _stock["ListTasks"](request | {"desiredStatus": "STOPPED"})
        arns += [
            arn for arn in json.loads(ended[2])["taskArns"] if is_new(arn, _changed(arn, True))
        ]
    return status, headers, json.dumps(answer | {"taskArns": arns}).encode()


def _changed(arn: str, has_stopped: bool) -> object:
    task = ecs._tasks[arn]
    if has_stopped:
        return task.get("stoppingAt") or task.get("stoppedAt")
    return task.get("createdAt")


# --- executions -----------------------------------------------------------------------------------
def describe_execution(request: Record) -> Any:
    """DescribeExecution: there is none yet, or it still runs."""
    arn = request.get("executionArn", "")
    status, headers, body = _stock["DescribeExecution"](request)
    if status >= 400:
        return status, headers, body
    found = json.loads(body)
    if is_new(arn, found["startDate"]):
        return _stock["DescribeExecution"]({"executionArn": f"{arn}-not-yet"})
    if is_new(arn, found.get("stopDate")):
        found = found | dict.fromkeys(ENDS) | {"status": "RUNNING"}
        found = {name: value for name, value in found.items() if value is not None}
    return status, headers, json.dumps(found).encode()


def list_executions(request: Record) -> Any:
    """ListExecutions, the same; a filter by status is by the one that shows."""
    wanted = request.get("statusFilter")
    everything = {name: value for name, value in request.items() if name != "statusFilter"}
    status, headers, body = _stock["ListExecutions"](everything)
    if status >= 400:
        return status, headers, body
    answer = json.loads(body)
    found = []
    for each in answer["executions"]:
        arn = each["executionArn"]
        if is_new(arn, each["startDate"]):
            continue
        shown = each
        if is_new(arn, each.get("stopDate")):
            shown = {name: value for name, value in each.items() if name not in ENDS}
            shown["status"] = "RUNNING"
        if wanted in (None, shown["status"]):
            found.append(shown)
    return status, headers, json.dumps(answer | {"executions": found}).encode()


_stock: dict[str, Any] = {}


def install() -> None:
    """Give the emulator these. Before what refuses lists with two filters: this asks for such."""
    _stock["ListTasks"] = ecs._ACTION_MAP["ListTasks"]
    _stock["DescribeExecution"] = stepfunctions._describe_execution
    _stock["ListExecutions"] = stepfunctions._list_executions
    ecs._ACTION_MAP["ListTasks"] = list_tasks
    stepfunctions._describe_execution = describe_execution
    stepfunctions._list_executions = list_executions
