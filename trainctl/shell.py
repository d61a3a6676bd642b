"""``trainctl shell``: a shell, or one command, inside a node's container.

ECS Exec on AWS; in the rehearsal, where the container is on this machine, Docker itself.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from contract import nodes
from trainctl import show
from trainctl.aws import NODES, Deployment, Task
from trainctl.errors import CliError, UsageError
from trainctl.options import Profile, Region

PLUGIN: Final = "session-manager-plugin"


def shell(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Run this instead of a shell; after -- .", show_default=False),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="On a node of this job, or run.", show_default="the standing cluster"),
    ] = None,
    node: Annotated[str, typer.Option(help="head or worker.")] = nodes.HEAD,
    task: Annotated[
        str | None, typer.Option(help="Which one: the beginning of its task's id.")
    ] = None,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Open a shell on the head, or run a command there.

    The exit code is the command's. On AWS it needs the session manager's plug-in.
    """
    if node not in NODES:
        raise UsageError(f"--node is {node!r}: it must be head or worker")
    deployment = Deployment.find(profile=profile, region=region)
    if job is None:
        tasks = deployment.tasks()
    else:
        tasks = [
            replace(each, node=nodes.HEAD) if each.node == nodes.JOB else each
            for each in deployment.alive(deployment.job(job))
        ]
    chosen = choose(tasks, node=node, task_id=task)
    run = _in_docker if deployment.is_local else _in_session
    raise typer.Exit(run(deployment, chosen, command or ["bash"], profile))


def choose(tasks: list[Task], *, node: str, task_id: str | None) -> Task:
    """The node that is meant. Raises CliError when none or several are."""
    if task_id:
        found = [task for task in tasks if task.id.startswith(task_id)]
        if len(found) != 1:
            there = ", ".join(f"{task.node} {task.id}" for task in tasks) or "none"
            raise UsageError(f"{len(found)} tasks begin with {task_id!r}; there are: {there}")
    else:
        found = [task for task in tasks if task.node == node]
    if not found:
        raise CliError(f"no {node} runs: trainctl cluster up starts the standing cluster")
    if found[0].status != "RUNNING":
        raise CliError(
            f"the {found[0].node} is not running yet ({found[0].status}): trainctl cluster up waits"
        )
    return found[0]


def _in_docker(deployment: Deployment, task: Task, command: list[str], _profile: str | None) -> int:
    del deployment
    client = shutil.which("docker")
    if client is None:
        raise CliError("there is no docker command, and the node is a container on this machine")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    options = ["--interactive", "--tty"] if is_terminal else []
    return subprocess.run(
        [client, "exec", *options, task.runtime_id, *command], check=False
    ).returncode


def _in_session(deployment: Deployment, task: Task, command: list[str], profile: str | None) -> int:
    from botocore.exceptions import ClientError

    plugin = require_plugin()
    try:
        session = deployment.open_shell(task, shlex.join(command))
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code not in ("TargetNotConnectedException", "InvalidParameterException"):
            raise
        raise CliError(
            f"no shell on {task.node} {task.id[:8]} yet: {error.response['Error']['Message']} Its "
            "agent takes up to a minute after the start: give the same command again"
        ) from None
    if len(command) > 1:
        show.say("ECS Exec does not pass on the exit code of a command; its output is what counts")
    request = {"Target": deployment.shell_target(task)}
    return run_plugin(plugin, deployment, session, request, profile)


def require_plugin() -> str:
    """Path of the session manager's plug-in. Raises CliError where it is not installed."""
    plugin = shutil.which(PLUGIN)
    if plugin is None:
        raise CliError(
            f"{PLUGIN} is not installed, and shells and tunnels on AWS go through it: see 'Install "
            "the Session Manager plugin' in the documentation of AWS Systems Manager"
        )
    return plugin


def run_plugin(
    plugin: str,
    deployment: Deployment,
    session: Mapping[str, Any],
    request: Mapping[str, Any],
    profile: str | None,
) -> int:
    """Hand a session to the plug-in, as the AWS CLI does; return its exit code.

    Args:
        session: what AWS has answered.
        request: what AWS was asked.
    """
    endpoint = f"https://ssm.{deployment.region}.amazonaws.com"
    arguments = [plugin, json.dumps(session), deployment.region, "StartSession", profile or ""]
    return subprocess.run(
        [*arguments, json.dumps(request), endpoint], env=os.environ, check=False
    ).returncode
