"""``trainctl cluster up | status | down``: the standing cluster.

Two ECS services keep a head and workers running until they are taken down; what runs on them is
started from a shell (``trainctl shell``). A job that brings its own cluster is another command.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from contract import exits, nodes
from contract.nodes import ClusterSize
from trainctl import show
from trainctl.aws import NODES, Deployment, Service, Shape, Task
from trainctl.errors import CliError, UsageError
from trainctl.help import Group
from trainctl.options import AsJson, Profile, Region, Yes
from trainctl.pricing import NAT_USD_PER_HOUR, Price

#: Each look makes about ten calls, and all clients of an account share ECS's limits, 20 calls a
#: second of a kind.
POLL_S: Final = 1.0
#: A node that ends this often while the cluster comes up will not come up.
MAX_ENDS: Final = 3

#: What a container's exit code means, where the node's own log may be hard to find.
_EXITS: Final = {
    exits.BAD_INPUT: "its settings are wrong",
    exits.NO_HEAD: "it did not find its head, or lost it",
    exits.REFUSED: "the head refuses its token: redeploy, then bring both down and up",
    exits.BAD_HOST: "its host's GPUs are not sound",
    137: "it was killed: by hand, or for want of memory",
}
#: Those that another attempt does not mend.
_FINAL_EXITS: Final = (exits.BAD_INPUT, exits.REFUSED, exits.BAD_HOST)

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="The standing cluster: a head and workers that stay until taken down.",
)

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]


@app.command()
def up(
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", help="Worker nodes.", show_default="as many as were deployed"
        ),
    ] = None,
    wait: Wait = True,
    timeout_minutes: Annotated[
        float, typer.Option(min=0.1, help="Give up waiting after this long.")
    ] = 30,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Start a head and workers, and wait until Ray sees them all.

    Says first what they cost. Ctrl-C while it waits leaves the cluster coming up. Given again, it
    changes the number of workers.
    """
    deployment = Deployment.find(profile=profile, region=region)
    shape = deployment.shape
    count = shape.max_workers if workers is None else workers
    least = 0 if shape.head_trains else 1
    if not least <= count <= shape.max_workers:
        raise UsageError(
            f"--workers is {count}: this deployment takes {least} to {shape.max_workers}. More "
            f'need another deploy: make deploy ARGS="-c max_workers={max(count, 1)} ..."'
        )
    services = deployment.services()
    now = {node: services[node].wanted for node in NODES}
    wanted = {nodes.HEAD: 1, nodes.WORKER: count}
    if now == wanted:
        show.say(f"Already asked for: a head, {_workers(count)}.")
    else:
        show.say(f"{_described(shape, count)}\n{price(shape, count)}")
        show.confirm("Start it?" if not any(now.values()) else "Change it?", yes=yes)
    began = datetime.now(tz=UTC)
    for node in NODES:
        if now[node] != wanted[node]:
            deployment.set_wanted(node, wanted[node])
    if not wait:
        show.say("Coming up. How far it is: trainctl cluster status")
        return
    try:
        _wait_until_up(deployment, count, began=began, timeout_s=timeout_minutes * 60)
    except KeyboardInterrupt:
        show.say(
            "\nDetached; the cluster goes on coming up.\n"
            "  how far it is   trainctl cluster status\n"
            "  wait again      trainctl cluster up\n"
            "  take it down    trainctl cluster down"
        )
        raise typer.Exit(exits.INTERRUPTED) from None
    _print_how_to_use(deployment, count)


