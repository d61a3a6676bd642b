"""``trainctl shell``: a shell, or one command, inside a node's container.

ECS Exec on AWS; in the rehearsal, where the container is on this machine, Docker itself.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from contract import faults
from contract.nodes import HEAD, WORKER
from contract.text import listed
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.tasks import Task
from trainctl.jobs.pricing import activity_of
from trainctl.options import Where
from trainctl.setup.plugin import require_plugin

#: What opens a shell in the place of a job's program.
_IN_PLACE: Final = ("python", "-P", "-m", "containers.program.start.shell")
#: ECS's answers while the agent in a container starts.
_NOT_READY: Final = ("TargetNotConnectedException", "InvalidParameterException")


def shell(
    *,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="ID of a job, or name of a run: its newest job.",
            show_default="the standing cluster",
        ),
    ] = "",
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Run this instead of a shell."),
    ] = None,
    node: Annotated[
        str,
        typer.Option(
            help="head, worker, or the number of a node as the log shows it.", metavar="NODE"
        ),
    ] = "head",
    task: Annotated[
        str | None, typer.Option(help="Which one: the beginning of its task's id.", metavar="ID")
    ] = None,
    where: Where,
) -> None:
    """Open a shell on a node, or run a command there.

    On a node of a job it is in the folder of its program, with its variables and packages. On AWS
    it needs the Session Manager plug-in, and ECS Exec does not pass on the command's exit code; a
    local deployment does.

    Examples: trainctl shell -- ray status; trainctl shell JOB --node 1 -- nvidia-smi
    """
    if node not in (HEAD, WORKER) and not node.isdecimal():
        raise UsageError(f"--node is {node!r}: give head, worker, or a number as in the log")
    deployment, words = where.find(), command or ["bash"]
    addresses: Sequence[str] = ()
    if job:
        found = deployment.jobs.find(job)
        tasks = deployment.jobs.alive(found)
        words = [*_IN_PLACE, *(command or [])]
        addresses = activity_of(deployment, found).nodes
    else:
        tasks = deployment.cluster.tasks()
    chosen = choose(tasks, node=node, task_id=task, addresses=addresses)
    if deployment.is_local:
        raise typer.Exit(_in_docker(chosen, words))
    raise typer.Exit(_in_session(deployment, chosen, words))


def choose(
    tasks: list[Task], *, node: str, task_id: str | None = None, addresses: Sequence[str] = ()
) -> Task:
    """The node that is asked for. Raises CliError if there is none, or several are.

    Args:
        addresses: of nodes, by their numbers; empty for one that the program has left.
    """
    there = ", ".join(f"{task.kind} {task.id}" for task in tasks) or "none"
    if task_id:
        found = [task for task in tasks if task.id.startswith(task_id)]
        if len(found) != 1:
            raise UsageError(f"{len(found)} tasks begin with {task_id!r}; there are: {there}")
    elif node.isdecimal():
        known = {number: address for number, address in enumerate(addresses) if address}
        found = [task for task in tasks if task.address == known.get(int(node))]
        if not found:
            numbers = listed([*map(str, known)]) or "none"
            raise UsageError(
                f"node {node} is not running; its program was started on the nodes: {numbers}. "
                f"Give --node head or worker, or --task with an ID of: {there}"
            )
    else:
        found = [task for task in tasks if task.kind == node]
    if not found:
        raise CliError(
            f"no {node} runs: trainctl ls lists the jobs, trainctl cluster up starts the standing "
            "cluster"
        )
    if found[0].is_head:
        found.reverse()  # the newest has replaced the others
    chosen = max(found, key=lambda task: task.status == "RUNNING")
    if chosen.status != "RUNNING":
        how = "not running yet" if chosen.is_starting else "ending"
        raise CliError(
            f"the {chosen.kind} is {how} ({chosen.status}): trainctl cluster up waits for one"
        )
    return chosen


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
        if faults.code_of(error) not in _NOT_READY:
            raise
        raise CliError(
            f"no shell on {task.kind} {task.id[:8]} yet: {error.response['Error']['Message']} Its "
            "agent takes up to a minute after the start: give the same command again"
        ) from None
    if len(command) > 1:
        output.say("ECS Exec does not pass on a command's exit code: check its output instead")
    variables = {**os.environ, **session.variables}
    return subprocess.run([plugin, *session.arguments], env=variables, check=False).returncode
