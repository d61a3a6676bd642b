"""Interface of a recipe's loop to its worker: rank, device, events, saves and stops.

``training.runtime`` has the two kinds: ``ray_worker`` for clusters, and ``torchrun`` for the
processes of one machine. Only rank 0 sends events.
"""

import time
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist

from contract.times import COLLECTIVE_S
from training.loop.saving import Saves
from training.record.events import Evaluating, Event

#: Seconds between two signs of life in an evaluation.
_PULSE_S: Final = 30.0


class Worker(Protocol):
    """One training process."""

    rank: int
    world_size: int
    device: torch.device
    run_uri: str
    """Address of the run's folder, ``<storage>/<run>``."""
    fence: int
    """Number of the lease that the run is written under; 0 without one."""
    saves: Saves
    """This rank's saves of checkpoints, in the background."""

    def emit(self, *events: Event) -> None:
        """Send events to the process that keeps the record; does nothing except on rank 0."""

    def stop_requested(self) -> bool:
        """True once the user or the machine asked to end; may be known to one rank only."""

    def is_losing_a_node(self) -> bool:
        """True once a node under this run is about to be taken away; known to all ranks at once.

        Every rank calls this after the same step. Whatever is saved then is not lost.
        """


def expect_steps() -> None:
    """From now on, wait for other ranks no longer than steps may take: what is slow at the start
    (compilers, a first look at the data) is over."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S))


class Pulse:
    """Tells that an evaluation has begun, and that it goes on, however long it takes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._tell()

    def beat(self) -> None:
        """Say so again, if some time has passed; to be called for each batch."""
        if time.monotonic() - self._told_at >= _PULSE_S:
            self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        self._worker.emit(Evaluating())
