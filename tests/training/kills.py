"""Kills of a real run at random moments, and a check of the history that it leaves.

As Jepsen tests databases: one side kills, by a seed; the other reads only what the run itself has
written, its checkpoints and its ``metrics.jsonl``, and compares it with an undisturbed run.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import pytest

from contract import exits
from contract.runs import checkpoint_key
from tests.training.local_runs import Command, assert_nothing_is_left
from training.checkpoint import checkpoints
from training.record import reader
from training.record.events import Phase, Resume, Step

#: The command starts these again by itself. ``server``: what the ranks are forked from.
WORKERS: Final = ("rank 0", "rank 1", "server")
#: After these it is given again. ``all``: its process group. The last two save before they end.
OTHERS: Final = ("command", "all", "Ctrl-C", "SIGTERM")
#: Moments of a run that resumes and goes on, and of one that is about to end, in their order.
MOMENTS: Final = ("save", "load", "step", "prune", "start", "fork")
ENDS: Final = ("last evaluation", "publishing", "report", "result")
_CODES: Final = {"Ctrl-C": exits.INTERRUPTED, "SIGTERM": exits.TERMINATED}
#: Between two looks at what lasts milliseconds.
_QUICKLY_S: Final = 0.001
#: A kill comes up to so long after the moment that it is meant for has begun, mostly sooner.
_PAUSE_S: Final = 0.2


@dataclass
class Kill:
    """A process that was killed, or asked to stop, and what became of the run."""

    victim: str
    hit: str
    """What the run was doing: ``step``, ``save`` or ``load``, or one of ``ENDS``."""
    saved: int
    """Step of the newest whole checkpoint at that time."""
    time: float
    """Unix time in seconds."""
    after: int = 0
    """The last step that was reported before."""


def plan(seed: int, ends: Sequence[str]) -> list[tuple[str, str]]:
    """Victims and moments of twelve kills: of one at each end, the others in the middle."""
    random = Random(seed)
    victims = {"start": ("command", "all"), "fork": OTHERS}  # before there are others
    chosen = [
        (random.choice(victims.get(moment, (*WORKERS, *OTHERS))), moment)
        for moment in random.sample(MOMENTS * 2, 12 - len(ends))
    ]
    random.shuffle(chosen)
    return [*chosen, *((random.choice(("command", "all", "rank 0")), end) for end in ends)]


def killed(few: list[tuple[str, str]], *, publishes: bool = True) -> pytest.MarkDecorator:
    """Kills of a run: a few in each CI run, and by night five runs with twelve kills each.

    Args:
        publishes: the recipe writes a model at its end; ``fsdp`` has it in its checkpoint.
    """
    ends = [end for end in ENDS if publishes or end != "publishing"]
    marks = [pytest.mark.night, pytest.mark.timeout(3600)]
    by_night = [pytest.param(plan(seed, ends), marks=marks, id=f"seed-{seed}") for seed in range(5)]
    in_ci = [pytest.param(few, id="few")] if few else []
    return pytest.mark.parametrize("kills", [*in_ci, *by_night])


def play(
    kills: list[tuple[str, str]],
    start: Callable[..., Command],
    whole: Command,
    words: Iterable[str],
) -> Command:
    """Kill a run like ``whole`` and start it again, by turns; return its last command."""
    again = partial(start, f"killed-{secrets.token_hex(4)}", *words, "--max-failures", "99")
    nemesis = Nemesis(again, whole)
    return nemesis.play(kills)


class Nemesis:
    """Kills a run, starts it again, and checks what it has reported so far."""

    def __init__(self, start: Callable[[], Command], undisturbed: Command) -> None:
        """
        Args:
            start: gives the command that begins the run, or resumes it.
            undisturbed: the same run, which nothing has happened to.
        """
        self._start, self._losses = start, undisturbed.losses()
        is_written = (undisturbed.run_folder / "evaluation.json").exists()  # not by imagenet
        self._before_report = "evaluation.json" if is_written else "model"
        self._random = Random(0)
        self._command = start()
        self._pids: list[int] = []
        self._killed: list[int] = []
        self.kills: list[Kill] = []

    def play(self, kills: Iterable[tuple[str, str]]) -> Command:
        """Kill, each victim at its moment; return the command, which has ended well."""
        for victim, moment in kills:
            if moment in ("save", "step", "prune"):
                self._check_resumed()
            if not self._await(moment):
                break
            self._kill(victim, moment)
        if not self.kills or self.kills[-1].hit not in ENDS:
            self._check_resumed()
        self._command.succeed()
        assert_nothing_is_left(self._command)
        assert not self._is_saving(), "what a killed save has left is gone"
        assert self._command.losses() == pytest.approx(self._losses, abs=1e-6)
        assert self._command.result()["damaged_lines"] == 0
        assert (self._command.run_folder / "report.html").exists()
        assert [*self._command.run_folder.glob(".*")] == []
        return self._command

    def _await(self, moment: str) -> bool:
        """Wait for a moment; false where the run has ended before, because the process that was
        killed last was a rank that had done its part."""
        command, folder = self._command, self._command.run_folder
        since = max((kill.time for kill in self.kills), default=0.0)
        newest, last = self._saved(), max(self._losses)
        if moment == "start":
            time.sleep(_PAUSE_S * self._random.random())
            return True

        def ranks() -> bool:
            before = self._pids
            pids = [each.pid for each in command.workers()]
            self._pids = [pid for pid in pids if pid not in self._killed]
            # Seen twice: the process that has looked at the data may still be ending.
            return len(self._pids) == 2 and self._pids == before

        def written(*names: str) -> bool:
            """Whether the command has written one of them since the last kill."""
            found = [path for name in names for path in folder.glob(name)]
            return any(path.stat().st_mtime > since for path in found if path.exists())

        step = command.steps_done() + self._random.randint(0, 2)
        begins: dict[str, Callable[[], bool]] = {
            "fork": lambda: command.server() is not None,
            "step": lambda: command.steps_done() >= step,
            "save": self._is_saving,
            "load": self._is_loading,
            "prune": lambda: self._saved() > newest,
            "last evaluation": lambda: self._steps() is not None and command.steps_done() >= last,
            "publishing": partial(written, ".staging-*", "model"),
            "report": partial(written, self._before_report),
            "result": partial(written, "result.json"),
        }
        last_kill = self.kills[-1] if self.kills else None
        may_be_over = last_kill and last_kill.victim in WORKERS and last_kill.hit in ENDS

        def is_over() -> bool:
            return bool(may_be_over) and command.process.poll() == exits.OK

        if moment != "fork":
            command.wait_until(lambda: ranks() or is_over())
        command.wait_until(lambda: begins[moment]() or is_over(), every_s=_QUICKLY_S)
        if is_over():
            return False
        time.sleep(_PAUSE_S * self._random.random() ** 3)
        return True

    def _kill(self, victim: str, moment: str) -> None:
        command, is_saving = self._command, self._is_saving()
        hit = "load" if self._steps() is None else "save" if is_saving else "step"
        hit = moment if moment in ENDS else hit
        self._killed = self._pids
        kill = Kill(victim=victim, hit=hit, saved=self._saved(), time=time.time())
        self.kills.append(kill)
        server, own = command.server(), command.process.pid
        targets = {"all": -own, "Ctrl-C": -own}  # as a terminal sends it, to the whole group
        if victim in WORKERS:
            assert server is not None
            targets |= {"rank 0": self._pids[0], "rank 1": self._pids[1], "server": server.pid}
        signals = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
        with suppress(ProcessLookupError):  # a rank that has done its part
            os.kill(targets.get(victim, own), signals.get(victim, signal.SIGKILL))
        if victim in OTHERS:
            code, _, err = command.end(timeout_s=90)
            is_over = moment == "result" and code == exits.OK
            assert is_over or code == _CODES.get(victim, -signal.SIGKILL), err
            assert "Traceback" not in err
            assert_nothing_is_left(command)
            kill.saved = self._saved()
        found = command.losses()
        assert found == pytest.approx({step: self._losses[step] for step in found}, abs=1e-6)
        kill.after = max(found, default=0)
        if victim in OTHERS:
            assert victim not in _CODES or hit == "load" or kill.saved == kill.after, kill
            self._command = self._start()

    def _check_resumed(self) -> None:
        """Wait for the next step; check that the run has resumed where it was saved last."""
        self._command.wait_until(lambda: bool(self._steps()))
        if not self.kills:
            return
        resumes = reader.read_metrics(str(self._command.run_folder)).of(Resume)
        resumed, last = resumes[-1].step if resumes else 0, self.kills[-1]
        newest = self._saved() if last.victim in WORKERS else last.saved
        assert last.saved <= resumed <= newest, f"resumed at {resumed}: {self.kills}"

    def _steps(self) -> list[Step] | None:
        """Since the workers began to train; None where they have not since the last kill."""
        metrics = reader.read_metrics(str(self._command.run_folder))
        times = [each.time for each in metrics.of(Phase) if each.name == "model_ready"]
        began, killed = max(times, default=0.0), self.kills[-1].time if self.kills else 0.0
        if began <= killed:
            return None
        return [each for each in metrics.of(Step) if each.time > began]

    def _saved(self) -> int:
        keys = map(checkpoint_key, checkpoints.names(str(self._command.run_folder)))
        return max((key[0] for key in keys if key), default=0)

    def _is_saving(self) -> bool:
        """A checkpoint that is being written has a hidden folder."""
        folder = self._command.run_folder / "checkpoints"
        return folder.exists() and any(name.startswith(".") for name in os.listdir(folder))

    def _is_loading(self) -> bool:
        """Whether a rank reads a checkpoint, or none does any more."""
        for pid in self._pids:
            folder = f"/proc/{pid}/fd"
            with suppress(OSError):  # one was closed, or the process has ended meanwhile
                files = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
                if any("/checkpoints/step-" in file for file in files):
                    return True
        return self._steps() is not None
