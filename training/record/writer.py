"""Writer of a run's record: every event becomes a line, a figure or a file in the run's folder.

One process does it: the command itself under Ray, rank 0 under torchrun. A folder on disk is
written line by line. In S3 nothing can be appended to: ``metrics.jsonl`` is written there as a
whole, whenever its lines must survive the loss of this process, and once a minute.
"""

import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from contract import exits, faults, runs
from contract.secret_text import masked
from contract.text import counted
from store import storage
from training.record import events, fields, reader
from training.record.events import (
    Evaluation,
    Event,
    Failed,
    Finished,
    Loaded,
    Measure,
    Metrics,
    Noted,
    Phase,
    Preempted,
    RankTimes,
    Resume,
    Sample,
    Saved,
    Saving,
    Silent,
    Skipped,
    Start,
    Step,
    Stopped,
    Warned,
    without_redone,
)
from training.record.fields import Rate
from training.record.goodput import Activity, Recorder
from training.record.progress import EVERY_S, Pace, Progress, Spending
from training.record.result import SUCCEEDED, Evaluated, Result, Status
from training.record.trackers import FILES, UPLOAD_S, Trackers

#: How long new lines may be missing in S3: what a lost head costs of the record at most.
FLUSH_EVERY_S: Final = 60.0
#: Share of the time that may go into writing them again: the file of a long run is large.
_FLUSH_SHARE: Final = 0.02

#: Events with a line in ``metrics.jsonl``, but for those that ``_on_start`` writes.
_LINES: Final = (
    Evaluation,
    Loaded,
    Preempted,
    RankTimes,
    Sample,
    Saved,
    Silent,
    Skipped,
    Step,
)
#: Events after which the record is flushed: lines before a checkpoint are not written again.
_FLUSHED: Final = (Evaluation, Preempted, Saving, Silent)

T = TypeVar("T")


class EventDisplay(Protocol):
    """Shows events to a person as they come."""

    def show(self, event: Event) -> None: ...

    def progress(self, progress: Progress) -> None: ...


