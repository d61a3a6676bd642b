"""Proves that the command watches a run from the first look at the data to the end of its
processes: a hang is described and ended, and a lost lease is noticed."""

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract import exits
from contract.errors import InputError
from contract.nodes import ONE_EACH, Range
from tests.clock import FakeClock
from tests.training.sample_events import start, step
from training import command
from training.record import reader
from training.record.events import (
    Event,
    Finished,
    Joined,
    Process,
    Reading,
    Silent,
    Stopped,
)
from training.record.result import Table
from training.runtime import driver, hang_detector
from training.runtime.driver import Driver
from training.runtime.processes import ProcessState
from training.settings import RunConfig

RANK = Process(rank=0, node="localhost", pid=1, born="1", stacks=3)
HANGS = "hangs"
"""From here on nothing comes."""
WAITS = "waits"
"""Nothing comes for nine seconds."""


class ScriptedWorkers:
    """Workers that send an event a second, those of ``prepares`` and then those of ``trains``."""

    start_text, stop_grace_s, logs, failure_code = "", 1.0, "", exits.FAILED

    def __init__(self, clock: FakeClock, prepares: Sequence[Any], trains: Sequence[Any]) -> None:
        self.clock = clock
        self.scripts = {"prepare": iter([*prepares]), "train": iter([*trains])}
        self.script: Iterator[Any] = iter(())
        self.is_done, self.is_hanging, self.failure = False, False, ""
        self.found: Any = None
        self.ended: list[Sequence[Process]] = []
        self.happens: dict[str, Callable[[], None]] = {}

    def start(self, num_workers: int) -> None:
        assert num_workers == 1

    def prepare(self, config: RunConfig) -> None:
        self.found, self.script = config, self.scripts["prepare"]

    def train(self, config: RunConfig, run_uri: str, fence: int) -> None:
        assert (config, fence) == (self.found, 1)
        assert run_uri
        self.is_done, self.script = False, self.scripts["train"]

    def poll(self) -> list[Event]:
        self.clock.now += 1 if not self.is_hanging else 9
        if self.ended:
            self.failure, self.is_done, self.found = "worker 0 ended (SIGKILL)", True, None
            return []
        event = None if self.is_hanging else next(self.script, None)
        self.is_done = event is None and not self.is_hanging
        self.is_hanging = self.is_hanging or event == HANGS
        self.clock.now += 8 * (event == WAITS)
        self.happens.get(str(event), lambda: None)()
        return [] if event is None or isinstance(event, str) else [event]

    def request_stop(self) -> None: ...

    def look(self, found: Sequence[Process]) -> list[ProcessState]:
        assert [*found] == [RANK]
        return [ProcessState(rank=0, state="T (stopped)", details="where it hangs")]

    def end(self, found: Sequence[Process]) -> None:
        self.ended.append(found)

    def close(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Play a script; returns the exit code, the workers and how long it took."""
    monkeypatch.setattr(Driver, "_catch_signals", lambda _: None)  # they are pytest's
    monkeypatch.setattr("training.record.page.write_report", lambda folder, *_, **__: folder)
    clock = FakeClock()
    made = functools.partial(hang_detector.HangDetector, clock=clock.time)
    monkeypatch.setattr(driver, "HangDetector", made)
    lease = SimpleNamespace(lost="", number=1, confirm=lambda: None, check=None)

    def play(prepares: Sequence[Any], trains: Sequence[Any] = ()) -> Any:
        words = ["ddp", "--local", "--run", "r", "--storage", str(tmp_path)]
        given = command.parse(words)
        config = command.configure(
            given,
            run="r",
            storage=str(tmp_path),
            workers=Range(1, 1),
            gpus=ONE_EACH,
        )

        (tmp_path / "r").mkdir(exist_ok=True)
        workers: Any = ScriptedWorkers(clock, prepares, trains)
        held: Any = lease
        driven = Driver(config, given, workers=workers, lease=held)
        workers.happens = {
            "lease lost": lambda: setattr(lease, "lost", "taken over by job x"),
            "Ctrl-C": lambda: driven._on_signal(signal.SIGINT, None),
        }
        return driven.run(), workers, clock.now

    return play


def test_a_hang_while_the_data_is_prepared_is_described_and_ended(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepares = [Joined(processes=(RANK,)), Reading(done=1, total=2), HANGS]
    code, workers, seconds = run(prepares)
    said = capsys.readouterr().err
    assert code == exits.FAILED
    assert workers.ended == [[RANK]]
    assert 7200 <= seconds < 7300
    assert "T (stopped)" in said
    (stacks,) = (tmp_path / "r" / "stacks").iterdir()
    assert stacks.read_text() == "where it hangs\n"


def test_a_process_that_hangs_after_the_model_is_published_does_not_undo_the_end(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    details = Table(title="t", heads=("a",), rows=((1.0,),))
    finished = Finished(step=1, loss=0.5, seconds=1.0, evaluation=details)
    # First it waits for hosts, longer than data may be silent: Ray may use the process again.
    trains = [*[WAITS] * 500, Joined(processes=(RANK,)), start(), step(1), finished, HANGS]
    code, workers, seconds = run([Joined(processes=(RANK,))], trains)
    assert code == exits.OK
    assert workers.ended == [[RANK]]
    assert 1800 <= seconds - 4500 < 1900
    assert reader.read_metrics(str(tmp_path / "r")).of(Silent) == []
    result = reader.read_result(str(tmp_path / "r"))
    assert result is not None
    assert result.status == "succeeded"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([Stopped(step=1)], "step 1"),
        ([], "without saving"),
    ],
)
def test_what_is_said_of_a_stop_is_what_was_saved(
    run: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    events: list[Event],
    said: str,
) -> None:
    code, _, _ = run([], [start(), step(1), "Ctrl-C", *events])
    assert code == exits.INTERRUPTED
    assert said in capsys.readouterr().err


def test_a_lease_that_is_lost_while_the_data_is_prepared_ends_the_command(
    run: Callable[..., Any],
) -> None:
    with pytest.raises(InputError, match="taken over by job x"):
        run([Reading(done=1, total=2), "lease lost", HANGS])


def test_a_lease_that_is_lost_ends_the_training_at_once(run: Callable[..., Any]) -> None:
    code, _, seconds = run([], [start(), step(1), "lease lost", *[WAITS] * 50])
    assert (code, seconds < 60) == (exits.BAD_INPUT, True)
