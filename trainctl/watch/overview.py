"""Summaries of jobs for ``trainctl ls``, ``show``, ``runs``, ``top`` and ``ui``.

A ``Row`` is a job in a list, asked for with all others; a ``View`` is one job with all that is
known of it.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from contract.runs import RESULT_FILE
from contract.text import age, counted, dollars, duration, percent, significant, utc
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.jobs import JobExecution, QueuePlace
from trainctl.aws.logs import LogLine, NodeLogs
from trainctl.aws.tasks import Task
from trainctl.jobs.pricing import cost_of, costs_of, goodput_of
from trainctl.runs import run_list, trial_list
from trainctl.runs.trial_list import TrialList
from trainctl.watch import boots, follow, job_log
from trainctl.watch.follow import Waits
from trainctl.watch.job_log import JobLog
from training import trials
from training.record.progress import Progress

#: Reasons of AWS, and of a job's autoscaler, for a node that has done its work.
_ROUTINE: Final = ("Essential container in task exited", "Ray's autoscaler: not needed any more")
#: Columns of a list of jobs, and those that a narrow terminal leaves out first.
COLUMNS: Final = ("job", "state", "nodes", "done", "age", "cost", "who")
OPTIONAL: Final = ("nodes", "done", "who", "cost")
#: Columns of a job's nodes.
NODES: Final = ("node", "task", "status", "address", "why it ended")
#: Figures of a ``result.json`` that deserve a note.
_NOTES: Final = {
    "skipped_steps": "skipped steps: {}, whose loss or gradient was not a number",
    "damaged_lines": "damaged lines left out of metrics.jsonl: {}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A job in a list."""

    job: JobExecution
    place: QueuePlace | None
    """Its place in the queue; None once it has left it."""
    state: str
    """Its state in a word or two: ``queued 2``, ``failed (1)``."""
    progress: Progress | None
    usd: float | None
    """Cost so far; None where that is not known."""

    @property
    def who(self) -> str:
        """Its submitter, without the domain."""
        return self.job.submitter.partition("@")[0]

    @property
    def cells(self) -> list[str]:
        """Its cells of ``COLUMNS``."""
        spec = self.job.spec
        return [
            self.job.id,
            self.state,
            " ".join((str(spec.nodes), *spec.pools)) if spec else "",
            self.progress.share if self.progress else "",
            age((datetime.now(tz=UTC) - self.job.began).total_seconds()),
            _cost(self.job, self.usd),
            self.who,
        ]

    def values(self) -> dict[str, object]:
        """The job for ``--json``."""
        return {**follow.values(self.job, self.place), "state": self.state, "usd": self.usd}


def rows_of(deployment: Deployment, jobs: Sequence[JobExecution]) -> list[Row]:
    """Rows of jobs, in their order; one that ended long ago costs no extra call."""
    is_there = any(not job.is_over for job in jobs) and not deployment.is_here
    queue = deployment.jobs.queue(deployment.shape.limits) if is_there else {}
    nodes = deployment.jobs.all_nodes_of(jobs)
    costs = costs_of(deployment, jobs, nodes)
    rows = []
    for job in jobs:
        place = None if nodes[job.id] else queue.get(job.id)
        waits = Waits()
        if not (place or job.is_over):
            waits = follow.waiting(deployment, job, nodes[job.id], explains=False)
        rows.append(
            Row(
                job=job,
                place=place,
                state=_state(job, place, waits, nodes[job.id]),
                progress=None if place else follow.progress_of(deployment, job),
                usd=costs[job.id],
            )
        )
    return rows


def _cost(job: JobExecution, usd: float | None) -> str:
    """Cost so far; empty where that is not known, and before a host is paid for."""
    return "" if usd is None or not (usd or job.is_over) else dollars(usd)


def _state(
    job: JobExecution, place: QueuePlace | None, waits: Waits, tasks: Sequence[Task] = ()
) -> str:
    """Its state in a word or two.

    Args:
        tasks: its nodes, with those that keep its hosts.
    """
    if place:
        return "user's limit" if place.limit else f"queued {place.number}"
    if waits.hold:
        return f"held, {duration(max(0, round(waits.hold.until - time.time())))} left"
    if job.is_over:
        kept = sum(not task.has_stopped for task in tasks if task.kept_until)
        return job.outcome.brief + (f", keeps {counted(kept, 'host')}" if kept else "")
    return "waiting" if waits.reason else "running"


