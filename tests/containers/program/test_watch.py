"""A program that hangs is found and ended, and one that is only silent is not.

The table plays hours in virtual time; real processes show that steps are counted and stacks read
from outside.
"""

import ctypes
import faulthandler
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from containers import ray_watch
from containers.demand import DemandWatch, RayReport, ResourceRequest
from containers.program.files.selection import TRACKERS
from containers.program.start.code import STARTUP
from containers.program.start.process import ProgramProcess
from containers.program.watch import steps
from containers.program.watch.signs import (
    EVERY_S,
    Found,
    NewLines,
    Signs,
    Verdict,
    Watch,
    are_over,
    is_served,
    look,
    signs,
    where,
)
from containers.program.watch.steps import SIZE
from containers.ray_watch import RayWatch
from contract import nodes
from contract.job import JobSpec
from contract.nodes import Range
from tests.containers.program.stub_torch import write_program
from tests.eventually import eventually
from training.runtime import processes

MINUTE = 60.0
LIMIT = 10 * MINUTE


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Minutes of a program of two nodes, which do the same unless ``other`` says what node 1 does.

    All but the steps is so much per second.
    """

    minutes: float = 400
    steps: float = 0.0
    cpu: float = 0.001  # threads that wait with a timeout
    bytes: float = 2e4  # Ray's heartbeats
    says: Callable[[int], str] | None = None
    """Its n-th line,"""
    each_s: float = 10.0
    """after as many seconds."""
    writes: str = ""
    """Name of a file that changes all the time."""
    other: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    """Of a program beside Ray: nodes beside the head, which is node 0 and prints for all."""
    asks: int = 0
    """Of such a program: requests that wait for resources."""
    is_served: bool = False


def loss(n: int) -> str:
    return f"step {n} loss {1 / n:.3f}"


def sentence(n: int) -> str:
    """Another one each time."""
    return f"the {'very ' * (n % 150)}old model says {'abc'[n % 3] * (n // 150)}"


def waiting(n: int) -> str:
    return f"[2026-11-28 {n // 360 % 24:02}:{n // 6 % 60:02}] still waiting after {10 * n} s"


def counting(total: int) -> Callable[[int], str]:
    """A count to ``total``, again and again."""
    return lambda n: f"eval {(n - 1) % total + 1}/{total}, {n / 7:.2f} s"


def bar(n: int) -> str:
    """tqdm's: its bar has eight parts a character."""
    return f"{n // 40}%|{'#' * (n // 40)}{n // 5 % 8}| [{n // 6}:{n % 6}0]".replace("#", "\u2588")


START = Phase(minutes=2, cpu=1, bytes=1e7, says=loss)
TRAIN = Phase(minutes=20, steps=2, cpu=1, bytes=1e6, says=loss)
DEAD = Phase()
SPIN = Phase(cpu=1)
GPUS = {"gpus": True}
#: Where each row of the tables is played, if it can: on nodes, and beside Ray.
BOTH = pytest.mark.parametrize("ray", ["", "1"])


def head_of_ray(nodes: str, now: float = 0, gpus: int = 0, least_s: float = 0) -> RayWatch:
    """The watch over a program beside Ray."""
    config = Mock(worker_gpus=gpus)
    workers = Range.parse(nodes, option="")
    config.spec = JobSpec(run="r1", command=("a",), nodes=workers, hang_s=int(least_s))
    return RayWatch(config, Mock(demand=DemandWatch([{}])), now)


def heard(
    watch: Watch,
    head: RayWatch | None,
    now: float,
    phase: Phase,
    samples: Mapping[int, Signs],
    has_ended: bool,
) -> Verdict:
    if head is None:
        watch.hear(now, samples)
        return watch.verdict(has_ended=has_ended)
    requests = (ResourceRequest(bundles=({},)),) * phase.asks
    client = ray_watch.client_of("")
    client.samples = samples
    client.seen = RayReport(requests=requests, idle_s=(0.0,) * phase.workers)
    if head.check(now, 0):
        return Verdict.HUNG
    return Verdict.SILENT if head._asked else Verdict.ALIVE


