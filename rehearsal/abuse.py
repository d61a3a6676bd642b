"""Programs whose nodes are killed while they train: ``make abuse``.

    python -m rehearsal.abuse --seeds 3 --programs ddp gpt

Each program runs as a job on two worker nodes, once per seed. Its head is killed when it has come
as far as the seed says, and once it has been started again, a worker node is. Most kills hit while
it trains, when something of it is in the bucket; the others while it starts. The job must end with
exit code 0, after all steps, with each rank once; a program whose result follows from its seed must
end with the result of plain processes on this machine that were left alone; and a program that
prints its saves must not lose what it saved longer ago than the interval between two copies.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contract import text, times
from contract.nodes import HEAD, WORKER
from rehearsal import commands
from rehearsal.cycle import ERRORS, SETTINGS, Rehearsal, take_away
from rehearsal.programs import PROGRAMS, Program, progress_of, starts_in
from rehearsal.steps import Steps, interruptible
from rehearsal.watch import Line, Node, Watch

#: Of one job, both losses included.
_END_S: Final = 900
_POLL_S: Final = 1.0
#: How far a result may be from the undisturbed one, of itself: sums of floats in another order.
_TOLERANCE: Final = 1e-4
#: A kill while a program starts comes within so many lines, of its own or about its start.
_START_LINES: Final = 4
#: What a copy into the bucket may take, beside the interval between two of them.
_COPY_S: Final = 10
#: So many of the kills come while a program trains, and the others while it starts.
_IN_TRAINING: Final = 0.75
#: Of the way to its end, a program has gone at most so much of it at a kill.
_LATEST: Final = 0.6
NUM_NODES: Final = 2
#: The nodes of a job that are killed, one after the other.
VICTIMS: Final = (HEAD, WORKER)

#: What a head says at each start of a program, whether it runs there or on all nodes.
_RUNNING: Final = re.compile(r"^node: running ")
_RESULT: Final = re.compile(r"\bresult (\{.*\})$")
#: Before each line of a worker of Ray's.
_OF_RAY: Final = re.compile(r"\bpid=\d+, ip=([\d.]+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A node of a job that was killed."""

    at: float
    """Unix time."""
    node: str
    """``HEAD`` or ``WORKER``."""
    progress: float
    """How far the program was."""
    is_saved: bool
    """Something that it could resume from was in the bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job that has ended."""

    exit_code: int
    lines: Sequence[Line]
    kills: tuple["Kill", ...] = ()
    seconds: float = 0.0

    def starts(self, rank: int | None = None) -> list[tuple[float, int, int]]:
        """When a rank, or any, has started, which one, and at which step."""
        return [each for each in starts_in(self.lines) if rank is None or each[1] == rank]

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
        if self.seconds > _END_S:
            found = [f"it did not end within {_END_S} s, and was stopped"]
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
        found = []
        for kill in self.kills:
            resumed = next((step for at, _, step in self.starts(rank=0) if at > kill.at), None)
            if resumed is None:
                continue
            old = kill.at - times.FILES_EVERY_S - _COPY_S
            saved = [line for line in self.lines if line.at <= old and program.prints_saves]
            must = int(progress_of(program, saved) or 0)
            if resumed < must:
                found.append(f"resumed at {resumed}, although {must} had been saved long before")
            elif kill.is_saved and not resumed:
                found.append("it began anew, although the bucket had something to resume from")
        return found


class Moment:
    """When the next node of a job is killed: at a part of the program's way that is left."""

    def __init__(self, program: Program, moments: random.Random, *, in_training: bool) -> None:
        self._program, self._part = program, moments.uniform(0, _LATEST)
        self._in_training = in_training and program.has_ranks

    def is_due(self, lines: Sequence[Line], *, is_saved: Callable[[], bool]) -> bool:
        """Whether it has come.

        Args:
            lines: of the job, since the last kill.
            is_saved: whether the bucket has something that the program has saved.
        """
        begins = [number for number, line in enumerate(lines) if _RUNNING.search(line.text)]
        if not begins:
            return False
        since = lines[begins[-1] + 1 :]
        if not self._in_training:
            # Of its first lines, not all come from the program: also before it runs.
            return len(since) >= self._part * min(self._program.length, _START_LINES)
        starts = starts_in(since)
        if {rank for _, rank, _ in starts} != {*range(NUM_NODES)}:
            return False
        first, now = starts[-1][2], progress_of(self._program, since) or 0.0
        goal = first + self._part * (self._program.length - first)
        return now >= goal and now > first and is_saved()


