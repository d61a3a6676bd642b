"""Watching a job: what it waits for, what it logs, how it ended."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

from contract import exits, nodes
from contract.job import Placement
from contract.runs import PROGRESS_FILE
from contract.text import duration
from contract.times import JOB_STOP_S
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.jobs import Job
from trainctl.aws.tasks import Task
from trainctl.errors import CliError
from trainctl.pricing import cost_of, dollars
from training.record.progress import Progress

#: Each look makes up to seven calls, two of a kind, and all clients of an account share limits of
#: roughly 10 to 25 calls a second of each kind: a few people may follow their jobs at a time.
POLL_S: Final = 1.0
#: CloudWatch shows a line a second or two after it was written, which may be after the job's end.
LAST_LINES_S: Final = 3.0
#: The log of a job that ended this long ago is complete.
COMPLETE_AFTER: Final = timedelta(minutes=1)


class Log:
    """The log of one node, line by line, each once."""

    def __init__(self, deployment: Deployment, task: Task) -> None:
        self._deployment, self._task = deployment, task
        self._token: str | None = None

    def lines(self) -> Iterator[str]:
        """What is new since the last call."""
        for _, line in self.timed():
            yield line

    def timed(self) -> Iterator[tuple[int, str]]:
        """The same, each with its Unix time in milliseconds."""
        while True:
            page = self._deployment.logs.page(self._task, self._token)
            yield from zip(page.times, page.lines, strict=True)
            # A page may be empty before the end: at the end the token stays as it is.
            if page.token == self._token:
                return
            self._token = page.token


class JobLog:
    """What a job has written: its heads' logs, and what its program prints on other nodes.

    Lines of nodes are in the order of their times, as far as they were there at the same call.
    """

    def __init__(self, deployment: Deployment, *, only: int | None = None) -> None:
        """``only``: the number of a node whose program's lines are wanted, and nothing else."""
        self._deployment, self._only = deployment, only
        self._logs: dict[str, Log] = {}

    def lines(self, job: Job, heads: Sequence[Task]) -> list[str]:
        """What is new since the last call. ``heads``: of the job, the newest last."""
        tasks = [*heads]
        if job.spec and job.spec.on == Placement.NODES:
            jobs = self._deployment.jobs
            tasks += jobs.all_workers(job) if job.is_over else jobs.workers(job)
        found: list[tuple[int, str]] = []
        for task in tasks:
            log = self._logs.setdefault(task.id, Log(self._deployment, task))
            found += [
                (at, line)
                for at, line in log.timed()
                if self._is_wanted(nodes.labelled_node(line), task)
            ]
        # Sorting keeps the lines of a node in their order.
        return [line for _, line in sorted(found, key=lambda each: each[0])]

    def _is_wanted(self, number: int | None, task: Task) -> bool:
        if self._only is not None:
            return number == self._only
        # A worker's own lines are about how it joined: trainctl logs --rank shows them.
        return number is not None or task.node != nodes.WORKER


def follow(deployment: Deployment, name: str) -> int:
    """Show a job's log until it ends; return what the command should exit with.

    Ctrl-C leaves the job running, and prints how to come back.
    """
    try:
        job = _follow(deployment, name)
    except KeyboardInterrupt:
        output.say(
            f"\nDetached; the job keeps running.\n  follow it   trainctl logs {name} --follow\n"
            f"  its state   trainctl show {name}\n  stop it     trainctl stop {name}"
        )
        raise typer.Exit(exits.INTERRUPTED) from None
    output.say(ending(deployment, job))
    return job.shell_code


def _follow(deployment: Deployment, name: str) -> Job:
    log = JobLog(deployment)
    num_heads = 0
    with output.Progress() as progress:
        while True:
            job = deployment.jobs.find(name)
            heads = deployment.jobs.heads(job)
            if len(heads) > max(1, num_heads):
                output.say("the head was lost; another one takes over")
            num_heads = len(heads)
            for line in log.lines(job, heads):
                output.print_text(line)
            if job.is_over:
                break
            if waits := waiting(deployment, job, heads):
                progress.update(waits)
            time.sleep(POLL_S)
    assert job.ended is not None
    if datetime.now(tz=UTC) - job.ended < COMPLETE_AFTER:
        time.sleep(LAST_LINES_S)
    for line in log.lines(job, heads):
        output.print_text(line)
    return job


