"""Watch over a program on its nodes: signs of life, the end of a hang, and where each rank was.

Two things are signs of life at any time: optimizer steps, which
``containers/program/watch/steps.py`` counts in each process, and lines that differ while a process
uses a processor, as an evaluation after the last step prints them. What else a program prints,
reads and writes, and its CPU time, postpone the end, each for so long: a thread that writes a log
survives a deadlock, and a process that waits for a GPU spins. Until its first step, and in a
program that makes none that can be counted, these are signs of life too.

``Watch`` is pure: samples and the time are handed in.
"""

import contextlib
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import psutil

from containers.host import machine
from containers.program.watch.cause import Error, cause
from contract import exits
from contract.text import duration
from training.record.events import Process
from training.runtime import processes
from training.system.devices import born

#: Between two samples of a node.
EVERY_S: Final = 5.0
#: Over so long, less than this share of a processor, and fewer bytes per second, are no sign of
#: life: threads that wait with a timeout, Ray's heartbeats, a monitor that reads /proc.
_WINDOW_S: Final = 30.0
_CPU: Final = 0.1
_BYTES_PER_S: Final = 200_000
#: The limit grows to so many times the longest pause that a program came back from, but by no more
#: than so many times the shortest limit.
_PAUSES: Final = 3
_LONGER: Final = 6
#: After the last sign of life, CPU time where processes wait for GPUs postpones the end for so many
#: times the shortest limit, and CPU time elsewhere, other lines, bytes and files for so many.
_BY_CPU: Final = 6
_BY_BYTES: Final = 24
#: Once the program has ended well on a node, the others have no longer than this.
_LEFT_S: Final = 300.0
#: A silence is reported after this share of the limit.
_REPORTED: Final = 0.25
#: Words with a number in them, such as times and addresses; a count; lines that are compared; the
#: first of so many parts of a count is its beginning.
_NUMBER: Final = re.compile(r"\w*\d[\w.,:+-]*")
_COUNT: Final = re.compile(r"(?<![\d.:])(\d{1,15})\s?(?:/|of)\s?(\d{1,15})(?![\d.:])")
_REMEMBERED: Final = 100
_FIRST: Final = 20
#: So many of a node's processes are looked at, ranks first.
_LOOKED_AT: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """Signs of life of a program on one node, all counted since its start."""

    steps: Mapping[int, int] = field(default_factory=dict)
    """Optimizer steps of each process that makes some, by its id."""
    cpu_s: float = 0.0
    """CPU time of all of its processes."""
    idle: float = 0.0
    """Share of a processor that they use while they have nothing to do."""
    moved: int = 0
    """Bytes that they have read and written, and the node has sent and received."""
    lines: int = 0
    """Lines that they have printed and that differ, see ``NewLines``."""
    printed: int = 0
    """All lines that they have printed."""
    written_ns: int = 0
    """Unix nanoseconds of the last change of a file that is kept, and is no tracker's."""
    is_served: bool = False
    """A person is connected to a port of the program."""


def is_served(pids: Collection[int]) -> bool:
    """True if another process of this node, such as a tunnel, is connected to a port of these at
    127.0.0.1; Ray's own use the node's address."""
    own: list[Any] = [each for each in psutil.net_connections("tcp") if each.pid in pids]
    ports = {each.laddr.port for each in own}
    served = {each.laddr.port for each in own if not each.raddr}
    return any(
        each.laddr.port in served
        and each.raddr.ip.endswith(("127.0.0.1", "::1"))
        and each.raddr.port not in ports
        for each in own
        if each.raddr
    )


class NewLines:
    """Counts lines, and those that differ: from the last hundred others, numbers aside, or by a
    count that has come further, as ``eval 120/500`` has.

    A thread that says that it waits repeats itself, with another number of seconds each time.
    """

    def __init__(self) -> None:
        self.num = self.num_new = 0
        self._recent: dict[int, int] = {}
        """Hashes of lines without their numbers, the latest last, and their counts."""

    def hear(self, line: str) -> None:
        """The next line."""
        text = hash(_NUMBER.sub("#", line))
        counts = [(int(done), int(of)) for done, of in _COUNT.findall(line)]
        done, of = max((each for each in counts if each[0] <= each[1]), default=(0, 0))
        before = self._recent.pop(text, -1)
        self.num += 1
        self.num_new += done > before
        # Another count to the same total begins at its beginning.
        self._recent[text] = done if 0 < done <= of // _FIRST else max(done, before)
        if len(self._recent) > _REMEMBERED:
            del self._recent[next(iter(self._recent))]


class Verdict(Enum):
    """Verdict about a program that runs."""

    ALIVE = auto()
    SILENT = auto()
    """It has become silent; this is said once of each silence."""
    HUNG = auto()


