"""Proves that the record of a run survives kills and restarts, and says what happened."""

import errno
import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract import exits
from store import storage
from tests.aws.s3 import WRITES, Effect
from tests.training.bucket import RUN, Bucket, install
from tests.training.sample_events import start, step
from training.record import events, page, reader
from training.record.events import (
    Evaluation,
    Event,
    Failed,
    Finished,
    Measure,
    Noted,
    Preempted,
    RankTimes,
    Saved,
    Saving,
    Skipped,
    Start,
    Step,
    Stopped,
    Warned,
)
from training.record.fields import Rate
from training.record.goodput import Activity
from training.record.progress import Progress
from training.record.result import Result, Table
from training.record.writer import FLUSH_EVERY_S, RunRecord
from training.system import lease

SETTINGS = {"run": "r", "recipe": "ddp", "lr": 0.1}
BANDWIDTH = Measure(name="bus_bandwidth", unit="GB/s")


class Silent:
    """A display that shows nothing."""

    def __init__(self) -> None:
        self.shown: list[Event] = []
        self.reached: list[Progress] = []

    def show(self, event: Event) -> None:
        self.shown.append(event)

    def progress(self, progress: Progress) -> None:
        self.reached.append(progress)

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.shown if isinstance(event, Warned)]


def opened_at(uri: str, *, display: Silent | None = None, **options: Any) -> RunRecord:
    return RunRecord(
        uri,
        run="r",
        recipe="ddp",
        settings=SETTINGS,
        environment={"python": "3"},
        display=display or Silent(),
        **options,
    )


def opened(folder: Path, **options: Any) -> RunRecord:
    folder.mkdir(exist_ok=True)
    return opened_at(str(folder), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "r"


@pytest.fixture
def kept(folder: Path) -> RunRecord:
    return opened(folder)


def evaluation(epoch: int, rate: float = 100.0) -> Evaluation:
    return Evaluation(
        epoch=epoch,
        step=4 * epoch,
        loss=1 / epoch,
        measures={"accuracy": 0.5},
        rate=Rate(items="images", per_s=rate),
        seconds=float(epoch),
        flops_per_s=1e9 * rate,
        mfu=rate / 1000,
        gpu_utilization=rate / 200,
    )


def finished() -> Finished:
    details = Table(title="t", heads=("a",), rows=((1.0,),))
    figures = {"accuracy": 0.5}
    return Finished(step=8, loss=0.5, measures=figures, seconds=2.0, evaluation=details)


def tell(kept: RunRecord, *events: Event) -> None:
    for event in events:
        kept.handle(event)


def steps_of(folder: Path | str) -> list[int]:
    return [each.step for each in reader.read_metrics(str(folder)).of(Step)]


def result_of(folder: Path | str) -> Result:
    found = reader.read_result(str(folder))
    assert found is not None
    return found


def test_a_run_that_ends_leaves_every_file_of_its_record(kept: RunRecord, folder: Path) -> None:
    tell(kept, start(), *map(step, range(1, 5)), evaluation(1, 90.0))
    tell(kept, *map(step, range(5, 9)), evaluation(2, 110.0), finished())
    report = kept.close()
    assert report == folder / "report.html"
    assert kept.is_complete
    result = result_of(folder)
    assert result == kept.result
    assert result.rate == Rate(items="images", per_s=100.0)
    assert (result.flops_per_s, result.mfu, result.gpu_utilization) == (1e11, 0.1, 0.5)
    assert (result.steps, result.world_size, result.resumed_from) == (8, 2, None)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "environment.json", "evaluation.json", "metrics.jsonl"}
    assert names >= {"result.json", "report.html"}
    assert steps_of(folder) == [*range(1, 9)]


