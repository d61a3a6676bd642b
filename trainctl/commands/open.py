"""``trainctl open``: Ray's dashboard of a running cluster, on this machine."""

import contextlib
import webbrowser
from typing import Annotated

import typer

from contract import nodes
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.errors import CliError
from trainctl.options import Profile, Region
from trainctl.plugin import require_plugin, run_plugin


def open_(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="ID of a job, or name of a run. Without: the standing cluster.",
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
        tasks = [task for task in deployment.cluster.tasks() if task.node == nodes.HEAD]
        missing = "the standing cluster is down: trainctl cluster up, or name a job (trainctl ls)"
    else:
        job = deployment.jobs.find(name)
        tasks = deployment.jobs.heads(job)
        missing = f"{job.id} has no running head: trainctl show {job.id}"
    running = [task for task in tasks if task.status == "RUNNING"]
    if not running:
        raise CliError(missing)
    head = running[-1]
    if deployment.is_local:  # its address is one of this machine's
        output.print_text(f"http://{head.address}:{nodes.DASHBOARD_PORT}")
        return
    plugin = require_plugin()
    session = deployment.sessions.tunnel(head, port=nodes.DASHBOARD_PORT, local_port=port)
    address = f"http://localhost:{port}"
    output.print_text(address)
    output.say(
        "It asks for the cluster's token: aws secretsmanager get-secret-value, of the secret "
        "'Token that every node and client of Ray must show'. Ctrl-C closes the tunnel."
    )
    if browser:
        webbrowser.open(address)
    with contextlib.suppress(KeyboardInterrupt):
        raise typer.Exit(run_plugin(plugin, session, region=deployment.region, profile=profile))
