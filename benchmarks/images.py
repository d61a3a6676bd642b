"""Benchmark of the picture reader: pictures per second beside Pillow and torch's DataLoader.

    python -m benchmarks.images [--processes 2] [--seconds 6] [--rounds 3]

Both start from the same JPEGs, of ImageNet's usual size, and have as many processes. The plain way
is that of the published example, with Pillow's memory kept: Pillow decodes, cuts a random part,
resizes it to 224 pixels and mirrors it; each picture becomes a normalized float tensor in its
worker. The reader decodes whole pictures into shared memory, from a tree, from shards and from
packed shards; cutting and resizing is left to the GPU, and not timed. The ways take turns, and
medians count. Ratios of CPU seconds are exact on a busy machine too.

It needs torch, numpy, Pillow, psutil, and scikit-learn for its two photographs.
"""

import argparse
import functools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from PIL import Image
from PIL import _imaging as core
from torch.utils.data import DataLoader, Dataset

from benchmarks.tables import cpu_seconds, report, say
from training.data import augmentation
from training.data.pictures import library
from training.data.pictures.batches import PictureReader, rank_plan
from training.data.pictures.destination import Destination
from training.data.pictures.index import JPEG, PACKED, RAW, SHARDS
from training.data.pictures.library import PictureSet
from training.data.pictures.prepare import DEFAULT_SIZE, Wish, prepare
from training.data.small_images import BatchOrder

MODEL_SIZE: Final = 224
_WIDTH, _HEIGHT = 500, 375  # of most of ImageNet's pictures
_QUALITY: Final = 95
_CLASSES: Final = 10
_WARM_UP_S: Final = 1.0
_STEPS: Final = range(1_000_000)

Way = Callable[[], Iterator[torch.Tensor]]


class Measured(NamedTuple):
    per_s: float
    """Pictures."""
    per_cpu_s: float
    """Pictures per CPU second of all processes together."""


# --- the pictures ---------------------------------------------------------------------------------
def write_pictures(folder: Path, *, num: int) -> None:
    """Write a tree of cut-outs of scikit-learn's photographs."""
    package = util.find_spec("sklearn")
    assert package is not None, "scikit-learn is not installed"
    assert package.origin is not None
    photographs = Path(package.origin).parent / "datasets" / "images"
    sources = [Image.open(path).convert("RGB") for path in sorted(photographs.glob("*.jpg"))]
    draw = random.Random(0)
    for number in range(num):
        source = sources[number % len(sources)]
        left = draw.randint(0, source.width - _WIDTH)
        top = draw.randint(0, source.height - _HEIGHT)
        part = source.crop((left, top, left + _WIDTH, top + _HEIGHT))
        for split in ("train", "val") if number < _CLASSES else ("train",):
            path = folder / split / f"n{number % _CLASSES:08d}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            part.save(path, "JPEG", quality=_QUALITY)


# --- the plain way --------------------------------------------------------------------------------
class Plain(Dataset[tuple[torch.Tensor, int]]):
    """What the published example gets from torchvision, written out."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._mean = torch.tensor(augmentation.MEAN).view(3, 1, 1)
        self._std = torch.tensor(augmentation.STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._paths[number]) as file:
            image = file.convert("RGB")
        part = image.resize(
            (MODEL_SIZE, MODEL_SIZE), Image.Resampling.BILINEAR, box=_random_box(*image.size)
        )
        if random.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()
        values = pixels.to(torch.float32).div(255)
        return values.sub_(self._mean).div_(self._std), number


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """A part of 8 to 100 % of the area, of a ratio from 3/4 to 4/3."""
    area = width * height * random.uniform(0.08, 1)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = min(width, round(math.sqrt(area * ratio))), min(height, round(math.sqrt(area / ratio)))
    left, top = random.randint(0, width - w), random.randint(0, height - h)
    return left, top, left + w, top + h


def plain(paths: Sequence[Path], *, batch: int, processes: int) -> Iterator[torch.Tensor]:
    loader = DataLoader(
        Plain(paths),
        batch_size=batch,
        shuffle=True,
        num_workers=processes,
        drop_last=True,
        persistent_workers=True,
        prefetch_factor=3,
        # By itself Pillow keeps no memory from one picture to the next, and the system clears it.
        worker_init_fn=lambda _worker: core.set_blocks_max(64),
    )
    while True:
        for values, _labels in loader:
            yield values


# --- this project's way ---------------------------------------------------------------------------
def ours(found: PictureSet, *, batch: int, processes: int) -> Iterator[torch.Tensor]:
    order = BatchOrder(num_images=len(found.train), global_batch=batch, seed=0)
    plan = rank_plan(order, steps=_STEPS, rank=0, world_size=1)
    size = found.index.size or DEFAULT_SIZE
    cpu = torch.device("cpu")
    with PictureReader(
        found, found.train, size=size, batch=2 * batch, device=cpu, decoders=processes
    ) as reader:
        for each in reader.batches(plan):
            yield each.pictures


# --- measuring ------------------------------------------------------------------------------------
def measured(way: Way, *, seconds: float) -> Measured:
    """Consume batches as fast as they come, after a second in which everything starts."""
    batches = way()
    for _ in _until(batches, _WARM_UP_S):
        pass
    began, cpu = time.perf_counter(), cpu_seconds()
    num = sum(len(each) for each in _until(batches, seconds))
    took, used = time.perf_counter() - began, cpu_seconds() - cpu
    batches.close()  # type: ignore[attr-defined]
    return Measured(num / took, num / used)


def _until(batches: Iterator[torch.Tensor], seconds: float) -> Iterator[torch.Tensor]:
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        yield next(batches)


def prepared(tree: Path, folder: Path) -> dict[str, PictureSet]:
    """The same pictures in each form."""
    wishes = {
        "shards": Wish(form=SHARDS),
        "packed": Wish(form=PACKED, encoding=JPEG),
        "packed_raw": Wish(form=PACKED, encoding=RAW),
    }
    found = {"tree": library.open_set(str(tree))}
    for name, wish in wishes.items():
        prepare(tree, Destination(uri=str(folder / name)), wish)
        found[name] = library.open_set(str(folder / name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    common = {"batch": options.batch, "processes": options.processes}
    with tempfile.TemporaryDirectory(prefix="images-") as name:
        tree = Path(name, "tree")
        say(f"writing {options.pictures:,} pictures, and packing them")
        write_pictures(tree, num=options.pictures)
        sets = prepared(tree, Path(name))
        paths = sorted((tree / "train").rglob("*.JPEG"))
        ways: dict[str, Way] = {"plain": functools.partial(plain, paths, **common)}
        ways |= {each: functools.partial(ours, found, **common) for each, found in sets.items()}
        rounds: dict[str, list[Measured]] = {each: [] for each in ways}
        for number in range(options.rounds):
            for each, way in ways.items():
                rounds[each].append(measured(way, seconds=options.seconds))
                say(f"round {number + 1}, {each}: {rounds[each][-1].per_s:,.0f} pictures/s")
    per_s, per_cpu_s = (
        {
            each: statistics.median(getattr(one, unit) for one in found)
            for each, found in rounds.items()
        }
        for unit in Measured._fields
    )
    report(
        {
            "benchmark": "images",
            "ratio": per_s["tree"] / per_s["plain"],
            "ratios": {each: per_s[each] / per_s["plain"] for each in sets},
            "ratios_of_cpu_seconds": {each: per_cpu_s[each] / per_cpu_s["plain"] for each in sets},
            "pictures_per_s": per_s,
            "pictures_per_cpu_s": per_cpu_s,
            "processes": options.processes,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
