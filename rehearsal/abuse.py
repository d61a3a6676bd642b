"""Programs whose nodes are killed while they train: ``make abuse``.

    python -m rehearsal.abuse --seeds 3 --programs ddp gpt

Each program runs as a job on two worker nodes, once per seed. Its head is killed at a moment that
follows from the seed, and once the program has been started again, a worker node is. The job must
end with exit code 0, after all steps, with each rank once; a program whose result follows from its
seed must end with the result of plain processes on this machine that were left alone; and what was
saved longer ago than the interval between two copies must not be lost.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from contract import text, times
from contract.nodes import HEAD, WORKER
from rehearsal import commands
from rehearsal.cycle import ERRORS, SETTINGS, Rehearsal, RehearsalError, take_away
from rehearsal.local_aws import ROOT
from rehearsal.steps import Steps, interruptible
from rehearsal.watch import Line, Watch

#: Of one job, both losses included.
_END_S: Final = 900
_POLL_S: Final = 1.0
#: How far a result may be from the undisturbed one, of itself: sums of floats in another order.
_TOLERANCE: Final = 1e-4
#: What a copy into the bucket may take, beside the interval between two of them.
_COPY_S: Final = 10
#: So many of the kills come while a program trains, and the others also while it starts.
_IN_TRAINING: Final = 0.75
NUM_NODES: Final = 2

_STARTS: Final = re.compile(r"\brank (\d+) of (\d+) starts at \D*(\d+)$")
#: What a head says at each start of a program, whether it runs there or on all nodes.
_RUNNING: Final = re.compile(r"^node: running ")
_RESULT: Final = re.compile(r"\bresult (\{.*\})$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program as a user brings it, long enough to lose two nodes."""

    name: str
    words: tuple[str, ...]
    """Its command."""
    source: str = ""
    """``PACKAGE:FILE`` where it is an installed package's; else it is in ``examples/NAME``."""
    ends_with: Mapping[str, int] = field(default_factory=dict)
    """Of its result, what must be exactly so."""
    is_seeded: bool = True
    """It ends with the same figures after any interruption."""
    saves: str = ""
    """Pattern of a line that it prints at each save, with the step; empty: it prints none."""
    has_ranks: bool = True
    """It prints which rank it is and where it starts, and its result."""
    ends_saying: str = ""
    """A part of what it prints at its end, where it prints no result."""
    within_s: float = 45.0
    """A kill comes at most so long after a start."""

    def bring(self, folder: Path) -> Path:
        """Put its files into a new folder below ``folder``; return that."""
        place = folder / self.name
        if not self.source:
            return Path(shutil.copytree(ROOT / "examples" / self.name, place))
        package, _, file = self.source.partition(":")
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise RehearsalError(f"{self.name} needs the package {package}: make venv-dev")
        place.mkdir()
        shutil.copy(Path(found.origin).parent / file, place)
        return place


