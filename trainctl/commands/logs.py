"""``trainctl logs``: what a job's nodes write."""

import time
from typing import Annotated

import typer

from contract.job import Placement
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
    node: Annotated[
        int | None,
        typer.Option(min=0, help="Only what its command printed on this node of a job on nodes."),
    ] = None,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Show a job's log: of its head and what its command prints on all nodes, or of one node."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.jobs.find(name)
    if node is not None:
        _check_node(job, node)
    if rank is None and node is None and following:
        raise typer.Exit(follow.follow(deployment, job.id))
    of_rank = None if rank is None else follow.Log(deployment, _node_of(deployment, job, rank))
    of_job = follow.JobLog(deployment, only=node)
    while True:
        job = deployment.jobs.find(job.id)
        new = of_rank.lines() if of_rank else of_job.lines(job, deployment.jobs.heads(job))
        for line in new:
            output.print_text(line)
        if not following or job.is_over:
            return
        time.sleep(follow.POLL_S)


def _check_node(job: Job, node: int) -> None:
    if job.spec is None or job.spec.on != Placement.NODES:
        raise UsageError(
            f"--node: the command of {job.id} runs on its head only; trainctl logs {job.id} shows "
            "what it prints, and --rank N the node of a rank"
        )
    if node > job.spec.nodes.high:
        raise UsageError(f"--node is {node}: {job.id} has nodes 0 to {job.spec.nodes.high}")


def _node_of(deployment: Deployment, job: Job, rank: int) -> Task:
    """The worker node that a rank trained on, according to the run's record."""
    if job.spec and job.spec.on == Placement.NODES:
        raise UsageError(f"--rank is for recipes; trainctl logs {job.id} --node N shows one node")
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
