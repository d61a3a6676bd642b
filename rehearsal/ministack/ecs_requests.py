"""Requests that ECS refuses and the emulator takes, and answers that lag behind.

RunTask         of a revision that was replaced, and while ECS throttles
ExecuteCommand  in a task that was started without it

What Step Functions tells of executions follows what happened after a while. Here it is up to
``DELAY_S``, or ``REHEARSAL_DELAY_S``: a part of it for each execution, which ``REHEARSAL_SEED``
decides together with its ARN. Inside ``.venv-aws`` only.
"""

import contextlib
import hashlib
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rehearsal.ministack.ecs_hosts import DELAY_S, refuse
from rehearsal.ministack.internals import ecs, stepfunctions

Request = dict[str, Any]

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
    if definition.get("status") == "INACTIVE":
        return refuse("ClientException", "TaskDefinition is inactive")
    return _stock["RunTask"](request)


def execute_command(request: Request) -> Any:
    """ExecuteCommand: only where the task was started for it."""
    cluster = ecs._resolve_cluster_name(request.get("cluster", "default"))
    task = ecs._resolve_task(request.get("task", ""), cluster) or {}
    if task and not task.get("enableExecuteCommand"):
        return refuse("InvalidParameterException", NO_EXEC)
    return _stock["ExecuteCommand"](request)


_stock: dict[str, Any] = {}


def install() -> None:
    """Give the emulator these. After its tasks and hosts: they answer what is not refused."""
    own = {"RunTask": run_task, "ExecuteCommand": execute_command}
    _stock.update({name: ecs._ACTION_MAP[name] for name in own})
    ecs._ACTION_MAP.update(own)


#: Of an execution that has ended and that does not show yet.
ENDS = ("stopDate", "output", "error", "cause")

Record = dict[str, Any]


def delay_s(arn: str) -> float:
    """How long it takes until a change of this execution shows."""
    most = float(os.environ.get("REHEARSAL_DELAY_S") or DELAY_S)
    digest = hashlib.sha256(f"{os.environ.get('REHEARSAL_SEED', '')} {arn}".encode()).digest()
    return most * digest[0] / 255


def is_new(arn: str, changed: object) -> bool:
    """Whether what changed at a time does not show yet; False for what has not changed."""
    if isinstance(changed, str) and changed:
        changed = datetime.fromisoformat(changed).timestamp()
    return isinstance(changed, int | float) and time.time() - changed < delay_s(arn)


# --- executions -----------------------------------------------------------------------------------
def shown(found: Record) -> Record:
    """An execution as it shows: where it has ended just now, it still runs; {} where it is new."""
    arn = found["executionArn"]
    if is_new(arn, found["startDate"]):
        return {}
    if is_new(arn, found.get("stopDate")):
        found = {name: value for name, value in found.items() if name not in ENDS}
        found["status"] = "RUNNING"
    return found


def describe_execution(request: Record) -> Any:
    """DescribeExecution."""
    status, headers, body = _stock_answers["DescribeExecution"](request)
    if status >= 400:
        return status, headers, body
    if found := shown(json.loads(body)):
        return status, headers, json.dumps(found).encode()
    return _stock_answers["DescribeExecution"]({"executionArn": "not-yet"})


def list_executions(request: Record) -> Any:
    """ListExecutions; a filter by status is by the one that shows."""
    wanted = request.get("statusFilter")
    everything = {name: value for name, value in request.items() if name != "statusFilter"}
    status, headers, body = _stock_answers["ListExecutions"](everything)
    if status >= 400:
        return status, headers, body
    answer = json.loads(body)
    found = [each for each in map(shown, answer["executions"]) if each]
    found = [each for each in found if wanted in (None, each["status"])]
    return status, headers, json.dumps(answer | {"executions": found}).encode()


_stock_answers: dict[str, Any] = {}


def install_delays() -> None:
    """Give the emulator these."""
    _stock_answers["DescribeExecution"] = stepfunctions._describe_execution
    _stock_answers["ListExecutions"] = stepfunctions._list_executions
    stepfunctions._describe_execution = describe_execution
    stepfunctions._list_executions = list_executions