class Abuse:
    """Runs programs on a deployment that is up."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal

    def disturbed(
        self,
        program: Program,
        code: Path,
        *,
        seed: int,
        victims: Sequence[str] = VICTIMS,
        in_training: float = _IN_TRAINING,
        spared: int | None = None,
    ) -> Ended:
        """Run a program of which a head and then a worker node are killed.

        Args:
            code: its folder.
            seed: decides when.
            victims: the nodes that are killed, one after the other.
            in_training: so many of the kills come while it trains.
            spared: the rank whose worker node is not killed. Where it is the one that saves, no
                kill waits for a copy in the bucket.

        Returns:
            With the exit code -1 where the job does not end: it is stopped then.
        """
        began = time.time()
        moments = random.Random(f"{program.name} {seed}")
        options = ["--code", str(code), "--nodes", str(NUM_NODES), "--yes"]
        run = f"abuse-{program.name.replace('_', '-')}-{seed}"
        options += ["--run", run]
        # All nodes share this machine's processors.
        options += ["--env", "OMP_NUM_THREADS=1"]
        job = self._rehearsal.trainctl("submit", *options, "--", *program.words).strip()
        watch = Watch(self._rehearsal, job)
        kills: list[Kill] = []
        moment: Moment | None = None

        def is_saved() -> bool:
            is_kept = spared is not None  # by the node that has saved it
            return is_kept or bool(program.file and watch.is_saved(run, program.file))

        while not watch.has_ended():
            if time.time() > began + _END_S:
                self._rehearsal.trainctl("stop", job)
                return Ended(
                    exit_code=-1,
                    lines=watch.lines(),
                    kills=tuple(kills),
                    seconds=time.time() - began,
                )
            if len(kills) < len(victims):
                if moment is None:
                    trains = moments.random() < in_training
                    moment = Moment(program, moments, in_training=trains)
                since = kills[-1].at if kills else began
                lines = [line for line in watch.lines() if line.at > since]
                node = victims[len(kills)]
                there = watch.nodes(node, 1 if node == HEAD else NUM_NODES)
                if node == WORKER:
                    there = with_ranks(there, lines, spared=spared)
                if there and moment.is_due(lines, is_saved=is_saved):
                    found = progress_of(program, lines) if starts_in(lines) else None
                    saved = is_saved()
                    # It may have ended by itself meanwhile.
                    victim = moments.choice(there)
                    kill = ("kill", "--signal", "KILL", victim.container)
                    self._rehearsal.engine(*kill, check=False)
                    now = time.time()
                    kills.append(Kill(at=now, node=node, progress=found or 0, is_saved=saved))
                    moment = None
            time.sleep(_POLL_S)
        watch.has_ended()  # the last lines
        shown = json.loads(self._rehearsal.trainctl("show", job, "--json"))
        return Ended(
            exit_code=-1 if shown["exit_code"] is None else int(shown["exit_code"]),
            lines=watch.lines(),
            kills=tuple(kills),
            seconds=time.time() - began,
        )


def with_ranks(
    nodes: Sequence[Node], lines: Sequence[Line], *, spared: int | None = None
) -> list[Node]:
    """Nodes on which ranks have started last; all of them while that is not known.

    Ray Train puts as many workers on a node as it holds: the other nodes have nothing to lose.

    Args:
        spared: of this rank, the node is left out.
    """
    begins = [number for number, line in enumerate(lines) if _RUNNING.search(line.text)]
    places: dict[int, str] = {}
    for line in lines[begins[-1] if begins else 0 :]:
        # Lines of Ray's workers come from the head, and name the node.
        of_ray = _OF_RAY.search(line.text)
        for _, rank, _ in starts_in([line]):
            places[rank] = of_ray[1] if of_ray else line.task
    left_out = {place for rank, place in places.items() if rank == spared}
    chosen = {*places.values()} - left_out
    return [each for each in nodes if not chosen or chosen & {each.address, each.task}]


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
        kills = ", ".join(f"{kill.node} at {kill.progress:g}" for kill in self.ended.kills)
        seconds = text.duration(round(self.ended.seconds))
        verdict = "; ".join(self.faults) or "as it should be"
        return (self.program, str(self.seed), kills or "-", starts or "-", seconds, verdict)


TITLES: Final = ("program", "seed", "killed", "rank 0 starts at", "took", "ended")


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
            if len(ended.kills) < len(VICTIMS):
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