def test_a_worker_lost_on_the_way_does_not_make_the_attempt_a_resumed_one(
    kept: RunRecord, folder: Path
) -> None:
    tell(kept, start(), *map(step, range(1, 5)), evaluation(1), step(5))
    tell(kept, start(4, resumed=True), *map(step, range(5, 9)), evaluation(2), finished())
    assert kept.result is not None
    assert kept.result.resumed_from is None
    assert steps_of(folder) == list(range(1, 9))
    display = Silent()
    tell(opened(folder, display=display), start(8, resumed=True), start(4, resumed=True), start())
    assert [each.message for each in display.shown if isinstance(each, Noted)] == [
        "run r broke off at step 8, and its last checkpoint is of step 4: 4 steps to train again",
        "run r broke off at step 4, and its last checkpoint is missing: 4 steps to train again",
    ]


def test_times_are_those_of_all_attempts(folder: Path) -> None:
    now = [0.0]
    # The last one follows one that was killed, which has left no result.
    for end, total in ((Stopped(step=4, seconds=7.0), 100), (finished(), 200), (finished(), 102)):
        kept = opened(folder, clock=lambda: now[0])
        tell(kept, start(4, resumed=total > 100), step(5))
        now[0] += 100
        tell(kept, replace(end, seconds=102.0) if isinstance(end, Finished) else end)
        kept.close()
        result = result_of(folder)
        assert (result.total_seconds, result.seconds) == (total, 7 if total == 100 else 102)
        if total == 200:
            (folder / "result.json").unlink()


def test_skipped_steps_and_lost_hosts_are_counted_over_all_attempts_but_not_what_is_done_again(
    kept: RunRecord,
    folder: Path,
) -> None:
    def skipped(number: int) -> Skipped:
        return Skipped(step=number, grad_norm=2.0, time=1.0)

    def taken(*nodes: str) -> Preempted:
        return Preempted(nodes=nodes, time=1.0)

    tell(kept, start(), skipped(1), *map(step, range(2, 5)), skipped(5), skipped(6))
    # A host goes; the workers start again within this attempt.
    tell(kept, taken("a"), start(4, resumed=True))
    assert (
        '"type": "skipped", "step": 1, "grad_norm": 2.0' in (folder / "metrics.jsonl").read_text()
    )
    # The head is lost as well: another process keeps the record from here on.
    again = opened(folder)
    tell(again, start(4, resumed=True), step(5), skipped(6), taken("b", "c"), evaluation(2))
    tell(again, Saved(step=6), finished())
    assert reader.read_metrics(str(folder)).of(Saved) == [Saved(step=6)]
    assert again.result is not None
    result = again.result
    assert (result.skipped_steps, result.preempted, result.resumed_from) == (2, 3, 4)


def test_the_activity_of_a_job_is_recorded_over_restarts_of_workers_and_head(
    folder: Path,
) -> None:
    def activity() -> Activity:
        return Activity.from_json(json.loads((folder / "jobs" / "j1.activity").read_text()))

    kept = opened(folder, job="j1")
    saving = RankTimes(
        step=4, epoch=1, rank=0, steps=4, step_time_s=1.0, phases={"checkpoint": 0.25}
    )
    tell(kept, start(), *map(step, range(1, 5)), saving)
    tell(kept, start(2, resumed=True), step(3))
    kept.close()
    first, second = activity().segments
    assert (first.step, first.stepped, first.last, first.saving_s) == (4, 1, 4, 1.0)
    assert (second.first, second.step, second.resumes) == (2, 3, 2), "two steps are lost"
    tell(opened(folder, job="j1"), start(4, resumed=True))
    assert activity().segments[:2] == (first, second)


def test_damaged_lines_of_earlier_attempts_are_dropped_and_counted(folder: Path) -> None:
    tell(opened(folder), start(), *map(step, range(1, 5)), evaluation(1))
    path = folder / "metrics.jsonl"
    path.write_bytes(b'{"type": "sam\n' + path.read_bytes())
    assert reader.read_metrics(str(folder)).num_damaged == 1
    kept = opened(folder)
    tell(kept, start(4, resumed=True), step(5))
    kept.close()
    assert reader.read_metrics(str(folder)).num_damaged == 0
    assert result_of(folder).damaged_lines == 1


