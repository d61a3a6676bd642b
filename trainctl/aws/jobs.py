"""Jobs: executions of the state machine, and the tasks that each of them starts."""

import functools
import re
import secrets as random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from contract import exits, nodes
from contract.admission import Limits, in_order
from contract.errors import InputError
from contract.instance_types import Prices
from contract.job import (
    JOB_GROUP,
    KEPT_GROUP,
    MAX_JOB_ID,
    PAUSE_STATE,
    STOP_ERROR,
    STOPPED_BY_USER,
    JobSpec,
    JobStatus,
    Outcome,
    Priority,
    execution_arn,
)
from contract.text import counted, did_you_mean, utc
from contract.times import CONSISTENT_S
from trainctl.aws.clients import Clients, unless
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.errors import UsageError
from trainctl.aws.tasks import Task, Tasks, node_of, owner_of
from training.record.fields import number

if TYPE_CHECKING:
    from mypy_boto3_stepfunctions.type_defs import (
        DescribeExecutionOutputTypeDef,
        HistoryEventTypeDef,
        ListExecutionsInputPaginateTypeDef,
    )

#: Among how many of the newest jobs a run is looked for by its name.
JOBS_LOOKED_AT: Final = 100
CONSISTENT_EVERY_S: Final = 0.5
_PROQUINT: Final = ("bdfghjklmnprstvz", "aiou") * 2 + ("bdfghjklmnprstvz",)
#: Suffix that ``new_id`` appends to a run's name.
_JOB_ID: Final = re.compile(
    r"(-[bdfghjklmnprstvz][aiou][bdfghjklmnprstvz][aiou][bdfghjklmnprstvz]){2}$"
)

