"""Time and CPU seconds from the command to the first step, against another checkout.

    python -m benchmarks.startup --baseline DIR [--runs 3] [--recipes ddp,fsdp] [--json]

DIR is a checkout of another commit (``git worktree add DIR COMMIT``); it runs in this environment.
The two take turns. CPU seconds are those of the whole machine meanwhile, so nothing else may run.
Then a short run of each ends, and their losses and weights are compared bit for bit; the exit code
is 1 if they differ. Linux only.
"""

import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.output import command_line, report, say
from training.record import reader
from training.record.events import Evaluation, Step

ROOT: Final = Path(__file__).resolve().parents[1]
#: Settings of a short run.
_RECIPES: Final[Mapping[str, Sequence[str]]] = {
    "ddp": ("--epochs", "1"),
    "fsdp": ("--max-steps", "4"),
}
_RUN: Final = "startup"
_TIMEOUT_S: Final = 600.0


def start(folder: Path, recipe: str, storage: Path) -> subprocess.Popen[bytes]:
    """Start a run on two workers with the code of a checkout."""
    command = [sys.executable, "-m", "training.launch", recipe, "--local", "--workers", "2"]
    command += ["--storage", str(storage), "--run", _RUN, "--report-every", "1", *_RECIPES[recipe]]
    with (storage.parent / "errors").open("wb") as errors:
        return subprocess.Popen(
            command,
            cwd=folder,
            # Before the line of a .pth file that names the other checkout.
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def busy_s() -> float:
    """CPU seconds that this machine has worked since it was started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def first_step(folder: Path, recipe: str) -> tuple[float, float]:
    """Seconds and CPU seconds to the first step of a run, which is ended then."""
    with tempfile.TemporaryDirectory(prefix="st-", ignore_cleanup_errors=True) as scratch:
        run = str(Path(scratch, "runs", _RUN))
        began, busy = time.monotonic(), busy_s()
        with start(folder, recipe, Path(scratch, "runs")) as process:
            while not reader.read_metrics(run).of(Step):
                if process.poll() is not None or time.monotonic() - began > _TIMEOUT_S:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise SystemExit(Path(scratch, "errors").read_text()[-2000:])
                time.sleep(0.02)
            spent = time.monotonic() - began, busy_s() - busy
            process.send_signal(signal.SIGINT)
    return spent


def whole_run(folder: Path, recipe: str, storage: Path) -> Path:
    """Let a run end; return its folder."""
    storage.parent.mkdir()
    with start(folder, recipe, storage) as process:
        if process.wait(_TIMEOUT_S):
            raise SystemExit((storage.parent / "errors").read_text()[-2000:])
    return storage / _RUN


def computed(run: Path) -> dict[str, object]:
    """Losses of a run, and digests of its weights: equal for equal runs, to the last bit."""
    found: dict[str, object] = {}
    for number, event in enumerate(reader.read_metrics(str(run)).events):
        if isinstance(event, Step):
            found[f"event {number}"] = (event.step, event.loss, event.lr, event.grad_norm)
        elif isinstance(event, Evaluation):
            found[f"event {number}"] = (event.step, event.loss, dict(event.measures))
    for file in sorted(run.rglob("*")):
        if file.suffix in (".safetensors", ".distcp"):
            found[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def different(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Names of the values in which two runs differ; ``nothing`` where there is none to compare."""
    names = [*dict.fromkeys([*one, *other])]
    return [name for name in names if one.get(name) != other.get(name)] if names else ["nothing"]


def compared(recipe: str, ways: Mapping[str, Path], *, runs: int) -> dict[str, Any]:
    """Figures of one recipe."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-1, runs):
        # Each comes first in turn; the first start of each fills the caches.
        for name in sorted(ways, reverse=number % 2 == 1):
            found = first_step(ways[name], recipe)
            say(f"{recipe}: {name}: {found[0]:.1f} s, {found[1]:.1f} CPU s")
            if number >= 0:
                spent[name].append(found)
    wall, cpu = (
        {name: statistics.median(each[part] for each in found) for name, found in spent.items()}
        for part in (0, 1)
    )
    with tempfile.TemporaryDirectory(prefix="st-") as scratch:
        folders = [whole_run(ways[name], recipe, Path(scratch, name, "runs")) for name in ways]
        differences = different(*map(computed, folders))
    return {
        "ratio": wall["baseline"] / wall["now"],
        "ratio_cpu": cpu["baseline"] / cpu["now"],
        "seconds": wall,
        "cpu_seconds": cpu,
        "all": spent,
        "equal": not differences,
        "differences": differences[:10],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("startup", __doc__)
    parser.add_argument("--baseline", type=Path, required=True, help="the other checkout")
    parser.add_argument("--runs", type=int, default=3, help="starts of each (default: 3)")
    parser.add_argument("--recipes", default=",".join(_RECIPES), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not (options.baseline / "training" / "launch.py").is_file():
        parser.error(f"--baseline is {options.baseline}, which is no checkout of this project")

    ways = {"baseline": options.baseline.resolve(), "now": ROOT}
    found = {name: compared(name, ways, runs=options.runs) for name in options.recipes.split(",")}
    first = next(iter(found.values()))
    report({"benchmark": "startup", "ratio": first["ratio"], **found}, as_json=options.json)
    return 0 if all(each["equal"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
