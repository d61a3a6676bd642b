"""All comparisons that a machine without a GPU can make, as one table.

    python -m benchmarks.compare [--data DIR] [--plain FILE] [--to benchmarks/results]

Each is a benchmark of its own, whose loops take turns, and whose figures are medians. ``--to``
replaces those of the pages.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import report, say
from contract import faults
from training.data import DIGITS


class Row(NamedTuple):
    """A line of the table: larger ratios are better for this project."""

    what: str
    ratio: float
    goal: float


def commands(data: str, plain: str) -> dict[str, list[str]]:
    """Name of each benchmark -> its words."""
    found = {"ddp": ["--data", data], "gpu_fsdp": [], "checkpoint": [], "images": []}
    if plain:
        found["fashion"] = ["--data", data, "--plain", plain]
    return found


def rows(found: Mapping[str, Any]) -> list[Row]:
    """The table of what the benchmarks printed, by their names."""
    [case] = found["gpu_fsdp"]["cases"]
    ways = found["checkpoint"]["seconds"]
    own, *others = ways.values()
    pictures = found["images"]["pictures_per_cpu_s"]
    table = [
        Row("ddp: images per CPU second to a plain loop's", found["ddp"]["ratio"], 1.5),
        *(
            Row(f"fsdp: tokens per CPU second to the {name} loop's", ratio, 1.0)
            for name, ratio in case["ratios"].items()
        ),
        *(
            Row(
                f"checkpoint: torch's best {of} to this one's",
                min(each[of] for each in others) / own[of],
                goal,
            )
            for of, goal in (("waited", 1.0), ("cpu", 0.8))
        ),
        Row(
            "pictures per CPU second to Pillow and DataLoader's",
            pictures["tree"] / pictures["plain"],
            1.3,
        ),
    ]
    if "fashion" in found:
        table.append(
            Row("fast: CPU seconds of a plain loop to its own", found["fashion"]["ratio"], 0.91)
        )
    return table


def run(module: str, words: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a benchmark."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


@faults.command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--data", default=DIGITS, help="folder with FashionMNIST's files")
    parser.add_argument("--plain", default="", help="script of the plain loop for preset fast")
    parser.add_argument("--to", type=Path, metavar="DIR", help="replace what it has of them")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name, words in commands(options.data, options.plain).items():
        say(f"{name} ...")
        code, printed = run(f"benchmarks.{name}", words)
        if code:
            return code
        found[name] = json.loads(printed)
        if options.to and (file := options.to / f"{name}.json").exists():
            file.write_text(printed, encoding="utf-8")
    table = rows(found)
    for each in table:
        say(f"{each.ratio:6.2f}  (aim {each.goal:.2f})  {each.what}")
    result = {
        "benchmark": "compare",
        "ratio": min(each.ratio / each.goal for each in table),
        "rows": [each._asdict() for each in table],
        "found": found,
    }
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
