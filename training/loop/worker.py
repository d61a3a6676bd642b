"""Interface of a recipe's loop to its worker: rank, device, events, saves and stops.

``training.runtime`` has the two kinds: ``ray_worker`` for clusters, and ``torchrun`` for the
processes of one machine. Only rank 0 sends events.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, Protocol, TypeVar

import torch
import torch.distributed as dist

from contract.times import COLLECTIVE_S
from training.loop.saving import Saves
from training.record.events import Evaluating, Event, Warned

Shown = TypeVar("Shown")

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


def uses_bf16(precision: str, device: torch.device) -> bool:
    """True if a model computes in bf16.

    Args:
        precision: ``fp32``, ``bf16``, or ``auto``: bf16 on GPUs with units for it, which begin with
            compute capability 8; a T4 only emulates it, slower than fp32.
    """
    if precision != "auto":
        return precision == "bf16"
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def displayed(worker: Worker, what: str, compute: Callable[[], Shown]) -> Shown | None:
    """A figure or text that is only displayed. Where it cannot be computed, a warning names it, and
    the run goes on without it. A rank that runs out of memory by itself ends the run: the others
    would wait for it."""
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an extra figure is not worth a run
        reason = f"{type(error).__name__}: {error}"
        worker.emit(Warned(message=f"{what} is not known ({reason})"))
        return None


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
        if time.monotonic() - self._sent_at >= _PULSE_S:
            self._tell()

    def _tell(self) -> None:
        self._sent_at = time.monotonic()
        self._worker.emit(Evaluating())