@pytest.mark.parametrize(
    ("last", "status", "error", "code"),
    [
        (finished(), "succeeded", None, exits.OK),
        (Stopped(step=5), "stopped", None, exits.OK),
        (Failed(message="it diverged", code=exits.STORAGE), "failed", "it diverged", exits.STORAGE),
    ],
    ids=["finished", "stopped", "failed"],
)
def test_the_result_has_how_a_run_ended_and_what_it_measured(
    last: Event, status: str, error: str | None, code: int, kept: RunRecord, folder: Path
) -> None:
    tell(kept, start(), *map(step, range(1, 5)), evaluation(1), step(5), last)
    assert kept.close() == folder / "report.html"
    result = result_of(folder)
    assert (result.status, result.error, kept.exit_code) == (status, error, code)
    assert result.measures == {"accuracy": 0.5}


def test_a_run_that_falls_short_fails_and_keeps_what_it_measured(folder: Path) -> None:
    """A recipe that trains nothing, judged by a figure of its own."""
    kept = opened(folder, measures=[BANDWIDTH])
    table = Table(title="All-reduce", heads=("bytes",), rows=((8.0,),))
    figures = {"bus_bandwidth": 41.5}
    tell(kept, Start(step=0, resumed=False, world_size=2, total_steps=2, device="CPU"))
    tell(kept, Evaluation(step=1, epoch=0, measures={"bus_bandwidth": 0.01}))
    tell(kept, Evaluation(step=2, epoch=0, measures=figures))
    short = "bus bandwidth is 41.5 GB/s, below --floor 80"
    tell(kept, Finished(step=2, measures=figures, seconds=1.0, evaluation=table, shortfall=short))
    kept.close()
    assert (kept.is_complete, kept.is_finished, kept.exit_code) == (False, True, exits.FAILED)
    result = result_of(folder)
    assert (result.status, result.error, result.loss, result.rate) == ("failed", short, None, None)
    assert result.measures == {"bus_bandwidth": 41.5}


def test_a_run_that_resumes_declares_its_measures_once(folder: Path) -> None:
    for number in range(3):
        kept = opened(folder, measures=[BANDWIDTH])
        tell(kept, start(number, resumed=number > 0), step(number + 1))
    assert reader.read_metrics(str(folder)).of(Measure) == [BANDWIDTH]


def test_lines_of_a_process_that_had_lost_the_run_do_not_count() -> None:
    line = '{"type": "step", "step": %d, "loss": %d, "lr": 1, "grad_norm": 1, "epoch": 1, "time": 1'
    texts = [f'{line % each}, "lease": {each[1]}}}' for each in ((1, 1), (2, 1), (2, 2), (3, 1))]
    resume = '{"type": "resume", "step": 1, "world_size": 2, "lease": 2}'  # step 2 is done again
    for last, steps in (("", [(1, 1), (2, 2)]), (resume, [(1, 1)])):
        found = events.parse_metrics("\n".join([*texts, last, ""]).encode())
        assert [(each.step, each.loss) for each in found.of(Step)] == steps


