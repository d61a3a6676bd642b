"""Hosts for tasks: as many as a file says, and for as long as ECS waits for one. Imported inside
``.venv-aws`` only.

ECS ends a task that has waited for a host for 10 to 30 minutes. Here it is ``PATIENCE_S``, or what
``REHEARSAL_PATIENCE_S`` says.
"""

import json
import os
import threading
import time
from typing import Any

from rehearsal.ministack import ecs_hosts
from rehearsal.ministack.internals import concurrency, ecs, responses
from rehearsal.ministack.switches import Strict, is_strict

PATIENCE_S = 60
POLL_S = 0.25
#: What ECS says of a task on EC2 that no host came for.
NO_HOST_CAME = "EMPTY CAPACITY PROVIDER"

_placing = threading.Lock()


def has_host(task: dict[str, Any]) -> bool:
    """Whether a host is free: ``capacity.json`` in the local AWS's folder may say how many there
    are for a capacity provider; without, there is always one more. The task has it then."""
    provider = task.get("capacityProviderName") or ""
    try:
        most = json.loads((ecs_hosts.folder() / "capacity.json").read_text()).get(provider)
    except (OSError, ValueError):
        most = None
    return not provider or ecs_hosts.take(task, most)


def place(task: dict[str, Any], become: Any) -> bool:
    """Wait until a task has a host and give it that: ``become()`` makes it what it is on it.

    Returns what ``become`` does; False where the task has ended before.
    """
    arn, began = task["taskArn"], time.monotonic()
    patience = float(os.environ.get("REHEARSAL_PATIENCE_S") or PATIENCE_S)
    while ecs._task_is_active(arn, task):
        with _placing:
            if has_host(task):
                return bool(become())
        if time.monotonic() - began > patience and is_strict(Strict.PATIENCE):
            ecs._mark_task_stopped(arn, task, NO_HOST_CAME, "TaskFailedToStart")
            return False
        time.sleep(POLL_S)
    return False


def place_record(task: dict[str, Any]) -> None:
    """The same for a task that is only a record, which the emulator says is running at once."""
    task["lastStatus"] = "PROVISIONING"
    for container in task["containers"]:
        container["lastStatus"] = "PENDING"

    def run() -> bool:
        task["lastStatus"] = "RUNNING"
        for container in task["containers"]:
            container["lastStatus"] = "RUNNING"
        return True

    account, region = responses.get_account_id(), responses.get_region()

    def wait() -> None:
        with responses.request_scope(account, region):
            place(task, run)

    concurrency.spawn_background(wait, thread_name=f"ecs-place-{task['taskArn'][-8:]}")


def install_for_records() -> None:
    """Give hosts to tasks that are only records, too."""
    ecs_hosts.install()
    stock = ecs._ACTION_MAP["RunTask"]

    def run_task(request: dict[str, Any]) -> Any:
        status, headers, body = stock(request)
        answer = json.loads(body)
        for each in answer.get("tasks", []):
            task = ecs._tasks[each["taskArn"]]
            own = task.pop("containerInstanceArn")
            with _placing:
                is_placed = has_host(task)
            if not task.get("capacityProviderName"):
                task["containerInstanceArn"] = own
            if not is_placed:
                place_record(task)
            each.pop("containerInstanceArn", None)
            each.update(ecs._sanitize(task))
        return status, headers, json.dumps(answer).encode()

    ecs._ACTION_MAP["RunTask"] = run_task
