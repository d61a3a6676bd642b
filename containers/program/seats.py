"""The nodes that a program may have, as Ray sees them, and which of them it has."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from containers.log import say
from containers.program.launch import Ended, Launcher, Order, Place
from contract import times
from contract.text import listed

#: What ``ray.nodes()`` calls the head.
_HEAD: Final = "node:__internal_head__"
#: A node that does not answer for this long is lost: Ray itself needs up to 24 s to see it.
_LOST_S: Final = 40.0
#: For an answer that a node gives at once.
ANSWER_S: Final = 5.0
_POLL_S: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A node that Ray has."""

    id: str
    address: str
    cpus: float
    gpus: float
    is_head: bool


@dataclass(kw_only=True, slots=True)
class Seat:
    """One of the places of a program, and the node that has it now."""

    number: int
    node: NodeInfo
    launcher: Any
    """The actor."""
    place: Place | None = None
    wait: Any = None
    """What ``Launcher.wait`` will return; None before a start and after an end."""
    call: Any = None
    """Of a node that joins a program that runs: what its ``prepare`` or ``start`` will return."""
    is_prepared: bool = False
    """Of such a node: ``call`` is its ``start``."""
    notice: Any = None
    ended: Ended | None = None
    save: Any = None
    """What ``Launcher.save`` will return where the program has ended before that on other nodes."""

    @property
    def is_running(self) -> bool:
        return self.wait is not None

    def still_runs(self) -> bool:
        """Whether the program still runs, or saves, on a node that the others go on without."""
        return self.wait is not None and not ray.wait([self.wait], timeout=0)[0]

    @property
    def is_done(self) -> bool:
        """The program has ended here as it should: it needs the node no more."""
        return self.ended is not None and not self.ended.code and not self.ended.was_told


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
    # A head that only coordinates has no CPUs to hand out. By address, as a torchrun that is not
    # told otherwise numbers nodes that meet at a store.
    return sorted(
        (node for node in found if node.cpus),
        key=lambda node: (node.address, not node.is_head, node.id),
    )


def first_failure(seats: Sequence[Seat]) -> Seat | None:
    """The node whose program failed first, of those that were not told to end."""
    failed = [seat for seat in seats if seat.ended and seat.ended.code and not seat.ended.was_told]
    return min(failed, key=lambda seat: seat.ended.at if seat.ended else 0.0, default=None)


def answers(seat: Seat, is_stopped: Callable[[], bool]) -> bool:
    """Whether a node is still there; waits until that is known, or the job has to end."""
    deadline = time.monotonic() + _LOST_S
    while time.monotonic() < deadline and not is_stopped():
        try:
            ray.get(seat.launcher.address.remote(), timeout=ANSWER_S)
            return True
        except GetTimeoutError:
            continue
        except RayError:
            return False
    return is_stopped()


def unfit(seats: Sequence[Seat]) -> list[Seat]:
    """The nodes whose hosts are found unfit to train, after the program has failed."""
    calls = {seat.launcher.host_faults.remote(): seat for seat in seats}
    done, _ = ray.wait([*calls], num_returns=len(calls), timeout=times.HOST_CHECK_S + ANSWER_S)
    found = []
    for call in done:
        with contextlib.suppress(RayError):  # lost since
            if faults := ray.get(call):
                seat = calls[call]
                say(f"node {seat.number} ({seat.node.address}) needs another host: {faults[0]}")
                found.append(seat)
    return found


def stop_all(seats: Sequence[Seat]) -> None:
    """Tell a program to end, on all of its nodes at once."""
    for seat in seats:
        if seat.is_running:
            seat.launcher.stop.remote(times.COMMAND_STOP_S)


def wait_for_end(seats: Sequence[Seat]) -> None:
    """Wait until a program that was told to end has ended on all nodes that are still there."""
    waits = {seat.wait: seat for seat in seats if seat.is_running}
    if waits:
        ray.wait([*waits], num_returns=len(waits), timeout=times.COMMAND_STOP_S + ANSWER_S)
    for wait, seat in waits.items():
        with contextlib.suppress(RayError):  # lost, or about to be
            seat.ended = ray.get(wait, timeout=0)
        seat.wait = None


def save_all(
    seats: Sequence[Seat], is_stopped: Callable[[], bool], deadline: float = math.inf
) -> list[str]:
    """Bring the files of a program, which has ended, to the bucket from all of its nodes.

    Args:
        is_stopped: whether the job has to end; asked until all are there.
        deadline: Unix time at which it will have to. Until then, what fails is tried again.

    Returns:
        What is lost, in words: an item for each node that has lost something.
    """
    until = time.monotonic() + times.FILES_SAVE_S + ANSWER_S if is_stopped() else math.inf
    within = times.FILES_SAVE_S if is_stopped() else save_within_s(deadline)
    saves = {}
    for seat in seats:
        if seat.save is None:
            seat.save = seat.launcher.save.remote(within)
        elif is_stopped():
            seat.launcher.hurry.remote(times.FILES_SAVE_S)
        saves[seat.save], seat.save = seat, None
    lost = []
    while saves and time.monotonic() < until:
        done, _ = ray.wait([*saves], timeout=_POLL_S)
        for each in done:
            seat = saves.pop(each)
            try:
                names = ray.get(each)
            except RayError:
                lost.append(f"the last files of node {seat.number}, which is lost")
                continue
            if names:
                lost.append(f"{len(names):,} files of node {seat.number}: {listed(names)}")
        if is_stopped() and until == math.inf:
            until = time.monotonic() + times.FILES_SAVE_S + ANSWER_S
            for seat in saves.values():
                seat.launcher.hurry.remote(times.FILES_SAVE_S)
    lost += [
        f"the last files of node {seat.number}, which does not answer" for seat in saves.values()
    ]
    for each in lost:
        say(f"warning: not saved: {each}")
    return lost


def save_within_s(deadline: float) -> float | None:
    """How long the last copy of a node's files may take: it ends before the job's deadline does."""
    if deadline == math.inf:
        return None
    return max(times.FILES_SAVE_S, deadline - times.FILES_SAVE_S - time.time())


def start_launcher(order: Order, node: NodeInfo) -> Any:
    """An actor that holds all of a node, so that nothing else is placed there."""
    return (
        ray.remote(Launcher)
        .options(
            num_cpus=node.cpus,
            num_gpus=node.gpus,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(order)
    )