@pytest.mark.parametrize("place", ["disk", "S3"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "report.html"])
def test_a_process_that_stalls_right_after_its_look_at_the_lease_puts_nothing_old_back(
    name: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    uri = RUN if place == "S3" else str(folder)
    newer: list[bytes | None] = []
    writing: list[str] = []
    write_bytes = storage.write_bytes

    def noted(target: str, content: bytes, **options: Any) -> None:
        writing.append(target)
        write_bytes(target, content, **options)

    def check() -> None:
        """Stall the first time that the file is about to be replaced; see it the next time."""
        if newer:
            raise lease.LostError("taken over")
        if writing[-1] == storage.join(uri, name):
            train(2)
            newer.append(storage.read_bytes(storage.join(uri, name)))

    def train(number: int, **options: Any) -> None:
        kept = opened_at(uri, lease=number, **options)
        tell(kept, start(), *map(step, range(1, number + 1)), finished())
        kept.close()

    folder.mkdir()
    train(0)
    monkeypatch.setattr(storage, "write_bytes", noted)
    with suppress(lease.LostError):  # where it is written to disk: that ends the command
        train(1, check=check)
    assert newer[0]
    assert storage.read_bytes(storage.join(uri, name)) == newer[0]
    assert not [each for each in storage.sizes(uri) if each.startswith(".")]


def test_a_run_that_never_started_gets_no_result(kept: RunRecord, folder: Path) -> None:
    kept.handle(Failed(message="no data"))
    assert kept.close() is None
    assert reader.read_result(str(folder)) is None


def test_a_run_is_complete_on_disk_only_once_its_report_is_there(
    kept: RunRecord, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(run_dir: Path, result: Result, **_: object) -> Path:
        assert reader.read_result(str(run_dir)) is None, "a kill in here would leave no report"
        return run_dir / result.status

    monkeypatch.setattr(page, "write_report", drawn)
    tell(kept, start(), step(1), finished())
    kept.flush()
    assert kept.close() == folder / "succeeded"
    assert result_of(folder).status == "succeeded"


class SlowBucket(Bucket):
    """One whose requests take time, may fail, and are listed: file, and whether it was quick."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now)
        self.now, self.put_s = 0.0, 0.1
        self.fails = False
        self.tries: list[tuple[str, bool]] = []
        self.display = Silent()

    def request(self, operation: str, key: str, effect: Effect, content: bytes = b"") -> Any:
        if operation in WRITES:
            self.now += self.put_s
            self.tries.append((key.rpartition("/")[2], self.is_quick))
            if self.fails:
                raise OSError(16, "Please reduce your request rate.")
        return super().request(operation, key, effect, content)

    @property
    def num_puts(self) -> int:
        """How often lines were written, or tried to be."""
        return [name for name, _ in self.tries].count("metrics.jsonl")

    def opened(self) -> RunRecord:
        """A record in it, of a run that has done its first step."""
        kept = opened_at(RUN, clock=lambda: self.now, display=self.display)
        tell(kept, start(), step(1))
        return kept


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> SlowBucket:
    bucket = SlowBucket()
    install(monkeypatch, bucket)
    return bucket


@pytest.mark.parametrize(
    ("event", "after_s", "is_there"),
    [
        (step(3), 0, False),
        (Saving(step=2), 0, True),
        (Preempted(nodes=("a",), time=1.0), 0, True),
        (evaluation(1), 0, True),
        (None, FLUSH_EVERY_S - 1, False),
        (None, FLUSH_EVERY_S + 1, True),
    ],
    ids=["a step", "a save", "a lost host", "an evaluation", "soon", "after a minute"],
)
def test_lines_reach_s3_before_they_could_be_missed(
    event: Event | None, after_s: float, is_there: bool, bucket: SlowBucket
) -> None:
    kept = bucket.opened()
    assert steps_of(RUN) == [1]  # the first step after a start
    kept.handle(step(2))
    bucket.now += after_s
    kept.handle(event) if event else kept.flush_in_time()
    assert (2 in steps_of(RUN)) == is_there
    num_puts = bucket.num_puts
    kept.handle(Saving(step=2))
    assert bucket.num_puts - num_puts == (not is_there), "nothing was new"
    tell(kept, start(2, resumed=True), step(3))
    assert steps_of(RUN) == [1, 2, 3]


def test_lines_wait_longer_where_writing_takes_long(bucket: SlowBucket) -> None:
    kept = bucket.opened()
    bucket.now += FLUSH_EVERY_S + 1
    bucket.put_s = 3.0  # the file has become large
    kept.handle(step(2))
    bucket.now += FLUSH_EVERY_S + 1
    kept.handle(step(3))
    assert steps_of(RUN) == [1, 2]
    bucket.now += 3.0 * 50
    kept.flush_in_time()
    assert steps_of(RUN) == [1, 2, 3]


def test_a_storage_that_fails_holds_up_nothing_and_misses_nothing(
    bucket: SlowBucket,
) -> None:
    kept = bucket.opened()
    bucket.fails = True
    bucket.tries.clear()
    tell(kept, step(2), evaluation(1), Saving(step=2), step(3), evaluation(2))
    assert bucket.tries == [("metrics.jsonl", True)]  # one short try a minute
    (warning,) = bucket.display.warnings
    assert "Please reduce" in warning
    bucket.now += FLUSH_EVERY_S + 1
    kept.flush_in_time()
    assert bucket.num_puts == 2
    bucket.fails = False
    bucket.now += FLUSH_EVERY_S + 1
    kept.flush_in_time()
    assert steps_of(RUN) == [1, 2, 3]
    tell(kept, finished())
    (kept.folder / "tensorboard").mkdir()
    (kept.folder / "tensorboard" / "trace.json").write_text("{}")
    assert kept.close() is None
    assert not kept.folder.exists()
    assert kept.error is None
    sent = list(dict.fromkeys(name for name, _ in bucket.tries))
    assert sent.index("report.html") < sent.index("trace.json") < sent.index("result.json")


def test_a_result_that_cannot_be_written_is_an_error_and_stays_here(
    bucket: SlowBucket,
) -> None:
    kept = bucket.opened()
    bucket.fails = True
    tell(kept, finished())
    bucket.tries.clear()
    kept.close()
    patient = [name for name, quick in bucket.tries if not quick]
    assert patient == [bucket.tries[0][0]], "the others are tried once"
    assert bucket.tries[-1][0] == "result.json", "the run is complete once it is there"
    assert kept.exit_code == exits.STORAGE
    assert "result.json" in str(kept.error)
    assert str(kept.folder) in str(kept.error)
    assert result_of(str(kept.folder)).status == "succeeded"
    shutil.rmtree(kept.folder)


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_under_the_record_of_a_run_in_s3_costs_nothing(
    bucket: SlowBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = bucket.opened()
    write = storage.write_bytes

    def only_in_s3(uri: str, content: bytes, **options: Any) -> None:
        if not storage.is_s3(uri):
            full()
        write(uri, content, **options)

    with monkeypatch.context() as patch:
        opens = Path.open
        patch.setattr(
            Path,
            "open",
            lambda path, mode="r", **options: (
                full() if mode == "a" else opens(path, mode, **options)
            ),
        )
        patch.setattr(storage, "write_bytes", only_in_s3)
        tell(kept, step(2), evaluation(1), Preempted(nodes=("a",), time=1.0), Saving(step=2))
        tell(kept, start(2, resumed=True), step(3))
    tell(kept, step(4), finished())
    kept.close()
    assert len(bucket.display.warnings) == 1
    assert steps_of(RUN) == [1, 2, 3, 4]
    assert kept.error is None
    assert kept.exit_code == exits.OK
    assert result_of(RUN).status == "succeeded"


@pytest.mark.parametrize("is_full_to_the_end", [False, True])
def test_a_result_that_a_full_disk_refuses_is_written_in_the_end_or_an_error(
    is_full_to_the_end: bool, kept: RunRecord, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(kept, start(), step(1))
    monkeypatch.setattr(storage, "write_bytes", full)
    tell(kept, finished())
    if is_full_to_the_end:
        kept.close()
        assert kept.exit_code == exits.STORAGE
        assert kept.error == f"evaluation.json, result.json could not be written to {folder}"
        return
    monkeypatch.undo()
    kept.close()
    assert result_of(folder).status == "succeeded"
    assert kept.exit_code == exits.OK


@pytest.mark.parametrize("makes_a_step", [False, True])
def test_an_earlier_run_is_replaced_with_the_first_step_and_not_before(
    tmp_path: Path, makes_a_step: bool
) -> None:
    earlier = {"config.json": b"{}", "result.json": b"a week of work", "metrics.jsonl": b""}
    for name, content in earlier.items():
        (tmp_path / name).write_bytes(content)

    def replace_it() -> None:
        for name in earlier:
            (tmp_path / name).unlink()

    record = opened(tmp_path, replace=replace_it)
    record.handle(start(), *([step(1)] if makes_a_step else []))
    record.handle(Failed(message="no memory", code=3))
    record.close()
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert (record.error, record.exit_code) == ("no memory", 3)
    if not makes_a_step:
        assert found == earlier
        return
    assert json.loads(found["config.json"]) == SETTINGS
    assert found["metrics.jsonl"].count(b"\n") == 1
    world = json.loads(found["result.json"])["world_size"]
    assert world == start().world_size, "what came before the step is taken too"
