"""Requests that ECS refuses, and the emulator takes. Imported inside ``.venv-aws`` only.

RunTask         of a revision that was replaced, and while ECS throttles; answers that are lost
ListTasks       by ``startedBy`` and anything else
ExecuteCommand  in a task that was started without it
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

from rehearsal.ministack.internals import ecs
from rehearsal.ministack.switches import Strict, is_strict

Request = dict[str, Any]

#: Beside the cluster and the page.
FILTERS = ("containerInstance", "desiredStatus", "family", "launchType", "serviceName")
NO_EXEC = (
    "The execute command failed because execute command was not enabled when the task was run or "
    "the execute command agent isn't running. Wait and try again or run a new task with execute "
    "command enabled and try again."
)
_fault = threading.Lock()
#: How many of a group's faults have happened.
_past: dict[str, int] = {}


def run_task(request: Request) -> Any:
    """RunTask, as requests and state machines ask for it."""
    fault = next_fault(request)
    if fault == "throttled":
        return refuse("ThrottlingException", "Rate exceeded")
    definition = ecs._task_defs.get(ecs._resolve_td_key(request.get("taskDefinition", ""))) or {}
    if definition.get("status") == "INACTIVE" and is_strict(Strict.REVISIONS):
        return refuse("ClientException", "TaskDefinition is inactive")
    answer = _stock["RunTask"](request)
    # The task is there, and who has asked for it does not hear of it.
    return refuse("ServerException", "Service Unavailable", 500) if fault == "lost" else answer


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


def next_fault(request: Request) -> str:
    """What goes wrong with this request: ``faults.json`` in the local AWS's folder has a list of
    ``throttled`` and ``lost`` for each group of tasks, or for ``*``; each happens once."""
    file = Path(os.environ["REHEARSAL_FOLDER"]) / "faults.json"
    try:
        planned = json.loads(file.read_text())
    except (OSError, ValueError):
        return ""
    group = request.get("group", "")
    group = group if group in planned else "*"
    with _fault:
        left = planned.get(group, [])[_past.get(group, 0) :]
        if left:
            _past[group] = _past.get(group, 0) + 1
    return str(left[0]) if left else ""


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
