"""``trainctl cluster up``: start or resize the standing cluster, and wait until Ray has it."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from contract import exits, nodes
from contract.job_outcome import Ending
from contract.nodes import ClusterSize, Range
from trainctl import output
from trainctl.aws.cluster import NODES, Service
from trainctl.aws.deployment import Deployment
from trainctl.aws.shape import Shape
from trainctl.aws.tasks import Task
from trainctl.commands.cluster import words
from trainctl.errors import CliError, UsageError
from trainctl.images import check_images
from trainctl.job_options import check_nodes
from trainctl.options import NoWorkers, Profile, Region, Wait, Yes
from trainctl.pace import Pace

#: A node that ends this often while the cluster comes up will not come up.
MAX_ENDS: Final = 3

#: What a container's exit code means, where the node's own log may be hard to find.
_EXITS: Final = {
    exits.BAD_INPUT: "its settings are wrong",
    exits.NO_HEAD: "it did not find its head, or lost it",
    exits.REFUSED: "the head refuses its token: redeploy, then take both down and up",
    exits.BAD_HOST: "its host's GPUs or EFA devices are not healthy",
    exits.KILLED: "it was killed",
}
#: Those that another attempt does not fix.
_FINAL_EXITS: Final = (exits.BAD_INPUT, exits.REFUSED, exits.BAD_HOST)


def up(
    *,
    given: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            "-n",
            metavar="N",
            help="Worker nodes, each with all of its GPUs.",
            show_default="as many as were deployed",
        ),
    ] = None,
    _workers: NoWorkers = None,
    wait: Wait = True,
    timeout_minutes: Annotated[
        float, typer.Option(min=0.1, help="Give up waiting after this long.", metavar="MINUTES")
    ] = 30,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Start a head and workers, and wait until Ray sees them all.

    Prints what they cost before starting. Ctrl-C while it waits leaves the cluster coming up. Given
    again, it changes the number of worker nodes.
    """
    deployment = Deployment.find(profile=profile, region=region, to_start=True)
    shape, cluster = deployment.shape, deployment.cluster
    num_nodes = _number(shape, given)
    services = cluster.services()
    now = {node: services[node].wanted for node in NODES}
    wanted = {nodes.HEAD: 1, nodes.WORKER: num_nodes}
    if now == wanted:
        output.say(f"Already requested: a head, {words.workers(num_nodes)}.")
    else:
        check_images(deployment)
        output.say(f"{words.described(shape, num_nodes)}\n{words.price(deployment, num_nodes)}")
        output.confirm("Start it?" if not any(now.values()) else "Change it?", yes=yes)
    began = datetime.now(tz=UTC)
    for node in NODES:
        if now[node] != wanted[node]:
            cluster.set_wanted(node, wanted[node])
    if not wait:
        output.say("Coming up. Its state: trainctl cluster status")
        return
    try:
        _wait_until_up(deployment, num_nodes, began=began, timeout_s=timeout_minutes * 60)
    except KeyboardInterrupt:
        output.say(
            "\nDetached; the cluster keeps coming up.\n"
            "  its state       trainctl cluster status\n"
            "  wait again      trainctl cluster up\n"
            "  take it down    trainctl cluster down"
        )
        raise typer.Exit(exits.INTERRUPTED) from None
    _print_how_to_use(deployment, num_nodes)


def _number(shape: Shape, given: str | None) -> int:
    if given is None:
        return shape.max_workers
    wanted = check_nodes(shape, Range.parse(given, option="--nodes"))
    if wanted.low != wanted.high:
        raise UsageError(
            f"--nodes is {given}: a standing cluster has a fixed size, give one number; a job can "
            "have a range (trainctl submit)"
        )
    return wanted.high


# --- waiting -----------------------------------------------------------------------------------
def _wait_until_up(
    deployment: Deployment, num_nodes: int, *, began: datetime, timeout_s: float
) -> None:
    """Wait until every node is healthy and in Ray. Raises CliError when that will not happen."""
    expected = deployment.shape.size(num_nodes)
    deadline = time.monotonic() + timeout_s
    reported = shown = ""
    pace = Pace(is_local=deployment.is_local)
    with output.Progress() as progress:
        while True:
            services, tasks = deployment.cluster.services(), deployment.cluster.tasks()
            size = words.ray_size(deployment, tasks)
            if is_up(tasks, size, expected):
                return
            _check_for_faults(deployment, services, began)
            if time.monotonic() > deadline:
                raise CliError(
                    f"the cluster is not up after {timeout_s / 60:.0f} min: "
                    f"{waiting_for(tasks, size, deployment.shape, expected)}. It keeps coming up: "
                    "trainctl cluster up waits again, trainctl cluster down ends it"
                )
            now = waiting_for(tasks, size, deployment.shape, expected)
            progress.update(now)
            if (event := newest_trouble(services.values(), began)) and event != reported:
                output.say(f"ECS reports: {event}")
                reported = event
            pace.wait(changed=now != shown)
            shown = now


