"""``trainctl open``: Ray's dashboard of a running job, on this machine."""

import contextlib
import webbrowser
from typing import Annotated

import typer

from contract import nodes
from trainctl import show
from trainctl.aws import Deployment
from trainctl.errors import CliError
from trainctl.options import Profile, Region
from trainctl.shell import require_plugin, run_plugin


def open_(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="A job's id, or a run. Without: the standing cluster.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="On this machine.")
    ] = nodes.DASHBOARD_PORT,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Open Ray's dashboard: a tunnel to the head, until Ctrl-C.

    Nothing of the cluster is reachable from outside; the tunnel is Systems Manager's.
    """
    deployment = Deployment.find(profile=profile, region=region)
    if name is None:
        tasks = [task for task in deployment.tasks() if task.node == nodes.HEAD]
        missing = "the standing cluster is down: trainctl cluster up, or name a job (trainctl ls)"
    else:
        job = deployment.job(name)
        tasks = deployment.heads(job)
        missing = f"{job.id} has no head that runs: trainctl show {job.id}"
    running = [task for task in tasks if task.status == "RUNNING"]
    if not running:
        raise CliError(missing)
    head = running[-1]
    if deployment.is_local:  # its address is one of this machine's
        show.print_text(f"http://{head.address}:{nodes.DASHBOARD_PORT}")
        return
    plugin = require_plugin()
    request = {
        "Target": deployment.shell_target(head),
        "DocumentName": "AWS-StartPortForwardingSession",
        "Parameters": {
            "portNumber": [str(nodes.DASHBOARD_PORT)],
            "localPortNumber": [str(port)],
        },
    }
    session = deployment.start_session(request)
    address = f"http://localhost:{port}"
    show.print_text(address)
    show.say(
        "It asks for the cluster's token: aws secretsmanager get-secret-value, of the secret "
        "'Token that every node and client of Ray must show'. Ctrl-C closes the tunnel."
    )
    if browser:
        webbrowser.open(address)
    with contextlib.suppress(KeyboardInterrupt):
        raise typer.Exit(run_plugin(plugin, deployment, session, request, profile))
