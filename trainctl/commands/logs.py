"""``trainctl logs``: the log of a job's nodes."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from contract.job import Placement
from contract.runs import METRICS_FILE
from trainctl import follow
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.jobs import Job
from trainctl.job_log import JobLog, Printer, Wanted
from trainctl.options import JobName, Where
from training.record.events import Phase, parse_metrics

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: CloudWatch's longest retention.
_LONGEST: Final = timedelta(days=3653)


def logs(
    *,
    name: JobName,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Until it ends; exits with its status.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only the last N lines so far.", metavar="N")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only what was written within this time: 90s, 10m, 2h, 1d.", metavar="T"),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(
            help="Only lines in which this regular expression is found.", metavar="PATTERN"
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Of the node on which this rank trained.", metavar="N"),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Only what its command printed on this node of a job on nodes.",
            metavar="N",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each line.")
    ] = False,
    where: Where,
) -> None:
    """Show the log of a job: of all its nodes, in the order of the times.

    Lines of the head have no label, those of worker nodes begin with [worker ID], and what a
    command prints on several nodes with [node N]. How long logs are kept is a setting of the
    deployment (log_retention_days).
    """
    pattern = None if grep is None else _pattern(grep)
    began = None if since is None else datetime.now(tz=UTC) - _time(since)
    deployment = where.find()
    job = deployment.jobs.find(name)
    if node is not None:
        _check_node(job, node)
    task = None if rank is None else _task_of(deployment, job, rank)
    wanted = Wanted(node=node, task=task, pattern=pattern, since=began)
    printer = Printer(as_json=as_json)
    if following:
        code = follow.follow(deployment, job.id, wanted=wanted, tail=tail, printer=printer)
        raise typer.Exit(code)
    log, nodes = JobLog(deployment.logs, wanted), deployment.jobs.all_nodes(job)
    printer.print(log.new(job, nodes) if tail is None else log.last(job, nodes, tail))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"--grep {text!r} is not a regular expression: {error}; put a backslash before "
            "characters that stand for themselves"
        ) from None


def _time(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not match:
        raise UsageError(f"--since is {text!r}: it must be a number and s, m, h or d, such as 10m")
    time = timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    if time > _LONGEST:
        raise UsageError(
            f"--since is {text!r}: it must be at most {_LONGEST.days}d, for which logs can be kept"
        )
    return time


def _check_node(job: Job, node: int) -> None:
    if job.spec is None or job.spec.on != Placement.NODES:
        raise UsageError(
            f"--node: the command of {job.id} runs on its head only; trainctl logs {job.id} shows "
            "what it prints, and --rank N the node of a rank"
        )
    if node > job.spec.nodes.high:
        raise UsageError(f"--node is {node}: {job.id} has nodes 0 to {job.spec.nodes.high}")


def _task_of(deployment: Deployment, job: Job, rank: int) -> str:
    """The task of the node that a rank trained on, according to the run's record."""
    if job.spec and job.spec.on == Placement.NODES:
        raise UsageError(f"--rank is for recipes; trainctl logs {job.id} --node N shows one node")
    hosts = _hosts_of_ranks(deployment, job)
    if not hosts:
        raise CliError(
            f"{job.run or job.id} has not recorded yet where its ranks are: trainctl logs {job.id}"
        )
    if rank >= len(hosts):
        raise UsageError(f"--rank is {rank}: {job.run} has ranks 0 to {len(hosts) - 1}")
    for task in reversed(deployment.jobs.all_nodes(job)):
        if task.address == hosts[rank]:
            return task.id
    raise CliError(
        f"rank {rank} trained on {hosts[rank]}, and no node of {job.id} has that address: the run "
        f"was trained by another job since. All nodes of this one: trainctl logs {job.id}"
    )


def _hosts_of_ranks(deployment: Deployment, job: Job) -> list[str]:
    """Address of the host of each rank, newest answer; empty while there is none."""
    if not job.run:
        return []
    content = deployment.bucket.read_of_run(job.run, METRICS_FILE) or b""
    phases = parse_metrics(content).of(Phase)
    return next(([*each.hosts] for each in reversed(phases) if each.hosts), [])