_SHELL_CODES: Final[Mapping[JobStatus, int]] = {
    JobStatus.SUCCEEDED: exits.OK,
    JobStatus.NO_CAPACITY: exits.NO_CAPACITY,
    JobStatus.DEADLINE: exits.DEADLINE,
    JobStatus.STOPPED: exits.TERMINATED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobExecution:
    """One submission of a run: an execution of the state machine."""

    id: str
    outcome: Outcome
    """Its end; while it runs, its status is ``running``."""
    began: datetime
    ended: datetime | None
    spec: JobSpec | None
    """Its order; None where this version does not understand it."""

    @property
    def run(self) -> str:
        return self.spec.run if self.spec else ""

    @property
    def recipe(self) -> str:
        """Name of its recipe; empty for a program of the user's own."""
        return self.spec.recipe if self.spec else ""

    @property
    def submitter(self) -> str:
        return self.spec.submitter if self.spec else ""

    @property
    def prices(self) -> Prices | None:
        """Prices of its order; None: not known."""
        return self.spec.prices if self.spec else None

    @property
    def status(self) -> JobStatus:
        return self.outcome.status

    @property
    def reason(self) -> str:
        """The status in words."""
        return self.outcome.reason

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def shell_code(self) -> int:
        """Exit code of ``trainctl wait``."""
        return self.outcome.exit_code or _SHELL_CODES.get(self.status, exits.FAILED)

    @classmethod
    def from_execution(cls, found: "DescribeExecutionOutputTypeDef") -> Self:
        """Make a job from the answer of Step Functions."""
        try:
            spec = JobSpec.from_json(found.get("input", ""))
        except InputError:
            spec = None
        return cls(
            id=found["name"],
            outcome=_outcome(found),
            began=found["startDate"],
            ended=found.get("stopDate"),
            spec=spec,
        )


def _outcome(found: "DescribeExecutionOutputTypeDef") -> Outcome:
    match found["status"]:
        case "SUCCEEDED":
            return _read(
                found.get("output"), Outcome(status=JobStatus.SUCCEEDED, reason="succeeded")
            )
        case "FAILED":
            error, cause = found.get("error", ""), found.get("cause", "")
            reason = f"failed: {error} {cause}".strip()
            return _read(cause, Outcome(status=JobStatus.FAILED, reason=reason))
        case "TIMED_OUT":
            return Outcome(status=JobStatus.DEADLINE, reason="deadline")
        case "ABORTED":
            return Outcome.of_abort(error=found.get("error"), cause=found.get("cause"))
    return Outcome(status=JobStatus.RUNNING, reason="running")


def _read(text: str | None, otherwise: Outcome) -> Outcome:
    """The outcome that the keeper wrote, where it is what ended the execution."""
    try:
        return Outcome.from_json(text or "")
    except InputError:
        return otherwise


def _ended(event: Mapping[str, Any]) -> Task:
    """The task of a job whose end ECS reports by this event."""
    moments = {
        name: datetime.fromisoformat(str(event[name]))
        for name in ("createdAt", "pullStartedAt", "startedAt", "stoppedAt", "updatedAt")
        if event.get(name)
    }
    task: Any = {"stoppedAt": moments.get("updatedAt"), **event, **moments, "lastStatus": "STOPPED"}
    return Task.from_ecs(node_of(event), task)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePlace:
    """A job's place in the queue."""

    number: int
    """1: it is the next one."""
    after: str
    """The job whose end makes room for it; far behind, the job before it."""
    until: datetime | None
    """Deadline of that job; None while it is queued itself."""

    limit: int = 0
    """Jobs that its user may have at a time, where it waits for those; 0: it waits for hosts."""
    kept: str = ""
    """Hosts that ``after`` keeps for another user, where those are in its way."""

    @property
    def words(self) -> str:
        if self.kept and self.until:
            return f"number {self.number}, {self.kept} by {self.after} until {utc(self.until)}"
        if self.limit:
            return f"number {self.number}, after {self.after}: max_jobs_per_user is {self.limit}"
        until = f", which ends by {utc(self.until)}, usually sooner" if self.until else ""
        return f"number {self.number}, after {self.after}{until}"

    def to_json(self) -> dict[str, object]:
        until = self.until and self.until.astimezone(UTC).isoformat()
        return {"number": self.number, "after": self.after, "until": until}


class Jobs:
    """All jobs of a deployment."""

    def __init__(self, clients: Clients, *, machine: str, cluster: str, task_events: str) -> None:
        """``machine``: ARN of the state machine; ``task_events``: log group of ECS's events."""
        self._clients, self._machine, self._task_events = clients, machine, task_events
        self._tasks = Tasks(clients, cluster=cluster)

    def _execution(self, job: str) -> str:
        return execution_arn(self._machine, job)

    def start(self, job: str, spec: JobSpec) -> None:
        """Start an execution. Giving the same job and spec again starts nothing more."""
        self._clients.stepfunctions.start_execution(
            stateMachineArn=self._machine, name=job, input=spec.to_json()
        )

    def newest(
        self, *, limit: int, running: bool = False, since: datetime | None = None
    ) -> list[JobExecution]:
        """The newest jobs, newest first; one call for each of them."""
        # The list has no orders.
        ids = self.newest_ids(limit=limit, running=running, since=since)
        found = [self._described(each) for each in ids]
        # One that has just been started may be in the list and not be described yet.
        jobs = [job for job in found if job]
        return sorted(jobs, key=lambda job: job.began, reverse=True)

    def newest_ids(
        self, *, limit: int, running: bool = False, since: datetime | None = None
    ) -> list[str]:
        """Their ids, in one call."""
        request: ListExecutionsInputPaginateTypeDef = {
            "stateMachineArn": self._machine,
            "PaginationConfig": {"MaxItems": limit},
        }
        if running:
            request["statusFilter"] = "RUNNING"
        pages = self._clients.stepfunctions.get_paginator("list_executions").paginate(**request)
        found = pages.search("executions[]")
        return [each["name"] for each in found if since is None or each["startDate"] >= since]

    def _described(self, job: str) -> JobExecution | None:
        """The job with this id, if Step Functions knows of it."""
        with unless("ExecutionDoesNotExist", "InvalidArn"):
            return JobExecution.from_execution(
                self._clients.stepfunctions.describe_execution(executionArn=self._execution(job))
            )
        return None

    def find(self, name: str) -> JobExecution:
        """The job with this id, or the newest one of the run with this name.

        Raises:
            UsageError: there is neither.
        """
        if job := self._described(name):
            return job
        newest = self.newest(limit=JOBS_LOOKED_AT)
        for job in newest:
            if job.run == name:
                return job
        # A new execution can be described only a moment later.
        until = time.monotonic() + (CONSISTENT_S if _JOB_ID.search(name) else 0)
        while time.monotonic() < until:
            time.sleep(CONSISTENT_EVERY_S)
            if job := self._described(name):
                return job
        there = sorted({job.run for job in newest if job.run})
        hint = did_you_mean(name, there, otherwise="trainctl ls lists the jobs there are")
        raise UsageError(f"there is no job and no run {name!r}: {hint}")

    def to_follow(self, after: str | None, with_run: str | None) -> dict[str, str]:
        """Fields of the order of a job that follows another, or goes with a run's.

        Raises:
            UsageError: there is no such job, or it has ended, for ``after`` without success.
        """
        if after and with_run:
            raise UsageError("--after and --with: give one of them")
        job = self.find(after or with_run or "")
        if job.is_over and (with_run or job.status != JobStatus.SUCCEEDED):
            option = f"--with {with_run}" if with_run else f"--after {after}"
            raise UsageError(f"{option}: {job.id} has ended ({job.reason})")
        return {"after": job.id, "with_run": job.run if with_run else ""}

    def heads(self, job: JobExecution) -> list[Task]:
        """The head tasks of a job, one for each attempt, the newest last."""
        arns: list[str] = []
        for event in self._submissions(job):
            arns += _submitted(event.get("taskSubmittedEventDetails", {}).get("output"))
        return self._tasks.described(nodes.JOB, arns)

    def pause(self, job: JobExecution) -> tuple[str, float | None] | None:
        """Reason and end (Unix time) of a job's pause between two attempts; None: it has none."""
        events = self._history(job)
        entered = [each for each in events if each["type"].endswith("StateEntered")]
        last = entered[-1].get("stateEnteredEventDetails") if entered else None
        if not last or last["name"] != PAUSE_STATE:
            return None
        state_input = json_object(last.get("input"))
        return str(state_input.get("reason")), number(state_input.get("until"))

    def _submissions(self, job: JobExecution) -> "list[HistoryEventTypeDef]":
        """The starts of its heads."""
        return [event for event in self._history(job) if event["type"] == "TaskSubmitted"]

    def _history(self, job: JobExecution) -> "list[HistoryEventTypeDef]":
        """All its events, oldest first: many where it has queued for days."""
        pages = self._clients.stepfunctions.get_paginator("get_execution_history").paginate(
            executionArn=self._execution(job.id), PaginationConfig={"PageSize": 1000}
        )
        return [*pages.search("events[]")]

    def deadline(self, job: JobExecution) -> datetime | None:
        """Deadline of a job; None before its head was requested."""
        starts = self._submissions(job)
        if not starts or not job.spec:
            return None
        return starts[0]["timestamp"] + timedelta(seconds=job.spec.max_seconds)

    def queue(self, limits: Limits, *, new: JobSpec | None = None) -> dict[str, QueuePlace]:
        """The jobs that are not admitted yet, by their ids, in the order of their turns.

        With a limit for each user, it may have one that has begun, and passed another by.

        Args:
            limits: of the deployment.
            new: order of a job that would be submitted now; its id is "".
        """
        described = functools.cache(self._described)

        def spec(name: str) -> JobSpec | None:
            job = described(name) if name else None
            return job.spec if job else None if name else new

        def user(name: str) -> str:
            return found.submitter if (found := spec(name)) else ""

        def priority(name: str) -> Priority:
            return found.priority if (found := spec(name)) else Priority.NORMAL

        @functools.cache
        def deadline(name: str) -> datetime | None:
            return self.deadline(job) if name and (job := described(name)) else None

        pages = self._clients.stepfunctions.get_paginator("list_executions").paginate(
            stateMachineArn=self._machine, statusFilter="RUNNING"
        )
        now = datetime.now(tz=UTC)
        executions = [*pages.search("executions[]")]
        executions += [{"name": "", "startDate": now}] if new else []
        names = in_order(executions, spec, has_begun=self._has_begun, now=now.timestamp())
        if len({*map(priority, names)}) > 1:  # what has begun is not ended for another
            names.sort(key=lambda name: not (name and self._has_begun(name)))
        order = limits.in_turn(names, user)
        # All behind them wait for a head in any case.
        first = order[: limits.max_heads + 1]
        wanted = [*map(spec, first)]
        queued = [
            name
            for number, name in enumerate(order)
            if number >= limits.max_heads or limits.place(wanted[number], wanted[:number]) is None
        ]
        places: dict[str, QueuePlace] = {}
        for turn, name in enumerate(queued, start=1):
            at = order.index(name)
            if at >= len(wanted):
                places[name] = QueuePlace(number=turn, after=order[at - 1], until=None)
                continue
            # It has room once some of those before it have ended, at their deadlines.
            ends = [(deadline(each), index) for index, each in enumerate(order[:at])]
            ends.sort(key=lambda end: (end[0] is None, end[0] or 0, end[1]))
            for gone, (until, index) in enumerate(ends, start=1):
                left = [wanted[each] for _, each in ends[gone:]]
                if gone == len(ends) or limits.place(wanted[at], left):
                    places[name] = QueuePlace(number=turn, after=order[index], until=until)
                    break
        for name in names:
            if name not in order:
                after = next(each for each in order if user(each) == user(name))
                limit = limits.max_jobs_per_user
                number = len(places) + 1
                places[name] = QueuePlace(number=number, after=after, until=None, limit=limit)
        places |= self._behind_kept(places, first, wanted, limits)
        for name, after, until in _followers(executions, names, spec, deadline):
            places[name] = QueuePlace(number=len(places) + 1, after=after, until=until)
        return places

    def _behind_kept(
        self,
        queued: Collection[str],
        names: Sequence[str],
        wanted: Sequence[JobSpec | None],
        limits: Limits,
    ) -> dict[str, QueuePlace]:
        """Jobs that would begin but for hosts that are kept for other users.

        Args:
            names: of jobs that have begun, or are next.
            wanted: their orders.
        """
        nodes, places = self._tasks.of_jobs(), dict[str, QueuePlace]()
        keepers = [(self._described(name), task) for name, task in nodes if task.kept_until]
        for at, (name, own) in enumerate(zip(names, wanted, strict=True)):
            others = [
                (job, task)
                for job, task in keepers
                if own and job and job.spec and job.spec.user_id != own.user_id
            ]
            hosts = Counter("" if task.is_head else task.pool for _, task in others)
            is_free = limits.without(hosts.pop("", 0), hosts).place(own, wanted[:at])
            if not others or is_free or name in queued or (name and self._has_begun(name)):
                continue
            job, task = max(others, key=lambda each: each[1].kept_until)
            places[name] = QueuePlace(
                number=len(queued) + len(places) + 1,
                after=job.id,
                until=datetime.fromtimestamp(task.kept_until, tz=UTC),
                kept=f"{counted(len(others), 'host')} kept for {job.submitter}",
            )
        return places

    def _has_begun(self, name: str) -> bool:
        job = self._described(name)
        return job is not None and bool(self._submissions(job))

    def workers(self, job: JobExecution) -> list[Task]:
        """The worker tasks of a job that have not ended for more than an hour."""
        return self._tasks.started_by(job.id)

    def all_nodes(self, job: JobExecution) -> list[Task]:
        """All tasks that a job has had, heads first; those that have ended as ECS reported it."""
        heads, workers = self.heads(job), self.workers(job)
        # After them: what ends in between is among these.
        ended = [task for _, task in self._ended_since(job.began, job.id)]
        kept = []
        if job.is_over and job.spec and job.spec.keep_s:
            kept = [task for owner, task in self._tasks.of_jobs() if owner == job.id]
        tasks = [*heads, *ended, *workers, *kept, *ended]  # of each the last one
        return [*{task.id: task for task in tasks}.values()]

    def all_nodes_of(self, jobs: Sequence[JobExecution]) -> dict[str, list[Task]]:
        """The same of many jobs, by their ids, in a few calls for all of them."""
        found: dict[str, dict[str, Task]] = {job.id: {} for job in jobs}
        if not jobs:
            return {}
        running = self._tasks.of_jobs()
        for job, task in self._ended_since(min(job.began for job in jobs), "*") + running:
            found.get(job, {}).setdefault(task.id, task)
        return {job: [*tasks.values()] for job, tasks in found.items()}

    def alive(self, job: JobExecution) -> list[Task]:
        """The tasks of a job that have not ended yet, heads first."""
        return [task for task in [*self.heads(job), *self.workers(job)] if not task.has_stopped]

    def kept_for(self, user_id: str) -> list[Task]:
        """The tasks that keep hosts for a user's next job."""
        return self._tasks.kept_for(user_id)

    def release(self, task: Task) -> None:
        """End a task that keeps a host, which the keeper's sweep then terminates."""
        self._tasks.stop(task, STOPPED_BY_USER)

    def stop(self, job: JobExecution) -> None:
        """End a job for its user: stop its head, or, before there is one, its execution.

        Of one that has ended already, stop the nodes that are left.
        """
        if job.is_over:
            for task in self.alive(job):
                self._tasks.stop(task, STOPPED_BY_USER)
            return
        # One that the sweep has told to stop, because it hangs, would be followed by another.
        own = ("", STOPPED_BY_USER)
        heads = [
            each for each in self.heads(job) if not each.has_stopped and each.stopped_reason in own
        ]
        stopped = [self._tasks.stop(head, STOPPED_BY_USER) for head in heads]
        # One that was lost a moment ago would be followed by another, too.
        if all(
            head.has_stopped and head.exit_code != exits.OK and head.stopped_reason not in own
            for head in stopped
        ):
            self._clients.stepfunctions.stop_execution(
                executionArn=self._execution(job.id), error=STOP_ERROR, cause=STOPPED_BY_USER
            )

    def _ended_since(self, began: datetime, job: str) -> list[tuple[str, Task]]:
        """Tasks that ended, with their jobs, from the log that outlives ECS's memory of them.

        Args:
            job: its id, or ``*`` for all jobs.
        """
        each = (f'($.detail.group = "{group}{job}")' for group in (JOB_GROUP, KEPT_GROUP))
        groups = " || ".join(each)
        pages = self._clients.logs.get_paginator("filter_log_events").paginate(
            logGroupName=self._task_events,
            startTime=int(began.timestamp() * 1000),
            filterPattern=f"{{ {groups} }}",
        )
        details = (json_object(each).get("detail") for each in pages.search("events[].message"))
        return [
            (owner, _ended(detail))
            for detail in details
            if isinstance(detail, dict) and (owner := owner_of(detail)) and job in ("*", owner)
        ]


def new_id(run: str) -> str:
    """An id for a job that can be read out, such as ``first-lusab-gutih``: 32 random bits after the
    run's name, short enough for ECS's ``startedBy``."""
    # Consonants and vowels in turn: proquints, arXiv:0901.4016.
    words = "-".join("".join(map(random.choice, _PROQUINT)) for _ in range(2))
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", run)[: MAX_JOB_ID - len(words) - 1].rstrip("-_")
    return f"{stem}-{words}"


def _followers(
    executions: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    spec: Callable[[str], JobSpec | None],
    deadline: Callable[[str], datetime | None],
) -> Iterator[tuple[str, str, datetime | None]]:
    """Jobs that wait for another: each with that one, and the deadline of one that must end first.

    Args:
        names: of those that wait for none.
        spec: order of a job.
    """
    for each in executions:
        own = None if each["name"] in names else spec(each["name"])
        if own:
            yield each["name"], own.after, None if own.with_run else deadline(own.after)


def _submitted(output: str | None) -> list[str]:
    """ARNs of the tasks that a state of the machine has started, from its RunTask's answer."""
    tasks = json_object(output).get("Tasks")
    return [str(task["TaskArn"]) for task in tasks] if isinstance(tasks, list) else []