class View:
    """A job as it is now, its nodes, and how far its run is."""

    def __init__(self, deployment: Deployment, job: JobExecution, *, lines: int = 0) -> None:
        """
        Args:
            lines: how many of the last ones of its log; 0: one, where its progress does not say
                more.
        """
        jobs, bucket = deployment.jobs, deployment.bucket
        self.job, self.record = job, ""
        self.result: Mapping[str, object] = {}
        self.use: list[str] = []
        """Lines that use the model of its run; empty before there is one."""
        self.place: QueuePlace | None = None
        self.waits, self.deadline = Waits(), None
        self.tasks = jobs.all_nodes(job)
        """All nodes that it has had, heads first."""
        if job.run:
            self.record = f"{bucket.run(job.run).uri}/"
            self.result = json_object(bucket.read_of_run(job.run, RESULT_FILE))
            self.use = run_list.use(bucket, job.run, self.result)
        if not (job.is_over or deployment.is_here):
            self.deadline = jobs.deadline(job)
            if not self.tasks:
                self.place = jobs.queue(deployment.shape.limits).get(job.id)
            if not self.place:
                self.waits = follow.waiting(deployment, job, self.tasks)
        self.trials = TrialList(rows=[])
        """Those of a job that tries settings."""
        if job.spec and trials.TUNE in job.spec.command:
            self.trials = trial_list.of(bucket, job.run)
        self.progress = follow.progress_of(deployment, job)
        self.start = boots.start_of(deployment, job, self.tasks)
        """Seconds of each part of its start."""
        self.cost = cost_of(deployment, job, self.tasks)
        self.goodput = goodput_of(deployment, job, self.cost)
        """Share of its paid time that was training, 0 to 1; None if unknown."""
        # What a program of the user's prints has its figures; a recipe has its progress.
        self._is_counted = job.is_over or bool(self.progress and job.recipe)
        wanted = lines or int(not self._is_counted)
        self.lines: list[LogLine] = []
        if self.tasks and wanted:
            self.lines = JobLog(deployment.logs).last(job, self.tasks, wanted)

    @property
    def state(self) -> str:
        """As in a list."""
        return _state(self.job, self.place, self.waits, self.tasks)

    def words(self) -> dict[str, str]:
        """All of it but its nodes and lines, by label; what is not known is left out."""
        job, spec, result = self.job, self.job.spec, self.result
        usd, why = self.cost.usd, self.cost.why_unknown
        said = "" if self._is_counted else "".join(map(job_log.text, self.lines[-1:]))
        if said.startswith("node: "):  # of a node that starts: no progress
            said = ""
        reached = [self.progress.line() if self.progress else "", said.strip()]
        notes = [text.format(result[name]) for name, text in _NOTES.items() if result.get(name)]
        rows = {
            "job": job.id,
            "run": job.run,
            "recipe": job.recipe,
            "state": self._reason(),
            "progress": ", ".join(filter(None, reached)),
            "submitted": utc(job.began) + (f" by {job.submitter}" if job.submitter else ""),
            "lasted" if job.is_over else "for": f"{follow.lasted(job)}{self._queued()}",
            "deadline": utc(self.deadline) if self.deadline else "",
            "command": shlex.join(spec.command) if spec else "",
            "nodes": _nodes(job, self.tasks),
            "pool": ", ".join(spec.pools) if spec else "",
            "start": boots.start_line(self.start),
            "kept": self._kept(),
            "cost": f"unknown: {why}" if why and usd is None else _cost(job, usd),
            "training": self._trained(),
            "record": self.record,
            "result": f"{result.get('status')}: {', '.join(_reached(result))}" if result else "",
            "note": "; ".join(notes),
        }
        return {name: text for name, text in rows.items() if text}

    def _reason(self) -> str:
        """Its state in a sentence: ``waiting for 2 x g5.xlarge``."""
        if self.place:
            return f"queued: {self.place.words}"
        waits = self.waits.words(time.time())
        if not waits or waits.startswith("waiting"):
            return waits or self.job.reason
        return f"{self.state}: {waits}"

    def _queued(self) -> str:
        """``, 3 min of it before its head ran``; empty if it did not wait."""
        began = min((task.since for task in self.tasks if task.since), default=self.job.began)
        waited_s = round((began - self.job.began).total_seconds())
        return f", {duration(waited_s)} of it before its head ran" if waited_s > 0 else ""

    def _kept(self) -> str:
        """Its hosts that wait for the next job; empty if there are none."""
        until = [each.kept_until for each in self.tasks if each.kept_until and not each.has_stopped]
        if not until:
            return ""
        at = utc(datetime.fromtimestamp(max(until), tz=UTC))
        whose = self.job.submitter
        return f"{counted(len(until), 'host')} for the next job of {whose}, until {at}"

    def _trained(self) -> str:
        """``81.20% of 3.52 paid host hours``; empty if unknown."""
        if self.goodput is None:
            return ""
        hours = sum(node.seconds for node in self.cost.paid or ()) / 3600
        return f"{percent(self.goodput)} of {hours:,.2f} paid host hours"

    def node_cells(self) -> list[list[str]]:
        """Its nodes, as cells of ``NODES``."""
        rows = []
        for task in self.tasks:
            is_routine = task.exit_code == 0 and task.stopped_reason in _ROUTINE
            why = "" if is_routine else task.stopped_reason
            kind = f"{task.kind}, kept" if task.kept_until else task.kind
            rows.append([kind, task.id, task.status, task.address, why])
        return rows

    def values(self, logs: NodeLogs) -> dict[str, object]:
        """All of it for ``--json``."""
        return {
            **follow.values(self.job, self.place),
            "state": self.state,
            "waiting": "" if self.place else self.waits.words(time.time()),
            "tasks": [{**asdict(task), "log_stream": logs.stream(task)} for task in self.tasks],
            "node_seconds": self.cost.seconds,
            "usd": self.cost.usd,
            "goodput": self.goodput,
            "start": self.start,
            "trials": self.trials.rows,
            "progress": self.progress and self.progress.to_json(),
            "result": self.result,
        }


def _nodes(job: JobExecution, tasks: Sequence[Task]) -> str:
    """Number of worker nodes; for a range, also how many run or were started."""
    if job.spec is None:
        return ""
    ordered = job.spec.nodes
    if ordered.low == ordered.high:
        return ordered.words
    workers = [task for task in tasks if not task.is_head]
    if job.is_over:
        return f"{ordered.words}; {len(workers)} started"
    return f"{ordered.words}; {sum(task.status == 'RUNNING' for task in workers)} running"


def _reached(result: Mapping[str, object]) -> list[str]:
    """The figures of a ``result.json``: its measures, loss and steps."""
    loss, steps = result.get("loss"), result.get("steps")
    others = [f"loss {significant(loss)}"] if isinstance(loss, int | float) else []
    others += [f"steps {steps:,}"] if isinstance(steps, int) and steps else []
    return [*run_list.measures(result), *others]
