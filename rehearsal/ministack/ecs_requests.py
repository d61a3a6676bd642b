"""Requests that ECS refuses and the emulator takes, and answers that lag behind.

RunTask         of a revision that was replaced, and while ECS throttles
ListTasks       by ``startedBy`` and anything else
ExecuteCommand  in a task that was started without it

ECS's lists of tasks, and what Step Functions tells of executions, follow what happened after a
while. Here it is up to ``DELAY_S``, or ``REHEARSAL_DELAY_S``: a part of it for each task and
execution, which ``REHEARSAL_SEED`` decides together with its ARN. Inside ``.venv-aws`` only.
"""

import contextlib
import hashlib
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rehearsal.ministack.internals import ecs, stepfunctions
from rehearsal.ministack.switches import Strict, is_strict

Request = dict[str, Any]

#: Beside the cluster and the page.
FILTERS = ("containerInstance", "desiredStatus", "family", "launchType", "serviceName")
NO_EXEC = (
    "The execute command failed because execute command was not enabled when the task was run or "
    "the execute command agent isn't running. Wait and try again or run a new task with execute "
    "command enabled and try again."
)


def run_task(request: Request) -> Any:
    """RunTask, as requests and state machines ask for it."""
    # Where this file lies in the local AWS's folder, the next request is throttled.
    with contextlib.suppress(FileNotFoundError):
        Path(os.environ["REHEARSAL_FOLDER"], "throttle").unlink()
        return refuse("ThrottlingException", "Rate exceeded")
    definition = ecs._task_defs.get(ecs._resolve_td_key(request.get("taskDefinition", ""))) or {}
    if definition.get("status") == "INACTIVE" and is_strict(Strict.REVISIONS):
        return refuse("ClientException", "TaskDefinition is inactive")
    return _stock["RunTask"](request)


def list_tasks(request: Request) -> Any:
    """ListTasks: with ``startedBy`` as the only filter, if it is one."""
    others = [each for each in FILTERS if request.get(each)]
    if request.get("startedBy") and others and is_strict(Strict.FILTERS):
        what = f"startedBy cannot be combined with {', '.join(others)}"
        return refuse("InvalidParameterException", what)
    return _stock["ListTasks"](request)


def execute_command(request: Request) -> Any:
    """ExecuteCommand: only where the task was started for it."""
    cluster = ecs._resolve_cluster_name(request.get("cluster", "default"))
    task = ecs._resolve_task(request.get("task", ""), cluster) or {}
    if task and not task.get("enableExecuteCommand") and is_strict(Strict.EXEC):
        return refuse("InvalidParameterException", NO_EXEC)
    return _stock["ExecuteCommand"](request)


def refuse(kind: str, message: str, status: int = 400) -> Any:
    """An error of ECS, as it answers."""
    body = json.dumps({"__type": kind, "message": message}).encode()
    return status, {"Content-Type": "application/x-amz-json-1.1", "x-amzn-errortype": kind}, body


_stock: dict[str, Any] = {}


def install() -> None:
    """Give the emulator these, before or after tasks become containers."""
    own = {"RunTask": run_task, "ListTasks": list_tasks, "ExecuteCommand": execute_command}
    _stock.update({name: ecs._ACTION_MAP[name] for name in own})
    ecs._ACTION_MAP.update(own)


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
def list_settled_tasks(request: Record) -> Any:
    """ListTasks, without what has just started; what was just told to stop is still there."""
    status, headers, body = _stock_answers["ListTasks"](request)
    if status >= 400:
        return status, headers, body
    answer = json.loads(body)
    wants_stopped = request.get("desiredStatus") == "STOPPED"
    arns = [arn for arn in answer["taskArns"] if not is_new(arn, _changed(arn, wants_stopped))]
    if not wants_stopped:
        ended = _stock_answers["ListTasks"](request | {"desiredStatus": "STOPPED"})
        arns += [
            arn for arn in json.loads(ended[2])["taskArns"] if is_new(arn, _changed(arn, True))
        ]
    if host := request.get("containerInstance"):  # the emulator lists those of all hosts
        arns = [arn for arn in arns if ecs._tasks[arn].get("containerInstanceArn") == host]
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
    status, headers, body = _stock_answers["DescribeExecution"](request)
    if status >= 400:
        return status, headers, body
    found = json.loads(body)
    if is_new(arn, found["startDate"]):
        return _stock_answers["DescribeExecution"]({"executionArn": f"{arn}-not-yet"})
    if is_new(arn, found.get("stopDate")):
        found = found | dict.fromkeys(ENDS) | {"status": "RUNNING"}
        found = {name: value for name, value in found.items() if value is not None}
    return status, headers, json.dumps(found).encode()


def list_executions(request: Record) -> Any:
    """ListExecutions, the same; a filter by status is by the one that shows."""
    wanted = request.get("statusFilter")
    everything = {name: value for name, value in request.items() if name != "statusFilter"}
    status, headers, body = _stock_answers["ListExecutions"](everything)
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


_stock_answers: dict[str, Any] = {}


def install_delays() -> None:
    """Give the emulator these. Before what refuses lists with two filters: this asks for such."""
    _stock_answers["ListTasks"] = ecs._ACTION_MAP["ListTasks"]
    _stock_answers["DescribeExecution"] = stepfunctions._describe_execution
    _stock_answers["ListExecutions"] = stepfunctions._list_executions
    ecs._ACTION_MAP["ListTasks"] = list_settled_tasks
    stepfunctions._describe_execution = describe_execution
    stepfunctions._list_executions = list_executions
