"""``trainctl logs``: what a job's nodes write."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from contract.runs import METRICS_FILE
from trainctl import follow, output
from trainctl.aws.deployment import Deployment
from trainctl.aws.jobs import Job
from trainctl.aws.tasks import Task
from trainctl.errors import CliError, UsageError
from trainctl.options import JobName, Profile, Region
from training.record.events import Phase
from training.record.lines import parse_metrics


def logs(
    *,
    name: JobName,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Until it ends; exits with its status.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of the node on which this rank trained.")
    ] = None,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Show a job's log: that of its head, with its code's output, or of a worker node."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.jobs.find(name)
    if rank is None and following:
        raise typer.Exit(follow.follow(deployment, job.id))
    if rank is not None:
        tasks: Sequence[Task] = [_node_of(deployment, job, rank)]
    else:
        tasks = deployment.jobs.heads(job)
    found = [follow.Log(deployment, task) for task in tasks]
    while True:
        for log in found:
            for line in log.lines():
                output.print_text(line)
        if not following or deployment.jobs.find(job.id).is_over:
            return
        time.sleep(follow.POLL_S)


def _node_of(deployment: Deployment, job: Job, rank: int) -> Task:
    """The worker node that a rank trained on, according to the run's record."""
    hosts = _hosts_of_ranks(deployment, job)
    if not hosts:
        raise CliError(
            f"{job.run or job.id} has not recorded yet where its ranks are: trainctl logs {job.id}"
        )
    if rank >= len(hosts):
        raise UsageError(f"--rank is {rank}: {job.run} has ranks 0 to {len(hosts) - 1}")
    for task in [*deployment.jobs.workers(job), *deployment.jobs.heads(job)]:
        if task.address == hosts[rank]:
            return task
    raise CliError(
        f"the node of rank {rank} ({hosts[rank]}) ended more than an hour ago, and ECS has "
        "forgotten which one it was; all logs of workers: aws logs tail "
        f"{deployment.logs.group} --log-stream-name-prefix worker/"
    )


def _hosts_of_ranks(deployment: Deployment, job: Job) -> list[str]:
    """Address of the host of each rank, newest answer; empty while there is none."""
    if not job.run:
        return []
    bucket = deployment.bucket
    content = bucket.read(bucket.key(bucket.run(job.run).file(METRICS_FILE))) or b""
    phases = parse_metrics(content).of(Phase)
    return next(([*each.hosts] for each in reversed(phases) if each.hosts), [])
