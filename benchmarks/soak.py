"""Whether a run starts every time, and leaves nothing behind whatever is killed at its start.

    python -m benchmarks.soak [--starts 150] [--kills 50] [--seed 0] [--json]

Each start is the real command on a few images, with two workers, to its end. Each kill is a SIGKILL
of the command, a fork server, the raylet or a worker, at a random moment: the command must end, no
process of it may be left, and the same command must then resume the run and complete it.
"""

import argparse
import gzip
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from benchmarks import meter
from benchmarks.output import report, say

#: In the environment of a command and of all that it starts, forks too.
TARGETS: Final = ("command", "server", "raylet", "worker")
#: A command whose process was killed ends by itself within this time.
_ENDS_S: Final = 300.0
_GONE_S: Final = 60.0


@dataclass(kw_only=True)
class Soak:
    """What became of the starts."""

    folder: Path
    seed: int = 0
    failures: list[str] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._data = write_images(self.folder / "data")
        self._number = 0

    def start(self, run: str = "") -> None:
        """Start a command, and let it run to its end."""
        name = self._name(run)
        began = time.monotonic()
        process, mark = self._command(run or name)
        code, said = _wait(process)
        self.start_s.append(time.monotonic() - began)
        if code:
            self.failures.append(f"{name}: exit code {code}: {said[-2000:]}")
        if "started quickly" in said:
            self.failures.append(f"{name}: {said}")
        self._nothing_is_left(name, mark)

    def kill(self, target: str, latest_s: float) -> None:
        """Kill one process at a random moment, at most so late; then resume the run."""
        name = self._name("")
        process, mark = self._command(name)
        time.sleep(self._random.uniform(0, latest_s))
        deadline = time.monotonic() + latest_s
        victims: list[psutil.Process] = []
        while not victims and process.poll() is None and time.monotonic() < deadline:
            victims = [each for each in meter.marked(mark) if kind_of(each, process.pid) == target]
            time.sleep(0.05)
        meter.kill(self._random.sample(victims, min(1, len(victims))))
        code, said = _wait(process)
        self.kills.append(f"{target}: {'killed' if victims else 'not there'}, exit code {code}")
        expected = (0, 1, -signal.SIGKILL) if victims else (0,)
        if code not in expected:
            self.failures.append(f"{name}: {target} killed, exit code {code}: {said[-2000:]}")
        self._nothing_is_left(name, mark)
        self.start(name)

    def _name(self, run: str) -> str:
        self._number += 1
        return run or f"soak-{self._number}"

    def _command(self, run: str) -> tuple["subprocess.Popen[str]", str]:
        mark = f"{os.getpid()}-{self._number}"
        command = [sys.executable, "-m", "training.launch", "ddp", "--local", "--workers", "2"]
        command += ["--data", str(self._data), "--epochs", "1", "--batch-per-worker", "16"]
        process = subprocess.Popen(
            [*command, "--run", run, "--storage", str(self.folder / "runs")],
            env={**os.environ, meter.MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return process, mark

    def _nothing_is_left(self, name: str, mark: str) -> None:
        deadline = time.monotonic() + _GONE_S
        while left := meter.marked(mark):
            if time.monotonic() > deadline:
                self.failures.append(f"{name}: still running: {[each.cmdline() for each in left]}")
                meter.kill(left)
                return
            time.sleep(0.1)


def write_images(folder: Path) -> Path:
    """A few images that no model can learn, as FashionMNIST's files."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for split, num in (("train", 64), ("t10k", 16)):
        pixels = numbers.integers(0, 256, (num, 28, 28), dtype=np.uint8)
        labels = np.arange(num, dtype=np.uint8) % 10
        for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            content = gzip.compress(header + values.tobytes())
            (folder / f"{split}-{kind}-ubyte.gz").write_bytes(content)
    return folder


def kind_of(process: psutil.Process, command: int) -> str:
    """Which of ``TARGETS`` a process is; empty for others."""
    if process.pid == command:
        return "command"
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    kinds: dict[str, Callable[[str], bool]] = {
        "server": lambda words: "from training.runtime.forkserver import main" in words,
        "raylet": lambda words: "/raylet/raylet " in words,
        "worker": lambda words: words.startswith("ray::RayTrainWorker"),
    }
    return next((kind for kind, fits in kinds.items() if fits(line)), "")


def _wait(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=_ENDS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
        return 124, f"it did not end within {_ENDS_S:.0f} s\n{said}"
    return process.returncode, said


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--starts", type=int, default=150, help="clean starts (default: 150)")
    parser.add_argument("--kills", type=int, default=50, help="starts with a kill (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(folder=Path(folder), seed=options.seed)
        for number in range(options.starts):
            soak.start()
            failed = f", {len(soak.failures)} FAILED" if soak.failures else ""
            say(f"start {number + 1} of {options.starts}: {soak.start_s[-1]:.1f} s{failed}")
        for number in range(options.kills):
            # From the first moment to well into training.
            latest_s = max([*soak.start_s[-3:], 5.0])
            soak.kill(TARGETS[number % len(TARGETS)], latest_s)
            failed = f", {len(soak.failures)} FAILED" if soak.failures else ""
            say(f"kill {number + 1} of {options.kills}: {soak.kills[-1]}{failed}")
    result = {
        "benchmark": "soak",
        "ratio": 1.0 if not soak.failures else 0.0,
        "starts": options.starts,
        "kills": soak.kills,
        "seconds_of_starts": [round(each, 2) for each in soak.start_s],
        "failures": soak.failures,
    }
    report(result, as_json=options.json)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
