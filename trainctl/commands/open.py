"""``trainctl open``: Ray's dashboard of a running cluster, a page that a job's program serves, such
as a notebook, or CloudWatch's dashboard, in the browser."""

import re
import webbrowser
from typing import Annotated, Final

import typer

from contract import nodes
from contract.job import Placement
from contract.text import duration
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.jobs import JobExecution
from trainctl.commands.shell import choose
from trainctl.jobs.pricing import activity_of, an_hour
from trainctl.options import Browser, Where
from trainctl.setup.plugin import free_port, require_plugin, tunnel

#: Lines of a node's log in which an address is looked for: all that CloudWatch has in one answer.
_LINES: Final = 10_000


def open_(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="ID of a job, or name of a run. Without: the standing cluster.",
        ),
    ] = None,
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard",
            help="The deployment's CloudWatch dashboard instead, in the AWS console.",
        ),
    ] = False,
    token: Annotated[
        bool,
        typer.Option("--token", help="Only print the token that Ray's dashboard asks for."),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="A port that the job's program serves, such as a notebook's, instead of Ray's "
            "dashboard.",
            metavar="PORT",
        ),
    ] = None,
    browser: Browser = True,
    where: Where,
) -> None:
    """Open Ray's dashboard, or a page of a job's program: a tunnel to the node, until Ctrl-C.

    Nothing of the cluster is reachable from outside; the tunnel is Systems Manager's. All clusters
    of a deployment have the same token. A program is reached where it runs: on the first worker
    node, or on the head.

    Example: trainctl open RUN --port 8888
    """
    if sum(map(bool, (dashboard, token, port))) > 1:
        raise UsageError("--dashboard, --token and --port: give one of them")
    if dashboard and name:
        raise UsageError("--dashboard shows the whole deployment: leave out JOB")
    deployment = where.find()
    if dashboard:
        _open_console(deployment, browser=browser)
        return
    if token:
        output.print_text(deployment.ray_token)
        return
    job = deployment.jobs.find(name) if name else None
    tasks = deployment.jobs.alive(job) if job else deployment.cluster.tasks()
    path, hint = "", "It asks for the cluster's token: trainctl open --token."
    if port and job and job.spec and job.spec.on == Placement.NODES:
        node = choose(tasks, node="0", addresses=activity_of(deployment, job).nodes)
    else:
        node = choose(tasks, node=nodes.HEAD)
    if port:
        # Jupyter prints its address with a token, which other commands do not show.
        printed = "\n".join(deployment.logs.last_lines(node, _LINES))
        path = "".join(re.findall(rf"://[^\s/]+:{port}(/\S*token=\S+)", printed)[-1:])
        hint = _terms(job)
    there = port or nodes.DASHBOARD_PORT
    if deployment.is_local:  # its address is one of this machine's
        output.print_text(f"http://{node.address}:{there}{path}")
        output.say(f"{hint} A program has to listen at 0.0.0.0.".lstrip() if port else hint)
        return
    require_plugin()
    here = free_port(there)
    address = f"http://localhost:{here}{path}"
    with tunnel(deployment, node, port=there, local_port=here) as process:
        try:
            output.print_text(address)
            output.say(f"{hint} Ctrl-C closes the tunnel.".lstrip())
            if browser:
                webbrowser.open(address)
            process.communicate()
        except KeyboardInterrupt:
            return
    raise CliError("the tunnel was closed: trainctl open opens it again")


def _terms(job: JobExecution | None) -> str:
    """Price and end of a job whose program serves a page; empty without a job."""
    if not (job and job.spec and job.spec.prices):
        return ""
    price = an_hour(job.spec.prices, job.spec.nodes.high)
    idle = duration(job.spec.hang_s) if job.spec.hang_s else "no time"
    return (
        f"Its price is {price}, until trainctl stop {job.id}, its deadline, or {idle} without a "
        "connection and another sign of life."
    )


def _open_console(deployment: Deployment, *, browser: bool) -> None:
    if deployment.is_local:
        raise CliError("a local deployment has no AWS console: trainctl open shows Ray's dashboard")
    output.print_text(deployment.console)
    if browser:
        webbrowser.open(deployment.console)
