"""How long it takes from the command to the first step, and where the time goes.

    python -m benchmarks.startup [--runs 3] [--json]

Starts the real command in a new process each time and reads the phases from the run's record.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.output import report, say
from training import contract, record

# What the project promises for two workers on two CPU cores.
TARGET_S: Final = 12.0
_PHASES: Final = {
    "ray_ready": "Ray, its processes and the imports of the command",
    "workers_ready": "Ray Train's controller and the worker processes",
    "model_ready": "data, model and checkpoint in the workers",
    "first_step": "wrapping in DDP and the first step",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="times to start (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    found = []
    for number in range(options.runs):
        say(f"start {number + 1} of {options.runs}")
        found.append(_start(options.workers))
    seconds = statistics.median(times["first_step"] for times in found)
    split = {}
    before = "command"
    for name, what in _PHASES.items():
        spent = [times[name] - times.get(before, 0.0) for times in found]
        split[name] = {"seconds": statistics.median(spent), "what": what}
        before = name
    result = {
        "benchmark": "startup",
        "ratio": TARGET_S / seconds,
        "seconds_to_first_step": seconds,
        "target_s": TARGET_S,
        "all_runs_s": [times["first_step"] for times in found],
        "phases": split,
        "world_size": options.workers,
    }
    report(result, as_json=options.json)
    return 0


def _start(workers: int) -> dict[str, float]:
    """Seconds from the command to each phase."""
    with tempfile.TemporaryDirectory() as storage:
        command = [
            *(sys.executable, "-m", "training.launch", "ddp", "--local"),
            *("--workers", str(workers), "--storage", storage, "--run", "startup"),
            *("--epochs", "1", "--report-every", "1"),
        ]
        began = time.time()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = record.read_lines(Path(storage) / "startup" / contract.METRICS_FILE)
    times = {line["name"]: line["time"] - began for line in lines if line["type"] == "phase"}
    first = next(line for line in lines if line["type"] == "step")
    return {**times, "first_step": first["time"] - began}


if __name__ == "__main__":
    sys.exit(main())