class Watch:
    """Finds that a program hangs, from samples of its nodes."""

    def __init__(self, least_s: float) -> None:
        """``least_s``: no shorter silence is a hang; 0: none is."""
        self._least_s = least_s
        self._slowest_s = 0.0  # of the pauses between steps that have ended, of all starts
        self.begin(0.0)

    def begin(self, now: float, *, spins: bool = False) -> None:
        """A start of the program on all nodes.

        Args:
            spins: they have GPUs, for which processes wait at full speed.
        """
        self._spins = spins
        self._heard_at = self._alive_at = self._moved_at = self._busy_at = now
        self._has_reported = self.has_stepped = False
        self.step = 0
        """Steps of the process that has made the most."""
        self._steps: dict[tuple[Any, int], int] = {}
        self._marks: dict[Any, tuple[float, Signs]] = {}

    def hear(self, now: float, nodes: Mapping[Any, Signs]) -> None:
        """Take samples, by node; call this every few seconds."""
        if now - self._heard_at > _WINDOW_S:
            self._alive(now)  # a head that stood still itself knows nothing of that time
        self._heard_at = now
        for number, signs in nodes.items():
            if signs.is_served:
                self._alive(now)
            at, mark = self._marks.setdefault(number, (now, signs))
            if now - at < min(_WINDOW_S, self._least_s / 16):
                continue
            self._marks[number] = (now, signs)
            is_busy = signs.cpu_s - mark.cpu_s > (_CPU + signs.idle) * (now - at)
            is_new = signs.lines > mark.lines
            if is_busy:
                self._busy_at = max(self._busy_at, at)
            # A program beside Ray prints on the head what it computes elsewhere.
            if is_new and self._busy_at >= at - _WINDOW_S:
                self._alive(at)
            if (
                is_new
                or signs.printed > mark.printed
                or signs.moved - mark.moved > _BYTES_PER_S * (now - at)
                or signs.written_ns > mark.written_ns
                or (is_busy and not self._spins)
            ):
                self._moved_at = max(self._moved_at, at)
        steps = {(n, name): each for n, at in nodes.items() for name, each in at.steps.items()}
        self.step = max(self.step, *steps.values(), 0)
        if steps != self._steps:
            if self.has_stepped:
                self._slowest_s = max(self._slowest_s, now - self._alive_at)
            self._steps, self.has_stepped = steps, True
            self._alive(now)
        elif not self.has_stepped:
            self._alive(self._moved_at)

    def _alive(self, at: float) -> None:
        if at > self._alive_at:
            self._alive_at, self._has_reported = at, False

    @property
    def words(self) -> str:
        """``no step or new line for 10 min 0 s``."""
        what = "no step or new line" if self.has_stepped else "no sign of life"
        return f"{what} for {duration(round(self._heard_at - self._alive_at))}"

    def verdict(self, *, has_ended: bool) -> Verdict:
        """
        Args:
            has_ended: the program has ended well on a node; the samples are of the others.
        """
        if not self._least_s:
            return Verdict.ALIVE
        least_s, slowest_s = self._least_s, self._slowest_s
        limit_s = max(least_s, min(_PAUSES * slowest_s, slowest_s + _LONGER * least_s))
        if has_ended:
            limit_s = min(limit_s, _LEFT_S)
        last = self._alive_at
        by_cpu = _BY_CPU if self.has_stepped else _BY_BYTES
        # Sums, so that one long pause does not make each of these limits as much longer.
        postponed = min(self._busy_at, last + by_cpu * least_s)
        postponed = max(postponed, min(self._moved_at, last + _BY_BYTES * least_s))
        if self._heard_at - max(last, postponed) >= limit_s:
            return Verdict.HUNG
        # A process that spins is reported, unless it may be a compiler before the first step.
        last = max(last, self._moved_at if self.has_stepped else self._busy_at)
        is_silent = self._heard_at - last >= max(_REPORTED * limit_s, 1.5 * slowest_s)
        if is_silent and not self._has_reported:
            self._has_reported = True
            return Verdict.SILENT
        return Verdict.ALIVE


# --- the processes of a node ----------------------------------------------------------------------
def signs(pids: Collection[int], folder: Path, **others: Any) -> Signs:
    """Sample a node.

    Args:
        pids: of the program.
        folder: in which they count their steps.
        others: signs of life that are known already.
    """
    counted = _counted(pids, folder)
    cpu_s, moved = machine.used(pids)
    return Signs(
        steps={pid: steps for pid, (steps, _, _) in counted.items() if steps},
        cpu_s=cpu_s,
        moved=moved,
        **others,
    )


