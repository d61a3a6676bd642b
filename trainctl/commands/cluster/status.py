"""``trainctl cluster status``: what runs in the standing cluster, what Ray sees, what it costs."""

from collections.abc import Sequence
from dataclasses import asdict

from contract import nodes
from trainctl import output
from trainctl.aws.cluster import NODES, Host
from trainctl.aws.deployment import Deployment
from trainctl.aws.tasks import Task
from trainctl.commands.cluster import words
from trainctl.options import AsJson, Profile, Region
from trainctl.pricing import dollars


def status(
    *,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Show the nodes, what Ray sees of them, all hosts of the deployment, and what they cost."""
    deployment = Deployment.find(profile=profile, region=region)
    services, tasks = deployment.cluster.services(), deployment.cluster.tasks()
    size, hosts = words.ray_size(deployment, tasks), deployment.cluster.hosts()
    usd = _usd_per_hour(deployment, tasks)
    prices = deployment.shape.prices(deployment.region)
    costs = "cost" if deployment.shape.shared else "costs"
    if as_json:
        output.print_json(
            {
                "up": any(service.wanted for service in services.values()),
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
    if not tasks and not any(service.wanted for service in services.values()):
        output.print_text(
            f"The standing cluster is down; {prices.standing} {costs} {dollars(usd)} an hour.\n"
            "Start it: trainctl cluster up"
        )
        _print_hosts(deployment, hosts)
        return
    rows = [
        [task.node, task.id, task.status, task.health, task.address, words.age(task.since)]
        for task in tasks
    ]
    output.print_table(["node", "task", "status", "health", "address", "since"], rows)
    wanted = services[nodes.WORKER].wanted
    output.print_text(
        f"\nwanted: a head, {words.workers(wanted)}; images: {deployment.shape.image_tag}\n"
        f"Ray:    {words.sized(size)}\n"
        f"cost:   {dollars(usd)} an hour at list prices, with {prices.standing}"
    )
    _print_hosts(deployment, hosts)


def _print_hosts(deployment: Deployment, hosts: Sequence[Host]) -> None:
    """The instances that are billed, jobs' too."""
    if not hosts:
        return
    output.print_text("\nHosts, those of jobs too:")
    rows = [
        [
            host.id,
            host.instance_type,
            words.state(host),
            str(host.num_tasks),
            words.age(host.since),
            words.an_hour(deployment, host),
        ]
        for host in hosts
    ]
    output.print_table(["host", "type", "state", "tasks", "since", "an hour"], rows)


def _usd_per_hour(deployment: Deployment, tasks: Sequence[Task]) -> float | None:
    """Of the hosts of these nodes and what is always there, in US dollars; None: not known."""
    prices = deployment.shape.prices(deployment.region)
    total = prices.standing_usd_per_hour
    for task in tasks:
        host = prices.head if task.node == nodes.HEAD else prices.worker
        if total is None or host.usd_per_hour is None:
            return None
        total += host.usd_per_hour
    return total
