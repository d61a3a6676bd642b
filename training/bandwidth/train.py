"""The bandwidth recipe: an all-reduce over all workers, one size after another.

It trains nothing. Buffers are filled, checked and timed. Seconds become bandwidth as NVIDIA's
nccl-tests computes it (its doc/PERFORMANCE.md): algorithm bandwidth is the size of the message over
the time that it took; bus bandwidth corrects it by what each rank has to send for that, so that it
can be compared with the speed of the link at any number of workers.
"""

import socket
import statistics
import time
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from contract.text import byte_size, counted, listed, significant
from training.bandwidth.settings import BandwidthConfig
from training.loop import metrics
from training.loop.worker import Worker
from training.record.events import Evaluation, Finished, Start, Stopped, Warned, phase
from training.record.result import Table
from training.system.devices import transport

_ELEMENT: Final = 4  # bytes of a float32
#: A size is measured in so many rounds, of which the median counts: one stall fails no job.
_ROUNDS: Final = 5
#: Most repetitions in a round, and seconds after which there are no more.
_REPEATS: Final = 4
_SECONDS: Final = 0.1
#: Rows of a matrix of the burn-in; part of the others' products that a healthy GPU makes at least.
_SIDE: Final = {"cuda": 4096, "cpu": 512}
_SLOW: Final = 0.8
_HEADS: Final = (
    "size (B)",
    "mean (us)",
    "slowest rank (us)",
    "algorithm bandwidth (GB/s)",
    "bus bandwidth (GB/s)",
)


class Timing(NamedTuple):
    """Seconds of one all-reduce."""

    mean: float
    """Over the ranks and repetitions."""
    slowest: float
    """On the slowest rank."""


def bus_gb_per_s(algorithm: float, num_ranks: int) -> float:
    """Bus bandwidth of an all-reduce, in which each byte crosses the busiest link twice, but for a
    rank's own share; 0 for a single rank, which sends nothing."""
    return algorithm * 2 * (num_ranks - 1) / num_ranks


def train(worker: Worker, config: BandwidthConfig) -> None:
    """Measure, and report as other recipes do: one evaluation for each size."""
    device, ranks = worker.device, worker.world_size
    on_gpu = device.type == "cuda"
    sizes = sorted({each // _ELEMENT * _ELEMENT for each in config.sizes(on_gpu=on_gpu)})
    hosts = [""] * ranks
    dist.all_gather_object(hosts, socket.gethostname())
    num_hosts = len({*hosts})
    began = time.monotonic()
    worker.emit(
        phase("model_ready"),
        Start(
            step=0,
            resumed=False,
            world_size=ranks,
            total_steps=len(sizes),
            device=metrics.device_name(device),
        ),
    )

    if ranks == 1:
        text = "a single worker sends nothing, and its bandwidth is 0: --workers 2 measures one"
        worker.emit(Warned(message=text))
    _burn_in(config.burn_in_s, device, hosts)
    over, bus = "", 0.0
    rows: list[tuple[float, ...]] = []
    for step, size in enumerate(sizes, start=1):
        timing = _timed(size, device)
        algorithm = size / timing.mean / 1e9
        bus = bus_gb_per_s(algorithm, ranks)
        rows.append((size, timing.mean * 1e6, timing.slowest * 1e6, algorithm, bus))
        # After the first all-reduce: NCCL makes its choice when it needs one.
        over = over or transport(dist.get_backend(), num_hosts=num_hosts)
        place = f"{byte_size(size)}, {over}"
        seconds = time.monotonic() - began
        worker.emit(
            Evaluation(
                step=step, epoch=0, place=place, measures={"all_reduce": bus}, seconds=seconds
            )
        )
        # Any rank may be asked to stop; every rank gets the same answer.
        asked = _over_ranks(float(worker.stop_requested()), device).slowest
        if asked and step < len(sizes):
            worker.emit(Stopped(step=step))
            return

    course = [row[-1] for row in rows]
    worker.emit(
        Finished(
            step=len(sizes),
            measures={"all_reduce": bus},
            seconds=time.monotonic() - began,
            evaluation=Table(
                # Mean and maximum, which are often confused.
                title=f"{counted(ranks, 'worker')} on {counted(num_hosts, 'host')}, {over}. "
                f"Bus bandwidth of an all-reduce in GB/s: {significant(statistics.mean(course))} "
                f"on average over all sizes, {significant(max(course))} at most.",
                heads=_HEADS,
                rows=tuple(rows),
            ),
        )
    )


def _burn_in(seconds: int, device: torch.device, hosts: list[str]) -> None:
    """Multiply the same matrices again and again.

    Args:
        hosts: names of the ranks' hosts.

    Raises:
        RuntimeError: a product differs from the first one, or a GPU is slower than the others.
    """
    if not seconds:
        return
    side = _SIDE[device.type]
    matrix = torch.randn(side, side, device=device)
    first, num, began = matrix @ matrix, 0, time.monotonic()
    while time.monotonic() - began < seconds:
        if not torch.equal(matrix @ matrix, first):  # waits for the device
            raise RuntimeError(f"burn-in: {hosts[dist.get_rank()]}, {device} computes wrong values")
        num += 1
    counts = [0] * len(hosts)
    dist.all_gather_object(counts, num)
    usual = statistics.median(counts)
    slow = {
        f"rank {rank} on {hosts[rank]}" for rank, each in enumerate(counts) if each < _SLOW * usual
    }
    # Other processes of a host take their part of its CPUs.
    if slow and device.type == "cuda":
        raise RuntimeError(f"burn-in: {listed(sorted(slow))} made fewer products than the others")


def _timed(size: int, device: torch.device) -> Timing:
    """Check an all-reduce of ``size`` bytes once, then repeat it; every rank gets the same median.

    Raises:
        RuntimeError: its result is wrong.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    message = torch.full((size // _ELEMENT,), float(rank + 1), device=device)
    dist.all_reduce(message)  # makes the connections
    if not bool((message == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"all-reduce of {size} bytes: rank {rank} received wrong values")
    message.zero_()  # or sums of sums would overflow
    once = _repeated(message, 1).slowest
    repeats = max(1, min(_REPEATS, int(_SECONDS / once)))
    return statistics.median_low(_repeated(message, repeats) for _ in range(_ROUNDS))


def _repeated(message: torch.Tensor, repeats: int) -> Timing:
    _synchronize(message.device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(message)
    _synchronize(message.device)
    return _over_ranks((time.perf_counter() - began) / repeats, message.device)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _over_ranks(seconds: float, device: torch.device) -> Timing:
    mean, most = torch.tensor([seconds], device=device), torch.tensor([seconds], device=device)
    dist.all_reduce(mean)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Timing(float(mean.item()) / dist.get_world_size(), float(most.item()))
