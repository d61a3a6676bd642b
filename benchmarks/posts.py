"""Table of the public posts' figures beside ours.

    python -m benchmarks.on_gpu --to DIR --only fashion dolly resnet50 b7
    python -m benchmarks.posts DIR       take what that has measured, and print the table

``benchmarks/figures`` has a JSON file for each machine; ``docs/benchmarks.md`` has the table, and a
test compares the two.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import on_gpu
from benchmarks.output import say
from training.record.events import Measure

FIGURES: Final = Path(__file__).parent / "figures"
#: Training images of FashionMNIST.
_IMAGES: Final = 60_000
#: Tokens of text in the second post's epoch; the recipe's has more (docs/fsdp.md).
TOKENS: Final = 222_998

#: Key of a figure -> what it is, and the post's.
ROWS: Final = {
    "fashion_epoch_s": ("FashionMNIST: seconds an epoch", "17.2 (2 x A10G)"),
    "fashion_images_per_s": ("… images/s per worker", "1,744"),
    "fashion_total_s": ("… ten epochs with start-up, seconds", "187"),
    "fashion_accuracy": ("… accuracy after ten epochs", "0.8852"),
    "fashion_loss": ("… loss after ten epochs", "0.419"),
    "dolly_epoch_s": (f"dolly, 6.9 B: seconds for its {TOKENS:,} tokens", "3,375 (8 x A10G)"),
    "dolly_usd": ("… dollars for them", "10.70"),
    "dolly_tokens_per_s": ("… tokens/s that are no padding", "66"),
    "dolly_gib": ("… GiB of each GPU", "19 to 22"),
    "dolly_gpu_use": ("… GPU utilization, %", "near 100"),
    "resnet50_images_per_s": ("ResNet50: images/s per GPU", "not published"),
    "efficientnet-b7_images_per_s": ("EfficientNet-B7: images/s per GPU", "not published"),
    "scaling": ("ResNet50: efficiency on 4 hosts", "close to 1 (p3.8xlarge)"),
    "efa_gain": ("EFA: shorter epochs, B7", "15 to 18 %"),
    "nccl_gb_per_s": ("NCCL all-reduce with 4 EFA adapters, GB/s", "42.04"),
    "imagenet_accuracy": ("ImageNet: accuracy", "not published"),
}


def of_fashion(found: Any) -> dict[str, float]:
    per_s = found["images_per_s"]
    return {
        "fashion_epoch_s": _IMAGES / per_s,
        "fashion_images_per_s": per_s / found["world_size"],
        "fashion_total_s": found["total_seconds"],
        "fashion_accuracy": found["accuracy"],
        "fashion_loss": found["loss"],
    }


def of_dolly(found: Any) -> dict[str, float]:
    recipe = found["cases"][0]["recipe"]
    if recipe["failure"]:
        raise ValueError(recipe["failure"])
    gib = recipe["peak_memory_bytes"] / 2**30
    return {"dolly_tokens_per_s": recipe["tokens_per_s"], "dolly_gib": gib}


def of_pictures(model: str, found: Any) -> dict[str, float]:
    return {f"{model}_images_per_s": found["images_per_s"] / found["world_size"]}


#: Step of ``on_gpu`` -> figures of the JSON object that it prints.
STEPS: Final[Mapping[str, Callable[[Any], dict[str, float]]]] = {
    "fashion": of_fashion,
    "dolly": of_dolly,
    "resnet50": partial(of_pictures, "resnet50"),
    "b7": partial(of_pictures, "efficientnet-b7"),
}


def table(folder: Path = FIGURES) -> str:
    """All figures as Markdown, a column for each file."""
    files = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    lines = [
        ["", "the post", *(each["machine"] for each in files)],
        ["---"] * (2 + len(files)),
    ]
    for key, (what, theirs) in ROWS.items():
        lines.append([what, theirs, *(_cell(each["figures"].get(key)) for each in files)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "none"
    note = f" ({figure['note']})" if figure.get("note") else ""
    value = Measure(name="").words(figure["value"])
    return f"{value}{note}, *{figure['how']}* {figure['date']}"


def take(folder: Path) -> None:
    """Write the figures that ``on_gpu`` has measured into the file of its machine.

    Args:
        folder: where it has written what its steps printed.
    """
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    name = f"{len(summary['gpus'])} x {summary['gpus'][0]}"
    path = FIGURES / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    file: dict[str, Any] = {"machine": name, "figures": {}}
    if path.exists():
        file = json.loads(path.read_text("utf-8"))
    for step in on_gpu.STEPS:
        if step.name not in STEPS or not (printed := folder / f"{step.name}.txt").exists():
            continue
        # The object comes last, after lines of progress.
        _, _, last = printed.read_text("utf-8").rpartition("\n{\n")
        try:
            printed_json, _ = json.JSONDecoder().raw_decode("{" + last)
            found = STEPS[step.name](printed_json)
        except ValueError as error:  # the step has failed
            say(f"{step.name}: no figures: {error}")
            continue
        date = f"{datetime.fromtimestamp(printed.stat().st_mtime, tz=UTC):%Y-%m-%d}"
        how = {"how": "measured", "date": date, "with": step.words}
        file["figures"] |= {key: {"value": value, **how} for key, value in found.items()}
    path.write_text(json.dumps(file, indent=1) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.posts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", help="what benchmarks.on_gpu wrote")
    options = parser.parse_args()
    if options.folder:
        take(Path(options.folder))
    print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
