"""Benchmark of the DDP recipe against a good plain loop, on two gloo ranks.

    python -m benchmarks.ddp

The plain loop is that of someone who knows how: images in memory, kernels that are channels last,
fused AdamW, gradients that are views of DDP's buckets; the whole ResNet18, in fp32. Both see the
same images in the same order from the same weights, so their losses must agree; then they take
turns, and medians of images per CPU second are compared, which are exact on a busy machine too.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import rank_groups
from benchmarks.tables import report
from training.data import DIGITS, small_images
from training.models import classifiers as models
from training.models import replicas
from training.models.resnet import ResNet18

WORLD_SIZE: Final = 2
KINDS: Final = ("plain", "recipe")
_BATCH_PER_WORKER: Final = 128
_COMPARED_STEPS: Final = 20
_ROUNDS: Final = 7
_STEPS_PER_ROUND: Final = 4


class Loop:
    """One of both loops: the recipe's own parts in its own order, or the plain one."""

    def __init__(
        self,
        kind: str,
        image_set: small_images.ImageSet,
        order: small_images.BatchOrder,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self._is_recipe = kind == "recipe"
        model: Any = ResNet18()
        cpu = torch.device("cpu")
        if self._is_recipe:
            models.keep_live_taps(model, image_size=small_images.IMAGE_SIZE)
            model.to(dtype)
            self._replica = replicas.distribute(model)
        else:
            model.to(dtype, memory_format=torch.channels_last)
            self._replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._model, self._order = model, order
        # As the recipe builds it, which takes weights in fp32 only.
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.0, fused=True
        )
        self._data = small_images.DeviceImages(image_set, cpu)

    def batches(self, first: int, num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(first, first + num):
            indices = self._order.indices(step)
            begin, end = small_images.shard_bounds(
                len(indices), rank=dist.get_rank(), world_size=WORLD_SIZE
            )
            yield self._data.batch(indices[begin:end])

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self._replica(pixels).logits, labels)
        loss.backward()
        if self._is_recipe:
            nn.utils.clip_grad_norm_(self._model.parameters(), float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def measure() -> dict[str, Any]:
    """Measure on one of the two ranks."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD_SIZE))
    dist.init_process_group("gloo")
    image_set = small_images.load(DIGITS)
    order = small_images.BatchOrder(
        num_images=len(image_set.train_images), global_batch=WORLD_SIZE * _BATCH_PER_WORKER, seed=0
    )

    # In double precision, because in single precision two loops that round differently drift
    # apart by 1e-2 within a few steps of Adam: so does the plain loop from itself when its
    # weights are changed by one part in ten million.
    doubles = [Loop(kind, image_set, order, torch.float64) for kind in KINDS]
    gaps = []
    for pixels, labels in doubles[0].batches(0, _COMPARED_STEPS):
        plain, recipe = (loop.step(pixels.double(), labels).item() for loop in doubles)
        gaps.append(abs(plain - recipe))

    loops = {kind: Loop(kind, image_set, order) for kind in KINDS}
    for loop in loops.values():
        _rate(loop, first=0)  # buffers and oneDNN's choices are made once
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(_ROUNDS):
        for name, loop in loops.items():
            rates[name].append(_rate(loop, first=number * _STEPS_PER_ROUND))
    per_cpu_s = {name: statistics.median(each) for name, each in rates.items()}
    return {"loss_difference_max": max(gaps), "images_per_cpu_s": per_cpu_s}


def main() -> int:
    figures, _ = rank_groups.run(WORLD_SIZE, measure)
    result = {
        "benchmark": "ddp",
        "ratio": figures["images_per_cpu_s"]["recipe"] / figures["images_per_cpu_s"]["plain"],
        **figures,
        "world_size": WORLD_SIZE,
        "batch_per_worker": _BATCH_PER_WORKER,
    }
    report(result)
    return 0 if figures["loss_difference_max"] <= 1e-4 else 1


def _rate(loop: Loop, *, first: int) -> float:
    """Images per CPU second of this rank, reading the data included."""
    dist.barrier()
    began = time.process_time()
    num = 0
    for pixels, labels in loop.batches(first, _STEPS_PER_ROUND):
        loop.step(pixels, labels)
        num += len(labels)
    return num / (time.process_time() - began)


if __name__ == "__main__":
    sys.exit(main())