def waiting(deployment: Deployment, job: Job, heads: Sequence[Task]) -> str:
    """What a running job waits for, in words; "" when it has all that it asked for."""
    shape = deployment.shape
    if not heads:
        return "waiting for the head to be started"
    head = heads[-1]
    if head.status in ("DEACTIVATING", "STOPPING", "DEPROVISIONING", "STOPPED"):
        return "waiting for its nodes to end"
    if head.status == "PROVISIONING":
        return f"waiting for 1 x {shape.head.name}, for the head"
    if head.status != "RUNNING":
        return "waiting for the head to pull its image and start"
    wanted = job.spec.nodes.high if job.spec else 0
    workers = [task for task in deployment.jobs.workers(job) if not task.has_stopped]
    placed = [task for task in workers if task.status != "PROVISIONING"]
    if len(placed) < wanted:
        return f"waiting for {wanted - len(placed)} x {shape.worker.name}"
    if pulling := [task for task in workers if task.status != "RUNNING"]:
        return f"waiting for {len(pulling)} of {len(workers)} workers to pull their image and start"
    return ""


def wait_until_over(deployment: Deployment, name: str) -> Job:
    """Wait until a job has ended, without its log."""
    with output.Progress() as progress:
        while not (job := deployment.jobs.find(name)).is_over:
            what = waiting(deployment, job, deployment.jobs.heads(job)) or "running"
            progress.update(f"{job.id}: {what}")
            time.sleep(POLL_S)
    return job


def wait_until_gone(
    deployment: Deployment, name: str, *, hear: Callable[[str], None] = lambda _text: None
) -> Job:
    """Wait until a job that was told to stop has ended, and all of its nodes too.

    Args:
        hear: is told what is waited for.

    Raises:
        CliError: nodes are left after the time that they have to end.
    """
    deadline = time.monotonic() + JOB_STOP_S
    while True:
        job = deployment.jobs.find(name)
        left = deployment.jobs.alive(job)
        if job.is_over and not left:
            return job
        if time.monotonic() > deadline:
            raise CliError(
                f"{job.id} still has {len(left)} tasks; the sweep stops orphaned tasks every five "
                f"minutes. Their state: trainctl show {job.id}"
            )
        hear(f"waiting for {len(left)} nodes to save and end")
        time.sleep(POLL_S)


def ending(deployment: Deployment, job: Job) -> str:
    """How a job ended, in a line or two."""
    assert job.ended is not None
    lasted = duration(round((job.ended - job.began).total_seconds()))
    with contextlib.suppress(Exception):  # how it ended matters more than its price
        cost = cost_of(deployment, job)
        return f"{job.id}: {job.reason}, after {lasted}, cost {dollars(cost.usd)}"
    return f"{job.id}: {job.reason}, after {lasted}"


def progress_of(deployment: Deployment, job: Job) -> Progress | None:
    """How far a running job's run is; None where it has not written that, or is over."""
    if job.is_over or not job.run:
        return None
    bucket = deployment.bucket
    content = bucket.read(bucket.key(bucket.run(job.run).file(PROGRESS_FILE)))
    try:
        found = Progress.from_json(output.json_object(content))
    except ValueError:
        return None
    return found if found.job == job.id else None  # else it is of an earlier job


def lasted(job: Job) -> str:
    """How long a job has run so far, or ran."""
    return duration(round(((job.ended or datetime.now(tz=UTC)) - job.began).total_seconds()))


def values(job: Job) -> dict[str, object]:
    """A job for ``--json``."""
    spec = output.json_object(job.spec.to_json()) if job.spec else None
    return {
        "id": job.id,
        "run": job.run,
        "status": job.status,
        "reason": job.reason,
        "exit_code": job.outcome.exit_code,
        "began": job.began.isoformat(),
        "ended": job.ended and str(job.ended),
        "spec": spec,
    }
