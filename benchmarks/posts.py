"""Table of the public posts' figures beside ours, and the measurements behind ours.

    python -m benchmarks.posts                                  print the table
    python -m benchmarks.posts --measure [--only PART …]        measure what is missing here first

``benchmarks/figures`` has a JSON file for each machine; ``docs/benchmarks.md`` has the table, and a
test compares the two. Each part takes at most eight minutes and is written down when it ends, so
the command can be cut off and given again. Without a GPU, only a short part of FashionMNIST is
measured.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import on_gpu
from benchmarks.output import say
from training.record.events import Measure
from training.system import machine

FIGURES: Final = Path(__file__).parent / "figures"
LIMIT_S: Final = 480
#: Training images of FashionMNIST.
_IMAGES: Final = 60_000

#: Key of a figure -> what it is, and the post's.
ROWS: Final = {
    "fashion_epoch_s": ("FashionMNIST: seconds an epoch", "17.2 (2 x A10G)"),
    "fashion_images_per_s": ("… images/s per worker", "1,744"),
    "fashion_total_s": ("… ten epochs with start-up, seconds", "187"),
    "fashion_accuracy": ("… accuracy after ten epochs", "0.8852"),
    "fashion_loss": ("… loss after ten epochs", "0.419"),
    "dolly_epoch_s": ("dolly, 6.9 B: seconds an epoch", "3,375 (8 x A10G)"),
    "dolly_usd": ("… dollars an epoch", "10.70"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A command of at most eight minutes that measures some of the figures."""

    name: str
    words: str
    """``{data}`` stands for FashionMNIST's place."""
    figures: Callable[[Any, float | None], Mapping[str, float | None]]
    """From the JSON object that it prints, and the median utilization of the GPU in percent."""
    on_gpu: bool = True
    note: str = ""
    """What a reader of its figures must know."""


def of_fashion(found: Any, gpu_use: float | None) -> dict[str, float]:
    del gpu_use
    per_s = found["images_per_s"]
    return {
        "fashion_epoch_s": _IMAGES / per_s,
        "fashion_images_per_s": per_s / found["world_size"],
    }


def of_ten_epochs(found: Any, gpu_use: float | None) -> dict[str, float]:
    return {
        **of_fashion(found, gpu_use),
        "fashion_total_s": found["total_seconds"],
        "fashion_accuracy": found["accuracy"],
        "fashion_loss": found["loss"],
    }


def of_dolly(found: Any, gpu_use: float | None) -> dict[str, float | None]:
    recipe = found["cases"][0]["recipe"]
    if recipe["failure"]:
        raise ValueError(recipe["failure"])
    return {
        "dolly_tokens_per_s": recipe["tokens_per_s"],
        "dolly_gib": recipe["peak_memory_bytes"] / 2**30,
        "dolly_gpu_use": gpu_use,
    }


def of_pictures(found: Any, gpu_use: float | None) -> dict[str, float]:
    del gpu_use
    return {f"{run['model']}_images_per_s": run["images_per_s"] for run in found["runs"]}


_FASHION: Final = "training.launch ddp --local --run posts --json --data {data} --preset tuned"
_PICTURES: Final = "benchmarks.imagenet_gpu --json --steps 30 --models"
PARTS: Final = (
    Part(name="fashion", words=_FASHION, figures=of_ten_epochs),
    Part(
        name="fashion-short",
        words=f"{_FASHION} --workers 2 --max-steps 30",
        figures=of_fashion,
        on_gpu=False,
        note="CPU, 30 steps",
    ),
    Part(
        name="dolly",
        words="benchmarks.gpu_fsdp --cases 6.9b --without-trainer --json",
        figures=of_dolly,
    ),
    Part(name="resnet50", words=f"{_PICTURES} resnet50 --batches 256", figures=of_pictures),
    Part(name="b7", words=f"{_PICTURES} efficientnet-b7 --batches 64", figures=of_pictures),
)


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


def measure(part: Part, *, data: str) -> dict[str, Any]:
    """Run a part; return its figures, each as a file has it.

    Raises:
        ValueError: it failed, and why.
    """
    with tempfile.TemporaryDirectory(prefix="posts-") as folder:
        words = [sys.executable, "-m", *shlex.split(part.words.format(data=data))]
        if words[2] == "training.launch":
            words += ["--storage", folder]
        printed = Path(folder, "printed.txt")
        with _gpu_use() as samples:
            outcome = on_gpu.run(words, printed, limit_s=LIMIT_S)
        # The object comes last, after lines of progress.
        before, _, last = printed.read_text("utf-8").rpartition("\n{\n")
        if outcome.exit_code:
            raise ValueError(f"{on_gpu.in_words(outcome)}: {(before + last)[-500:]}")
        # The first half has start-up in it.
        busy = samples[len(samples) // 2 :]
        printed_json, _ = json.JSONDecoder().raw_decode("{" + last)
        found = part.figures(printed_json, median(busy) if busy else None)
    date = f"{datetime.now(tz=UTC):%Y-%m-%d}"
    how = {"how": "measured", "date": date, "with": part.words, "note": part.note}
    return {key: {"value": value, **how} for key, value in found.items() if value is not None}


@contextmanager
def _gpu_use() -> Iterator[list[float]]:
    """Utilization of the GPUs in percent, a sample each second; filled when the block ends."""
    samples: list[float] = []
    if not machine.gpu_names():
        yield samples
        return
    words = "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits --loop=1"
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(words.split(), stdout=file)
        try:
            yield samples
        finally:
            process.terminate()
            process.wait()
            file.seek(0)
            samples += [float(line) for line in file if line.strip().isdigit()]


def fill(name: str, *, only: list[str] | None, data: str) -> bool:
    """Measure what the file of this machine lacks, or ``only`` some parts; return whether all of
    it worked."""
    path = FIGURES / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    file: dict[str, Any] = {"machine": name, "figures": {}}
    if path.exists():
        file = json.loads(path.read_text("utf-8"))
    figures = file["figures"]
    known = {each.get("with") for each in figures.values()}
    worked = True
    for part in PARTS:
        is_due = part.name in only if only else part.words not in known
        if part.on_gpu != bool(machine.gpu_names()) or not is_due:
            continue
        say(f"{part.name}: python -m {part.words}")
        try:
            figures |= measure(part, data=data)
        except ValueError as error:
            say(f"{part.name}: {error}")
            worked = False
            continue
        path.write_text(json.dumps(file, indent=1) + "\n", "utf-8")
    return worked


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.posts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--measure", action="store_true", help="measure what is missing here")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in PARTS], metavar="PART")
    parser.add_argument("--data", default="fashion-mnist", help="FashionMNIST, if not fetched")
    options = parser.parse_args()
    worked = True
    if options.measure:
        gpus = machine.gpu_names()
        cores = f"{machine.num_cpus()} cores of {machine.cpu_name()}"
        name = f"{len(gpus)} x {gpus[0]}" if gpus else cores
        worked = fill(name, only=options.only, data=options.data)
    print(table(), end="")
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
