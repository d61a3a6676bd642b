"""``trainctl cluster``: the standing cluster, a head and workers that stay until taken down.

What trains on it is started from a shell (``trainctl shell``). A job brings its own cluster.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from contract import exits, nodes
from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from contract.instance_types import HostPrice, Prices, instance_type
from contract.job_outcome import Ending
from contract.nodes import ClusterSize, Range
from contract.text import counted, dollars, duration
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError, explained
from trainctl.aws.standing_cluster import NODES, UNREGISTERED, Host, Service
from trainctl.aws.tasks import Task
from trainctl.jobs.job_options import check_nodes
from trainctl.jobs.node_images import check_images
from trainctl.jobs.pricing import an_hour, machines
from trainctl.options import AsJson, Wait, Where, Yes
from trainctl.watch.polling import Polling

#: A node that ends this often while the cluster comes up will not come up.
MAX_ENDS: Final = 3

#: Meaning of a container's exit codes, where the node's own log may be hard to find.
_EXITS: Final = {
    exits.BAD_INPUT: "its settings are wrong",
    exits.NO_HEAD: "it did not find its head, or lost it",
    exits.REFUSED: "the head refuses its token: redeploy, then take both down and up",
    exits.BAD_HOST: "its host's GPUs or EFA devices are not healthy",
    exits.KILLED: "it was killed",
}
#: Exit codes that another attempt does not fix.
_FINAL_EXITS: Final = (exits.BAD_INPUT, exits.REFUSED, exits.BAD_HOST)


def up(
    *,
    count: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            "-n",
            metavar="N",
            help="Worker nodes, each with all of its GPUs.",
            show_default="as many as were deployed",
        ),
    ] = None,
    wait: Wait = True,
    timeout_minutes: Annotated[
        float,
        typer.Option(min=0.1, max=1440, help="Give up waiting after this long.", metavar="MINUTES"),
    ] = 30,
    yes: Yes = False,
    where: Where,
) -> None:
    """Start a head and workers, and wait until Ray sees them all.

    Prints what they cost before starting. Ctrl-C while it waits leaves the cluster coming up. Given
    again, it changes the number of worker nodes.
    """
    deployment = where.find(to_start=True)
    shape, cluster = deployment.shape, deployment.cluster
    num_nodes = _number(shape, count)
    services = cluster.services()
    now = {node: services[node].wanted for node in NODES}
    wanted = {nodes.HEAD: 1, nodes.WORKER: num_nodes}
    if now == wanted:
        output.say(f"Already requested: a head, {counted(num_nodes, 'worker node')}.")
    else:
        check_images(deployment)
        hosts = machines(shape, Range(num_nodes, num_nodes))
        output.say(f"{hosts}; images: {shape.image_tag}\n{_price(deployment, num_nodes)}")
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


def _number(shape: ClusterShape, count: str | None) -> int:
    if count is None:
        return shape.max_workers
    wanted = check_nodes(shape, Range.parse(count, option="--nodes"))
    if wanted.low != wanted.high:
        raise UsageError(
            f"--nodes is {count}: a standing cluster has a fixed size, give one number; a job can "
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
    polling = Polling(is_local=deployment.is_local)
    with output.ProgressLine() as progress:
        while True:
            services, tasks = deployment.cluster.services(), deployment.cluster.tasks()
            size = _ray_size(deployment, tasks)
            if is_up(tasks, size, expected):
                return
            _check_for_faults(deployment, services, began)
            now = waiting_for(tasks, size, deployment.shape, expected)
            if time.monotonic() > deadline:
                raise CliError(
                    f"the cluster is not up after {timeout_s / 60:.0f} min: {now}. It keeps coming "
                    "up: trainctl cluster up waits again, trainctl cluster down ends it"
                )
            progress.update(now)
            if (event := newest_trouble(services.values(), began)) and event != reported:
                output.say(f"ECS reports: {event}")
                reported = event
            polling.wait(changed=now != shown)
            shown = now


def is_up(tasks: Sequence[Task], size: ClusterSize | None, expected: ClusterSize) -> bool:
    """True if all nodes run, are healthy, and have joined Ray."""
    ready = [task for task in tasks if task.status == "RUNNING" and task.health == "HEALTHY"]
    return len(tasks) == len(ready) == expected.num_nodes and size == expected


def waiting_for(
    tasks: Sequence[Task], size: ClusterSize | None, shape: ClusterShape, expected: ClusterSize
) -> str:
    """Missing nodes of the cluster, in words."""
    started = len([task for task in tasks if task.status in ("RUNNING", "ACTIVATING", "PENDING")])
    if started < expected.num_nodes:
        hosts = {shape.head.name, shape.worker.name}
        missing = counted(expected.num_nodes - started, "host")
        return f"waiting for {missing} ({', '.join(sorted(hosts))})"
    if pulling := [task for task in tasks if task.is_starting]:
        num_nodes = counted(len(tasks), "node")
        return f"waiting for {len(pulling)} of {num_nodes} to pull the image and start"
    if size is None:
        return "waiting for Ray on the head"
    if size != expected:
        return f"waiting for nodes to join Ray: {_sized(size)} of {_sized(expected)}"
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
    # A surplus task that was stopped on purpose is no fault.
    ended = [
        task
        for task in deployment.cluster.tasks(stopped=True)
        if task.since and task.since >= began and task.ending is not Ending.SURPLUS
    ]
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
    text = output.addressed(
        f"Up: {_sized(deployment.shape.size(num_nodes))}\n"
        f"  a shell         trainctl shell\n"
        f"  Ray's state     trainctl shell -- ray status\n"
        f"  train           trainctl shell -- python -m training.launch ddp\n"
        f"  Ray dashboard   trainctl open\n"
        f"  take it down    trainctl cluster down\n"
        f"{_price(deployment, num_nodes)}"
    )
    output.print_text(text)


def down(
    *,
    wait: Wait = True,
    yes: Yes = False,
    where: Where,
) -> None:
    """Stop head and workers.

    Training on them saves what it can within the stop timeout. Empty hosts are terminated at once;
    with --no-wait, within about ten minutes, and cost until then.
    """
    deployment = where.find()
    cluster = deployment.cluster
    services, tasks = cluster.services(), cluster.tasks()
    if not tasks and not any(service.wanted for service in services.values()):
        output.say("The standing cluster is down already.")
        return
    names = ", ".join(f"{task.node} {task.id[:8]}" for task in tasks)
    output.say(f"Stopping {counted(len(tasks), 'node')}: {names}")
    output.confirm("Stop them?", yes=yes)
    # Workers first: a worker that loses its head before it has drained cannot leave in order.
    for node in reversed(NODES):
        cluster.set_wanted(node, 0)
    if not wait:
        output.say("Going down. Its state: trainctl cluster status")
        return
    polling, shown = Polling(is_local=deployment.is_local), 0
    with output.ProgressLine() as progress:
        # Those that were told to stop and have not ended yet are listed as stopped.
        while left := [
            task for task in cluster.tasks() + cluster.tasks(stopped=True) if not task.has_stopped
        ]:
            progress.update(f"waiting for {counted(len(left), 'node')} to end")
            polling.wait(changed=len(left) != shown)
            shown = len(left)
    output.say(f"Down. {_release(deployment)}; make destroy removes the deployment itself.")


def _release(deployment: Deployment) -> str:
    """Terminate the empty hosts, and report the result."""
    try:
        count = deployment.cluster.release_hosts()
    except Exception as error:  # the keeper does it later
        output.say(f"The hosts were not terminated at once: {explained(error)}")
        return "Empty hosts terminate within about ten minutes"
    return f"{counted(count, 'empty host')} terminated"


def status(
    *,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Show the nodes, what Ray sees of them, all hosts of the deployment, and what they cost."""
    deployment = where.find()
    services, tasks = deployment.cluster.services(), deployment.cluster.tasks()
    size, hosts = _ray_size(deployment, tasks), deployment.cluster.hosts()
    is_wanted = any(service.wanted for service in services.values())
    prices = deployment.shape.prices(deployment.region)
    usd = _usd_per_hour(prices, tasks)
    costs = "cost" if deployment.shape.shared else "costs"
    if as_json:
        output.print_json(
            {
                "up": is_wanted,
                "wanted": {node: services[node].wanted for node in NODES},
                "running": {node: services[node].running for node in NODES},
                "tasks": [asdict(task) for task in tasks],
                "ray": asdict(size) if size else None,
                "usd_per_hour": None if usd is None else round(usd, 3),
                "image_tag": deployment.shape.image_tag,
                "hosts": [asdict(host) for host in hosts],
            }
        )
        return
    if not tasks and not is_wanted:
        output.print_text(
            f"The standing cluster is down; {prices.standing} {costs} {dollars(usd)} an hour.\n"
            + output.addressed("Start it: trainctl cluster up")
        )
    else:
        rows = [
            [task.node, task.id, task.status, task.health, task.address, _age(task.since)]
            for task in tasks
        ]
        columns = ["node", "task", "status", "health", "address", "since"]
        output.print_table(columns, rows, optional=["health", "address"])
        wanted, tag = services[nodes.WORKER].wanted, deployment.shape.image_tag
        output.print_text(
            f"\nwanted: a head, {counted(wanted, 'worker node')}; images: {tag}\n"
            f"Ray:    {_sized(size)}\n"
            f"cost:   {dollars(usd)} an hour at list prices, with {prices.standing}"
        )
    if hosts:  # the instances that are billed
        output.print_text("\nHosts, those of jobs too:")
        rows = [
            [
                host.id,
                host.instance_type,
                _state(host),
                str(host.num_tasks),
                _age(host.since),
                _an_hour(deployment, host),
            ]
            for host in hosts
        ]
        columns = ["host", "type", "state", "tasks", "since", "an hour"]
        output.print_table(columns, rows, optional=["tasks", "since"])


