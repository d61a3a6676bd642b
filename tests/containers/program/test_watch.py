"""A program that hangs is found and ended, and one that is only silent is not.

The table plays hours in virtual time; real processes show that steps are counted and stacks read
from outside.
"""

import os
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from containers.program.on_node import STARTUP
from containers.program.process import ProgramProcess
from containers.program.watch import (
    EVERY_S,
    Found,
    Signs,
    Verdict,
    Watch,
    are_over,
    look,
    signs,
    where,
)
from contract import nodes
from tests.containers.program.stub_torch import write_program
from tests.eventually import eventually
from training.runtime import processes

MINUTE = 60.0
LIMIT = 10 * MINUTE


@dataclass(frozen=True)
class Phase:
    """Minutes of a program of two nodes, which do the same unless ``other`` says what node 1 does.

    All but the steps is so much per second.
    """

    minutes: float
    steps: float = 0.0
    cpu: float = 0.001  # threads that wait with a timeout
    bytes: float = 2e4  # Ray's heartbeats
    lines: float = 0.0
    files: float = 0.0
    other: Mapping[str, float] = field(default_factory=dict)


START = Phase(2, cpu=1, bytes=1e7, lines=0.1)
TRAIN = Phase(20, steps=2, cpu=1, bytes=1e6, lines=0.1)
DEAD = Phase(400)
SPIN = Phase(400, cpu=1)


def play(
    phases: Sequence[Phase],
    *,
    gpus: bool = False,
    least_s: float = LIMIT,
    ends: float | None = None,
) -> dict[Verdict, float]:
    """Minutes into the last phase at which a verdict came first.

    Args:
        ends: minutes after which node 0 has ended well.
    """
    watch = Watch(least_s)
    now = 1000.0
    watch.begin(now, spins=gpus)
    totals = [dict.fromkeys(("steps", "cpu", "bytes", "lines", "files"), 0.0) for _ in range(2)]
    began, found = now, dict[Verdict, float]()
    for phase in phases:
        started = now
        while now - started < phase.minutes * MINUTE:
            now += EVERY_S
            has_ended = ends is not None and now - began >= ends * MINUTE
            for number, total in enumerate(totals):
                for name in total:
                    rate = getattr(phase, name)
                    rate = phase.other.get(name, rate) if number else rate
                    total[name] += rate * EVERY_S
            samples = {
                number: Signs(
                    steps={f"rank {number}": int(total["steps"])} if total["steps"] >= 1 else {},
                    cpu_s=total["cpu"],
                    moved=int(total["bytes"]),
                    lines=int(total["lines"]),
                    written_ns=int(total["files"]),
                )
                for number, total in enumerate(totals)
                if number or not has_ended
            }
            watch.hear(now, samples)
            verdict = watch.verdict(has_ended=has_ended)
            if verdict is not Verdict.ALIVE and phase is phases[-1]:
                found.setdefault(verdict, (now - started) / MINUTE)
            elif verdict is Verdict.HUNG:
                raise AssertionError(f"hung in {phase}")
            if verdict is Verdict.HUNG:
                return found
    return found


@pytest.mark.parametrize(
    ("phases", "options", "reported", "ended"),
    [
        ([START, TRAIN, DEAD], {}, 3, 10),
        ([START, TRAIN, DEAD], {"gpus": True}, 3, 10),
        # A rank sleeps, and the others wait for it in a collective of NCCL: they spin.
        ([START, TRAIN, Phase(400, cpu=1, other={"cpu": 0})], {"gpus": True}, 3, 70),
        # All wait for a lock, and a thread reports the use of the host, as W&B's does.
        ([START, TRAIN, Phase(400, bytes=5e4, files=0.1)], {}, 3, 10),
        # A thread prints that it waits, for ever.
        ([START, TRAIN, Phase(400, lines=0.02)], {}, None, 250),
        # Before the first step: a reader waits for a FIFO; a rendezvous that nobody joins.
        ([DEAD], {}, 3, 10.5),
        ([START, DEAD], {}, 3, 10.5),
        ([START, SPIN], {"gpus": True}, None, 250),
        # At its exit, on one node of two; the same where the one that is left spins.
        ([START, TRAIN, DEAD], {"ends": 22}, 1.5, 5),
        ([START, TRAIN, SPIN], {"ends": 22, "gpus": True}, 1.5, 35),
        # A slow pause before lets it have more time.
        ([START, TRAIN, Phase(8), TRAIN, DEAD], {}, 12.3, 24.5),
        ([START, TRAIN, DEAD], {"least_s": 60}, 1, 1),
    ],
)
def test_a_hang_is_reported_and_ends(
    phases: list[Phase], options: dict[str, float], reported: float | None, ended: float
) -> None:
    found = play(phases, **options)  # type: ignore[arg-type]
    assert found[Verdict.HUNG] <= ended + 0.1
    assert found[Verdict.HUNG] > ended * 0.8
    if reported is not None:
        assert found[Verdict.SILENT] <= reported


