"""Resources that a job's program asks Ray for: requests that can never be met, and idle nodes.

Ray waits forever for resources to which a cluster may still grow. A job knows how far it can grow,
so its head compares, and ends the job if its program asks for more. What is only queued behind
other work is never counted. Not for recipes, whose workers the laptop has counted.
"""

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from contract.nodes import WORKER
from contract.text import counted

#: Ray's head answers within so many seconds.
ANSWER_S: Final = 5
#: A program may ask, give up and ask for less: only requests that last this long count.
MEANT_S: Final = 15.0
#: What a job's order says of a node's size. A program that asks for memory, or for resources of its
#: own, that no node has waits for them, as on any cluster of Ray.
_OF_SIZE: Final = ("CPU", "GPU")
_STRATEGY: Final = re.compile(r"(STRICT_PACK|STRICT_SPREAD|PACK|SPREAD)")

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceRequest:
    """A task, an actor or a placement group that waits."""

    bundles: tuple[Resources, ...]
    """Each is on one node; only CPUs and GPUs are compared."""
    strategy: str = ""
    """Strategy of a placement group, as Ray names it; empty for a task or an actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayReport:
    """Ray's report at a moment."""

    requests: tuple[ResourceRequest, ...]
    idle_s: tuple[float, ...]
    """Seconds that each live worker node has been idle; 0 while it works."""


def impossible(request: ResourceRequest, nodes: Sequence[Resources]) -> str | None:
    """Reason why a job can never fulfill a request, in words; None where it can, or might: of
    bundles that differ, each kind is counted as if it were the only one.

    Args:
        nodes: all that the job can have at a time, idle, the head first.
    """
    bundles = [{k: v for k, v in each.items() if k in _OF_SIZE and v} for each in request.bundles]
    if request.strategy in ("", "STRICT_PACK"):
        whole = {name: sum(each.get(name, 0.0) for each in bundles) for name in _OF_SIZE}
        if any(_times(whole, node) for node in nodes):
            return None
        has = words(nodes[-1])  # a worker, if there are any
        return f"asks for {words(whole)} on one node; a node of this job has {has}"
    for bundle in bundles:
        num = bundles.count(bundle)
        most = 1 if request.strategy == "STRICT_SPREAD" else num
        at_most = sum(min(_times(bundle, node), most) for node in nodes)
        if at_most < num:
            what = f"{counted(num, 'worker')} of {words(bundle)}{' each' if num > 1 else ''}"
            return f"asks for {what}; this job has at most {at_most}"
    return None


def _times(bundle: Resources, node: Resources) -> int:
    """Number of copies of a bundle that fit on an idle node."""
    # Tolerance: thirds of a GPU do not add up to exactly one.
    fits = [
        math.floor(node.get(name, 0) / wanted + 1e-6) for name, wanted in bundle.items() if wanted
    ]
    return min(fits, default=1_000_000)


def words(resources: Resources) -> str:
    """``{"CPU": 2, "GPU": 1}`` as "2 CPUs and 1 GPU"."""
    found = {name: value for name, value in resources.items() if value}
    return " and ".join(f"{v:g} {name}{'s' * (v > 1)}" for name, v in found.items()) or "no CPU"


def read(client: Any) -> RayReport:
    """Read Ray's report from its head. Raises Ray's own errors where it does not answer."""
    messages = importlib.import_module("ray.core.generated.autoscaler_pb2")
    reply = messages.GetClusterResourceStateReply()
    reply.ParseFromString(client.get_cluster_resource_state(ANSWER_S))
    return parse(reply.cluster_resource_state)


def parse(state: Any) -> RayReport:
    """Read ``ClusterResourceState``, the protocol buffer that Ray's autoscaler gets."""
    # Labels, which a request may ask for beside resources, only leave it fewer nodes.
    single = [
        ResourceRequest(bundles=(dict(each.request.resources_bundle),))
        for each in state.pending_resource_requests
    ]
    groups = []
    for gang in state.pending_gang_resource_requests:
        found = _STRATEGY.search(gang.details)
        bundles = tuple(dict(each.resources_bundle) for each in gang.requests)
        if bundles:
            groups.append(ResourceRequest(bundles=bundles, strategy=found[1] if found else "PACK"))
    # A task inside a placement group asks for parts of that group, which counts itself.
    single = [each for each in single if not any("_group_" in name for name in each.bundles[0])]
    return RayReport(
        requests=(*single, *groups),
        idle_s=tuple(
            node.idle_duration_ms / 1000
            for node in state.node_states
            if node.total_resources and node.ray_node_type_name == WORKER
        ),
    )


class DemandWatch:
    """Takes Ray's reports, one after the other."""

    def __init__(self, nodes: Sequence[Resources]) -> None:
        """``nodes``: as for ``impossible``."""
        self._nodes = nodes
        self._since: dict[str, float] = {}
        self.reason = ""
        """Reason why the program can never have what it asks for; empty while it can."""
        self.idle_s: tuple[float, ...] = ()
        self.waits = False
        """Something waits for resources."""

    def take(self, seen: RayReport, *, now: float) -> None:
        """Take note of what Ray reports at ``now``, in seconds."""
        self.idle_s = seen.idle_s
        self.waits = bool(seen.requests)
        found = {text for each in seen.requests if (text := impossible(each, self._nodes))}
        # Ray Train takes its group back and asks again, so it may be missing once.
        self._since = {
            each: since
            for each, since in self._since.items()
            if each in found or now - since < MEANT_S
        }
        for each in found:
            if now - self._since.setdefault(each, now) >= MEANT_S:
                self.reason = each
