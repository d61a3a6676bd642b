"""Outcome of a job from the end of its head's task, and the marks left on tasks and hosts.

``ending`` reads ECS's stop code, reason and exit code, for ``trainctl cluster up`` and for the
function that cleans up after jobs (``stacks/jobs/keeper``). ``verdict`` maps the end of a head's
task to the job's outcome and to a retry.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Final

from contract import exits, times
from contract.job import (
    JOB_GROUP,
    STOPPED_BY_USER,
    Hold,
    JobStatus,
    Outcome,
    status_of_stop,
)
from contract.nodes import ENV_DEADLINE

#: Stop codes of a task whose host went away below it.
_HOST_LOST: Final = ("SpotInterruption", "TerminationNotice")
#: Reasons why an image cannot be pulled in another attempt either.
_NO_IMAGE: Final = r"not found|manifest unknown|does not exist|no such image|platform"
#: GPUs or EFA devices that are not there when a container starts, and a full disk: the next task
#: fails there too.
_BAD_HOST: Final = (
    r"nvidia-container|libnvidia|libcuda|NVML|could not select device driver|"
    r"custom device \W*/dev/infiniband|no space left on device"
)
#: The host or AWS could not do its part.
_HOST_FAULT: Final = (
    r"Cannot(Pull|Create|Start|Inspect)Container|ResourceInitialization|ContainerRuntime|"
    r"DockerTimeout|\bAGENT\b|agent .*disconnect|Throttl|Rate exceeded|"
    r"ECS\.(AmazonECS|Server)Exception"
)
#: Errors about a secret, which another attempt would get too.
_NO_SECRET: Final = r"ResourceNotFoundException|AccessDenied"


class Ending(Enum):
    """Kinds of end of a task."""

    HOST_LOST = auto()
    """Its host was reclaimed, terminated or stopped."""
    STOPPED = auto()
    """A user, or a program for one, stopped it."""
    SURPLUS = auto()
    """Its service had more tasks than it should keep."""
    IMAGE_NOT_FOUND = auto()
    """The image does not exist."""
    BAD_HOST = auto()
    """Its host is not fit to run it: its GPUs do not answer, or its disk is full."""
    HOST_FAULT = auto()
    """Its host or AWS could not start it: a pull, a secret, the agent, throttling."""
    OUT_OF_MEMORY = auto()
    """Linux killed it because it used more memory than it may."""
    KILLED = auto()
    """SIGKILL from elsewhere."""
    EXITED = auto()
    """Its container ended by itself, with an exit code."""
    NOT_STARTED = auto()
    """Its container never ran."""


def ending(*, stop_code: str, reason: str, exit_code: int | None) -> Ending:
    """Classify the end of a task.

    Args:
        stop_code: of the task.
        reason: of its container, or of the task where the container has none; the error of RunTask
            where there is no task.
        exit_code: of its container; None where it has none.
    """
    if stop_code in _HOST_LOST or re.search(r"Host EC2 .*(terminated|stopped)", reason):
        return Ending.HOST_LOST
    if stop_code == "UserInitiated":
        return Ending.STOPPED
    if stop_code == "ServiceSchedulerInitiated":
        return Ending.SURPLUS
    has_not_run = exit_code is None
    if exit_code == exits.BAD_HOST or (has_not_run and _says(_BAD_HOST, reason)):
        return Ending.BAD_HOST
    if "CannotPullContainer" in reason and _says(_NO_IMAGE, reason):
        return Ending.IMAGE_NOT_FOUND
    if "OutOfMemory" in reason:
        return Ending.OUT_OF_MEMORY
    if exit_code == exits.KILLED:
        return Ending.KILLED
    if has_not_run:
        is_fault = _says(_HOST_FAULT, reason) and not _says(_NO_SECRET, reason)
        return Ending.HOST_FAULT if is_fault else Ending.NOT_STARTED
    return Ending.EXITED


def _says(pattern: str, reason: str) -> bool:
    return re.search(pattern, reason, re.IGNORECASE) is not None


# --- what it means for a job ----------------------------------------------------------------------
#: ECS's words where no host came for a task, or none has room.
NO_HOST = r"capacity provider|capacity is unavailable|\bRESOURCE:|No Container Instances"
#: AWS's words, or its code, where a launch fails however often it is tried: a quota of nothing, a
#: type that the zone lacks, a right, a key, an image or a reservation that is not there (EC2 Auto
#: Scaling's guide, "Troubleshoot EC2 instance launch failures"; EC2's reference, "Error codes").
_IN_VAIN: Final = (
    r"current vCPU limit of 0 |Unsupported|not supported in your requested|"
    r"UnauthorizedOperation|not authorized|Client\.InternalError|KMS|"
    r"capacity reservation.*(not found|expired|cancelled)|"
    r"Invalid\w+\.(NotFound|Malformed)|does not exist"
)
#: So many times in a row a head may be killed, or its Ray end: that may be its program's fault.
MOST_IN_VAIN: Final = 3
#: ECS's own words when a user stops a task without giving a reason.
NO_REASON_GIVEN = "Task stopped by user"


def head_of(event: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The task of a head that has ended, empty where there was none, and the error.

    Ignore unparsable fields: cleanup must run regardless.

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
    in_a_row: int,
) -> Outcome:
    """Outcome of a job whose head task has ended.

    Failures of AWS, hosts, or storage never end a job before its deadline.

    Args:
        task: its description, as Step Functions writes it (``Containers``, ``StopCode`` ...); empty
            when there was none.
        error: name of Step Functions' error, with its cause where that is no task.
        deadline: Unix time.
        patience: Unix time until which a host for the head is asked for. What counts for both is
            when the task ended, not when this is asked.
        attempt: number of this attempt, from 1.
        in_a_row: the same, counted since one has run for long.
    """
    container = _container(task)
    code = _exit_code(container)
    stopped = text_of(task, "StoppedReason")
    said = text_of(container, "Reason") or stopped
    ordered = status_of_stop(stopped)  # by this function's sweep
    how = ending_of(task, error)
    ended_at = _time_of(task, "StoppedAt")
    if ended_at - _time_of(task, "StartedAt") > times.LONG_RUN_S:
        in_a_row = 1  # it has saved since

    def ended(status: JobStatus, reason: str, *, again: bool = False) -> Outcome:
        return Outcome(
            status=status,
            reason=reason,
            exit_code=code,
            again=again,
            attempts=attempt,
            in_a_row=in_a_row,
        )

    if code == exits.OK:
        return ended(JobStatus.SUCCEEDED, "succeeded")
    if code == exits.FILES_LOST:  # at the deadline, maybe: the last copy is retried until then
        return ended(JobStatus.FILES_LOST, "files lost")
    is_late = error.startswith("States.Timeout") or ended_at > deadline
    if code == exits.DEADLINE or ordered == JobStatus.DEADLINE or is_late:
        return ended(JobStatus.DEADLINE, "deadline")
    if code == exits.NO_CAPACITY or ordered == JobStatus.NO_CAPACITY:
        said = stopped.partition("] ")[2]
        return ended(JobStatus.NO_CAPACITY, said if "no capacity: " in said else "no capacity")
    not_run = how in (Ending.NOT_STARTED, Ending.HOST_FAULT)
    if not_run and re.search(NO_HOST, f"{said} {error}", re.IGNORECASE):
        # It did not run, so it does not count.
        found = ended(JobStatus.NO_CAPACITY, "no capacity", again=ended_at < patience)
        return replace(found, attempts=attempt - 1, in_a_row=in_a_row - 1)
    lost = {
        Ending.BAD_HOST: f"its host is not fit: {said}",
        Ending.HOST_FAULT: f"the head could not be started: {said or error}",
        Ending.HOST_LOST: "its host was lost",
        Ending.KILLED: "the head was killed",
    }.get(how)
    if code in exits.TRIED_AGAIN and how is not Ending.STOPPED:  # a user's stop is the last word
        lost = {
            exits.BAD_HOST: "its host's GPUs or EFA devices are not healthy",
            exits.RAY_FAILED: "Ray did not start on its head, or ended there by itself",
            exits.STORAGE: "its storage did not answer, or a disk was full",
        }[code]
    if ordered is JobStatus.HOST_LOST:  # by the sweep
        lost = stopped.partition("] ")[2]
    if lost is not None:
        repeated = f", {in_a_row} times" if in_a_row > 1 else ""
        lost = f"failed: {lost}"[:1000]
        is_hung = ordered is not None and "StartedAt" in task
        may_be_program = how is Ending.KILLED or code == exits.RAY_FAILED or is_hung
        again = in_a_row < MOST_IN_VAIN or not may_be_program
        return ended(JobStatus.HOST_LOST, f"{lost}{repeated}", again=again)
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
    if code == exits.HUNG:
        return ended(JobStatus.FAILED, "failed: hung")
    if code is not None:
        return ended(JobStatus.FAILED, f"failed: user code exit {code}")
    why = said or error or "unknown"
    return ended(JobStatus.FAILED, f"failed: the head did not start: {why}"[:1000])


def at_hold(task: Mapping[str, Any], hold: Hold) -> Mapping[str, Any]:
    """A head's task as it would be if it had ended when its command failed: what happened to it
    while its hosts were held changes no outcome.

    ECS has the last word: a head that ended with another exit code has not held its hosts.
    """
    if _exit_code(_container(task)) not in (None, exits.KILLED, hold.code):
        return task
    return {
        **task,
        "Containers": [{"ExitCode": hold.code}],
        "StopCode": "EssentialContainerExited",
        "StoppedReason": "",
        "StoppedAt": hold.since * 1000,
    }


def refusal(activities: Sequence[Mapping[str, Any]], *, since: float) -> str:
    """AWS's own sentence, if the newest launch of a group's scaling activities has failed since a
    Unix time; "" if it has not."""
    for each in activities:  # the newest is the first
        if "aunching" in each.get("Description", ""):
            is_new = each["StartTime"].timestamp() >= since
            has_failed = is_new and each["StatusCode"] in ("Failed", "Cancelled")
            return str(each.get("StatusMessage") or "") if has_failed else ""
    return ""


def is_in_vain(sentence: str) -> bool:
    """Whether to wait does not help where AWS says this of a launch."""
    return _says(_IN_VAIN, sentence)


def ending_of(task: Mapping[str, Any], error: str = "") -> Ending:
    """Classify the end of a head's task, or of the RunTask call."""
    container = _container(task)
    said = text_of(container, "Reason") or text_of(task, "StoppedReason") or error
    code = _exit_code(container)
    return ending(stop_code=text_of(task, "StopCode"), reason=said, exit_code=code)


