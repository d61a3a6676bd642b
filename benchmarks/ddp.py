"""Benchmark of the DDP recipe against a plain loop with the reference's semantics, on two gloo
ranks.

    python -m benchmarks.ddp [--data DIR] [--rounds 7]

The plain loop is what one writes first: PIL images normalised one by one in a DataLoader without
workers, fp32, Adam, DDP over the whole ResNet18. Both see the same images in the same order from
the same weights, so their losses must agree; then they take turns, and medians are compared.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks import rank_groups
from benchmarks.tables import report, say
from contract import faults
from training.data import DIGITS, small_images
from training.ddp import train as ddp
from training.ddp.settings import DdpConfig
from training.models import classifiers as models
from training.models import replicas
from training.models.resnet import ResNet18

WORLD_SIZE: Final = 2
_BATCH_PER_WORKER: Final = 128
_COMPARED_STEPS: Final = 20
_STEPS_PER_ROUND: Final = 4


class PlainImages(Dataset[tuple[torch.Tensor, int]]):
    """One image at a time through PIL, as torchvision's FashionMNIST, ToTensor and Normalize do."""

    def __init__(self, image_set: small_images.ImageSet) -> None:
        self._images = image_set.train_images
        self._labels = image_set.train_labels
        self._mean, self._std = image_set.mean, image_set.std

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = Image.fromarray(self._images[index])
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        tensor = pixels.view(picture.size[1], picture.size[0], 1).permute(2, 0, 1).contiguous()
        scaled = tensor.to(torch.float32).div(255)
        mean = torch.as_tensor([self._mean]).view(-1, 1, 1)
        std = torch.as_tensor([self._std]).view(-1, 1, 1)
        return scaled.sub_(mean).div_(std), int(self._labels[index])


class PlainLoop:
    """The reference's training step: whole model, default DDP, Adam, images through PIL."""

    def __init__(
        self,
        image_set: small_images.ImageSet,
        order: small_images.BatchOrder,
        rank: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.model = ResNet18().to(dtype)
        self.replica = DistributedDataParallel(self.model)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._data = PlainImages(image_set)
        self._order, self._rank = order, rank

    def batches(self, first: int, num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batches = [_shard(self._order, step, self._rank).tolist() for step in _steps(first, num)]
        return iter(DataLoader(self._data, batch_sampler=batches, num_workers=0))

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.replica(pixels).logits, labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class RecipeLoop:
    """The recipe's own parts in its own order, at the same settings."""

    def __init__(
        self,
        image_set: small_images.ImageSet,
        order: small_images.BatchOrder,
        rank: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self._config = _config()
        self.model = ResNet18()
        models.keep_live_taps(self.model, image_size=small_images.IMAGE_SIZE)
        self.model.to(dtype)
        self.replica = replicas.distribute(self.model)
        cpu = torch.device("cpu")
        self._optimizer = ddp.build_optimizer(self.model, self._config, cpu)
        self._data = small_images.DeviceImages(image_set, cpu)
        self._order, self._rank = order, rank

    def batches(self, first: int, num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in _steps(first, num):
            yield self._data.batch(_shard(self._order, step, self._rank))

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss_sum = F.cross_entropy(self.replica(pixels).logits, labels, reduction="sum")
        (loss_sum / len(labels)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss_sum.detach() / len(labels)


def measure(data: str, rounds: int) -> dict[str, Any]:
    """Measure on one of the two ranks."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD_SIZE))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    image_set = small_images.load(data)
    order = small_images.BatchOrder(
        num_images=len(image_set.train_images), global_batch=_config().images_per_step, seed=0
    )
    kinds: dict[str, Any] = {"plain": PlainLoop, "recipe": RecipeLoop}
    figures: dict[str, Any] = {}

    # In double precision, because in single precision two loops that round differently drift
    # apart by 1e-2 within a few steps of Adam: so does the plain loop from itself when its
    # weights are changed by one part in ten million.
    _progress(rank, f"comparing the losses of {_COMPARED_STEPS} steps in double precision")
    doubles = {name: kind(image_set, order, rank, torch.float64) for name, kind in kinds.items()}
    losses = _losses(doubles["plain"], doubles)
    gaps = [abs(a - b) for a, b in zip(losses["plain"], losses["recipe"], strict=True)]
    figures["loss_difference_max"] = max(gaps)
    figures["losses_agree_to_1e-4"] = max(gaps) <= 1e-4
    figures["loss_first_last"] = [losses["recipe"][0], losses["recipe"][-1]]

    loops: dict[str, Any] = {name: kind(image_set, order, rank) for name, kind in kinds.items()}
    _progress(rank, f"timing {rounds} rounds of {_STEPS_PER_ROUND} steps each, in turn")
    for loop in loops.values():
        _rate(loop, first=0)  # buffers and oneDNN's choices are made once
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name, loop in loops.items():
            rates[name].append(_rate(loop, first=number * _STEPS_PER_ROUND))
    figures["images_per_s"] = {name: statistics.median(found) for name, found in rates.items()}
    return figures


@faults.command()
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp", description=__doc__)
    parser.add_argument("--data", default=DIGITS, help="folder with FashionMNIST's files")
    parser.add_argument("--rounds", type=int, default=7, help="of a few steps of each loop")
    options = parser.parse_args()
    small_images.load(options.data)
    figures, _ = rank_groups.run(WORLD_SIZE, measure, options.data, options.rounds)
    result = {
        "benchmark": "ddp",
        "ratio": figures["images_per_s"]["recipe"] / figures["images_per_s"]["plain"],
        **figures,
        "world_size": WORLD_SIZE,
        "batch_per_worker": _BATCH_PER_WORKER,
        "data": "digits" if options.data == DIGITS else Path(options.data).name,
    }
    report(result)
    return 0 if figures["losses_agree_to_1e-4"] else 1


def _config() -> DdpConfig:
    return DdpConfig(
        recipe="ddp",
        run="benchmark",
        storage="unused",
        data="unused",
        num_workers=WORLD_SIZE,
        batch_per_worker=_BATCH_PER_WORKER,
        max_grad_norm=0.0,
    )


def _steps(first: int, num: int) -> range:
    return range(first, first + num)


def _shard(order: small_images.BatchOrder, step: int, rank: int) -> torch.Tensor:
    indices = order.indices(step)
    first, end = small_images.shard_bounds(len(indices), rank=rank, world_size=WORLD_SIZE)
    return indices[first:end]


def _losses(source: PlainLoop, loops: dict[str, Any]) -> dict[str, list[float]]:
    """Loss of each of the first steps of each loop on the same batches, averaged over the ranks."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in loops}
    for pixels, labels in source.batches(0, _COMPARED_STEPS):
        for name, loop in loops.items():
            found[name].append(loop.step(pixels.double(), labels))
    means = {name: torch.stack(losses) / WORLD_SIZE for name, losses in found.items()}
    for losses in means.values():
        dist.all_reduce(losses)
    return {name: losses.tolist() for name, losses in means.items()}


def _rate(loop: Any, *, first: int) -> float:
    """Images per second of both ranks together, reading the data included."""
    dist.barrier()
    began = time.perf_counter()
    num = 0
    for pixels, labels in loop.batches(first, _STEPS_PER_ROUND):
        loop.step(pixels, labels)
        num += len(labels)
    dist.barrier()
    return WORLD_SIZE * num / (time.perf_counter() - began)


def _progress(rank: int, text: str) -> None:
    if rank == 0:
        say(text)


if __name__ == "__main__":
    sys.exit(main())
