"""The bandwidth recipe: collectives over all workers, one size after another, and each link.

It trains nothing. Buffers are filled, checked and timed; seconds become bandwidth in ``formulas``.
The all-reduce of the largest message is what a floor is compared with. Between hosts, each link is
measured too: a collective is as slow as the slowest of them, and does not tell which one that is.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from contract.text import byte_size, counted, significant
from training.loop import metrics
from training.loop.worker import Worker
from training.recipes.bandwidth import links
from training.recipes.bandwidth.links import Timing
from training.recipes.bandwidth.settings import COLLECTIVES, BandwidthConfig
from training.record.events import Evaluation, Finished, Start, Stopped, Warned, phase
from training.record.result import Table
from training.system.machine import transport

_ELEMENT: Final = 4  # bytes of a float32
#: Most repetitions of a collective at one size.
_REPEATS: Final = 20
_HEADS: Final = ("mean (us)", "slowest rank (us)", "algorithm bandwidth (GB/s)", "bus bandwidth")


def train(worker: Worker, config: BandwidthConfig) -> None:
    """Measure, and report as other recipes do: one evaluation for each size."""
    device, ranks = worker.device, worker.world_size
    on_gpu = device.type == "cuda"
    # An element for each rank at least.
    sizes = sorted({max(size, ranks * _ELEMENT) for size in config.sizes(on_gpu=on_gpu)})
    hosts = links.hosts()
    num_hosts = len(set(hosts))
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

    over, slow = "", ""
    measures: dict[str, float] = {}
    courses: dict[str, list[float]] = {name: [] for name in config.chosen}
    rows: list[tuple[float, ...]] = []
    for step, size in enumerate(sizes, start=1):
        row = [float(size)]
        for name in config.chosen:
            timing = _timed(name, size, device, config)
            bus = timing.bus_gb_per_s(ranks)
            row += [timing.seconds * 1e6, timing.slowest_s * 1e6, timing.algorithm_gb_per_s, bus]
            courses[name].append(bus)
            measures[name.replace("-", "_")] = bus
        rows.append(tuple(row))
        # After the first collective: NCCL makes its choice when it needs one.
        over = over or transport(dist.get_backend(), num_hosts=num_hosts)
        if step == len(sizes) and num_hosts > 1:
            speeds = links.measured(hosts, device)
            measures["slowest_link"] = min(speeds.values())
            if slow := links.slow(speeds):
                worker.emit(Warned(message=slow))
        place = f"{byte_size(size)}, {over}"
        seconds = time.monotonic() - began
        worker.emit(
            Evaluation(step=step, epoch=0, place=place, measures=dict(measures), seconds=seconds)
        )
        if step < len(sizes) and _is_to_stop(worker):
            worker.emit(Stopped(step=step))
            return

    worker.emit(
        Finished(
            step=len(sizes),
            measures=measures,
            seconds=time.monotonic() - began,
            evaluation=Table(
                title=f"{counted(ranks, 'worker')} on {counted(num_hosts, 'host')}, {over}. "
                f"{_summary(courses)}",
                heads=("size (B)", *(f"{name}: {head}" for name in courses for head in _HEADS)),
                rows=tuple(rows),
            ),
            shortfall=_shortfall(measures.get("all_reduce"), config, over=over, slow=slow),
        )
    )


def _timed(name: str, size: int, device: torch.device, config: BandwidthConfig) -> Timing:
    """Check a collective once, then repeat it; every rank gets the same result."""
    run, num_bytes = _collective(name, size, device)
    run()  # makes the connections
    links.synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    run()
    links.synchronize(device)
    once = _over_ranks(time.perf_counter() - began, device)[1]
    repeats = max(1, min(_REPEATS, int(config.seconds_each / once)))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    links.synchronize(device)
    mean, slowest = _over_ranks((time.perf_counter() - began) / repeats, device)
    return Timing(collective=name, num_bytes=num_bytes, seconds=mean, slowest_s=slowest)


def _collective(name: str, size: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """A collective over a message of about ``size`` bytes, checked, and the message's true size.

    Raises:
        RuntimeError: its result is wrong.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = max(1, size // _ELEMENT // ranks)  # elements of each rank's share
    mine = float(rank + 1)
    total = ranks * (ranks + 1) / 2
    match name:
        case "all-reduce":
            whole = torch.full((part * ranks,), mine, device=device)
            run = functools.partial(dist.all_reduce, whole)
            run()
            is_right = bool((whole == total).all())
            whole.zero_()  # or sums of sums would overflow
        case "all-gather":
            whole = torch.zeros(part * ranks, device=device)
            share = torch.full((part,), mine, device=device)
            run = functools.partial(dist.all_gather_into_tensor, whole, share)
            run()
            is_right = _is_in_order(whole, part)
        case "reduce-scatter":
            whole = torch.full((part * ranks,), mine, device=device)
            share = torch.zeros(part, device=device)
            run = functools.partial(dist.reduce_scatter_tensor, share, whole)
            run()
            is_right = bool((share == total).all())
        case _:
            whole = torch.full((part * ranks,), mine, device=device)
            received = torch.zeros(part * ranks, device=device)
            run = functools.partial(dist.all_to_all_single, received, whole)
            run()
            is_right = _is_in_order(received, part)
    if not is_right:
        raise RuntimeError(f"{name} of {size} bytes: rank {rank} received wrong values")
    return run, whole.numel() * _ELEMENT


def _is_in_order(received: torch.Tensor, part: int) -> bool:
    """Whether each rank's share, ``part`` elements, came from that rank."""
    return all(bool((each == rank).all()) for rank, each in enumerate(received.split(part), 1))


def _over_ranks(seconds: float, device: torch.device) -> tuple[float, float]:
    """Mean and maximum."""
    mean, most = torch.tensor([seconds], device=device), torch.tensor([seconds], device=device)
    dist.all_reduce(mean)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(mean.item()) / dist.get_world_size(), float(most.item())


def _is_to_stop(worker: Worker) -> bool:
    """Whether any rank was asked to; every rank gets the same answer."""
    return _over_ranks(float(worker.stop_requested()), worker.device)[1] > 0


def _summary(courses: dict[str, list[float]]) -> str:
    """Mean over all sizes and maximum of each bus bandwidth, which are often confused."""
    found = [
        f"{name} {significant(statistics.mean(course))} on average over all sizes, "
        f"{significant(max(course))} at most"
        for name, course in courses.items()
    ]
    return f"Bus bandwidth in GB/s: {'; '.join(found)}."


def _shortfall(
    reached: float | None, config: BandwidthConfig, *, over: str, slow: str
) -> str | None:
    """Why the run failed: the largest all-reduce is below the floor. None where it is not."""
    expected = config.expected_gb_per_s
    floor = max(config.floor, config.floor_share * (expected or 0.0))
    if reached is None or reached >= floor:
        return None
    compared = f" ({config.instance}: {significant(expected)} GB/s)" if expected else ""
    return (
        f"{COLLECTIVES[0]} has a bus bandwidth of {significant(reached)} GB/s with {over}, below "
        f"the floor of {significant(floor)} GB/s{compared}{'; ' if slow else ''}{slow}"
    )
