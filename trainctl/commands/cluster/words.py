"""What the cluster commands say about a cluster: its size, its hosts, its price."""

from collections.abc import Sequence
from datetime import UTC, datetime

from contract import nodes
from contract.errors import InputError
from contract.instance_types import HostPrice, instance_type
from contract.nodes import ClusterSize
from contract.text import duration
from trainctl.aws.cluster import UNREGISTERED, Host
from trainctl.aws.deployment import Deployment
from trainctl.aws.shape import Shape
from trainctl.aws.tasks import Task
from trainctl.pricing import at_list_prices, dollars


def ray_size(deployment: Deployment, tasks: Sequence[Task]) -> ClusterSize | None:
    """What Ray has, as the running head's log reports it; None while there is none."""
    heads = [task for task in tasks if task.node == nodes.HEAD and task.status == "RUNNING"]
    return deployment.logs.ray_size(heads[0]) if heads else None


def price(deployment: Deployment, num_nodes: int) -> str:
    """What a cluster costs per hour, as one sentence."""
    prices = deployment.shape.prices(deployment.region)
    total = prices.usd_per_hour(num_nodes)
    if total is None:
        return f"cost: unknown, because {prices.why_unknown}"
    return (
        f"cost: ${total:.3f} an hour with disks and {prices.standing}, {at_list_prices(prices)}, "
        "until trainctl cluster down"
    )


def described(shape: Shape, num_nodes: int) -> str:
    """The hosts of a cluster and its images."""
    hosts = [f"head on {shape.head.name}{', trains too' if shape.head_trains else ''}"]
    if num_nodes:
        hosts.append(f"{workers(num_nodes)} on {shape.worker.name}")
    return f"{'; '.join(hosts)}; images: {shape.image_tag}"


def workers(count: int) -> str:
    return f"{count} worker node{'' if count == 1 else 's'}"


def sized(size: ClusterSize | None) -> str:
    if size is None:
        return "nothing yet"
    return f"{size.num_nodes} nodes, {size.num_cpus} CPUs, {size.num_gpus} GPUs"


def age(since: datetime | None) -> str:
    """How long something has been there."""
    return "" if since is None else duration(round((datetime.now(tz=UTC) - since).total_seconds()))


def state(host: Host) -> str:
    """What ECS does with a host: ``ACTIVE, agent disconnected 12 min`` can take no task."""
    if host.is_connected or host.state == UNREGISTERED:
        return host.state
    return f"{host.state}, agent disconnected {age(host.disconnected_since)}".rstrip()


def an_hour(deployment: Deployment, host: Host) -> str:
    """The list price of a host with its disk."""
    disk = deployment.shape.root_volume_gib
    try:
        machine = instance_type(host.instance_type)
    except InputError:
        return dollars(None)
    return dollars(HostPrice.of(machine, region=deployment.region, disk_gib=disk).usd_per_hour)
