"""Pictures per second of the ImageNet recipe on one GPU: with its data path, and without.

    python -m benchmarks.imagenet_gpu [--models resnet50] [--batches 128 256] [--json]
    python -m benchmarks.imagenet_gpu --data DIR --decoders 14 [--json]

Needs PyTorch and transformers, not Ray. Without ``--data`` the pictures are made on the device, so
nothing waits for a decoder; with it they come from a folder, best one that ``trainctl data prepare
imagenet`` has packed. Both train with the recipe's own loop: random crops, mixup, label smoothing,
the average of the weights. A run has two epochs of ``--steps`` steps, of which the second counts:
in the first cuDNN chooses its algorithms. On a CPU it shows that it works, with small pictures.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import alone
from benchmarks.output import report, say
from contract.errors import InputError
from training.models import picture_shapes
from training.record.events import Evaluation, RankTimes, Start

#: Of an A100 with the same arithmetic, measured by its maker (docs/imagenet.md).
_A100_IMAGES_PER_S = {"resnet50": 2470.0}


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imagenet_gpu", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=picture_shapes.NAMES, default=["resnet50"], metavar="MODEL"
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[128, 256, 512] if on_gpu else [8]
    )
    parser.add_argument("--size", type=int, default=224 if on_gpu else 32, help="image size")
    parser.add_argument("--steps", type=int, default=60 if on_gpu else 8, help="steps of an epoch")
    parser.add_argument("--data", help="folder of pictures (default: pictures of the device)")
    parser.add_argument("--decoders", type=int, default=0, help="processes (0: one per core)")
    parser.add_argument("--settings", nargs="*", default=[], help="more of the recipe's words")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    runs = []
    for model in options.models:
        for batch in options.batches:
            words = ["--image-size", str(options.size), "--first-size", "0"]
            words += ["--model", model, "--batch-per-worker", str(batch)]
            words += ["--synthetic-images", str(batch * options.steps)]
            words += ["--decoders", str(options.decoders), *options.settings]
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
            "pictures": options.data or "made on the device",
            "ratio": ratio(runs),
            "runs": runs,
        },
        as_json=options.json,
    )
    return 0 if runs else 1


def measured(words: Sequence[str]) -> dict[str, Any]:
    """Train two epochs; return the figures of the second."""
    common = ("--epochs", "2", "--checkpoint-every-epochs", "2", "--checkpoint-minutes", "0")
    events = alone.train(("imagenet", "--preset", "resnet50", *common, *words))
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


def ratio(runs: Sequence[dict[str, Any]]) -> float | None:
    """The best images/s of ResNet50 over an A100's."""
    found = [run["images_per_s"] for run in runs if run["model"] in _A100_IMAGES_PER_S]
    return max(found) / _A100_IMAGES_PER_S["resnet50"] if found else None


if __name__ == "__main__":
    sys.exit(main())
