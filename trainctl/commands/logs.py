"""``trainctl logs``: the log of a job's nodes."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from contract.job import Placement
from trainctl import follow, output
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import Job
from trainctl.job_log import JobLog, Printer, Wanted
from trainctl.options import JobName, Where

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
    node: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Only what its command printed on this node of a job on nodes.",
            metavar="N",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Routine lines of nodes too.")] = False,
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
    wanted = Wanted(node=node, pattern=pattern, since=began, routine=everything or as_json)
    printer = Printer(as_json=as_json)
    if following:
        code = follow.follow(deployment, job.id, wanted=wanted, tail=tail, printer=printer)
        raise typer.Exit(code)
    log, nodes = JobLog(deployment.logs, wanted), deployment.jobs.all_nodes(job)
    lines = log.new(job, nodes) if tail is None else log.last(job, nodes, tail)
    printer.print(lines)
    if not lines:
        output.say("There are no such lines so far.")


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
            "what it prints"
        )
    if node > job.spec.nodes.high:
        raise UsageError(f"--node is {node}: {job.id} has nodes 0 to {job.spec.nodes.high}")