def is_up(tasks: Sequence[Task], size: ClusterSize | None, expected: ClusterSize) -> bool:
    """Whether all nodes run, are healthy, and are in Ray."""
    ready = [task for task in tasks if task.status == "RUNNING" and task.health == "HEALTHY"]
    return len(tasks) == len(ready) == expected.num_nodes and size == expected


def waiting_for(
    tasks: Sequence[Task], size: ClusterSize | None, shape: Shape, expected: ClusterSize
) -> str:
    """What the cluster lacks, in words."""
    started = len([task for task in tasks if task.status in ("RUNNING", "ACTIVATING", "PENDING")])
    if started < expected.num_nodes:
        hosts = {shape.head.name, shape.worker.name}
        return f"waiting for {expected.num_nodes - started} hosts ({', '.join(sorted(hosts))})"
    if pulling := [task for task in tasks if task.status != "RUNNING"]:
        return f"waiting for {len(pulling)} of {len(tasks)} nodes to pull their image and start"
    if size is None:
        return "waiting for Ray on the head"
    if size != expected:
        return f"waiting for nodes to join Ray: {words.sized(size)} of {words.sized(expected)}"
    return "waiting for the health checks"


def newest_trouble(services: Iterable[Service], began: datetime) -> str:
    """The newest event of a service that is no progress report; "" if there is none."""
    signs = ("unable", "failed", "insufficient", "RESOURCE", "unhealthy")
    events = [
        event
        for service in services
        for event in service.events
        if event[0] >= began and any(sign in event[1] for sign in signs)
    ]
    return max(events)[1] if events else ""


def _check_for_faults(
    deployment: Deployment, services: dict[str, Service], began: datetime
) -> None:
    """Raise CliError once it is clear that the cluster will not come up."""
    after = "The cluster is left as it is: trainctl cluster down ends it"
    for service in services.values():
        if service.rollout == "FAILED":
            raise CliError(f"ECS gives up on the {service.node}: {service.rollout_reason} {after}")
    stopped = deployment.cluster.tasks(stopped=True)
    ended = [task for task in stopped if task.since and task.since >= began]
    # What was stopped on purpose, because there was one too many, is no fault.
    ended = [task for task in ended if task.ending is not Ending.SURPLUS]
    for task in ended:
        if task.ending is Ending.IMAGE_NOT_FOUND:
            tag = deployment.shape.image_tag
            raise CliError(
                f"the image of the {task.node} cannot be pulled: {task.stopped_reason}\nIs there "
                f"one with the tag {tag!r}? Build and push it (make images; "
                f"docs/operations.md, Images), or deploy an existing tag (-c image_tag=...). "
                f"{after}"
            )
        if task.exit_code in _FINAL_EXITS:
            raise CliError(f"{_obituary(deployment, task)}\n{after}")
    for node in NODES:
        of_node = [task for task in ended if task.node == node]
        if len(of_node) >= MAX_ENDS:
            raise CliError(
                f"the {node} ended {len(of_node)} times: {_obituary(deployment, of_node[-1])}\n"
                f"{after}"
            )


def _obituary(deployment: Deployment, task: Task) -> str:
    if task.ending is Ending.OUT_OF_MEMORY:
        reason = "it was killed because it ran out of memory"
    else:
        reason = _EXITS.get(task.exit_code or 0, task.stopped_reason)
    code = f" (exit code {task.exit_code})" if task.exit_code is not None else ""
    lines = [f"  {line}" for line in deployment.logs.last_lines(task)]
    return "\n".join([f"{task.node} {task.id[:8]} ended{code}: {reason}", *lines])


# --- once it is up -------------------------------------------------------------------------------
def _print_how_to_use(deployment: Deployment, num_nodes: int) -> None:
    output.print_text(
        f"Up: {words.sized(deployment.shape.size(num_nodes))}\n"
        f"  a shell         trainctl shell\n"
        f"  Ray's state     trainctl shell -- ray status\n"
        f"  train           trainctl shell -- python -m training.launch ddp\n"
        f"  Ray dashboard   trainctl open\n"
        f"  a notebook      trainctl notebook\n"
        f"  take it down    trainctl cluster down\n"
        f"{words.price(deployment, num_nodes)}"
    )
