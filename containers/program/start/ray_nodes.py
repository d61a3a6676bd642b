"""Nodes of a job's Ray cluster, each held for a program by an actor."""

from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from containers.program.start.on_node import Launcher, LaunchSpec

#: Resource that marks the head in ``ray.nodes()``.
_HEAD: Final = "node:__internal_head__"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A node that Ray has."""

    id: str
    address: str
    cpus: float
    gpus: float
    is_head: bool


def alive() -> list[NodeInfo]:
    """The nodes of the cluster on which a program may run, in the order of their addresses."""
    found = [
        NodeInfo(
            id=each["NodeID"],
            address=each["NodeManagerAddress"],
            cpus=each["Resources"].get("CPU", 0.0),
            gpus=each["Resources"].get("GPU", 0.0),
            is_head=_HEAD in each["Resources"],
        )
        for each in ray.nodes()
        if each["Alive"]
    ]
    # A head that only coordinates has no CPUs to hand out.
    return sorted(
        (node for node in found if node.cpus),
        key=lambda node: (node.address, not node.is_head, node.id),
    )


def start_launcher(spec: LaunchSpec, node: NodeInfo) -> Any:
    """An actor that holds all of a node, so that nothing else is placed there."""
    return (
        ray.remote(Launcher)
        .options(
            num_cpus=node.cpus,
            num_gpus=node.gpus,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(spec)
    )
