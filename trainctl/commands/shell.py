"""``trainctl shell``: a shell, or one command, inside a node's container.

ECS Exec on AWS; in the rehearsal, where the container is on this machine, Docker itself.
"""

import os
import shlex
import shutil
import subprocess
from typing import Annotated, Literal

import typer

from contract import faults
from trainctl import completion, output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.tasks import Task
from trainctl.options import Where
from trainctl.plugin import require_plugin


def shell(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Run this instead of a shell; after -- ."),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="On a node of this job, or run.",
            metavar="JOB",
            show_default="the standing cluster",
            autocompletion=completion.jobs,
        ),
    ] = None,
    node: Annotated[
        Literal["head", "worker"], typer.Option(help="head or worker.", metavar="NODE")
    ] = "head",
    task: Annotated[
        str | None, typer.Option(help="Which one: the beginning of its task's id.", metavar="ID")
    ] = None,
    where: Where,
) -> None:
    """Open a shell on the head, or run a command there.

    On AWS it needs the Session Manager plug-in, and ECS Exec does not pass on the command's exit
    code; a local deployment does.
    """
    deployment = where.find()
    if job is None:
        tasks = deployment.cluster.tasks()
    else:
        tasks = deployment.jobs.alive(deployment.jobs.find(job))
    chosen = choose(tasks, node=node, task_id=task)
    words = command or ["bash"]
    if deployment.is_local:
        raise typer.Exit(_in_docker(chosen, words))
    raise typer.Exit(_in_session(deployment, chosen, words))


def choose(tasks: list[Task], *, node: str, task_id: str | None) -> Task:
    """The node that is meant. Raises CliError when none or several are."""
    if task_id:
        found = [task for task in tasks if task.id.startswith(task_id)]
        if len(found) != 1:
            there = ", ".join(f"{task.kind} {task.id}" for task in tasks) or "none"
            raise UsageError(f"{len(found)} tasks begin with {task_id!r}; there are: {there}")
    else:
        found = [task for task in tasks if task.kind == node]
    if not found:
        raise CliError(f"no {node} runs: trainctl cluster up starts the standing cluster")
    if found[0].status != "RUNNING":
        how = "not running yet" if found[0].is_starting else "ending"
        raise CliError(
            f"the {found[0].kind} is {how} ({found[0].status}): trainctl cluster up waits for one"
        )
    return found[0]


def _in_docker(task: Task, command: list[str]) -> int:
    client = shutil.which("docker")
    if client is None:
        raise CliError("there is no docker command, and the node is a container on this machine")
    is_terminal = os.isatty(0) and os.isatty(1)
    options = ["--interactive", "--tty"] if is_terminal else []
    return subprocess.run(
        [client, "exec", *options, task.runtime_id, *command], check=False
    ).returncode


def _in_session(deployment: Deployment, task: Task, command: list[str]) -> int:
    from botocore.exceptions import ClientError

    plugin = require_plugin()
    try:
        session = deployment.sessions.shell(task, shlex.join(command))
    except ClientError as error:
        code = faults.code_of(error)
        if code not in (
            "TargetNotConnectedException",
            "InvalidParameterException",
        ):
            raise
        raise CliError(
            f"no shell on {task.kind} {task.id[:8]} yet: {error.response['Error']['Message']} Its "
            "agent takes up to a minute after the start: give the same command again"
        ) from None
    if len(command) > 1:
        output.say("ECS Exec does not pass on a command's exit code: check its output instead")
    return subprocess.run([plugin, *session], check=False).returncode