def _usd_per_hour(prices: Prices, tasks: Sequence[Task]) -> float | None:
    """Price of these nodes' hosts and of what always runs, in US dollars; None: not known."""
    hosts = [prices.head if task.is_head else prices.worker for task in tasks]
    usd = [prices.standing_usd_per_hour, *(host.usd_per_hour for host in hosts)]
    known = [each for each in usd if each is not None]
    return sum(known) if len(known) == len(usd) else None


def _ray_size(deployment: Deployment, tasks: Sequence[Task]) -> ClusterSize | None:
    """Size of the cluster, as the running head's log reports it; None while there is none."""
    heads = [task for task in tasks if task.is_head and task.status == "RUNNING"]
    return deployment.logs.ray_size(heads[0]) if heads else None


def _price(deployment: Deployment, num_nodes: int) -> str:
    """Hourly cost of a cluster, as one sentence."""
    prices = deployment.shape.prices(deployment.region)
    return f"cost: {an_hour(prices, num_nodes)}, until trainctl cluster down"


def _sized(size: ClusterSize | None) -> str:
    return size.words if size else "nothing yet"


def _age(since: datetime | None) -> str:
    """Age of something, in words."""
    return "" if since is None else duration(round((datetime.now(tz=UTC) - since).total_seconds()))


def _state(host: Host) -> str:
    """State of a host in ECS: ``ACTIVE, agent disconnected 12 min`` can take no task."""
    if host.is_connected or host.state == UNREGISTERED:
        return host.state
    return f"{host.state}, agent disconnected {_age(host.disconnected_since)}".rstrip()


def _an_hour(deployment: Deployment, host: Host) -> str:
    """The list price of a host with its disk."""
    disk = deployment.shape.root_volume_gib
    try:
        machine = instance_type(host.instance_type, deployment.shape.instance_types)
    except InputError:
        return dollars(None)
    return dollars(HostPrice.of(machine, region=deployment.region, disk_gib=disk).usd_per_hour)
