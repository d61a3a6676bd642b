"""Proves that workers which hang are noticed, described and started again, and that those which
only take long are left alone."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from contract.nodes import ENV_SILENCE
from store import storage
from tests.clock import FakeClock
from tests.forks import FORKS
from tests.training.sample_events import step
from training import launch
from training.loop.saving import Saves
from training.record import reader
from training.record.events import (
    Evaluating,
    Event,
    Finished,
    Joined,
    Process,
    Reading,
    Resume,
    Saving,
    Silent,
    Start,
)
from training.runtime import local, outcome
from training.runtime.driver import Driver
from training.runtime.hang_detector import HangDetector
from training.runtime.processes import ProcessState
from training.runtime.torchrun import TorchrunWorker

LEAST_S = 300.0
#: Seconds, and the event after them; None: the workers start again.
Told = tuple[float, Event | None]


class Silence(HangDetector):
    """One whose time goes by only in ``wait``."""

    def __init__(self) -> None:
        self.time = FakeClock()
        super().__init__("", look=Mock(), end=Mock(), clock=self.time.time)

    def wait(self, seconds: float) -> bool:
        """Let time go by, and ask as the command does; whether it was ever too long."""
        end, found = self.time.now + seconds, False
        while self.time.now < end:
            self.time.now = min(end, self.time.now + 5)
            found = self.is_too_long() or found
        return found

    def tell(self, *told: Told) -> None:
        """Take events, each after a silence that is not too long, unless workers start again."""
        for after_s, event in told:
            is_long = self.wait(after_s)
            if event is None:
                self.forget()
            else:
                assert not is_long
                self.hear(event)


@pytest.fixture
def silence() -> Silence:
    return Silence()


def start(step: int = 0) -> Start:
    return Start(step=step, resumed=step > 0, world_size=2, total_steps=1000, device="CPU")


HALF_AN_HOUR, TWO_HOURS, NEVER = 1800.0, 7200.0, 1e9
JOINED = Joined(processes=())
BEGUN: list[Told] = [(0, start()), (1, step(1)), (1, step(2))]
EVALUATING: list[Told] = [*BEGUN, (0, Evaluating()), *[(1700, Evaluating())] * 5]
SAVES = Saving(step=2)
SAVING: list[Told] = [(0, SAVES), *[(30, SAVES)] * 59]
LAST_STEP: list[Told] = [(0, start(998)), (1, step(999)), (1, step(1000))]


def stepped(step_s: float) -> list[Told]:
    return [(0, start()), *((step_s, step(number)) for number in range(1, 9))]


#: Seconds and the event after them, and the seconds of silence after which they are too long.
LIMITS: dict[str, tuple[list[Told], float]] = {
    "no process is known yet": ([], NEVER),
    "reading": ([(0, JOINED), (7100, Reading(done=1, total=2))], TWO_HOURS),
    "started again": ([*BEGUN, (0, None), (7100, JOINED)], TWO_HOURS),
    "first step": ([(0, start())], HALF_AN_HOUR),
    # Twenty steps, and never less than five minutes.
    "10 s a step": (stepped(10.0), LEAST_S),
    "60 s a step": (stepped(60.0), 1200.0),
    "evaluating": (EVALUATING, HALF_AN_HOUR),
    # How long an evaluation or a save takes says nothing of the steps.
    "saved": ([*BEGUN, *SAVING, (0, step(3))], LEAST_S),
    # As long as S3 is asked again and again, and some more.
    "a save that writes nothing": ([*BEGUN, *SAVING], 30.0),
    "the last save": ([*LAST_STEP, *[(600, Saving(step=1000))] * 3], 600.0),
    "uploading": ([*LAST_STEP, (1700, Saving(step=1000)), (1700, Evaluating())], HALF_AN_HOUR),
    # The workers start again, and compile again.
    "restarted": ([*stepped(1), (LEAST_S + 10, None), (0, JOINED), (60, start())], HALF_AN_HOUR),
    "saving the same again": ([*BEGUN, (0, SAVES), (0, None), *BEGUN, (0, SAVES)], LEAST_S),
}


@pytest.mark.parametrize("name", LIMITS)
def test_workers_are_too_long_silent_for_what_they_do(name: str, silence: Silence) -> None:
    told, limit_s = LIMITS[name]
    silence.tell(*told)
    assert not silence.wait(min(limit_s, 2e4) - 1)
    if limit_s < NEVER:
        assert silence.wait(2)


def test_the_steps_of_one_report_share_its_time(silence: Silence) -> None:
    silence.tell((0, start()), (5, step(1)))
    silence.time.now += 100
    silence.hear(*map(step, range(2, 12)))  # 10 s each: a pause of 100 s counts for more
    assert silence.limit_s() == LEAST_S
    silence.time.now += 200
    silence.hear(*map(step, range(12, 22)))
    assert silence.limit_s() == 600


@pytest.mark.parametrize("fails", [False, True], ids=["storage answers", "storage fails"])
def test_workers_are_ended_before_their_stacks_are_written_with_few_tries(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, done = FakeClock(), Mock()
    done.write.side_effect = OSError("no answer") if fails else None
    monkeypatch.setattr(storage, "write_bytes", done.write)
    seen = ProcessState(rank=0, state="D (disk sleep)", details="where it hangs")
    watch = HangDetector("s3://b/runs/r", look=lambda _: [seen], end=done.end, clock=clock.time)
    process = Process(rank=0, node="n", pid=1, born="1", stacks=3)
    watch.hear(Joined(processes=(process,)), start(4))
    while (found := watch.restart_if_silent()) is None:
        clock.now += 9
    uri, _ = done.write.call_args.args
    written = call.write(uri, b"where it hangs\n", quick=True)
    assert done.mock_calls == [call.end([process]), written]
    assert found.states == ("rank 0: D (disk sleep)",)
    assert found.stacks == ("" if fails else uri.removeprefix("s3://b/runs/r/"))


def test_a_command_that_stood_still_itself_blames_nobody(silence: Silence) -> None:
    """Ctrl-Z, a container that was paused, a laptop that slept."""
    silence.tell(*BEGUN)
    silence.time.now += 3600
    assert not silence.wait(LEAST_S - 1)
    assert silence.wait(10)
    assert silence.step == 2


# --- ranks that hang ------------------------------------------------------------------------------

#: Seconds, in place of five minutes: more than a step takes on a machine that is busy.
LIMIT_S = 2.5
#: What hangs, and on which rank.
HANGS = [f"{what} {rank}" for what in ("process", "read", "save") for rank in (0, 1)]


def train(
    send: Callable[[Sequence[Event]], None],
    _settings: object,
    run_uri: str,
    fence: int,
    store: str,
) -> object:
    """A loop in place of a recipe's, with the worker, the saves and the collectives of one. Each
    start saves after four steps, and meets the next one of the hangs soon after that.
    """
    folder = Path(run_uri).parents[1]
    worker = TorchrunWorker(run_uri=run_uri, fence=fence, store=store)
    worker.on_events = lambda *events: send(events)
    worker.saves = Saves(worker.emit, report_every_s=0.2)
    outcome.introduce(worker, node="localhost", host="localhost")
    group = dist.new_group(backend="gloo")
    begun = int((folder / "saved").read_text())
    hang = [*(folder / "hangs").read_text().splitlines(), ""][begun // 4]

    def meet(what: str) -> None:
        if hang == f"{what} {worker.rank}":
            if what == "process":
                os.kill(os.getpid(), signal.SIGSTOP)
            (folder / "blocks").read_bytes()  # nobody ever writes to this pipe

    def save(number: int) -> str:
        if number == begun + 8:
            meet("save")
        dist.barrier(group)
        (folder / "saved").write_text(str(number))
        return ""

    total = 4 * len(HANGS) + 8
    worker.emit(Start(step=begun, resumed=begun > 0, world_size=2, total_steps=total, device="CPU"))
    for number in range(begun + 1, total + 1):
        if number == begun + 6:
            worker.saves.finish()
            meet("process")
            meet("read")
        dist.all_reduce(torch.ones(1))
        worker.emit(step(number))
        if number % 4 == 0:
            worker.saves.start(number, partial(save, number))
    worker.saves.finish()
    worker.emit(Finished(step=total, seconds=1.0))
    return local._Done()


@pytest.mark.slow
@pytest.mark.parametrize(
    "hangs",
    [
        pytest.param(["read 0", "process 1", "save 1"], marks=pytest.mark.long),
        pytest.param(HANGS, marks=pytest.mark.night),
    ],
    ids=len,
)
def test_a_rank_that_hangs_is_noticed_in_time_and_named_and_all_resume(
    hangs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "hangs").write_text("\n".join(hangs))
    (tmp_path / "saved").write_text("0")
    os.mkfifo(tmp_path / "blocks")
    FORKS.Process().start()  # the server with torch, not one that the command would start
    monkeypatch.setenv(ENV_SILENCE, str(LIMIT_S))
    monkeypatch.setattr(local, "_train", train)
    monkeypatch.setattr(Driver, "_catch_signals", lambda _: None)  # they are pytest's
    words = ["ddp", "--local", "--workers", "2", "--max-failures", "1", "--run", "hung"]
    assert launch.main([*words, "--storage", str(tmp_path / "runs")]) == 0

    run, err = tmp_path / "runs" / "hung", capsys.readouterr().err
    metrics = reader.read_metrics(str(run))
    # One failure each, and no second one in a row: each start has resumed from a later step.
    assert [each.step for each in metrics.of(Resume)] == [4 * n + 4 for n in range(len(hangs))]
    assert err.count("all start again from the last checkpoint") == len(hangs)
    for hang, silent in zip(hangs, metrics.of(Silent), strict=True):
        what, rank = hang.split()
        # A start whose five steps reached a busy command at once has no pace that it could be held
        # to: it gets the longer limit, as every save does. What is above is the machine's delay.
        assert silent.seconds >= (6 * LIMIT_S if what == "save" else LIMIT_S), silent
        assert silent.seconds < 6 * LIMIT_S + 10, silent
        assert f"after step {silent.after:,}" in err
        assert (f"rank {rank}: T (stopped)" in silent.states) == (what == "process"), silent
        assert Path(__file__).name in (run / silent.stacks).read_text()
    assert (run / "report.html").exists()