@app.command()
def status(
    *,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """What runs, what Ray sees of it, and what it costs."""
    deployment = Deployment.find(profile=profile, region=region)
    services, tasks = deployment.services(), deployment.tasks()
    size = _ray_size(deployment, tasks)
    usd = sum(_usd(deployment.shape, task.node) or 0 for task in tasks) + NAT_USD_PER_HOUR
    if as_json:
        show.print_json(
            {
                "up": any(service.wanted for service in services.values()),
                "wanted": {node: services[node].wanted for node in NODES},
                "running": {node: services[node].running for node in NODES},
                "tasks": [asdict(task) for task in tasks],
                "ray": asdict(size) if size else None,
                "usd_per_hour": round(usd, 3),
                "image_tag": deployment.shape.image_tag,
            }
        )
        return
    if not tasks and not any(service.wanted for service in services.values()):
        show.print_text(
            f"The standing cluster is down; the NAT gateway costs ${NAT_USD_PER_HOUR:.3f} an hour."
            "\nStart it: trainctl cluster up"
        )
        return
    rows = [
        [task.node, task.id, task.status, task.health, task.address, _age(task)] for task in tasks
    ]
    show.print_table(["node", "task", "status", "health", "address", "since"], rows)
    wanted = services[nodes.WORKER].wanted
    show.print_text(
        f"\nwanted: a head, {_workers(wanted)}; images: {deployment.shape.image_tag}\n"
        f"Ray:    {_sized(size)}\n"
        f"cost:   ${usd:.3f} an hour at list prices, NAT gateway included"
    )


@app.command()
def down(
    *,
    wait: Wait = True,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Stop head and workers.

    Whatever trains on them saves what it can within the stop timeout. Hosts that are empty end by
    themselves, after 15 minutes at most, and cost until then.
    """
    deployment = Deployment.find(profile=profile, region=region)
    services, tasks = deployment.services(), deployment.tasks()
    if not tasks and not any(service.wanted for service in services.values()):
        show.say("The standing cluster is down already.")
        return
    show.say(f"Stopping {len(tasks)} nodes: {', '.join(f'{t.node} {t.id[:8]}' for t in tasks)}")
    show.confirm("Stop them?", yes=yes)
    # Workers first: a worker that loses its head before it drains cannot say goodbye to it.
    for node in reversed(NODES):
        deployment.set_wanted(node, 0)
    if not wait:
        show.say("Going down. How far it is: trainctl cluster status")
        return
    with show.Progress() as progress:
        while tasks := deployment.tasks() + _ending(deployment):
            progress.update(f"waiting for {len(tasks)} nodes to end")
            time.sleep(POLL_S)
    show.say("Down. Empty hosts end within 15 minutes; make destroy removes the deployment itself.")


# --- waiting -----------------------------------------------------------------------------------
def _wait_until_up(
    deployment: Deployment, num_workers: int, *, began: datetime, timeout_s: float
) -> None:
    """Wait until every node is healthy and in Ray. Raises CliError when that will not happen."""
    expected = deployment.shape.size(num_workers)
    deadline = time.monotonic() + timeout_s
    heard = ""
    with show.Progress() as progress:
        while True:
            services, tasks = deployment.services(), deployment.tasks()
            size = _ray_size(deployment, tasks)
            if is_up(tasks, size, expected):
                return
            _check_for_faults(deployment, services, began)
            if time.monotonic() > deadline:
                raise CliError(
                    f"the cluster is not up after {timeout_s / 60:.0f} min: "
                    f"{waiting_for(tasks, size, deployment.shape, expected)}. It goes on coming "
                    "up: trainctl cluster up waits again, trainctl cluster down ends it"
                )
            progress.update(waiting_for(tasks, size, deployment.shape, expected))
            if (event := newest_trouble(services.values(), began)) and event != heard:
                show.say(f"ECS says: {event}")
                heard = event
            time.sleep(POLL_S)


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
        return f"waiting for nodes to join Ray: {_sized(size)} of {_sized(expected)}"
    return "waiting for the health checks"


def newest_trouble(services: Any, began: datetime) -> str:
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
    ended = [task for task in deployment.tasks(stopped=True) if task.since and task.since >= began]
    # What was stopped on purpose, a worker too many say, is no fault.
    ended = [task for task in ended if task.stop_code != "ServiceSchedulerInitiated"]
    for task in ended:
        if "CannotPullContainer" in task.stopped_reason:
            tag = deployment.shape.image_tag
            raise CliError(
                f"the image of the {task.node} cannot be pulled: {task.stopped_reason}\nIs there "
                f"one with the tag {tag!r}? Build and push it (python -m containers.publish; "
                f"docs/operations.md, Images), or deploy the tag there is (-c image_tag=...). "
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
    reason = _EXITS.get(task.exit_code or 0, task.stopped_reason)
    code = f" (exit code {task.exit_code})" if task.exit_code is not None else ""
    lines = [f"  {line}" for line in deployment.last_lines(task)]
    return "\n".join([f"{task.node} {task.id[:8]} ended{code}: {reason}", *lines])


def _ray_size(deployment: Deployment, tasks: Sequence[Task]) -> ClusterSize | None:
    heads = [task for task in tasks if task.node == nodes.HEAD and task.status == "RUNNING"]
    return deployment.ray_size(heads[0]) if heads else None


def _ending(deployment: Deployment) -> list[Task]:
    """Nodes that were told to stop and have not ended yet."""
    return [task for task in deployment.tasks(stopped=True) if task.status != "STOPPED"]


# --- words ---------------------------------------------------------------------------------------
def _usd(shape: Shape, node: str) -> float | None:
    machine = shape.head if node == nodes.HEAD else shape.worker
    return machine.usd_per_hour


def price(shape: Shape, num_workers: int) -> str:
    """What a cluster costs per hour, as one sentence."""
    total = Price.of(shape).per_hour(num_workers)
    if total is None:
        return "cost: these hosts have no list price, they are reserved by capacity blocks"
    less = "; spot hosts usually cost less" if shape.spot else ""
    return (
        f"cost: ${total:.3f} an hour at us-east-1's list prices, NAT gateway included{less}, until "
        "trainctl cluster down"
    )


def _described(shape: Shape, num_workers: int) -> str:
    hosts = [f"head on {shape.head.name}{', trains too' if shape.head_trains else ''}"]
    if num_workers:
        hosts.append(f"{_workers(num_workers)} on {shape.worker.name}")
    return f"{'; '.join(hosts)}; images: {shape.image_tag}"


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _sized(size: ClusterSize | None) -> str:
    if size is None:
        return "nothing yet"
    return f"{size.num_nodes} nodes, {size.num_cpus} CPUs, {size.num_gpus} GPUs"


def _age(task: Task) -> str:
    if task.since is None:
        return ""
    return show.duration((datetime.now(tz=UTC) - task.since).total_seconds())


def _print_how_to_use(deployment: Deployment, num_workers: int) -> None:
    tasks = deployment.tasks()
    head = next(task for task in tasks if task.node == nodes.HEAD)
    ports = f"localPortNumber={nodes.DASHBOARD_PORT},portNumber={nodes.DASHBOARD_PORT}"
    dashboard = (
        f"http://{head.address}:{nodes.DASHBOARD_PORT}"
        if deployment.is_local
        else f"aws ssm start-session --target {deployment.shell_target(head)} "
        f"--document-name AWS-StartPortForwardingSession --parameters {ports}"
    )
    show.print_text(
        f"Up: {_sized(deployment.shape.size(num_workers))}\n"
        f"  a shell         trainctl shell\n"
        f"  Ray's state     trainctl shell -- ray status\n"
        f"  a run           trainctl shell -- python -m training.launch ddp --workers "
        f"{max(1, num_workers)}\n"
        f"  Ray dashboard   {dashboard}\n"
        f"  take it down    trainctl cluster down\n"
        f"{price(deployment.shape, num_workers)}"
    )