@pytest.mark.parametrize(
    ("phases", "options"),
    [
        ([START, Phase(15, cpu=1), TRAIN], {"gpus": True}),  # a compiler, before the first step
        ([START, Phase(1, steps=0.02, cpu=1), Phase(40, cpu=1), TRAIN], {"gpus": True}),  # after it
        ([Phase(180, bytes=5e6), TRAIN], {}),  # a download
        ([START, TRAIN, Phase(50, cpu=1), TRAIN], {"gpus": True}),  # an evaluation on a GPU
        ([START, TRAIN, Phase(180, cpu=1), TRAIN], {}),  # the same without one
        ([START, TRAIN, Phase(180, cpu=1, lines=0.1), TRAIN], {"gpus": True}),  # a printing one
        ([START, TRAIN, Phase(30, bytes=3e6), TRAIN], {}),  # a checkpoint
        # Rank 0 saves, and the others wait for it.
        ([START, TRAIN, Phase(30, bytes=3e6, other={"bytes": 0}), TRAIN], {}),
        ([Phase(600, cpu=1)], {}),  # a program that makes no steps: a fit of trees
        ([Phase(120, cpu=8, bytes=1e8), TRAIN], {}),  # data becomes tokens
        ([Phase(600, cpu=1, lines=0.01)], {"gpus": True}),  # JAX, a line each 100 s
        ([Phase(600, cpu=1, files=0.01)], {"gpus": True}),  # the same, in a file
        (
            [START, *[Phase(0.1, steps=1, cpu=1), Phase(9, cpu=1)] * 20],
            {"gpus": True},
        ),  # slow steps
        ([START, TRAIN, Phase(9), TRAIN, Phase(25), TRAIN], {}),  # a pause longer than before
        ([START, TRAIN, Phase(30, cpu=1, bytes=1e6), TRAIN], {"ends": 22}),  # the rest on node 1
        ([START, TRAIN, DEAD], {"least_s": 0}),
    ],
)
def test_honest_silence_is_not_ended(phases: list[Phase], options: dict[str, float]) -> None:
    assert Verdict.HUNG not in play(phases, **options)  # type: ignore[arg-type]


def test_a_silence_is_reported_once_and_a_head_that_stood_still_ends_nothing() -> None:
    watch = Watch(LIMIT)
    watch.begin(0.0)
    step = Signs(steps={"rank 0": 1})
    verdicts = []
    for now in range(5, 400, 5):
        watch.hear(now, {0: step})
        verdicts.append(watch.verdict(has_ended=False))
    assert verdicts.count(Verdict.SILENT) == 1
    watch.hear(4000.0, {0: step})
    assert watch.verdict(has_ended=False) is Verdict.ALIVE
    assert watch.words == "no step for 0 s"


