"""Benchmark of the ImageNet recipe on one GPU: pictures per second with its data path, and without.

    python -m benchmarks.imagenet_gpu [--models resnet50] [--batches 128 256] [--json]
    python -m benchmarks.imagenet_gpu --packed raw [--json]
    python -m benchmarks.imagenet_gpu --data DIR [--decoders 14] [--json]

Needs PyTorch and transformers, not Ray. Without more the pictures are made on the device, so
nothing waits for a decoder. ``--packed`` makes a tree of JPEGs (of scikit-learn's photographs),
packs it as ``trainctl data prepare imagenet`` does, and reads that; ``--data`` reads a set that is
there. All train with the recipe's own loop: random crops, label smoothing, the average of
the weights. A run has two epochs, of which the second counts: in the first cuDNN chooses its
algorithms. On a CPU it shows that it works, with small pictures.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import images, processes
from benchmarks.output import command_line, report, say
from contract.errors import InputError
from training.data.pictures.destination import Destination
from training.data.pictures.index import ENCODINGS
from training.data.pictures.prepare import Wish, prepare
from training.models import picture_shapes
from training.record.events import Evaluation, RankTimes, Start

#: Of an A100 with the same arithmetic, measured by its maker (docs/imagenet.md).
_A100_IMAGES_PER_S = {"resnet50": 2470.0}


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = command_line("imagenet_gpu", __doc__)
    parser.add_argument(
        "--models", nargs="+", choices=picture_shapes.NAMES, default=["resnet50"], metavar="MODEL"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[128, 256, 512] if on_gpu else [8]
    )
    parser.add_argument("--size", type=int, default=224 if on_gpu else 32, help="image size")
    parser.add_argument("--steps", type=int, default=60 if on_gpu else 8, help="steps of an epoch")
    parser.add_argument("--data", help="folder of pictures (default: pictures of the device)")
    parser.add_argument("--packed", choices=ENCODINGS, help="make such a set, and read it")
    parser.add_argument("--decoders", type=int, default=0, help="processes (0: one per core)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        if options.packed:
            most = options.steps * max(options.batches)
            options.data = packed(Path(folder), num=most, encoding=options.packed)
        return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    """Measure each model with each batch."""
    runs = []
    for model in options.models:
        for batch in options.batches:
            words = ["--image-size", str(options.size), "--first-size", "0"]
            words += ["--model", model, "--batch-per-worker", str(batch)]
            words += ["--synthetic-images", str(max(64, batch * options.steps))]
            words += ["--decoders", str(options.decoders)]
            if options.data:
                words += ["--data", options.data]
            try:
                run = {"model": model, "batch": batch, **measured(words)}
            except (InputError, torch.OutOfMemoryError) as error:
                say(f"{model}, batch {batch}: {str(error).splitlines()[0]}")
                continue
            say(f"{model}, batch {batch}: {run['images_per_s']:.0f} images/s, MFU {run['mfu']}")
            runs.append(run)
    report(
        {
            "benchmark": "imagenet_gpu",
            "image_size": options.size,
            "pictures": options.packed or options.data or "made on the device",
            "ratio": ratio(runs),
            "runs": runs,
        },
        as_json=options.json,
    )
    return 0 if runs else 1


def measured(words: Sequence[str]) -> dict[str, Any]:
    """Train two epochs; return the figures of the second."""
    common = ("--epochs", "2", "--checkpoint-every-epochs", "2", "--checkpoint-minutes", "0")
    events = processes.train_here(("imagenet", "--preset", "resnet50", *common, *words))
    begun = next(event for event in events if isinstance(event, Start))
    last = [event for event in events if isinstance(event, Evaluation)][-1]
    times = [event for event in events if isinstance(event, RankTimes)][-1]
    return {
        "precision": begun.precision,
        "device": begun.device,
        "images_per_s": last.items_per_s,
        "mfu": last.mfu,
        "tflops_per_s": (last.flops_per_s or 0.0) / 1e12,
        "step_time_s": times.step_time_s,
        "phases_s": dict(times.phases or {}),
        "memory_gib": None if last.memory_bytes is None else last.memory_bytes / 2**30,
    }


def packed(folder: Path, *, num: int, encoding: str) -> str:
    """Make a packed set of pictures as large as ImageNet's; return its folder."""
    say(f"making {num} pictures and packing them as {encoding}")
    images.write_pictures(folder / "tree", num=num)
    to = Destination(uri=str(folder / "packed"))
    prepare(folder / "tree", to, Wish(encoding=encoding))
    return to.uri


def ratio(runs: Sequence[dict[str, Any]]) -> float | None:
    """The best images/s of ResNet50 over an A100's."""
    found = [run["images_per_s"] for run in runs if run["model"] in _A100_IMAGES_PER_S]
    return max(found) / _A100_IMAGES_PER_S["resnet50"] if found else None


if __name__ == "__main__":
    sys.exit(main())
