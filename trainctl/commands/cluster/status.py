"""``trainctl cluster status``: what runs in the standing cluster, what Ray sees, what it costs."""

from dataclasses import asdict

from contract import nodes
from trainctl import output
from trainctl.aws.cluster import NODES
from trainctl.aws.deployment import Deployment
from trainctl.aws.shape import Shape
from trainctl.commands.cluster import words
from trainctl.options import AsJson, Profile, Region
from trainctl.pricing import NAT_USD_PER_HOUR


def status(
    *,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Show the nodes, what Ray sees of them, and what they cost."""
    deployment = Deployment.find(profile=profile, region=region)
    services, tasks = deployment.cluster.services(), deployment.cluster.tasks()
    size = words.ray_size(deployment, tasks)
    usd = sum(_usd(deployment.shape, task.node) or 0 for task in tasks) + NAT_USD_PER_HOUR
    if as_json:
        output.print_json(
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
        output.print_text(
            f"The standing cluster is down; the NAT gateway costs ${NAT_USD_PER_HOUR:.3f} an hour."
            "\nStart it: trainctl cluster up"
        )
        return
    rows = [
        [task.node, task.id, task.status, task.health, task.address, words.age(task)]
        for task in tasks
    ]
    output.print_table(["node", "task", "status", "health", "address", "since"], rows)
    wanted = services[nodes.WORKER].wanted
    output.print_text(
        f"\nwanted: a head, {words.workers(wanted)}; images: {deployment.shape.image_tag}\n"
        f"Ray:    {words.sized(size)}\n"
        f"cost:   ${usd:.3f} an hour at list prices, NAT gateway included"
    )


def _usd(shape: Shape, node: str) -> float | None:
    machine = shape.head if node == nodes.HEAD else shape.worker
    return machine.usd_per_hour
