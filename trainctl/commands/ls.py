"""``trainctl ls``: the jobs that were submitted."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from contract.job import JobStatus
from contract.text import age, dollars, duration
from trainctl import follow, output
from trainctl.aws.deployment import Deployment
from trainctl.aws.jobs import JobExecution, QueuePlace
from trainctl.aws.tasks import Task
from trainctl.options import AsJson, Where
from trainctl.pricing import costs_of


def _state(
    deployment: Deployment, job: JobExecution, place: QueuePlace | None, tasks: Sequence[Task]
) -> str:
    """Its state in a word or two; ``trainctl show`` has the reason."""
    if place:
        return "user's limit" if place.limit else f"queued {place.number}"
    if not job.is_over:
        waits = follow.waiting(deployment, job, tasks, explains=False)
        if waits.hold:
            return f"held, {duration(max(0, round(waits.hold.until - time.time())))} left"
        return "waiting" if waits.reason else "running"
    code = job.outcome.exit_code if job.status == JobStatus.FAILED else None
    return job.status.replace("_", " ") + (f" ({code})" if code else "")


def ls(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="How many, newest first.", metavar="N")
    ] = 20,
    running: Annotated[bool, typer.Option("--running", help="Only running ones.")] = False,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """List jobs: state, nodes, share of the steps, age, cost at list prices and who submitted them.

    The job's id begins with the name of its run. A narrow terminal shows fewer columns.
    """
    deployment = where.find()
    jobs = deployment.jobs.newest(limit=limit, running=running)
    is_there = any(not job.is_over for job in jobs)
    queue = deployment.jobs.queue(deployment.shape.limits) if is_there else {}
    nodes = deployment.jobs.all_nodes_of(jobs)
    queue = {job: place for job, place in queue.items() if not nodes.get(job)}
    costs = costs_of(deployment, jobs, nodes)
    if as_json:
        output.print_json(
            [{**follow.values(job, queue.get(job.id)), "usd": costs[job.id]} for job in jobs]
        )
        return
    if not jobs:
        output.print_text("No jobs. Start one: trainctl submit ddp")
        return
    rows = []
    for job in jobs:
        progress = follow.progress_of(deployment, job)
        rows.append(
            [
                job.id,
                _state(deployment, job, queue.get(job.id), nodes[job.id]),
                " ".join((str(job.spec.nodes), *job.spec.pools)) if job.spec else "",
                progress.share if progress else "",
                age((datetime.now(tz=UTC) - job.began).total_seconds()),
                "" if costs[job.id] is None else dollars(costs[job.id]),
                job.spec.submitter.partition("@")[0] if job.spec else "",
            ]
        )
    columns = ["job", "state", "nodes", "done", "age", "cost", "who"]
    output.print_table(columns, rows, optional=["nodes", "done", "who", "cost"])
