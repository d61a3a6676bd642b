"""What the end of a head's task means for its job: why it ended, and whether it is tried again.

The function that cleans up after jobs asks (``stacks/job_keeper``).
"""

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
    container: dict[str, Any] = next(iter(task.get("Containers") or []), {})
    code = container.get("ExitCode")
    stopped = task.get("StoppedReason") or ""
    said = container.get("Reason") or stopped
    ordered = status_of_stop(stopped)  # by this function's sweep
    how = ending_of(task, error)

    def ended(status: JobStatus, reason: str, *, again: bool = False) -> Outcome:
        return Outcome(status=status, reason=reason, exit_code=code, again=again, attempts=attempt)

    if code == exits.OK:
        return ended(JobStatus.SUCCEEDED, "succeeded")
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
    container: dict[str, Any] = next(iter(task.get("Containers") or []), {})
    said = container.get("Reason") or task.get("StoppedReason") or error
    code = container.get("ExitCode")
    return ending(stop_code=task.get("StopCode") or "", reason=said, exit_code=code)