def _counted(pids: Collection[int], folder: Path) -> dict[int, tuple[int, int, int]]:
    """Steps, rank and open file of each process that is Python."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, struct.error):
            steps, rank, file = struct.unpack("3q", (folder / str(pid)).read_bytes()[:24])
            found[pid] = steps, rank, file
    return found


def _name(pid: int, rank: int) -> str:
    return f"process {pid}" if rank < 0 else f"rank {rank}"


Frame = tuple[str, str, str]


def _is_own(frame: Frame) -> bool:
    return not re.search(r"/lib/python3|/torch/|<frozen|^$", frame[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """State of one process of a program that shows no progress."""

    name: str
    """Such as ``rank 3 on node 1``."""
    steps: int
    seen: processes.ProcessState

    @property
    def threads(self) -> list[list[Frame]]:
        """File, line and function of each thread, innermost first; empty where not known."""
        # faulthandler writes the main thread last. A deep stack ends with dots.
        first, *threads = re.split(rf"(?m)^.*{processes.MOST_RECENT}.*$", self.seen.details)
        frame = r'(?m)^  (?:File "(.+)", line (\d+) in (.+)|\.\.\.)$'
        return [re.findall(frame, each) for each in threads or [first]]

    @property
    def frames(self) -> list[Frame]:
        """Those of the main thread; or, where that has none in the user's own code, as an actor of
        Ray Train, of a thread that has."""
        *others, main = self.threads
        return next((each for each in (main, *others) if any(map(_is_own, each))), main)

    @property
    def place(self) -> str:
        """Its place in the user's own code: ``load (train.py:12)``."""
        frames = self.frames
        for file, line, function in () if self.is_stopped else [*filter(_is_own, frames)] or frames:
            return f"{function} ({Path(file).name}:{line})"
        return f"state {self.seen.state}"

    @property
    def is_stopped(self) -> bool:
        return self.seen.state.startswith("T")

    @property
    def distance(self) -> tuple[bool, bool, bool, int]:
        """Distance from the cause: it is stopped, waits for nobody, has work, has made fewer
        steps."""
        own = [*map(_is_own, self.frames)]
        inner = self.frames[: own.index(True) if any(own) else 4]
        waits = re.search(r"/torch/(distributed|autograd|nn/parallel)/|/ray/", f"{inner}")
        return not self.is_stopped, waits is not None, not any(own), self.steps

    @property
    def is_ending(self) -> bool:
        """True if its main thread has come to the end of the program: the interpreter ends, or
        what the last line leaves is freed."""
        functions = [function for _, _, function in self.threads[-1]]
        if not functions or functions[-1] not in ("<module>", "_run_module_as_main", ""):
            return processes.MOST_RECENT in self.seen.details
        return "_shutdown" in functions or (self.steps > 0 and functions[0] == "<module>")


def look(pids: Collection[int], folder: Path, *, node: str, is_last: bool) -> list[Found]:
    """See what the processes of a node are doing, ranks first; of Python, if any is.

    Args:
        is_last: they are ended next; see ``processes.look``.
    """
    counted = _counted(pids, folder) or dict.fromkeys(pids, (0, -1, -1))
    chosen = sorted(counted, key=lambda pid: (-counted[pid][0], counted[pid][1], pid))[:_LOOKED_AT]
    asked = [
        Process(rank=counted[pid][1], node=node, pid=pid, born=born(pid), stacks=counted[pid][2])
        for pid in chosen
    ]
    return [
        Found(name=f"{_name(pid, seen.rank)} on node {node}", steps=counted[pid][0], seen=seen)
        for pid, seen in zip(chosen, processes.look(asked, is_last=is_last), strict=True)
        if not seen.is_gone
    ]


# --- what that means ------------------------------------------------------------------------------
def ranks(found: Sequence[Found]) -> list[Found]:
    """Those that make steps; a launcher waits for them, and workers work for them."""
    return [each for each in found if each.steps] or [*found]


def are_over(found: Sequence[Found], *, step: int) -> bool:
    """True if each has come to the end of the program, after all ``step`` steps."""
    return bool(found) and all(each.is_ending and each.steps >= step for each in ranks(found))


def where(found: Sequence[Found]) -> str:
    """``rank 1 on node 1 was in load (train.py:12)``, of those that keep the others waiting, as far
    as states, stacks and steps show it."""
    known = sorted(ranks(found), key=lambda each: each.distance)
    first = [each for each in known if each.distance == known[0].distance]
    return ", ".join(f"{each.name} was in {each.place}" for each in first[:3])


def silence(life: Watch, found: Sequence[Found], more: str = "") -> str:
    """Describe a program that shows no progress."""
    return "; ".join(filter(None, (more, life.words, where(found))))


def hung(text: str, errors: Sequence[Error], run: str) -> str:
    """The reason of a job that is ended for a silence.

    Args:
        text: what ``silence`` has found.
        errors: that the program's processes have noted before.
    """
    before = f"; before that, {cause(errors, code=exits.HUNG).line}" if errors else ""
    advice = "--hang-minutes lets it wait for longer"
    return f"failed: hung: {text}{before}; all stacks: trainctl logs {run}; {advice}"