PROGRAMS: Final = (
    Program(
        name="ddp",
        words=("torchrun", "train.py", "--steps", "24000", "--save-every", "400"),
        ends_with={"steps": 24000, "world_size": 2},
        saves=r"^step (\d+) loss",
    ),
    Program(
        name="gpt",
        words=(
            *("sh", "-c"),
            "python prepare.py && torchrun train.py --steps 3000 --save-every 50",
        ),
        ends_with={"steps": 3000, "world_size": 2},
        saves=r"^step (\d+) loss",
    ),
    Program(
        name="hf_trainer",
        words=("torchrun", "train.py", "--max_steps", "2000", "--save_steps", "200"),
        ends_with={"steps": 2000, "world_size": 2},
    ),
    Program(
        name="accelerate",
        words=("torchrun", "train.py", "--epochs", "400"),
        ends_with={"epochs": 400, "world_size": 2},
        saves=r"^epoch (\d+) loss",
    ),
    # Its order of batches follows from the number of workers, which may change on the way.
    Program(
        name="ray_train",
        words=("python", "train.py", "--epochs", "400"),
        ends_with={"epoch": 400, "world_size": 2},
        is_seeded=False,
    ),
    # Of the packages' own tests and examples: short, and they save nothing.
    Program(
        name="accelerate_sync",
        source="accelerate:test_utils/scripts/test_sync.py",
        words=("torchrun", "test_sync.py"),
        has_ranks=False,
        is_seeded=False,
        ends_saying="gradient accumulation with optimizer and scheduler",
        within_s=15,
    ),
    Program(
        name="ray_linear",
        source="ray:train/examples/pytorch/torch_linear_example.py",
        words=("python", "torch_linear_example.py", "-n", "2"),
        has_ranks=False,
        is_seeded=False,
        ends_saying="'loss': ",
        within_s=15,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job that has ended."""

    exit_code: int
    lines: Sequence[Line]
    kills: tuple[float, ...] = ()
    """Unix times."""
    seconds: float = 0.0

    def starts(self, rank: int | None = None) -> list[tuple[float, int, int]]:
        """When a rank, or any, has started, which one, and at which step."""
        found = [(line.at, _STARTS.search(line.text)) for line in self.lines]
        starts = [(at, int(each[1]), int(each[3])) for at, each in found if each]
        return [each for each in starts if rank is None or each[1] == rank]

    def result(self) -> dict[str, float]:
        """What the program has printed as its result; empty where it has not."""
        found = [each[1] for line in self.lines if (each := _RESULT.search(line.text))]
        return json.loads(found[-1]) if found else {}

    def faults(self, program: Program, undisturbed: Mapping[str, float]) -> list[str]:
        """What is not as it must be, in words; empty where all is.

        Args:
            undisturbed: the result of the program without a loss; empty: it is not known.
        """
        found = [] if self.exit_code == 0 else [f"exit code {self.exit_code}"]
        if not program.has_ranks:
            if not any(program.ends_saying in line.text for line in self.lines):
                found.append(f"it has not printed {program.ends_saying!r}")
            return found
        last = sorted(rank for _, rank, _ in self.starts()[-NUM_NODES:])
        if last != [*range(NUM_NODES)]:
            found.append(f"ranks {last} in the last start")
        result = self.result()
        if not result:
            return [*found, "no result"]
        for name, wanted in program.ends_with.items():
            if (seen := result.get(name)) != wanted:
                found.append(f"{name} is {seen}, not {wanted}")
        for name in undisturbed.keys() - program.ends_with.keys() if program.is_seeded else ():
            value, now = undisturbed[name], result.get(name, float("nan"))
            if not abs(now - value) <= _TOLERANCE * abs(value):
                found.append(f"{name} is {now}, undisturbed {value}")
        return found + self._lost(program)

    def _lost(self, program: Program) -> list[str]:
        """Where more work was lost at a kill than that since the last copy."""
        if not program.saves:
            return []
        pattern = re.compile(program.saves)
        saves = [(line.at, int(m[1])) for line in self.lines if (m := pattern.search(line.text))]
        found = []
        for kill in self.kills:
            old = kill - times.FILES_EVERY_S - _COPY_S
            must = max((step for at, step in saves if at <= old), default=0)
            resumed = next((step for at, _, step in self.starts(rank=0) if at > kill), None)
            if resumed is not None and resumed < must:
                found.append(f"resumed at {resumed}, although {must} had been saved long before")
        return found


class Abuse:
    """Runs programs on a deployment that is up."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal

    def disturbed(self, program: Program, code: Path, *, seed: int, within_s: float = 0) -> Ended:
        """Run a program whose head and then a worker node are killed.

        Args:
            code: its folder.
            within_s: in place of the program's own.

        Raises:
            RehearsalError: the job does not end.
        """
        began = time.time()
        moments = random.Random(f"{program.name} {seed}")
        options = ["--code", str(code), "--nodes", str(NUM_NODES), "--yes"]
        options += ["--run", f"abuse-{program.name.replace('_', '-')}-{seed}"]
        # All nodes share this machine's processors.
        options += ["--env", "OMP_NUM_THREADS=1"]
        job = self._rehearsal.trainctl("submit", *options, "--", *program.words).strip()
        watch = Watch(self._rehearsal, job)
        kills: list[float] = []
        at: float | None = None
        begins = self._begins(program, moments)
        while not watch.has_ended():
            if time.time() > began + _END_S:
                log = "\n".join(line.text for line in watch.lines()[-40:])
                raise RehearsalError(f"{job} has not ended within {_END_S} s:\n{log}")
            if at is None and len(kills) < 2:
                since = kills[-1] if kills else began
                if any(begins.search(line.text) for line in watch.lines() if line.at > since):
                    at = time.time() + moments.uniform(0, within_s or program.within_s)
            if at is not None and time.time() >= at:
                there = watch.containers(*((WORKER, NUM_NODES) if kills else (HEAD, 1)))
                if there:
                    victim = moments.choice(there)
                    # It may have ended by itself meanwhile.
                    self._rehearsal.engine("kill", "--signal", "KILL", victim, check=False)
                    kills.append(time.time())
                    at, begins = None, self._begins(program, moments)
            time.sleep(_POLL_S)
        watch.has_ended()  # the last lines
        found = json.loads(self._rehearsal.trainctl("show", job, "--json"))
        return Ended(
            exit_code=-1 if found["exit_code"] is None else int(found["exit_code"]),
            lines=watch.lines(),
            kills=tuple(kills),
            seconds=time.time() - began,
        )

    @staticmethod
    def _begins(program: Program, moments: random.Random) -> re.Pattern[str]:
        """The line from which on a kill may come: of the training, or now and then of the start."""
        return _STARTS if program.has_ranks and moments.random() < _IN_TRAINING else _RUNNING


def undisturbed(program: Program, code: Path) -> dict[str, float]:
    """The result of a program in plain processes on this machine; empty where it has none to
    compare with.

    Args:
        code: its folder, in which it runs.

    Raises:
        commands.CommandError: it fails.
    """
    if not program.is_seeded:
        return {}
    variables = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        # As many processes as the job has nodes.
        "PET_STANDALONE": "1",
        "PET_NPROC_PER_NODE": str(NUM_NODES),
        "OMP_NUM_THREADS": "1",
    }
    said = commands.run(
        program.words, environment={**os.environ, **variables}, folder=code, timeout_s=_END_S
    )
    lines = [Line(at=0, text=line) for line in said.splitlines()]
    return Ended(exit_code=0, lines=lines).result()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of one program."""

    program: str
    seed: int
    ended: Ended
    faults: Sequence[str]

    def cells(self) -> tuple[str, ...]:
        starts = ", ".join(str(step) for _, _, step in self.ended.starts(rank=0))
        kills = len(self.ended.kills)
        seconds = text.duration(round(self.ended.seconds))
        verdict = "; ".join(self.faults) or "as it should be"
        return (self.program, str(self.seed), str(kills), starts or "-", seconds, verdict)


TITLES: Final = ("program", "seed", "kills", "rank 0 starts at", "took", "ended")


def abuse(
    rehearsal: Rehearsal, programs: Sequence[Program], seeds: Sequence[int], folder: Path
) -> list[Row]:
    """Run programs on a deployment that is up, and say on stderr how each has ended.

    Args:
        folder: an empty one, for their files.
    """
    rows = []
    runner = Abuse(rehearsal)
    for program in programs:
        code = program.bring(folder)
        with _copy(code) as own:
            expected = undisturbed(program, own)
        for seed in seeds:
            ended = runner.disturbed(program, code, seed=seed)
            faults = ended.faults(program, expected)
            if len(ended.kills) < 2:
                faults.append("it ended before its head and a worker had been killed")
            if program.is_seeded and not expected:
                faults.append("its undisturbed result is not known")
            row = Row(program=program.name, seed=seed, ended=ended, faults=faults)
            print(f"        {'  '.join(row.cells())}", file=sys.stderr, flush=True)
            if faults:
                log = folder.parent / f"abuse-{program.name}-{seed}.log"
                log.write_text("\n".join(f"{line.at:.3f} {line.text}" for line in ended.lines))
                print(f"        its log: {log}", file=sys.stderr, flush=True)
            rows.append(row)
    return rows


@contextmanager
def _copy(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="undisturbed-") as place:
        yield Path(shutil.copytree(folder, Path(place) / folder.name))


def table(rows: Sequence[Row]) -> str:
    """The rows, in columns."""
    cells = [TITLES, *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(TITLES))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def main(argv: Sequence[str] | None = None) -> int:
    names = [program.name for program in PROGRAMS]
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.abuse",
        description="Run programs as jobs in containers while their head and then a worker node "
        "are killed at random moments. The exit code is 1 where one does not end as it should.",
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of each program [%(default)s]")
    parser.add_argument(
        "--programs", nargs="*", metavar="NAME", help=f"of {', '.join(names)} [all of them]"
    )
    given = parser.parse_args(argv)
    chosen = given.programs or names
    if unknown := [name for name in chosen if name not in names]:
        print(f"error: no program {unknown[0]}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    try:
        rehearsal = Rehearsal.here()
        with interruptible(), tempfile.TemporaryDirectory(prefix="abuse-") as folder:
            try:
                rehearsal.up(Steps(5), standing=False, settings={**SETTINGS, "spot": "true"})
                programs = [each for each in PROGRAMS if each.name in chosen]
                rows = abuse(rehearsal, programs, range(given.seeds), Path(folder))
            finally:
                take_away(rehearsal)
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(rows))
    return 1 if any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
