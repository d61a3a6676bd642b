"""The whole FashionMNIST on one GPU: preset `tuned` beside the small stem, and settings to try.

    python -m benchmarks.fashion_gpu --data DIR [--seeds 3] [--json]
    python -m benchmarks.fashion_gpu --data DIR --seeds 1 --minutes 5 --ways \
        --try "lr=0.006" "lr=0.004 cutout=8" "width=48 global_batch=256" [--json]

Needs PyTorch, not Ray; a machine without a GPU takes hours. Each ``--try`` changes settings of
preset ``small-stem``. Seeds and ways take turns, so that none has a warmer machine than another.
After ``--minutes`` no further run starts: what has finished is reported. Seconds are those of
training and evaluation, without the start of the process; the first seed's include cuDNN's choice
of algorithms, so a median over three seeds leaves it out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import alone
from benchmarks.output import report, say
from contract.errors import InputError
from training.record.events import Evaluation

# The reference's global batch, which one worker of its 128 images would halve.
TUNED: Final = ("--preset", "tuned", "--global-batch", "256")
SMALL: Final = ("--preset", "small-stem")
WAYS: Final[Mapping[str, Sequence[str]]] = {
    "tuned": TUNED,
    "small-stem": SMALL,
    "small-stem, one epoch": (*SMALL, "--epochs", "1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fashion_gpu", description=__doc__)
    parser.add_argument("--data", required=True, help="folder with FashionMNIST's four files")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1 (default: 3)")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS])
    parser.add_argument(
        "--try",
        dest="tries",
        nargs="+",
        default=[],
        metavar='"NAME=VALUE …"',
        help="settings of preset small-stem, an argument for each run",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after that")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    ways = {way: WAYS[way] for way in options.ways}
    ways |= {tried: (*SMALL, *words_of(tried)) for tried in options.tries}
    runs: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for seed in range(options.seeds):
        for way, words in ways.items():
            if time.monotonic() > end:
                continue
            try:
                run = {"way": way, "seed": seed, **measured(words, data=options.data, seed=seed)}
            except InputError as error:
                print(f"error: {way}: {error}", file=sys.stderr)
                return 2
            say(
                f"{way}, seed {seed}: {run['accuracy_after_1']:.4f} after epoch 1, "
                f"{run['accuracy']:.4f} after {run['epochs']}, {run['seconds']:.1f} s"
            )
            runs.append(run)
    report({"benchmark": "fashion_gpu", **summary(runs)}, as_json=options.json)
    return 0


def words_of(settings: str) -> list[str]:
    """``lr=0.006 flip=false`` as words of the command line."""
    words = []
    for each in settings.split():
        name, _, value = each.partition("=")
        option = name.replace("_", "-")
        if value in ("true", "false"):
            words.append(f"--{'no-' if value == 'false' else ''}{option}")
        else:
            words += [f"--{option}", value]
    return words


def measured(words: Sequence[str], *, data: str, seed: int) -> dict[str, Any]:
    """Train one run; return what it reached."""
    # Checkpoints only at the end: they are no part of what is compared.
    rare = ("--checkpoint-every-epochs", "1000", "--checkpoint-minutes", "0")
    events = alone.train(("ddp", "--data", data, "--seed", str(seed), *rare, *words))
    evaluations = [event for event in events if isinstance(event, Evaluation)]
    first, last = evaluations[0], evaluations[-1]
    return {
        "epochs": len(evaluations),
        "accuracy_after_1": first.measures["accuracy"],
        "accuracy": last.measures["accuracy"],
        "loss": last.loss,
        "seconds": last.seconds,
        "images_per_s": last.items_per_s,
        "mfu": last.mfu,
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and medians of each way, the most accurate first, and all single runs."""
    by_way: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_way.setdefault(run["way"], []).append(run)
    ways = {
        way: {
            "seeds": len(found),
            "accuracy_after_1": statistics.mean(each["accuracy_after_1"] for each in found),
            "accuracy": statistics.mean(each["accuracy"] for each in found),
            "lowest_accuracy": min(each["accuracy"] for each in found),
            "seconds": statistics.median(each["seconds"] for each in found),
            "images_per_s": statistics.median(each["images_per_s"] for each in found),
        }
        for way, found in by_way.items()
    }
    ordered = dict(sorted(ways.items(), key=lambda each: -each[1]["accuracy"]))
    plain, small = ways.get("tuned"), ways.get("small-stem")
    # Seconds of the plain preset over those of the small stem, whose accuracy is beside it.
    ratio = plain["seconds"] / small["seconds"] if plain and small else None
    return {"ratio": ratio, "ways": ordered, "runs": list(runs)}


if __name__ == "__main__":
    sys.exit(main())