@dataclass(eq=False)
class RunRecord:
    """Keeps ``<storage>/<run>/`` up to date from the events of rank 0; it may hold the lines of
    earlier attempts."""

    run_uri: str
    _: KW_ONLY
    run: str
    recipe: str
    settings: Mapping[str, object]
    """Content of ``config.json``."""
    environment: Mapping[str, object]
    """Content of ``environment.json``."""
    display: EventDisplay
    measures: Sequence[Measure] = ()
    """Figures besides the loss by which the recipe's runs are judged."""
    use: Sequence[str] = ()
    """Lines that use the trained model, for the report."""
    report_to: Sequence[str] = ()
    """Names of trackers that show the curves, too."""
    job: str = ""
    """Id of the job that trains the run; empty without one."""
    spending: Spending | None = None
    """Counts the cost of that job."""
    lease: int = 0
    """Number of the lease that this process holds; 0 without one. It is in each line: a late one,
    after a stall, does not count."""
    check: Callable[[], None] | None = None
    """See ``storage.write_bytes``: another process may take the run at any moment."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, from any beginning."""
    began: float | None = None
    """Reading of the clock when this attempt began; None: now."""
    replace: Callable[[], None] | None = None
    """Removes an earlier run of the name. It is called before the first step is written down;
    without a step nothing of the record is, and the earlier run stays."""

    def __post_init__(self) -> None:
        self.error: str | None = None
        self.exit_code = exits.OK
        self.stopped_at: int | None = None
        self._stopped_s: float | None = None
        self.result: Result | None = None
        self.is_finished = False
        self._evaluated: Evaluated | None = None
        now = self.clock()
        self._began = now if self.began is None else self.began
        self._flush_at = now + FLUSH_EVERY_S
        self._in_s3 = storage.is_s3(self.run_uri)
        self._check_on_disk = None if self._in_s3 else self.check
        # Content of what the run's folder lacks; None: as it is on this machine's disk.
        self._unsent: dict[str, bytes | None] = {}
        # What a disk that failed lacks, and whether that replaces all lines of an earlier attempt.
        self._lines: list[str] = []
        self._is_anew = False
        self._is_failing = self._is_disk_failing = False
        self._pace = Pace()
        self._last_step: Step | None = None
        self._shown_step = 0
        self._progress_at = math.inf
        self._start: Start | None = None
        self._num_damaged = 0
        self._resumed_from: int | None = None
        self._before_s = 0.0
        self._phases: list[Phase] = []
        self._step = 0
        self.first_step_at: float | None = None
        """Unix time at which the first step of this attempt was done."""
        self._held: list[Event] = []
        if self.replace is None:
            self._open()

    def _open(self) -> None:
        """Begin to write."""
        self._take_over_spending()
        self._recorder = Recorder(self._read_activity())
        self.folder = (
            Path(tempfile.mkdtemp(prefix="record-")) if self._in_s3 else Path(self.run_uri)
        )
        self._metrics = self.folder / runs.METRICS_FILE
        self._trackers = Trackers(
            self.report_to, self.folder, self.run, self.settings, say=self.display.show
        )
        storage.remove_leftovers(self.run_uri, *runs.RECORD[""])
        if self._in_s3:
            uri = storage.join(self.run_uri, runs.METRICS_FILE)
            if earlier := storage.read_bytes(uri):
                self._metrics.write_bytes(earlier)
        self._write_json(runs.CONFIG_FILE, self.settings)
        self._write_json(runs.ENVIRONMENT_FILE, self.environment)

    def handle(self, *found: Event) -> None:
        """Take the events of one report: write them down and show them."""
        for event in found:
            if self.replace is not None and isinstance(event, Step | Finished):
                self.replace()
                self.replace = None
                self._open()
                self._note(*self._held)
            if self.replace is None:
                self._note(event)
            elif isinstance(event, Failed):
                self._take(event)
            else:
                self._held.append(event)
            self.display.show(event)
        self.flush_in_time()

    def _note(self, *found: Event) -> None:
        for event in found:
            self._take(event)
            self._trackers.handle(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, _LINES):
            self._lines.append(self._line(event) + "\n")
            self._write_lines()
        match event:
            case Start():
                self._on_start(event)
            case Phase():
                self._phases.append(event)
                if event.hosts is not None and self.spending is not None:
                    self.spending.set_hosts(event.hosts)
            case Step() | Skipped():
                self._step = event.step
                self._recorder.step(event.time, event.step)
                if isinstance(event, Step):
                    self._on_step(event)
            case RankTimes(rank=0):
                self._recorder.save(event.phases.get("checkpoint", 0.0) * (event.steps or 0))
            case Stopped():
                self.stopped_at, self._stopped_s = event.step, event.seconds
            case Failed():
                self.error, self.exit_code = event.message, event.code
            case Finished():
                if event.evaluation is not None:
                    self._evaluated = event.evaluation
                    self._write_json(runs.EVALUATION_FILE, fields.to_json(event.evaluation))
                self._step = event.step
                self._last_step = None
                self.is_finished = True
                if event.shortfall is not None:
                    self.error, self.exit_code = event.shortfall, exits.FAILED
                self._set_result(event)
        if isinstance(event, _FLUSHED):
            self.flush()

    def _on_step(self, event: Step) -> None:
        is_first, self._last_step = self._last_step is None, event
        self._pace.add(event)
        if self.first_step_at is None:
            self.first_step_at = event.time
        if is_first:
            self.flush()

    @property
    def is_complete(self) -> bool:
        return self.result is not None and self.result.status == SUCCEEDED

    def close(self) -> Path | None:
        """Write the result and the report of what there is; return the report's path if local."""
        report = None
        if self.replace is not None:
            return None
        self._write_lines()
        if self._start is not None:
            if not self.is_finished:
                self._set_result()
            from training.record.page import write_report  # takes as long to load as all else

            assert self.result is not None
            try:
                if self._metrics.exists():  # a disk may have taken nothing of the record
                    report = self._on_disk(
                        partial(
                            write_report,
                            self.folder,
                            self.result,
                            metrics=self._read(),
                            settings=self.settings,
                            environment=self.environment,
                            evaluated=self._evaluated,
                            use=self.use if self.is_complete else (),
                            check=self._check_on_disk,
                        )
                    )
            finally:  # a run that has a result is complete: the report comes first
                self._write_activity()
                self._write_json(runs.RESULT_FILE, self.result.to_json())
        # An upload may take its time: meanwhile the run's own files are sent.
        self._trackers.close(self.exit_code, wait_s=3)
        self._send_all()
        self._trackers.close(self.exit_code, wait_s=UPLOAD_S)
        return None if self._in_s3 else report

    def _send_all(self) -> None:
        """Bring what is missing in the run's folder there, which in S3 may be any file, with the
        patience that it takes; the result last: a run that has one is complete."""
        names = {*self._unsent}
        if self._in_s3:
            found = self.folder.rglob("*")
            names |= {path.relative_to(self.folder).as_posix() for path in found if path.is_file()}
        missing: list[str] = []
        for name in sorted(names, key=lambda name: (name == runs.RESULT_FILE, name)):
            try:
                # Once it has failed for minutes, the others are tried once.
                self._write(name, quick=bool(missing))
            except Exception as error:  # s3fs lets botocore's many exceptions through
                missing.append(name)
                self._warn(error)
        if not missing:
            if self._in_s3:
                shutil.rmtree(self.folder, ignore_errors=True)
            return
        kept = f", and {'is' if len(missing) == 1 else 'are'} kept in {self.folder}"
        self.error = self.error or (
            f"{', '.join(missing)} could not be written to {self.run_uri}"
            f"{kept if self._in_s3 else ''}"
        )
        self.exit_code = self.exit_code or exits.STORAGE

    def abandon(self) -> None:
        """Write no more: the run's folder belongs to another process now."""
        if self._in_s3 and self.replace is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def flush(self) -> None:
        """Bring S3 up to date, and have a folder on disk survive a loss of power."""
        if not self._in_s3 and self._metrics.exists():
            self._write_lines()
            self._on_disk(lambda: storage.sync(self._metrics))
            for name in sorted(self._unsent):
                self._on_disk(partial(self._write, name, quick=False))
        if self._in_s3:
            for path in (path for pattern in FILES for path in self.folder.glob(pattern)):
                self._unsent[path.relative_to(self.folder).as_posix()] = None
        if not self._unsent:
            return
        if self._is_failing and self.clock() < self._flush_at:
            return  # each try holds up what else this process does
        began = self.clock()
        if all(self._send(name) for name in sorted(self._unsent)):
            self._is_failing = False
        ended = self.clock()
        self._flush_at = ended + max(FLUSH_EVERY_S, (ended - began) / _FLUSH_SHARE)

    def _send(self, name: str) -> bool:
        """Bring a file to S3; return whether that went well. If not, it is tried again with the
        next flush: a storage that fails for a while must not end the training."""
        try:
            self._write(name, quick=True)
        except Exception as error:  # s3fs lets botocore's many exceptions through
            self._warn(error)
            return False
        return True

    def _write(self, name: str, *, quick: bool) -> None:
        content = self._unsent.get(name)
        if content is None:
            content = (self.folder / name).read_bytes()
        uri = storage.join(self.run_uri, name)
        storage.write_bytes(uri, content, quick=quick, check=self.check)
        self._unsent.pop(name, None)

    def _on_disk(self, write: Callable[[], T]) -> T | None:
        """Result of a write to this machine's disk; None if it fails, which is reported once:
        a disk that is full must not end the training."""
        try:
            return write()
        except OSError as error:
            if not self._is_disk_failing:
                message = f"the record cannot be written to {self.folder} ({error.strerror})"
                self.display.show(Warned(message=f"{message}: lines of it may be missing"))
            self._is_disk_failing = True
            return None

    def _warn(self, error: Exception) -> None:
        """Say once that the storage fails."""
        if not self._is_failing:
            reason = faults.text(error)
            message = f"the record cannot be written to {self.run_uri} for now ({reason})"
            self.display.show(Warned(message=f"{message}: it is tried again every minute"))
        self._is_failing = True

    def flush_in_time(self) -> None:
        """Flush if lines have waited for long. To be called often, also while no events come."""
        now = self.clock()
        if self.replace is not None:
            return
        if now >= self._flush_at:
            self.flush()
        last = self._last_step
        if now >= self._progress_at and last is not None and last.step != self._shown_step:
            self._report_progress(last)
            self._progress_at = now + EVERY_S

    def _report_progress(self, last: Step) -> None:
        """Say and write down how far the run is."""
        assert self._start is not None
        self._shown_step = last.step
        usd = None if self.spending is None else self.spending.usd()
        progress = self._pace.progress(self._start, last, job=self.job, usd=usd)
        self.display.progress(progress)
        # A disk, or S3, that fails for a moment must not end the training.
        with contextlib.suppress(Exception):
            self._write_json(runs.PROGRESS_FILE, progress.to_json())
        self._write_activity()

    def _write_activity(self) -> None:
        """Write when the job trained."""
        if self.job:
            with contextlib.suppress(Exception):
                name = runs.job_activity(self.job)
                self._write_json(name, self._recorder.activity.to_json())

    def _read_activity(self) -> Activity:
        """Activity that lost heads of the same job recorded."""
        with contextlib.suppress(Exception):
            if self.job:
                found = reader.read_json(self.run_uri, runs.job_activity(self.job))
                return Activity.from_json(found or {})
        return Activity()

    def _take_over_spending(self) -> None:
        """Add what a lost head of the same job had counted."""
        if not self.job or self.spending is None:
            return
        with contextlib.suppress(Exception):
            found = reader.read_json(self.run_uri, runs.PROGRESS_FILE)
            earlier = Progress.from_json(found or {})
            if earlier.job == self.job and earlier.usd is not None:
                self.spending.begin_with(earlier.usd)

    def _on_start(self, event: Start) -> None:
        """Forget what an earlier attempt did after its last checkpoint: it is done again now."""
        # One that found no checkpoint begins with what comes before the first step.
        last_kept = event.step if event.resumed else -1
        earlier = self._read()
        kept = [
            line
            for line in without_redone(earlier.lines, last_kept)
            if not isinstance(line.event, Phase | Measure)
        ]
        added: list[Event] = [*self.measures, *self._phases]
        # Without a checkpoint all is done again, and nothing is missing from the record.
        self._num_damaged = earlier.num_damaged if event.resumed else 0
        if event.resumed:
            added.insert(0, Resume(step=event.step, world_size=event.world_size))
        self._phases = []
        texts = [*(line.text for line in kept), *map(self._line, added)]
        self._lines, self._is_anew = [f"{text}\n" for text in texts], True
        self._write_lines()
        # A worker lost on the way starts again within this attempt: the first start counts.
        if self._start is None and event.resumed:
            self._resumed_from = event.step
            ended = reader.read_result(self.run_uri)
            self._before_s = (ended and ended.total_seconds) or 0.0
        last = max((each.step for each in earlier.of(Step)), default=0)
        if lost := max(0, last - event.step):
            saved = f"of step {event.step:,}" if event.resumed else "missing"
            message = (
                f"run {self.run} broke off at step {last:,}, and its last checkpoint is {saved}"
            )
            again = f"{counted(lost, 'step')} to train again"
            self.display.show(Noted(message=f"{message}: {again}"))
        self._start = event
        self._recorder.begin(time.time(), first=event.step)
        self._write_activity()
        self._step = self._shown_step = event.step
        self._pace, self._last_step = Pace(), None
        self._progress_at = self.clock() + EVERY_S

    def _set_result(self, end: Finished | None = None) -> None:
        """Put the result together, which ``close`` writes.

        Args:
            end: None if the run was stopped before its end.
        """
        assert self._start is not None
        status: Status = SUCCEEDED if end else "stopped"
        # Of all attempts: a head that is lost after its workers does not forget them.
        lines = self._read()
        evaluations = lines.of(Evaluation)
        evaluation = evaluations[-1] if evaluations else Evaluation(step=0, epoch=0)
        last = end or evaluation
        seconds = end.seconds if end else self._seconds(evaluation)

        def median(name: str) -> float | None:
            """Median over the evaluations that have it: that before the first step has no speed."""
            found = [value for each in evaluations if (value := getattr(each, name))]
            return statistics.median(found) if found else None

        speed = median("items_per_s")
        hosts = [each.hosts for each in lines.of(Phase) if each.hosts]
        self.result = Result(
            run=self.run,
            recipe=self.recipe,
            status=status if self.error is None else "failed",
            loss=last.loss,
            measures=last.measures,
            seconds=seconds,
            # An attempt that was killed has left no result; what it trained counts.
            total_seconds=max(self._before_s + self.clock() - self._began, seconds or 0.0),
            usd=self.spending.usd() if self.spending else None,
            steps=self._step,
            total_steps=self._start.total_steps,
            rate=Rate(items=self._start.items, per_s=speed) if self._start.items else None,
            world_size=self._start.world_size,
            hosts=hosts[-1] if hosts else (),
            resumed_from=self._resumed_from,
            preempted=sum(len(each.nodes) for each in lines.of(Preempted)),
            skipped_steps=len(lines.of(Skipped)),
            damaged_lines=self._num_damaged,
            parameters=self._start.parameters,
            flops_per_s=median("flops_per_s"),
            mfu=median("mfu"),
            memory_bytes=evaluation.memory_bytes,
            gpu_utilization=median("gpu_utilization"),
            device=self._start.device,
            precision=self._start.precision,
            error=self.error,
        )

    def _seconds(self, evaluation: Evaluation) -> float | None:
        """Time spent training by a run that was stopped."""
        seconds = self._stopped_s or evaluation.seconds
        if seconds is None and self._last_step and self.first_step_at:  # cut off before it said
            seconds = self._last_step.time - self.first_step_at
        return seconds

    def _read(self) -> Metrics:
        kept = None if self._is_anew else storage.read_bytes(str(self._metrics))
        return events.parse_metrics((kept or b"") + "".join(self._lines).encode())

    def _line(self, event: Event) -> str:
        values = events.to_json(event) | ({"lease": self.lease} if self.lease else {})
        return masked(json.dumps(values), by_name=False)

    def _write_lines(self) -> None:
        def write() -> None:
            content = "".join(self._lines)
            if self._is_anew:
                storage.write_bytes(str(self._metrics), content.encode(), check=self._check_on_disk)
            else:
                with self._metrics.open("a", encoding="utf-8") as file:
                    file.write(content)
            self._lines, self._is_anew = [], False

        if self._lines or self._is_anew:
            self._on_disk(write)
            if self._in_s3 and self._metrics.exists():  # the next flush sends them
                self._unsent[runs.METRICS_FILE] = None

    def _write_json(self, name: str, values: Mapping[str, object]) -> None:
        content = (masked(json.dumps(values, indent=1), by_name=False) + "\n").encode()
        self._unsent[name] = content
        if not self._in_s3:
            self._on_disk(lambda: self._write(name, quick=False))
            return
        # The report is drawn from this machine's disk.
        self._on_disk(lambda: storage.write_bytes(str(self.folder / name), content))
        if not self._is_failing and name != runs.RESULT_FILE:
            self._send(name)
