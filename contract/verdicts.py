"""What the end of a head's task means for its job: why it ended, and whether it is tried again.

The function that cleans up after jobs asks (``stacks/job_keeper``).
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contract import exits
from contract.endings import Ending, ending
from contract.job import STOPPED_BY_USER, JobStatus, Outcome, status_of_stop

#: ECS's words where no host came for a task, or none has room.
NO_HOST = r"capacity provider|capacity is unavailable|\bRESOURCE:|No Container Instances"
#: ECS's own words when a user stops a task without giving a reason.
NO_REASON_GIVEN = "Task stopped by user"


def head_of(event: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The task of a head that has ended, empty where there was none, and the error.

    The job has to be cleaned up after whatever they say, so what is not understood is left out.

    Args:
        event: ``Task``, or ``Error`` and ``Cause`` of Step Functions. The cause is the task, what
            ECS could not start (a list, or an object with one), or text.
    """
    task: Any = event.get("Task") or {}
    error = str(event.get("Error") or "")
    if cause := event.get("Cause"):
        try:
            task = json.loads(cause)
        except (TypeError, ValueError, RecursionError):
            error = f"{error}: {cause}"
    failures = task.get("Failures") if isinstance(task, dict) else task
    if failures:
        listed = failures if isinstance(failures, list) else [failures]
        said = [(isinstance(each, dict) and each.get("Reason")) or each for each in listed if each]
        task, error = {}, f"{error}: {'; '.join(str(each) for each in said)}"
    return task if isinstance(task, dict) else {}, error


def verdict(
    task: Mapping[str, Any],
    error: str,
    *,
    deadline: float,
    patience: float,
    attempt: int,
    attempts: int,
) -> Outcome:
    """What the end of a head task means.

    Args:
        task: its description, as Step Functions writes it (``Containers``, ``StopCode`` ...); empty
            when there was none.
        error: name of Step Functions' error, with its cause where that is no task.
        deadline: Unix time.
        patience: Unix time until which a host for the head is asked for.
        attempt: number of this attempt, from 1.
        attempts: as many as the job may have.
    """
    container = _container(task)
    code = _exit_code(container)
    stopped = text_of(task, "StoppedReason")
    said = text_of(container, "Reason") or stopped
    ordered = status_of_stop(stopped)  # by this function's sweep
    how = ending_of(task, error)

    def ended(status: JobStatus, reason: str, *, again: bool = False) -> Outcome:
        return Outcome(status=status, reason=reason, exit_code=code, again=again, attempts=attempt)

    if code == exits.OK:
        return ended(JobStatus.SUCCEEDED, "succeeded")
    if code == exits.FILES_LOST:  # at the deadline, maybe: the last copy is retried until then
        return ended(JobStatus.FILES_LOST, "files lost")
    is_late = error.startswith("States.Timeout") or time.time() > deadline
    if code == exits.DEADLINE or ordered == JobStatus.DEADLINE or is_late:
        return ended(JobStatus.DEADLINE, "deadline")
    if code == exits.NO_CAPACITY or ordered == JobStatus.NO_CAPACITY:
        return ended(JobStatus.NO_CAPACITY, "no capacity")
    not_run = how in (Ending.NOT_STARTED, Ending.HOST_FAULT)
    if not_run and re.search(NO_HOST, f"{said} {error}", re.IGNORECASE):
        # It did not run, so it does not count.
        found = ended(JobStatus.NO_CAPACITY, "no capacity", again=time.time() < patience)
        return replace(found, attempts=attempt - 1)
    lost = {
        Ending.BAD_HOST: f"its host is not fit: {said}",
        Ending.HOST_FAULT: f"the head could not be started: {said or error}",
        Ending.HOST_LOST: "its host was lost",
        Ending.KILLED: "the head was killed",
    }.get(how)
    if code == exits.BAD_HOST:
        lost = "its host's GPUs or EFA devices are not healthy"
    if code == exits.RAY_FAILED:
        lost = "Ray did not start on its head, or ended there by itself"
    if lost is not None:
        repeated = f", {attempt} times" if attempt > 1 else ""
        lost = f"failed: {lost}"[:1000]
        return ended(JobStatus.HOST_LOST, f"{lost}{repeated}", again=attempt < attempts)
    if how is Ending.STOPPED:
        by_user = stopped in ("", STOPPED_BY_USER, NO_REASON_GIVEN)
        return ended(
            JobStatus.STOPPED, STOPPED_BY_USER if by_user else f"its head was stopped: {stopped}"
        )
    if code in (exits.TERMINATED, exits.INTERRUPTED):
        return ended(JobStatus.STOPPED, f"its command was stopped (exit code {code})")
    if how is Ending.IMAGE_NOT_FOUND:
        return ended(JobStatus.IMAGE_NOT_FOUND, f"image not found: {said}")
    if how is Ending.OUT_OF_MEMORY:
        return ended(JobStatus.FAILED, "failed: out of memory on the head")
    if code == exits.ASKS_TOO_MUCH:
        return ended(JobStatus.FAILED, "failed: asks for more than the job can have")
    if code is not None:
        return ended(JobStatus.FAILED, f"failed: user code exit {code}")
    why = said or error or "unknown"
    return ended(JobStatus.FAILED, f"failed: the head did not start: {why}"[:1000])


def ending_of(task: Mapping[str, Any], error: str = "") -> Ending:
    """How a head's task ended, or how RunTask did."""
    container = _container(task)
    said = text_of(container, "Reason") or text_of(task, "StoppedReason") or error
    code = _exit_code(container)
    return ending(stop_code=text_of(task, "StopCode"), reason=said, exit_code=code)


def text_of(values: Mapping[str, Any], name: str) -> str:
    """A text in what AWS describes; "" where there is none."""
    found = values.get(name)
    return found if isinstance(found, str) else ""


def _container(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """The head's container; empty where it has none."""
    containers = task.get("Containers")
    first = containers[0] if isinstance(containers, list) and containers else None
    return first if isinstance(first, dict) else {}


def _exit_code(container: Mapping[str, Any]) -> int | None:
    code = container.get("ExitCode")
    return code if isinstance(code, int) and not isinstance(code, bool) else None
