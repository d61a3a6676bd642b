"""Outcome of a job from the end of its head's task, and the marks left on tasks and hosts.

``ending`` reads ECS's stop code, reason and exit code, for ``trainctl cluster up`` and for the
function that cleans up after jobs (``stacks/jobs/keeper``). ``verdict`` maps the end of a head's
task to the job's outcome and to a retry.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, Self

from contract import exits, times
from contract.job import (
    JOB_GROUP,
    KEPT_GROUP,
    STOPPED_BY_USER,
    Hold,
    JobStatus,
    Outcome,
    status_of_stop,
)
from contract.nodes import ENV_DEADLINE, ENV_KEPT

#: Stop codes of a task whose host went away below it.
_HOST_LOST: Final = ("SpotInterruption", "TerminationNotice")
#: Reasons why an image cannot be pulled in another attempt either.
_NO_IMAGE: Final = r"not found|manifest unknown|does not exist|no such image|platform"
#: GPUs or EFA devices that are not there when a container starts, and a full disk: the next task
#: fails there too.
_BAD_HOST: Final = (
    r"nvidia-container|libnvidia|libcuda|NVML|could not select device driver|"
    r"custom device \W*/dev/(infiniband|efa)|no space left on device"
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
STOP_WITHOUT_REASON = "Task stopped by user"


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
    capacity_deadline: float,
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
        capacity_deadline: Unix time until which a host for the head is requested. Both times are
            compared with the end of the task, not with the current time.
        attempt: number of this attempt, from 1.
        in_a_row: the same, counted since one has run for long.
    """
    end = _End.of(task, error)
    if end.at - _time_of(task, "StartedAt") > times.LONG_RUN_S:
        in_a_row = 1  # it has saved since

    def ended(status: JobStatus, reason: str, *, again: bool = False) -> Outcome:
        return Outcome(
            status=status,
            reason=reason,
            exit_code=end.code,
            again=again,
            attempts=attempt,
            in_a_row=in_a_row,
        )

    if end.code == exits.OK:
        return ended(JobStatus.SUCCEEDED, "succeeded")
    if end.code == exits.FILES_LOST:  # at the deadline, maybe: the last copy is retried until then
        return ended(JobStatus.FILES_LOST, "files lost")
    is_late = error.startswith("States.Timeout") or end.at > deadline
    if is_late or end.code == exits.DEADLINE or end.ordered is JobStatus.DEADLINE:
        return ended(JobStatus.DEADLINE, "deadline")
    if end.code == exits.NO_CAPACITY or end.ordered is JobStatus.NO_CAPACITY:
        why = end.order
        return ended(JobStatus.NO_CAPACITY, why if "no capacity: " in why else "no capacity")
    if end.has_found_no_host:
        # It did not run, so it does not count.
        found = ended(JobStatus.NO_CAPACITY, "no capacity", again=end.at < capacity_deadline)
        return replace(found, attempts=attempt - 1, in_a_row=in_a_row - 1)

    if (lost := end.loss) is None:
        return ended(*end.last)
    repeated = f", {in_a_row} times" if in_a_row > 1 else ""
    is_hung = end.ordered is not None and "StartedAt" in task
    may_be_program = end.how is Ending.KILLED or end.code == exits.RAY_FAILED or is_hung
    return ended(
        JobStatus.HOST_LOST,
        f"{f'failed: {lost}'[:1000]}{repeated}",
        again=in_a_row < MOST_IN_VAIN or not may_be_program,
    )