# --- what processes count, and where they are -----------------------------------------------------
@pytest.mark.parametrize(
    ("per_minute", "slow"),
    [
        ((10, 10, 10), ""),
        ((10, 9, 10), ""),
        ((10, 7, 10), "node 1 is slow: 14 steps, each of the others 20 or more"),
        ((10, 0, 9), "node 1 is slow: 0 steps, each of the others 18 or more"),
        ((4, 1, 4), ""),
        ((10,), ""),
    ],
    ids=["as fast", "nearly", "slow", "stands", "too few steps", "alone"],
)
def test_a_node_that_makes_fewer_steps_than_the_others_is_named(
    per_minute: tuple[int, ...], slow: str
) -> None:
    found = Watch(600)
    found.begin(0)
    for minute in range(10):
        signs = {
            node: Signs(steps={f"rank {node}": minute * steps, "process 9": minute // 5})
            for node, steps in enumerate(per_minute)
        }
        for second in range(0, 60, 5):
            found.hear(60 * minute + second, signs)
    assert found.slow == slow
    found.begin(600)
    assert found.slow == "", "another start may have another node there"


def test_the_numbers_are_those_that_the_launcher_reads() -> None:
    source = (STARTUP.parent / "steps.py").read_text()
    assert f'WATCH: Final = "{nodes.ENV_WATCH}"' in source
    assert f"SIGNAL: Final = {processes.SIGNAL}\n" in source


OPTIMIZER = """
def optimizer():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    return torch.optim.AdamW([parameter])
"""
#: Steps of two processes.
COUNTED = """
import os, time, torch
from torch.optim.optimizer import Optimizer as optimizer
{own}
def make(number, *optimizers):
    for _ in range(number):
        for each in optimizers:
            each.step()

os.environ["RANK"] = "3"
make(6, first := optimizer())       # a plain loop
make(5, optimizer(), optimizer())   # a GAN; its first step is taken for a part of the last one
if not os.fork():
    os.environ["RANK"] = "4"
    make(2, optimizer())
print("ready", flush=True)
def load():
    time.sleep(600)
load()
"""


@pytest.mark.parametrize(
    "is_real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a stub", "PyTorch"]
)
def test_steps_are_counted_and_stacks_read_from_outside(tmp_path: Path, is_real: bool) -> None:
    path = write_program(tmp_path, COUNTED.format(own=OPTIMIZER if is_real else ""))
    if is_real:
        shutil.rmtree(tmp_path / "torch")
    watched = tmp_path / "watch"
    watched.mkdir()
    said: list[str] = []
    program = ProgramProcess(
        (sys.executable, str(path)),
        folder=tmp_path,
        environment={**os.environ, "PYTHONPATH": str(STARTUP), nodes.ENV_WATCH: str(watched)},
        emit=said.append,
    )
    try:
        eventually("both", lambda: len(said) == 2, timeout_s=60, every_s=0.1)
        assert signs(program.left(), watched, lines=2).steps == {"rank 3": 10, "rank 4": 2}
        found = look(program.left(), watched, node=1)
        assert [each.name for each in found] == ["rank 3 on node 1", "rank 4 on node 1"]
        assert [each.place.partition(" (program.py:")[0] for each in found] == ["load", "load"]
        assert not any(each.is_ending for each in found)
        assert program.poll() is None
    finally:
        program.end()


def test_a_process_that_has_become_another_program_gets_no_signal(tmp_path: Path) -> None:
    program = ProgramProcess(("sleep", "600"), folder=None, environment=os.environ, emit=print)
    try:
        (pid,) = program.left()
        (tmp_path / str(pid)).write_bytes(struct.pack("3q", 5, 0, 1))
        (seen,) = look([pid], tmp_path, node=0)
        # It may have been looked at before it slept.
        assert seen.place in ("state S (sleeping)", "state R (running)")
        assert program.poll() is None
    finally:
        program.end()


def found(name: str, *frames: str, steps: int = 50, state: str = "S (sleeping)") -> Found:
    """``frames``: file and function of the main thread, innermost first."""
    lines = [f'  File "{each.split()[0]}", line 7 in {each.split()[1]}' for each in frames]
    details = "\n".join(
        [
            'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in wait',
            "Thread 0x2 (most recent call first):",
            *(lines or ["  <no Python frame>"]),
        ]
    )
    seen = processes.ProcessState(rank=0, state=state, details=details)
    return Found(name=name, steps=steps, seen=seen)


LIB = "/usr/lib/python3.11"
TORCH = f"{LIB}/site-packages/torch"
MAIN = "/app/train.py <module>"
WAITS = [f"{TORCH}/distributed/distributed_c10d.py all_reduce", MAIN]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            [found("c", f"{LIB}/queue.py get", "/app/data.py read", MAIN)],
            "c was in read (data.py:7)",
        ),
        ([found("c", *WAITS, steps=49)], "c was in <module> (train.py:7)"),
        ([found("c", *WAITS, state="T (stopped)")], "c was in <module> (train.py:7)"),
        # DDP's backward waits for the gradients of all.
        (
            [found("c", f"{TORCH}/autograd/graph.py run", MAIN), found("d", MAIN)],
            "d was in <module> (train.py:7)",
        ),
        (
            [found("launcher", f"{LIB}/select.py poll", MAIN, steps=0)],
            "a was in <module> (train.py:7)",
        ),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(others: list[Found], words: str) -> None:
    all_found = [found("a", *WAITS), *others]
    assert where(all_found) == words


@pytest.mark.parametrize(
    ("frames", "steps", "is_ending"),
    [
        ((), 50, True),
        ((f"{TORCH}/distributed/x.py destroy", "/app/train.py at_exit"), 0, True),
        ((f"{LIB}/threading.py _shutdown",), 0, True),
        ((f"{LIB}/threading.py _shutdown", "<string> <module>"), 0, True),
        # TRL: the destructor of DDP's reducer, at the return of main().
        ((MAIN, "<frozen runpy> _run_code", "<frozen runpy> _run_module_as_main"), 6, True),
        ((MAIN,), 0, False),  # a program of no steps that sleeps
        (("/app/train.py load", MAIN), 50, False),
    ],
)
def test_the_end_of_a_program_shows_in_its_stack(
    frames: tuple[str, ...], steps: int, is_ending: bool
) -> None:
    ranks = [found("a", *frames, steps=steps), found("launcher", MAIN, steps=0)]
    assert are_over(ranks[: 1 + bool(steps)], step=steps) == is_ending
    assert not are_over(ranks, step=steps + 1)
    assert not are_over([*ranks, found("b", "/app/train.py load", MAIN, steps=steps + 1)], step=0)
