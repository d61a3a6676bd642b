"""Benchmark of preset ``fast`` against a small plain loop: FashionMNIST for CPU seconds.

    python -m benchmarks.fashion --data DIR --plain FILE [--seeds 0 1 2 3 4]

The plain loop is a script of one process that is given CPU seconds and prints what it reached. The
recipe has two processes, each of one thread; reading the images, evaluation, checkpoint and record
are counted, imports are not. They take turns.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import rank_groups
from benchmarks.tables import report, say
from contract import faults
from training.ddp.settings import PRESETS, DdpConfig
from training.ddp.train import train
from training.record.events import Evaluation
from training.runtime.torchrun import TorchrunWorker

WORLD_SIZE: Final = 2
#: CPU seconds of the plain loop.
_BUDGET_S: Final = "28"
_PRINTED: Final = re.compile(r"(\d+) CPU s, .* accuracy ([\d.]+),")


def measure(folder: str, data: str, seed: int) -> tuple[float, float]:
    """Train as one rank; return its CPU seconds, and the accuracy on rank 0."""
    worker = TorchrunWorker(run_uri=f"{folder}/run")
    found = [0.0]
    worker.on_events = lambda *events: found.extend(
        each.measures["accuracy"] for each in events if isinstance(each, Evaluation)
    )
    settings: dict[str, Any] = {**PRESETS["fast"], "seed": seed, "data": data}
    config = DdpConfig(recipe="ddp", run="run", storage=folder, num_workers=WORLD_SIZE, **settings)
    began = time.process_time()
    train(worker, config)
    worker.saves.finish()
    return time.process_time() - began, found[-1]


def plain(file: Path, data: str, seed: int) -> tuple[float, float]:
    """CPU seconds and accuracy of the plain loop."""
    command = [sys.executable, str(file), _BUDGET_S, "--seed", str(seed), "--data", data]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _PRINTED.search(printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])


@faults.command()
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fashion", description=__doc__)
    parser.add_argument("--data", required=True, help="folder with FashionMNIST's files")
    parser.add_argument("--plain", type=Path, required=True, help="script of the plain loop")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"recipe": [], "plain": []}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="fashion-") as folder:
            ranks = rank_groups.run(WORLD_SIZE, measure, folder, options.data, seed)
        found["recipe"].append((sum(each for each, _ in ranks), ranks[0][1]))
        found["plain"].append(plain(options.plain, options.data, seed))
        say(f"seed {seed}: " + ", ".join(f"{name} {each[-1]}" for name, each in found.items()))
    spent = {name: statistics.median(each for each, _ in pairs) for name, pairs in found.items()}
    result = {
        "benchmark": "fashion",
        "ratio": spent["plain"] / spent["recipe"],
        "ratio_is_of": "CPU seconds of the plain loop to those of both ranks",
        "cpu_seconds": spent,
        "accuracy": {name: [each for _, each in pairs] for name, pairs in found.items()},
        "seeds": list(options.seeds),
    }
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
