"""Proves that workers which hang are noticed, described and started again, and that those which
only take long are left alone."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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
    Evaluation,
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
from training.runtime.hang_detector import HangDetector, Watch
from training.runtime.processes import Seen
from training.runtime.torchrun import TorchrunWorker

LEAST_S = 300.0


class Silence(HangDetector):
    """One whose time goes by only in ``wait``."""

    def __init__(self) -> None:
        self.time = FakeClock()
        super().__init__(LEAST_S, clock=self.time.time)

    def wait(self, seconds: float) -> bool:
        """Let time go by, and ask as the command does; whether it was ever too long."""
        end, found = self.time.now + seconds, False
        while self.time.now < end:
            self.time.now = min(end, self.time.now + 5)
            found = self.is_too_long() or found
        return found

    def tell(self, *told: tuple[float, Event]) -> None:
        """Events, each so many seconds after the one before, which is never too long."""
        for after_s, event in told:
            assert not self.wait(after_s)
            self.hear(event)


@pytest.fixture
def silence() -> Silence:
    return Silence()


def start(step: int = 0) -> Start:
    return Start(step=step, resumed=step > 0, world_size=2, total_steps=1000, device="CPU")


@pytest.fixture
def stepping(silence: Silence) -> Silence:
    """After two steps of a second each."""
    silence.tell((0, start()), (1, step(1)), (1, step(2)))
    return silence


def test_data_and_models_may_take_two_hours_between_two_signs_of_life(silence: Silence) -> None:
    assert not silence.wait(1e4), "no process is known yet"
    silence.tell((0, Joined(processes=())), (7100, Reading(done=1, total=2)))
    assert not silence.wait(7100)
    silence.tell((0, Joined(processes=())))  # those that train
    assert not silence.wait(7100)
    assert silence.wait(200)


@pytest.mark.parametrize(
    ("step_s", "limit_s"), [(0.1, LEAST_S), (10.0, LEAST_S), (60.0, 1200.0), (600.0, 12000.0)]
)
def test_twenty_steps_are_too_long_and_never_less_than_five_minutes(
    step_s: float, limit_s: float, silence: Silence
) -> None:
    silence.tell((0, start()), *((step_s, step(number)) for number in range(1, 9)))
    assert not silence.wait(limit_s - 1)
    assert silence.wait(2)
    assert (silence.step, silence.seconds) == (8, limit_s + 1)


def test_the_steps_of_one_report_share_its_time(silence: Silence) -> None:
    silence.tell((0, start()), (5, step(1)))
    silence.time.now += 100
    silence.hear(*map(step, range(2, 12)))  # 10 s each: a pause of 100 s counts for more
    assert silence.limit_s() == LEAST_S
    silence.time.now += 200
    silence.hear(*map(step, range(12, 22)))
    assert silence.limit_s() == 600


def test_first_steps_and_each_sign_of_an_evaluation_may_take_half_an_hour(silence: Silence) -> None:
    seconds = 1700.0
    silence.tell((0, start()))
    assert not silence.wait(seconds)
    assert silence.wait(200)
    silence.tell((0, step(1)), (1, step(2)), (0, Evaluating()))
    for _ in range(5):
        assert not silence.wait(seconds)
        silence.tell((0, Evaluating()))
    assert silence.wait(seconds + 200)
    silence.tell((0, Evaluation(step=2, epoch=1.0)))
    assert silence.limit_s() == LEAST_S, "how long an evaluation takes says nothing of the steps"


def test_the_first_step_after_a_restart_may_take_as_long_as_that_of_the_first_start(
    silence: Silence,
) -> None:
    silence.tell((0, start()), *((1, step(number)) for number in range(1, 9)))
    assert silence.wait(LEAST_S + 10)
    silence.forget()
    silence.tell((0, Joined(processes=())), (60, start()))
    assert not silence.wait(1700)  # it compiles again
    silence.tell((0, step(1)))
    assert silence.wait(LEAST_S + 10)


@pytest.mark.parametrize("last", [2, 1000], ids=["in between", "after the last step"])
def test_a_save_that_writes_nothing_for_half_an_hour_is_too_long(
    last: int, silence: Silence
) -> None:
    silence.tell((0, start()), (1, step(1)), (1, step(last)), (0, Saving(step=last)))
    # As long as S3 is asked again and again, and some more.
    silence.tell(*((30, Saving(step=last)) for _ in range(59)))
    assert silence.wait(35)
    assert silence.step == last


def test_how_long_a_save_was_waited_for_says_nothing_of_the_steps(stepping: Silence) -> None:
    stepping.tell((0, Saving(step=2)))
    stepping.tell(*((30, Saving(step=2)) for _ in range(30)), (0, step(3)))
    assert stepping.limit_s() == LEAST_S


@pytest.mark.parametrize("fails", [False, True], ids=["storage answers", "storage fails"])
def test_workers_are_ended_before_their_stacks_are_written_with_few_tries(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    clock = FakeClock()

    def write(uri: str, content: bytes, *, quick: bool = False) -> None:
        assert (content, quick) == (b"where it hangs\n", True)
        done.append(f"written to {uri}")
        if fails:
            raise OSError("no answer")

    seen = Seen(rank=0, state="D (disk sleep)", details="where it hangs")
    monkeypatch.setattr(storage, "write_bytes", write)
    watch = Watch(
        "s3://b/runs/r", look=lambda _: [seen], end=lambda _: done.append("ended"), clock=clock.time
    )
    process = Process(rank=0, node="n", pid=1, born="1", stacks=3)
    watch.hear(Joined(processes=(process,)))
    watch.hear(start(4))
    clock.now += 9
    assert watch.restart_if_silent() is None
    while (found := watch.restart_if_silent()) is None:
        clock.now += 9
    assert done[0] == "ended"
    (written,) = done[1:]
    assert found.states == ("rank 0: D (disk sleep)",)
    assert found.stacks == "" if fails else written == f"written to s3://b/runs/r/{found.stacks}"


def test_what_follows_the_last_step_may_take_half_an_hour_between_two_signs_of_life(
    silence: Silence,
) -> None:
    """The evaluation, the last save, the upload of the model, and the end of the processes."""
    silence.tell((0, start(998)), (1, step(999)), (1, step(1000)), (1700, Saving(step=1000)))
    silence.tell((1700, Evaluating()), (1700, Finished(step=1000, seconds=1.0)))
    assert not silence.wait(1700)
    assert silence.wait(200)


def test_after_a_restart_nothing_is_expected(silence: Silence) -> None:
    silence.tell((0, start()), (1, step(1)), (1, Saving(step=1)))
    silence.forget()
    assert not silence.wait(1e4)
    silence.tell((0, Saving(step=1)))  # the last word of one that is being ended
    silence.tell((5, start()), (1, step(1)))
    assert silence.wait(1e4)


def test_a_command_that_stood_still_itself_blames_nobody(stepping: Silence) -> None:
    """Ctrl-Z, a container that was paused, a laptop that slept."""
    stepping.time.now += 3600
    assert not stepping.wait(LEAST_S - 1)
    assert stepping.wait(10)


# --- ranks that hang ------------------------------------------------------------------------------

#: Seconds, in place of five minutes: more than a step takes on a machine that is busy.
LIMIT_S = 2.5
#: What hangs, and on which rank.
HANGS = [f"{what} {rank}" for what in ("process", "read", "save") for rank in (0, 1)]


def train(
    send: Callable[[Sequence[Event]], None], _settings: object, run_uri: str, fence: int
) -> object:
    """A loop in place of a recipe's, with the worker, the saves and the collectives of one. Each
    start saves after four steps, and meets the next one of the hangs soon after that.
    """
    folder = Path(run_uri).parents[1]
    worker = TorchrunWorker(run_uri=run_uri, fence=fence)
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
def test_a_rank_that_hangs_is_noticed_in_time_and_named_and_all_resume_where_they_were_saved(
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
    assert "Started again" in (run / "report.html").read_text()