def _time_of(task: Mapping[str, Any], name: str) -> float:
    """Unix time of a moment of a task; now where its description has none. Step Functions tells it
    in milliseconds."""
    at = task.get(name)
    return at / 1000 if isinstance(at, int | float) and at else time.time()


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


# --- what the project wrote on a task or a host ---------------------------------------------------
#: Attributes of a host: the Unix time of the sweep that first saw its agent disconnected, or a task
#: that fares badly there. Of a task, its id and what is wrong follow after a space.
DISCONNECTED_SINCE: Final = "train.disconnected-since"
AILING_SINCE: Final = "train.ailing-since"


def job_of(task: Mapping[str, Any]) -> str:
    """The job that a task belongs to; "" for one of the standing cluster."""
    group = str(task.get("group") or "")
    return group.removeprefix(JOB_GROUP) if group.startswith(JOB_GROUP) else ""


def told(task: Mapping[str, Any], name: str) -> str | None:
    """A variable of the environment that a task was started with."""
    for container in (task.get("overrides") or {}).get("containerOverrides") or []:
        for each in container.get("environment") or []:
            if each.get("name") == name:
                return str(each.get("value", ""))
    return None


def deadline_of(task: Mapping[str, Any], *, default: float) -> float:
    """Unix time at which the job of a task ends."""
    value = told(task, ENV_DEADLINE)
    try:
        return float(value) if value else default
    except ValueError:  # the state machine only writes numbers
        return 0


def seen_since(host: Mapping[str, Any], mark: str, what: str = "") -> float | None:
    """Unix time since which sweeps have seen ``what`` on a host; None: they have not."""
    for each in host.get("attributes") or []:
        if each["name"] == mark:
            since, _, seen = str(each.get("value") or "").partition(" ")
            try:
                return float(since) if seen == what else None
            except ValueError:  # the sweep only writes numbers
                return 0
    return None