@patch.multiple(
    ray_watch,
    client_of=Mock(),
    report=Mock(),
    read=lambda client: client.seen,
    _get=lambda client, name: client.samples if "signs" in name else {},
    _put=Mock(),
)
def play(
    phases: Sequence[Phase],
    *,
    gpus: bool = False,
    least_s: float = LIMIT,
    ends: float | None = None,
    ray: str = "",
) -> dict[Verdict, float]:
    """Minutes into the last phase at which a verdict came first.

    Args:
        ends: minutes after which node 0 has ended well.
        ray: number of nodes of a program beside Ray, with twenty processes on each.
    """
    watch = Watch(least_s)
    now = 1000.0
    watch.begin(now, spins=gpus)
    head = head_of_ray(ray, now, gpus, least_s) if ray else None
    processes = 20 * bool(ray)
    totals = [dict.fromkeys(("steps", "cpu", "bytes"), 0.0) for _ in range(2)]
    lines, written = [NewLines(), NewLines()], [0, 0]
    began, found = now, dict[Verdict, float]()
    for phase in phases:
        started = now
        nodes_do = [phase, replace(phase, **phase.other)]
        while now - started < phase.minutes * MINUTE:
            now += EVERY_S
            has_ended = ends is not None and now - began >= ends * MINUTE
            for number, does in enumerate(nodes_do):
                for name in totals[number]:
                    totals[number][name] += getattr(does, name) * EVERY_S
                totals[number]["cpu"] += 0.007 * processes * EVERY_S
                num = int((now - started) // does.each_s)
                if does.says and num > (now - EVERY_S - started) // does.each_s:
                    lines[number].hear(does.says(num))
                if does.writes and not TRACKERS.search(f"work/{does.writes}"):
                    written[number] = int(now)
            samples = {
                number: Signs(
                    steps={number: int(total["steps"])} if total["steps"] >= 1 else {},
                    cpu_s=total["cpu"],
                    idle=ray_watch._IDLE * processes,
                    moved=int(total["bytes"]),
                    lines=lines[number].num_new,
                    printed=lines[number].num,
                    written_ns=written[number],
                    is_served=phase.is_served,
                )
                for number, total in enumerate(totals)
                if number or not has_ended
            }
            verdict = heard(watch, head, now, phase, samples, has_ended)
            if verdict is not Verdict.ALIVE and phase is phases[-1]:
                found.setdefault(verdict, (now - started) / MINUTE)
            elif verdict is Verdict.HUNG:
                raise AssertionError(f"hung in {phase}")
            if verdict is Verdict.HUNG:
                return found
    return found


#: Limits of the page: ten minutes (or more, after a pause), and before that at most an hour in
#: which processes wait for GPUs, or four of other signs.
HANGS: dict[str, tuple[list[Phase], dict[str, Any], float | None, float]] = {
    "all wait": ([START, TRAIN, DEAD], {}, 3, 10),
    "a rank sleeps, NCCL spins": ([START, TRAIN, Phase(cpu=1, other={"cpu": 0})], GPUS, 3, 70),
    **{
        f"a lock, and a thread that writes {name}": (
            [START, TRAIN, Phase(bytes=5e4, cpu=0.03, writes=name)],
            {},
            3,
            10,
        )
        for name in (
            "wandb/run-1/files/wandb-summary.json",
            "runs/a/events.out.tfevents.17.host.1.0",
            "mlruns/0/a/metrics/gpu",
            "logs/rank0.txt",
        )
    },
    "a thread that says that it waits": (
        [START, TRAIN, Phase(says=waiting, each_s=50)],
        {},
        None,
        250,
    ),
    "the same beside NCCL": ([START, TRAIN, Phase(says=waiting, cpu=1)], GPUS, None, 250),
    "a logger of ever other sentences": ([START, TRAIN, Phase(says=sentence)], {}, None, 250),
    "a logger that counts to five": (
        [START, TRAIN, Phase(says=counting(5), cpu=1)],
        GPUS,
        None,
        251,
    ),
    "a spinning lock, no GPU": ([START, TRAIN, SPIN], {}, None, 250),
    "a reader of a FIFO": ([DEAD], {}, 3, 10.5),
    "a rendezvous that nobody joins": ([START, DEAD], {}, 3, 10.5),
    "NCCL before the first step": ([START, SPIN], GPUS, None, 250),
    "an exit, on one node": ([START, TRAIN, DEAD], {"ends": 22}, 1.5, 5),
    "an exit that spins, on one node": ([START, TRAIN, SPIN], {"ends": 22, **GPUS}, 3, 65),
    "after a slow pause": ([START, TRAIN, Phase(minutes=8), TRAIN, DEAD], {}, 12.3, 24.5),
    "NCCL, after a silent evaluation": (
        [START, TRAIN, Phase(minutes=55, cpu=1), TRAIN, SPIN],
        GPUS,
        None,
        60 + 55 + 60.1,
    ),
    "a thread that says that it waits, after a silent evaluation": (
        [START, TRAIN, Phase(minutes=55, cpu=1), TRAIN, Phase(says=waiting)],
        GPUS,
        None,
        240 + 55 + 60.1,
    ),
    "NCCL, after an evaluation that prints": (
        [START, TRAIN, Phase(minutes=300, cpu=1, says=sentence), TRAIN, SPIN],
        GPUS,
        3,
        71,
    ),
    "all wait, after a long save": (
        [START, TRAIN, Phase(minutes=200, bytes=3e6), TRAIN, DEAD],
        {},
        None,
        200 + 60.1,
    ),
    "a resource of Ray never comes": ([Phase(asks=1)], {"ray": "1"}, 3, 10.6),
    "the same, and a host could": ([Phase(asks=1)], {"ray": "1:2"}, 33, 41),
    "a lost worker of Ray": ([START, TRAIN, Phase(workers=0)], {"ray": "1"}, 33, 41),
    "a limit of a minute": ([START, TRAIN, DEAD], {"least_s": 60}, 1, 1),
}


@BOTH
@pytest.mark.parametrize(("phases", "options", "reported", "ended"), HANGS.values(), ids=HANGS)
def test_a_hang_is_reported_and_ends(
    phases: list[Phase], options: dict[str, Any], reported: float | None, ended: float, ray: str
) -> None:
    found = play(phases, **{"ray": ray * ("ends" not in options), **options})
    assert found[Verdict.HUNG] <= ended + (0.6 if ray else 0.1)  # nodes look
    assert found[Verdict.HUNG] > ended * 0.8
    if reported is not None:
        assert found[Verdict.SILENT] <= reported


HONEST: dict[str, tuple[list[Phase], dict[str, Any]]] = {
    "a compiler": ([START, Phase(minutes=15, cpu=1), TRAIN], GPUS),
    "a compiler after a step": (
        [START, Phase(minutes=1, steps=0.02, cpu=1), Phase(minutes=40, cpu=1), TRAIN],
        GPUS,
    ),
    "a download": ([Phase(minutes=180, bytes=5e6), TRAIN], {}),
    "a download that prints, slowly": ([Phase(minutes=600, bytes=1e5, says=waiting), TRAIN], GPUS),
    "a silent evaluation on a GPU": ([START, TRAIN, Phase(minutes=50, cpu=1), TRAIN], GPUS),
    "each evaluation longer than the one before": (
        [START, TRAIN, Phase(minutes=40, cpu=1), TRAIN, Phase(minutes=130, cpu=1), TRAIN],
        GPUS,
    ),
    "a silent evaluation without one": ([START, TRAIN, Phase(minutes=180, cpu=1), TRAIN], {}),
    "an evaluation that counts": (
        [START, TRAIN, Phase(minutes=600, cpu=1, says=counting(4000))],
        GPUS,
    ),
    "the same count, after each epoch": (
        [START, *[TRAIN, Phase(minutes=300, cpu=1, says=counting(2000))] * 3],
        GPUS,
    ),
    "an evaluation that counts as it likes": (
        [START, TRAIN, Phase(minutes=235, cpu=1, says=lambda n: f"batch {n}"), TRAIN],
        GPUS,
    ),
    "tqdm": ([START, TRAIN, Phase(minutes=600, cpu=1, says=bar)], GPUS),
    "generated text": ([START, TRAIN, Phase(minutes=900, cpu=1, says=sentence, each_s=300)], GPUS),
    "one node evaluates, the other waits": (
        [START, TRAIN, Phase(minutes=600, cpu=1, says=sentence, other={"cpu": 0, "says": None})],
        {},
    ),
    "answers of a remote judge": ([START, TRAIN, Phase(minutes=230, says=sentence), TRAIN], GPUS),
    "rank 0 saves, the others wait": (
        [START, TRAIN, Phase(minutes=30, bytes=3e6, other={"bytes": 0}), TRAIN],
        {},
    ),
    "predictions in a file": ([START, TRAIN, Phase(minutes=220, writes="predictions.jsonl")], GPUS),
    "a file of a step's time in a log folder": (
        [START, TRAIN, Phase(minutes=200, writes="lightning_logs/v0/checkpoints/a.ckpt"), TRAIN],
        {},
    ),
    "a fit of trees": ([Phase(minutes=600, cpu=1)], {}),
    "data becomes tokens": ([Phase(minutes=120, cpu=8, bytes=1e8), TRAIN], {}),
    "JAX that prints": ([Phase(minutes=600, cpu=1, says=loss, each_s=100)], GPUS),
    "slow steps": (
        [START, *[Phase(minutes=0.1, steps=1, cpu=1), Phase(minutes=9, cpu=1)] * 20],
        GPUS,
    ),
    "slow steps that say so": (
        [START, *[Phase(minutes=0.1, steps=1), Phase(minutes=80, cpu=1, says=sentence)] * 5],
        GPUS,
    ),
    "a pause longer than before": (
        [START, TRAIN, Phase(minutes=9), TRAIN, Phase(minutes=25), TRAIN],
        {},
    ),
    "the rest on node 1": (
        [START, TRAIN, Phase(minutes=30, cpu=1, bytes=1e6), TRAIN],
        {"ends": 22},
    ),
    "an evaluation on the last node": (
        [START, TRAIN, Phase(minutes=60, cpu=1)],
        {"ends": 22, **GPUS},
    ),
    "one that prints on the last node": (
        [START, TRAIN, Phase(minutes=500, cpu=1, says=sentence)],
        {"ends": 22, **GPUS},
    ),
    "hosts of Ray come": ([Phase(minutes=29, workers=0), TRAIN], {"ray": "1"}),
    "actors evaluate, and print": (
        [START, TRAIN, Phase(minutes=600, says=sentence, other={"cpu": 1, "says": None})],
        GPUS,
    ),
    "a port with a connection": ([Phase(is_served=True)], {}),
    "actors work, the driver waits": ([Phase(other={"cpu": 1})], {}),
    "the driver works, actors wait": ([Phase(cpu=1, other={"cpu": 0})], {}),
    "no limit": ([START, TRAIN, DEAD], {"least_s": 0}),
}


@BOTH
@pytest.mark.parametrize(("phases", "options"), HONEST.values(), ids=HONEST)
def test_honest_silence_is_not_ended(
    phases: list[Phase], options: dict[str, Any], ray: str
) -> None:
    assert Verdict.HUNG not in play(phases, **{"ray": ray * ("ends" not in options), **options})


def test_what_the_driver_waits_for_is_named_and_else_the_driver() -> None:
    waiting = [found("idle", *NO_WORK), found("driver", *GETS)]
    assert where(waiting) == "driver was in <module> (train.py:7)"
    assert where([*waiting, found("actor", *LOADS)]) == "actor was in load (data.py:7)"


def test_a_connection_from_outside_is_one_to_a_port_of_the_program() -> None:
    own = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = f"import socket; s = socket.create_connection({server.getsockname()}); input()"
        client = subprocess.Popen((sys.executable, "-c", words), stdin=subprocess.PIPE)
        with server.accept()[0]:
            assert is_served({own})
            assert not is_served({own, client.pid})
        client.communicate()


def test_lines_of_ray_itself_are_no_sign_of_life() -> None:
    head = head_of_ray("1")
    for kind in ("(raylet)", "\x1b[36m(TrainController pid=7)\x1b[0m", "(RayTrainWorker pid=8)"):
        head.hear(kind)
    assert head._lines.num == 1


def test_a_silence_is_reported_once_and_a_head_that_stood_still_ends_nothing() -> None:
    watch = Watch(LIMIT)
    watch.begin(0.0)
    step = Signs(steps={0: 1})
    verdicts = []
    for now in range(5, 400, 5):
        watch.hear(now, {0: step})
        verdicts.append(watch.verdict(has_ended=False))
    assert verdicts.count(Verdict.SILENT) == 1
    watch.hear(4000.0, {0: step})
    assert watch.verdict(has_ended=False) is Verdict.ALIVE
    assert watch.words == "no step or new line for 0 s"


# --- what processes count, and where they are -----------------------------------------------------
def test_the_numbers_are_those_that_the_launcher_reads() -> None:
    source = (STARTUP.parents[1] / "watch" / "steps.py").read_text()
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
import os, threading, time, torch
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
class Data:
    def load(self):
        time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
Data().load()
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
        assert sorted(signs(program.left(), watched, lines=2).steps.values()) == [2, 10]
        for is_last in (False, True):
            found = look(program.left(), watched, node="1", is_last=is_last)
            assert [each.name for each in found] == ["rank 3 on node 1", "rank 4 on node 1"]
            assert [each.place.partition(" (program.py:")[0] for each in found] == ["load", "load"]
            assert not any(each.is_ending for each in found)
            # A signal, which adds stacks to the file, may crash a process that is well.
            sizes = {(watched / f"{pid}").stat().st_size for pid in program.left()}
            assert (sizes == {SIZE}) != is_last
        assert program.poll() is None
    finally:
        program.end()


def test_a_process_that_has_become_another_program_gets_no_signal(tmp_path: Path) -> None:
    program = ProgramProcess(("sleep", "600"), folder=None, environment=os.environ, emit=print)
    try:
        (pid,) = program.left()
        (tmp_path / str(pid)).write_bytes(struct.pack("3q", 5, 0, 1))
        (seen,) = look([pid], tmp_path, node="0", is_last=True)
        # It may have been looked at before it slept.
        assert seen.place in ("state S (sleeping)", "state R (running)")
        assert program.poll() is None
    finally:
        program.end()


def test_a_stack_that_may_not_be_read_is_reported_and_costs_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = tmp_path / "py-spy"
    refused.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(processes.SIGNAL, file=file)
        try:
            pid = os.getpid()
            (tmp_path / f"{pid}").write_bytes(struct.pack("3q", 5, 0, file.fileno()))
            (seen,) = look([pid], tmp_path, node="0", is_last=False)
            assert "cannot be read from outside: Error: Permission Denied" in seen.seen.details
            assert not Path(file.name).read_text()
            (seen,) = look([pid], tmp_path, node="0", is_last=True)
            assert ".py:" in seen.place
        finally:
            faulthandler.unregister(processes.SIGNAL)


def test_a_kernel_with_yama_lets_the_launcher_read_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Mock()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    for path, num in ((tmp_path / "none", 0), (tmp_path, 1)):
        monkeypatch.setattr(steps, "YAMA", str(path))
        steps._let_others_read()
        assert library.prctl.call_count == num
    assert library.prctl.call_args[0][0] == int.from_bytes(b"Yama")
    assert library.prctl.call_args[0][1].value == 2 ** (8 * ctypes.sizeof(ctypes.c_ulong)) - 1


def found(name: str, *frames: str, steps: int = 50, state: str = "S (sleeping)") -> Found:
    """``frames``: file and function of the main thread, innermost first."""
    lines = [f'  File "{each.split()[0]}", line 7 in {each.split()[1]}' for each in frames]
    details = "\n".join(
        [
            f'Thread 0x1 (most recent call first):\n  File "{LIB}/threading.py", line 1 in wait',
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
#: Of a driver that waits for an actor, of that actor, and of one without work.
GETS = [f"{LIB}/site-packages/ray/_private/worker.py get_objects", MAIN]
LOADS = ["/tmp/ray/data.py load", f"{LIB}/site-packages/ray/util/tracing.py _resume_span"]
NO_WORK = [f"{LIB}/site-packages/ray/_private/worker.py main_loop"]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            [found("c", f"{LIB}/queue.py get", "/app/data.py read", MAIN)],
            "c was in read (data.py:7)",
        ),
        ([found("c", *WAITS, steps=49)], "c was in <module> (train.py:7)"),
        ([found("c", *WAITS, state="T (stopped)")], "c was in state T (stopped)"),
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
