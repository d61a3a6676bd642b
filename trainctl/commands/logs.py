"""``trainctl logs``: the log of a job's nodes."""

from typing import Annotated

import typer

from contract.job import Placement
from trainctl import output
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import JobExecution
from trainctl.options import JobName, Where
from trainctl.watch import follow
from trainctl.watch.job_log import JobLog


def logs(
    *,
    name: JobName,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Until it ends; exits with its status.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only the last N lines so far.", metavar="N")
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
    deployment = where.find()
    job = deployment.jobs.find(name)
    if node is not None:
        _check_node(job, node)
    log = JobLog(deployment.logs, node=node, tail=tail, as_json=as_json)
    if following:
        raise typer.Exit(follow.follow(deployment, job.id, log=log))
    if not log.print_new(job, deployment.jobs.all_nodes(job)):
        output.say("There are no such lines so far.")


def _check_node(job: JobExecution, node: int) -> None:
    if job.spec is None or job.spec.on != Placement.NODES:
        raise UsageError(
            f"--node: the command of {job.id} runs on its head only; trainctl logs {job.id} shows "
            "what it prints"
        )
    if node > job.spec.nodes.high:
        raise UsageError(f"--node is {node}: {job.id} has nodes 0 to {job.spec.nodes.high}")