#: Why a head was lost: by how its task ended, and by its exit code.
_LOSSES: Final = {
    Ending.BAD_HOST: "its host is not fit: {said}",
    Ending.HOST_FAULT: "the head could not be started: {said}",
    Ending.HOST_LOST: "its host was lost",
    Ending.KILLED: "the head was killed",
}
LOSS_CODES: Final = {
    exits.BAD_HOST: "its host's GPUs or EFA devices are not healthy",
    exits.RAY_FAILED: "Ray did not start on its head, or ended there by itself",
    exits.STORAGE: "its storage did not answer, or a disk was full",
}
#: Other exit codes with a meaning.
_FAILURES: Final = {
    exits.ASKS_TOO_MUCH: "asks for more than the job can have",
    exits.HUNG: "hung",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """The end of a head's task, or of the call that should have started it."""

    how: Ending
    at: float
    """Unix time."""
    code: int | None
    stopped: str
    """Reason of the stop: ours, a user's or ECS's."""
    said: str
    """Error from ECS for the container, else for the task, else from Step Functions."""
    ordered: JobStatus | None
    """Status for which the sweep has stopped it."""
    error: str

    @classmethod
    def of(cls, task: Mapping[str, Any], error: str) -> Self:
        container = _container(task)
        stopped = text_of(task, "StoppedReason")
        return cls(
            how=ending_of(task, error),
            at=_time_of(task, "StoppedAt"),
            code=_exit_code(container),
            stopped=stopped,
            said=text_of(container, "Reason") or stopped or error,
            ordered=status_of_stop(stopped),
            error=error,
        )

    @property
    def order(self) -> str:
        """The sweep's reason."""
        return self.stopped.partition("] ")[2]

    @property
    def has_found_no_host(self) -> bool:
        """No host came, or none had room."""
        has_not_run = self.how in (Ending.NOT_STARTED, Ending.HOST_FAULT)
        return has_not_run and _says(NO_HOST, f"{self.said} {self.error}")

    @property
    def loss(self) -> str | None:
        """Why the head was lost to its host, or to AWS; None if it was not."""
        if self.ordered is JobStatus.HOST_LOST:
            return self.order
        if self.code in exits.TRIED_AGAIN and self.how is not Ending.STOPPED:
            return LOSS_CODES[self.code]  # a user's stop is the last word
        found = _LOSSES.get(self.how)
        return found and found.format(said=self.said)

    @property
    def last(self) -> tuple[JobStatus, str]:
        """Status and reason of a head that was not lost."""
        if self.how is Ending.STOPPED:
            by_user = self.stopped in ("", STOPPED_BY_USER, STOP_WITHOUT_REASON)
            other = f"its head was stopped: {self.stopped}"
            return JobStatus.STOPPED, STOPPED_BY_USER if by_user else other
        if self.code in (exits.TERMINATED, exits.INTERRUPTED):
            return JobStatus.STOPPED, f"its command was stopped (exit code {self.code})"
        if self.how is Ending.IMAGE_NOT_FOUND:
            return JobStatus.IMAGE_NOT_FOUND, f"image not found: {self.said}"
        if self.how is Ending.OUT_OF_MEMORY:
            return JobStatus.FAILED, "failed: out of memory on the head"
        if self.code is None:
            why = f"failed: the head did not start: {self.said or 'unknown'}"
            return JobStatus.FAILED, why[:1000]
        return (
            JobStatus.FAILED,
            f"failed: {_FAILURES.get(self.code, f'user code exit {self.code}')}",
        )


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
    """True if AWS refused a launch for a reason that waiting cannot remove."""
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


def keeper_of(task: Mapping[str, Any]) -> str:
    """The ended job whose host a task keeps; "" for any other task."""
    group = str(task.get("group") or "")
    return group.removeprefix(KEPT_GROUP) if group.startswith(KEPT_GROUP) else ""


def kept_until(task: Mapping[str, Any]) -> float:
    """Unix time until which a task keeps its host."""
    return _moment(task, ENV_KEPT, default=0)


def env_override(task: Mapping[str, Any], name: str) -> str | None:
    """A variable of the environment that a task was started with."""
    for container in (task.get("overrides") or {}).get("containerOverrides") or []:
        for each in container.get("environment") or []:
            if each.get("name") == name:
                return str(each.get("value", ""))
    return None


def deadline_of(task: Mapping[str, Any], *, default: float) -> float:
    """Unix time at which the job of a task ends."""
    return _moment(task, ENV_DEADLINE, default=default)


def _moment(task: Mapping[str, Any], name: str, *, default: float) -> float:
    """A Unix time in the environment that a task was started with."""
    value = env_override(task, name)
    try:
        return float(value) if value else default
    except ValueError:  # the state machine and the keeper only write numbers
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
