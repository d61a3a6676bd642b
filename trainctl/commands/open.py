"""``trainctl open``: Ray's dashboard of a running cluster, or CloudWatch's, in the browser."""

import webbrowser
from typing import Annotated

import typer

from contract import nodes
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.tasks import Task
from trainctl.options import Browser, Port, Where
from trainctl.setup.plugin import require_free, require_plugin, tunnel


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
    port: Port = nodes.DASHBOARD_PORT,
    browser: Browser = True,
    where: Where,
) -> None:
    """Open Ray's dashboard: a tunnel to the head, until Ctrl-C.

    Nothing of the cluster is reachable from outside; the tunnel is Systems Manager's. All clusters
    of a deployment have the same token.
    """
    if dashboard and (token or name):
        raise UsageError("--dashboard shows the whole deployment: leave out JOB and --token")
    deployment = where.find()
    if dashboard:
        _open_console(deployment, browser=browser)
        return
    if token:
        output.print_text(deployment.ray_token)
        return
    head = _running_head(deployment, name)
    if deployment.is_local:  # its address is one of this machine's
        address = f"http://{head.address}:{nodes.DASHBOARD_PORT}"
        output.print_text(address)
        output.say("It asks for the cluster's token: trainctl open --token")
        return
    require_plugin()
    require_free(port)
    address = f"http://localhost:{port}"
    with tunnel(deployment, head, port=nodes.DASHBOARD_PORT, local_port=port) as process:
        try:
            output.print_text(address)
            output.say(
                "It asks for the cluster's token: trainctl open --token. Ctrl-C closes the tunnel."
            )
            if browser:
                webbrowser.open(address)
            process.communicate()
        except KeyboardInterrupt:
            return
    raise CliError("the tunnel was closed: trainctl open opens it again")


def _running_head(deployment: Deployment, name: str | None) -> Task:
    """The head of a job or run, or that of the standing cluster.

    Raises:
        CliError: none is running.
    """
    if name is None:
        tasks = [task for task in deployment.cluster.tasks() if task.is_head]
        missing = "the standing cluster is down: trainctl cluster up, or name a job (trainctl ls)"
    else:
        job = deployment.jobs.find(name)
        tasks = deployment.jobs.heads(job)
        missing = f"{job.id} has no running head: trainctl show {job.id}"
    running = [task for task in tasks if task.status == "RUNNING"]
    if not running:
        raise CliError(missing)
    return running[-1]


def _open_console(deployment: Deployment, *, browser: bool) -> None:
    if deployment.is_local:
        raise CliError("a local deployment has no AWS console: trainctl open shows Ray's dashboard")
    output.print_text(deployment.console)
    if browser:
        webbrowser.open(deployment.console)
