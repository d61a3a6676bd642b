"""The DDP recipe against a plain loop with the reference's semantics, on two gloo ranks.

    python -m benchmarks.ddp [--data DIR] [--json]

The plain loop is what one writes first: PIL images normalised one by one in a DataLoader without
workers, fp32, Adam, DDP over the whole ResNet18. Both see the same images in the same order from
the same weights, so their losses must agree; then they take turns, and medians are compared.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.output import report, say
from contract.errors import InputError
from training.data import DIGITS, images
from training.models import classifiers as models
from training.models import replicas
from training.recipes.ddp import loop as ddp
from training.recipes.ddp.settings import DdpConfig

WORLD_SIZE: Final = 2
_BATCH_PER_WORKER: Final = 128
_COMPARED_STEPS: Final = 20
_ROUNDS: Final = 7
_STEPS_PER_ROUND: Final = 4


class PlainImages(Dataset[tuple[torch.Tensor, int]]):
    """One image at a time through PIL, as torchvision's FashionMNIST, ToTensor and Normalize do."""

    def __init__(self, image_set: images.ImageSet) -> None:
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
        image_set: images.ImageSet,
        order: images.BatchOrder,
        rank: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.model = models.resnet18().to(dtype)
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
        image_set: images.ImageSet,
        order: images.BatchOrder,
        rank: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self._config = _config()
        self.model = models.resnet18()
        models.keep_live_taps(self.model, image_size=images.IMAGE_SIZE)
        self.model.to(dtype)
        self.replica = replicas.distribute(
            self.model,
            compression=self._config.gradient_compression,
            bucket_mb=self._config.bucket_mb,
        )
        cpu = torch.device("cpu")
        self._optimizer = ddp.build_optimizer(self.model, self._config, cpu)
        self._data = images.DeviceImages.train_split(image_set, cpu)
        self._order, self._rank = order, rank

    def batches(self, first: int, num: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in _steps(first, num):
            yield self._data.batch(_shard(self._order, step, self._rank))

    def mirrored_batches(self, first: int, num: int) -> Iterator[Any]:
        for step in _steps(first, num):
            indices = _shard(self._order, step, self._rank)
            shifts, mirrored = images.augmentation(
                seed=0, step=step, num=len(indices), shift=0, flip=True
            )
            yield self._data.augmented(indices, shifts=shifts, mirrored=mirrored)

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss_sum = F.cross_entropy(self.replica(pixels).logits, labels, reduction="sum")
        (loss_sum / len(labels)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss_sum.detach() / len(labels)


def measure(rank: int, data: str, port: int, out: str) -> None:
    """What each of the two ranks does; rank 0 writes the figures to ``out``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD_SIZE))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    # In a function of its own: DDP that is freed after its process group can hang.
    figures = _figures(rank, data)
    if rank == 0:
        Path(out).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _figures(rank: int, data: str) -> dict[str, Any]:
    """Compare and time the loops; every rank calls this."""
    image_set = images.load(data)
    order = images.BatchOrder(
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
    figures["pixel_difference_max"] = _pixel_difference(doubles)
    gaps = [abs(a - b) for a, b in zip(losses["plain"], losses["recipe"], strict=True)]
    figures["loss_difference_max"] = max(gaps)
    figures["losses_agree_to_1e-4"] = max(gaps) <= 1e-4
    figures["loss_first_last"] = [losses["recipe"][0], losses["recipe"][-1]]

    loops: dict[str, Any] = {name: kind(image_set, order, rank) for name, kind in kinds.items()}
    _progress(rank, f"timing {_ROUNDS} rounds of {_STEPS_PER_ROUND} steps each, in turn")
    for loop in loops.values():
        _rate(loop, first=0)  # buffers and oneDNN's choices are made once
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(_ROUNDS):
        for name, loop in loops.items():
            rates[name].append(_rate(loop, first=number * _STEPS_PER_ROUND))
    figures["images_per_s"] = {name: statistics.median(found) for name, found in rates.items()}

    _progress(rank, "timing the data path alone")
    figures["data_ms_per_batch"] = _data_times(loops)
    figures["bytes_reduced_per_step"] = {
        name: _bytes_reduced(image_set, order, rank, name) for name in ("plain", "recipe", "fp16")
    }
    _progress(rank, "timing one rank alone: the limit that communication leaves")
    figures["images_per_s_alone"] = _rate_alone(loops["recipe"], rank)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp", description=__doc__)
    parser.add_argument("--data", default=DIGITS, help="folder with FashionMNIST's files")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    try:
        images.load(options.data)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(folder) / "figures.json"
        spawn(measure, args=(options.data, port, str(out)), nprocs=WORLD_SIZE)
        figures = json.loads(out.read_text(encoding="utf-8"))
    rates, data = figures["images_per_s"], figures["data_ms_per_batch"]
    reduced = figures["bytes_reduced_per_step"]
    limit = WORLD_SIZE * figures["images_per_s_alone"]
    result = {
        "benchmark": "ddp",
        "ratio": rates["recipe"] / rates["plain"],
        "data_path_ratio": data["plain"] / data["recipe"],
        "data_path_ratio_augmented": data["plain"] / data["recipe_augmented"],
        "bytes_reduced_ratio": reduced["plain"] / reduced["recipe"],
        "bytes_reduced_ratio_fp16": reduced["plain"] / reduced["fp16"],
        **figures,
        "limit_images_per_s": limit,
        "part_of_limit": rates["recipe"] / limit,
        "world_size": WORLD_SIZE,
        "batch_per_worker": _BATCH_PER_WORKER,
        "data": "digits" if options.data == DIGITS else Path(options.data).name,
    }
    report(result, as_json=options.json)
    return 0 if figures["losses_agree_to_1e-4"] else 1


def _config(**changes: Any) -> DdpConfig:
    settings: dict[str, Any] = {
        "recipe": "ddp",
        "run": "benchmark",
        "storage": "unused",
        "data": "unused",
        "num_workers": WORLD_SIZE,
        "batch_per_worker": _BATCH_PER_WORKER,
        "schedule": "constant",
        "max_grad_norm": 0.0,
    }
    return DdpConfig(**{**settings, **changes})


def _steps(first: int, num: int) -> range:
    return range(first, first + num)


def _shard(order: images.BatchOrder, step: int, rank: int) -> torch.Tensor:
    indices = order.indices(step)
    first, end = images.shard_bounds(len(indices), rank=rank, world_size=WORLD_SIZE)
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


def _pixel_difference(loops: dict[str, Any]) -> float:
    """Largest difference between the two data paths' normalised pixels, over a few batches."""
    pairs = zip(loops["plain"].batches(0, 5), loops["recipe"].batches(0, 5), strict=True)
    return max(float((one[0] - other[0]).abs().max()) for one, other in pairs)


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


def _data_times(loops: dict[str, Any]) -> dict[str, float]:
    """Median milliseconds per batch of one rank: through PIL, from the device, and mirrored."""
    recipe: RecipeLoop = loops["recipe"]
    # Numbers of batches that take about as long, tens of milliseconds.
    ways: dict[str, tuple[Any, int]] = {
        "plain": (loops["plain"].batches, 10),
        "recipe": (recipe.batches, 300),
        "recipe_augmented": (recipe.mirrored_batches, 100),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, (batches, num) in ways.items():
            began = time.perf_counter()
            for _batch in batches(0, num):
                pass
            times[name].append((time.perf_counter() - began) / num)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def _bytes_reduced(
    image_set: images.ImageSet, order: images.BatchOrder, rank: int, name: str
) -> int:
    """Bytes that one rank hands to all-reduce in a step, counted as DDP hands them over."""
    loop: Any = PlainLoop(image_set, order, rank) if name == "plain" else None
    loop = loop or RecipeLoop(image_set, order, rank)
    counted = 0

    def count(
        state: Any, bucket: torch._C._distributed_c10d.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        nonlocal counted
        size = 2 if name == "fp16" else bucket.buffer().element_size()
        counted += bucket.buffer().numel() * size
        hook = default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.allreduce_hook
        return hook(state, bucket)

    loop.replica.register_comm_hook(None, count)
    for batch in loop.batches(0, 1):
        loop.step(*batch)
    return counted


def _rate_alone(loop: Any, rank: int) -> float:
    """Images per second of one rank while the other waits and nothing is reduced."""
    rate = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        times = []
        with loop.replica.no_sync():
            for pixels, labels in loop.batches(0, 8):
                began = time.perf_counter()
                loop.step(pixels, labels)
                times.append((time.perf_counter() - began) / len(labels))
        rate[0] = 1 / statistics.median(times)
    dist.all_reduce(rate)
    return float(rate.item())


def _progress(rank: int, text: str) -> None:
    if rank == 0:
        say(text)


if __name__ == "__main__":
    sys.exit(main())
