"""Runs of recipes on this machine, as tests start and watch them."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from containers.host import machine
from contract.runs import RunPaths
from store.cache import CACHE_VARIABLE
from tests.forks import Ranks, ranks
from training import recipes
from training.record import reader
from training.record.events import Event, Step
from training.runtime.torchrun import TorchrunWorker
from training.settings import RunConfig

REPO = Path(__file__).parents[2]
#: Variable in the environment of all that a command starts.
MARK = "MARK_OF_TEST"
# About six seconds of training on two cores.
DIGITS = ["--preset", "digits", "--epochs", "3", "--workers", "2"]


@dataclass
class Run:
    """A run, and what its processes write."""

    process: "subprocess.Popen[str] | Ranks"
    folder: Path
    run: str

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.run

    def steps_done(self) -> int:
        return max(self.losses(), default=0)

    def wait_until(self, condition: Callable[[], bool], every_s: float = 0.05) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(every_s)

    def end(self, timeout_s: float = 400) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        code = self.process.poll()
        assert code is not None
        return code, out, err

    def succeed(self) -> str:
        """Wait for its end, which must be a good one; return what it has printed."""
        code, out, err = self.end()
        assert code == 0, err
        return out

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run_folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["type"] == kind]

    def losses(self) -> dict[int, float]:
        """The loss of each step so far."""
        steps = reader.read_metrics(str(self.run_folder)).of(Step)
        return {each.step: each.loss for each in steps}

    def has_stored_losses(self, expected: dict[int, tuple[float, float]]) -> None:
        """Compare losses with those stored, on a CPU in fp32 with seed 0: a loss and its tolerance
        by step. A change of these is a change of the recipe. Rounding differs from one kind of
        CPU to the next, and grows with the steps."""
        for step, (loss, tolerance) in expected.items():
            assert abs(self.losses()[step] - loss) <= tolerance, step

    def copy(self, name: str, *, without: str) -> None:
        """Copy the run under another name, as if it had been killed before the save ``without``."""
        folder = self.run_folder.with_name(name)
        shutil.copytree(self.run_folder, folder)
        (folder / "result.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "run": name}))
        shutil.rmtree(folder / "checkpoints" / without)

    def result(self) -> dict[str, Any]:
        found = reader.read_json(str(self.run_folder), "result.json")
        assert found is not None
        return found


@dataclass
class Command(Run):
    """The launch command in a process group of its own, as a terminal would start it."""

    process: subprocess.Popen[str]
    mark: str
    """Marks all of its processes: other tests, and other checkouts, have runs of the same name."""

    def processes(self) -> list[int]:
        """Ids of all that run, however far they have detached themselves."""
        return machine.marked(MARK, self.mark)

    def server(self) -> psutil.Process | None:
        """The process that the workers are forked from; None before it is there."""
        for each in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                if "multiprocessing.forkserver" in " ".join(each.cmdline()):
                    return each
        return None

    def workers(self) -> list[psutil.Process]:
        """The training processes, in the order of their starts."""
        server = self.server()
        found = server.children() if server else []
        return sorted(found, key=lambda process: process.create_time())


@dataclass
class RankedRun(Run):
    """The same loop as so many ranks, as torchrun starts them: quicker, for what the command has no
    part in."""

    process: Ranks


@contextmanager
def launcher(folder: Path, recipe: str) -> Iterator[Callable[..., Command]]:
    """Start ``python -m training.launch RECIPE --local`` in a folder; whatever is left at the end
    is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *arguments: str, local: bool = True, under: Sequence[str] = ()) -> Command:
        start = [*under, sys.executable, "-m", "training.launch"]
        command = [*start, recipe, "--run", name, *arguments]
        mark = secrets.token_hex(8)
        process = subprocess.Popen(
            [*command, "--local"] if local else command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPO), MARK: mark},
            start_new_session=True,
        )
        started.append(process)
        return Command(process, folder, name, mark)

    yield run
    for process in started:
        with process:  # closes its pipes, which would spoil a later test
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def ranked(folder: Path, recipe: str) -> Iterator[Callable[..., RankedRun]]:
    """Start a recipe as so many ranks in a folder; whatever is left at the end is killed."""
    started: list[Ranks] = []

    def run(name: str, *arguments: str, world: int) -> RankedRun:
        command = ("-m", "training.launch", recipe, "--run", name, *arguments)
        out, err = (folder / f"{name}-{len(started)}.{each}" for each in ("out", "err"))
        started.append(ranks(command, folder=folder, out=out, err=err, world=world))
        return RankedRun(started[-1], folder, name)

    yield run
    for each in started:
        each.kill()


def trained(config: RunConfig) -> list[Event]:
    """Train as one of the ranks of ``benchmarks.rank_groups.run``; return this rank's events."""
    os.environ[CACHE_VARIABLE] = f"{config.storage}/cache"  # a fork has its server's variables
    worker = TorchrunWorker(run_uri=RunPaths.of(config.storage, config.run).uri)
    events: list[Event] = []
    worker.on_events = lambda *found: events.extend(found)
    recipes.by_name(config.recipe).train()(worker, config)
    worker.close()
    return events


def assert_nothing_is_left(command: Command) -> None:
    deadline = time.monotonic() + 30
    while left := command.processes():
        assert time.monotonic() < deadline, [psutil.Process(pid).name() for pid in left]
        time.sleep(0.1)
