"""What a job's program asks Ray for: what can never be had, and nodes that have nothing to do.

Ray waits for ever for resources that a cluster may still grow to. A job knows how far it can grow,
so its head compares, and ends a job whose program asks for more than the whole of it. What is only
queued behind other work is never counted. Not for recipes, whose workers the laptop has counted.
"""

import importlib
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from contract.nodes import HEAD, WORKER
from contract.text import counted

POLL_S: Final = 3.0
#: A program may ask, give up and ask for less; what it asks for this long, it means.
MEANT_S: Final = 15.0
#: Until a program has asked for anything; Ray is imported after this, not while the job starts.
FIRST_LOOK_S: Final = 5.0
#: Parts of names of resources that Ray makes itself, and that say nothing about a node's size.
_OF_RAY: Final = re.compile(r"^node:|^accelerator_type:|_group_|^bundle")
_OF_NODES: Final = ("memory", "object_store_memory")
_STRATEGY: Final = re.compile(r"(STRICT_PACK|STRICT_SPREAD|PACK|SPREAD)")

Resources = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A task, an actor or a placement group that waits."""

    bundles: tuple[Resources, ...]
    """Each is on one node: CPUs, GPUs, bytes of memory and what programs define themselves."""
    strategy: str = ""
    """Of a placement group, as Ray names it; empty for a task or an actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """All that a job can have at a time, with nothing running on it."""

    head: Resources
    worker: Resources
    """Of each worker node."""
    workers: int
    """Worker nodes at most."""

    @property
    def nodes(self) -> list[Resources]:
        return [self.head, *[self.worker] * self.workers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What Ray reports at a moment."""

    requests: tuple[Request, ...]
    totals: Mapping[str, Resources]
    """``head`` or ``worker`` -> what a live node of that kind has."""
    idle_s: tuple[float, ...]
    """Of each live worker node: how long it has had nothing to do; 0 while it works."""


def impossible(request: Request, capacity: Capacity) -> str | None:
    """Why a job can never fulfill a request, in words; None where it can, or might.

    Where bundles differ, only what holds for every way to place them is counted.
    """
    bundles = [{k: v for k, v in each.items() if v > 0} for each in request.bundles]
    nodes = capacity.nodes
    largest = next((each for each in bundles if not any(_fits(each, node) for node in nodes)), None)
    if largest is not None and not request.strategy:
        return f"asks for a task or actor of {words(largest)}; {_each_has(capacity)}"
    num = len(bundles)
    at_most = num
    if request.strategy == "STRICT_PACK":
        whole = {k: sum(each.get(k, 0.0) for each in bundles) for each in bundles for k in each}
        if not any(_fits(whole, node) for node in nodes):
            return f"asks for {words(whole)} on one node; {_each_has(capacity)}"
    elif all(each == bundles[0] for each in bundles):
        each_on_own = request.strategy == "STRICT_SPREAD"
        held = (_times(bundles[0], node) for node in nodes)
        at_most = sum(min(each, 1 if each_on_own else num) for each in held)
    elif largest is not None:
        at_most = 0
    elif request.strategy == "STRICT_SPREAD" and num > len(nodes):
        return f"asks for {num} nodes at once; this job has at most {len(nodes)}"
    else:
        for name in {name for each in bundles for name in each}:
            wanted = sum(each.get(name, 0.0) for each in bundles)
            there = sum(node.get(name, 0.0) for node in nodes)
            if wanted > there:
                had = words({name: there}) if there else f"no {name}"
                return f"asks for {words({name: wanted})} at once; this job has at most {had}"
    if at_most >= num:
        return None
    what = words(largest or bundles[0])
    workers = "a worker" if num == 1 else counted(num, "worker")
    each = "" if num == 1 else " each"
    return f"asks for {workers} of {what}{each}; this job has at most {at_most}"


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= wanted for name, wanted in bundle.items())


def _times(bundle: Resources, node: Resources) -> int:
    """How often a bundle fits on an idle node."""
    if not bundle:
        return 1_000_000
    # A little more than nothing: thirds of a GPU do not add up to one.
    return min(math.floor(node.get(name, 0.0) / wanted + 1e-6) for name, wanted in bundle.items())


def _each_has(capacity: Capacity) -> str:
    has = capacity.worker if capacity.workers else capacity.head
    return f"a node of this job has {words({'CPU': 0, 'GPU': 0, **has})}"


def words(resources: Resources) -> str:
    """``{"CPU": 2, "GPU": 1}`` as "2 CPUs and 1 GPU"; bytes of memory in GiB."""
    parts = [_part(name, resources[name]) for name in sorted(resources)]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "none"


def _part(name: str, value: float) -> str:
    if name in _OF_NODES:
        return f"{value / 2**30:.1f} GiB of {name.replace('_', ' ')}"
    number = "no" if value == 0 else f"{value:g}"
    return f"{number} {name}{'s' if name in ('CPU', 'GPU') and value > 1 else ''}"


class Reader:
    """Asks Ray's head, from inside its node."""

    def __init__(self, address: str) -> None:
        """``address``: of Ray's head, with its port."""
        raylet: Any = importlib.import_module("ray._raylet")  # neither has types
        self._client = raylet.GcsClient(address)
        self._messages: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")

    def __call__(self) -> Seen:
        """What Ray reports now. Raises Ray's own errors where it does not answer."""
        reply = self._messages.GetClusterResourceStateReply()
        reply.ParseFromString(self._client.get_cluster_resource_state())
        return parse(reply.cluster_resource_state)


def parse(state: Any) -> Seen:
    """Read ``ClusterResourceState``, the protocol buffer that Ray's autoscaler gets."""
    # Labels, which a request may ask for beside resources, only leave it fewer nodes.
    single = [
        Request(bundles=(dict(each.request.resources_bundle),))
        for each in state.pending_resource_requests
    ]
    groups = []
    for gang in state.pending_gang_resource_requests:
        found = _STRATEGY.search(gang.details)
        bundles = tuple(dict(each.resources_bundle) for each in gang.requests)
        if bundles:
            groups.append(Request(bundles=bundles, strategy=found[1] if found else "PACK"))
    # A task inside a placement group asks for parts of that group, which counts itself.
    single = [each for each in single if not any("_group_" in name for name in each.bundles[0])]
    alive = [node for node in state.node_states if node.total_resources]
    return Seen(
        requests=(*single, *groups),
        totals={node.ray_node_type_name: dict(node.total_resources) for node in alive},
        idle_s=tuple(
            node.idle_duration_ms / 1000 for node in alive if node.ray_node_type_name == WORKER
        ),
    )


def comparable(request: Request, capacity: Capacity, seen: Seen) -> tuple[Request, Capacity]:
    """Both with the resources that can be compared.

    How much memory a node offers is known once one of its kind has joined; so are the resources
    that nodes have beside the usual ones. Until then they are left out.
    """
    known = {HEAD, *([WORKER] if capacity.workers else [])} <= seen.totals.keys()

    def counts(name: str) -> bool:
        return name in ("CPU", "GPU") or (known and not _OF_RAY.search(name))

    def more(kind: str, own: Resources) -> dict[str, float]:
        rest = {k: v for k, v in seen.totals.get(kind, {}).items() if k not in ("CPU", "GPU")}
        return {name: each for name, each in {**rest, **own}.items() if counts(name)}

    bundles = tuple({k: v for k, v in each.items() if counts(k)} for each in request.bundles)
    return Request(bundles=bundles, strategy=request.strategy), Capacity(
        head=more(HEAD, capacity.head),
        worker=more(WORKER, capacity.worker),
        workers=capacity.workers,
    )


class Watch:
    """Looks again and again; for a thread of its own."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._since: dict[str, float] = {}
        self.reason = ""
        """Why the program can never have what it asks for; empty while it can."""
        self.idle_s: tuple[float, ...] = ()

    def run(self, address: str, ended: threading.Event) -> None:
        """Look until ``ended`` is set or there is a reason. ``address``: of Ray's head."""
        if ended.wait(FIRST_LOOK_S):
            return
        read = Reader(address)
        while not self.reason and not ended.wait(POLL_S):
            try:
                seen = read()
            except Exception:  # Ray is busy or ends, which the job sees itself
                continue
            self.take(seen, now=time.monotonic())

    def take(self, seen: Seen, *, now: float) -> None:
        """Take note of what Ray reports at ``now``, in seconds."""
        self.idle_s = seen.idle_s
        found = set(self._sentences(seen.requests, seen))
        # Ray Train takes its group back and asks again, so it may be missing once.
        self._since = {
            each: since
            for each, since in self._since.items()
            if each in found or now - since < MEANT_S
        }
        for each in found:
            if now - self._since.setdefault(each, now) >= MEANT_S:
                self.reason = each

    def _sentences(self, requests: Sequence[Request], seen: Seen) -> list[str]:
        found = (impossible(*comparable(each, self._capacity, seen)) for each in requests)
        return [each for each in found if each]
