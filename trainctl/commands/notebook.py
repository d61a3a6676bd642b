"""``trainctl notebook``: JupyterLab on the head of the standing cluster, in the browser here."""

import contextlib
import webbrowser
from collections.abc import Iterator
from typing import Annotated

import typer

from contract import nodes, runs
from trainctl import notebooks, output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError
from trainctl.aws.tasks import Task
from trainctl.commands.open import running_head
from trainctl.options import AsJson, Browser, Port, Where
from trainctl.plugin import free_port, require_free, require_plugin, tunnel
from trainctl.ray_jobs import RayJobs
from trainctl.variables import variables

_LOOPBACK = "127.0.0.1"


def notebook(
    *,
    stop: Annotated[
        bool, typer.Option("--stop", help="End it; its files stay in the bucket.")
    ] = False,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="Variable of its kernels, or of pip: PIP_INDEX_URL. Can be repeated.",
        ),
    ] = None,
    port: Port = nodes.NOTEBOOK_PORT,
    browser: Browser = True,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Open JupyterLab on the head of the standing cluster; a tunnel to it, until Ctrl-C.

    It starts if it does not run yet, and keeps running when the tunnel closes. In a notebook,
    ray.init() joins the cluster. Its folder is copied into the bucket and comes back at the next
    start. It ends with --stop, or with trainctl cluster down.
    """
    of_kernels = variables(given or [])
    deployment = where.find()
    head = running_head(deployment)
    is_local = deployment.is_local  # its nodes are containers of this machine
    if not is_local:
        require_plugin()
        if not stop:
            require_free(port)
    with _dashboard(deployment, head) as jobs, output.Progress() as shown:
        if stop:
            _stop(jobs, shown)
            return
        is_new = notebooks.start(
            jobs,
            address=head.address if is_local else _LOOPBACK,
            variables=of_kernels,
            report=shown.update,
        )
    if of_kernels and not is_new:
        output.say("It was running already: --env counts after trainctl notebook --stop.")
    host = f"{head.address}:{nodes.NOTEBOOK_PORT}" if is_local else f"localhost:{port}"
    address = f"http://{host}/lab?token={nodes.page_token(deployment.ray_token)}"
    if is_local:
        _show(deployment, address, as_json=as_json, browser=browser)
        return
    with tunnel(deployment, head, port=nodes.NOTEBOOK_PORT, local_port=port) as process:
        try:
            _show(deployment, address, as_json=as_json, browser=browser)
            process.communicate()
        except KeyboardInterrupt:
            output.say(
                "\nThe tunnel is closed; the notebook runs on: trainctl notebook opens it again"
            )
            return
    raise CliError("the tunnel was closed; the notebook runs on: trainctl notebook opens it again")


@contextlib.contextmanager
def _dashboard(deployment: Deployment, head: Task) -> Iterator[RayJobs]:
    """Ray's dashboard on the head, which is reached through a tunnel on AWS."""
    token = deployment.ray_token
    if deployment.is_local:
        yield RayJobs(host=head.address, port=nodes.DASHBOARD_PORT, token=token)
        return
    port = free_port()
    with tunnel(deployment, head, port=nodes.DASHBOARD_PORT, local_port=port):
        yield RayJobs(host=_LOOPBACK, port=port, token=token)


def _stop(jobs: RayJobs, shown: output.Progress) -> None:
    shown.update("saving the files, ending JupyterLab")
    if notebooks.stop(jobs):
        output.say(f"Stopped. Its files: trainctl download {nodes.NOTEBOOK_RUN}")
    else:
        output.say("No notebook is running.")


def _show(deployment: Deployment, address: str, *, as_json: bool, browser: bool) -> None:
    files = f"{deployment.bucket.uri}/{runs.output_prefix(nodes.NOTEBOOK_RUN)}"
    if as_json:
        output.print_json({"address": address, "files": files, "run": nodes.NOTEBOOK_RUN})
    else:
        output.print_text(address)
    output.say(
        f"{'' if deployment.is_local else 'Ctrl-C closes the tunnel; the notebook keeps running. '}"
        f"Its files are copied to {files}\n"
        "  come back       trainctl notebook\n"
        "  stop it         trainctl notebook --stop\n"
        f"  its files here  trainctl download {nodes.NOTEBOOK_RUN}"
    )
    if browser:
        webbrowser.open(address)
