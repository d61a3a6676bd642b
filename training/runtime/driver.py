"""Driver of a run: has workers started, keeps the record, and ends cleanly.

The workers are on a Ray cluster (``training.runtime.ray_cluster``) or processes of this machine
(``training.runtime.local``); this process reads their events, shows them and waits for signals. The
first Ctrl-C or SIGTERM lets the workers save and leave; a second one ends them as they are, and so
does the end of their time: ten seconds on one machine, ``CHECKPOINT_STOP_S`` on a cluster.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from contract import exits
from contract.errors import InputError, UnreachableError
from contract.runs import RunPaths
from training.command import Command
from training.record import progress
from training.record.display import Display
from training.record.events import Event, Failed, Noted, Process, Reading, Warned
from training.record.writer import RunRecord
from training.runtime.hang_detector import HangDetector
from training.runtime.outcome import opened_record, print_result
from training.runtime.processes import ProcessState
from training.settings import RunConfig
from training.system.lease import Lease


class Workers(Protocol):
    """The processes of a run: one that looks at the data, then those that train."""

    start_text: str
    """Text on the display while the workers start."""
    stop_grace_s: float
    """How long they have to save when they are asked to stop."""
    is_done: bool
    """True if the last phase that was started (``prepare`` or ``train``) has ended."""
    failure: str
    """Why it failed, for people; empty where it did not."""
    failure_code: int
    """Exit code of the command then."""
    found: RunConfig | InputError | UnreachableError | None
    """The result of ``prepare``: the settings with what was decided, or what is wrong."""

    @property
    def logs(self) -> str:
        """Where the logs are, as part of a sentence; empty where there are none."""
        ...

    def start(self, num_workers: int) -> None:
        """Set up what the processes are started by. Called in the main thread."""

    def prepare(self, config: RunConfig) -> None:
        """Begin to look at the data."""

    def train(self, config: RunConfig, run_uri: str, fence: int) -> None:
        """Begin to train; workers that fail are started again.

        Args:
            fence: number of the lease that the run is written under.
        """

    def poll(self) -> list[Event]:
        """Wait a moment; return the events that have come in."""

    def request_stop(self) -> None:
        """Have the workers save and leave."""

    def look(self, found: Sequence[Process]) -> list[ProcessState]:
        """See what workers are doing."""

    def end(self, found: Sequence[Process]) -> None:
        """Kill workers."""

    def close(self) -> None:
        """End all that was started."""


class Driver:
    """One attempt at a run."""

    def __init__(
        self,
        config: RunConfig,
        command: Command,
        *,
        workers: Workers,
        lease: Lease,
        replace: Callable[[], None] | None = None,
    ) -> None:
        """``replace``: see ``RunRecord``."""
        self._began = time.monotonic()
        self._config = config
        self._options = command
        self._workers, self._lease, self._replace = workers, lease, replace
        self._run_uri = RunPaths.of(config.storage, config.run).uri
        self._display = Display(command.recipe.measures, verbose=command.verbose)
        self._record: RunRecord | None = None
        self._signals: list[int] = []
        self._watch = HangDetector(self._run_uri, look=workers.look, end=workers.end)

    def run(self) -> int:
        """Train; return the exit code.

        Raises:
            InputError: The data cannot be used, or no cluster is there.
            UnreachableError: nor reached.
        """
        self._catch_signals()
        try:
            self._display.phase(self._workers.start_text)
            self._workers.start(self._config.num_workers)
            self._catch_signals()  # Ray has put its own handlers in place
            return self._run()
        finally:
            self._display.close()
            self._workers.close()

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.append(number)

    def _run(self) -> int:
        workers = self._workers
        if not self._prepare():
            return self._finish_early()

        job, spending = progress.of_job()
        self._record = record = opened_record(
            self._config,
            self._options,
            display=self._display,
            lease=self._lease,
            job=job,
            spending=spending,
            began=self._began,
            replace=self._replace,
        )
        self._display.phase("starting workers")
        workers.train(self._config, self._run_uri, self._lease.number)
        stop_by: float | None = None
        while not workers.is_done:
            events = workers.poll()
            self._watch.hear(*events)
            # A report on reading the data may come late.
            record.handle(*(each for each in events if not isinstance(each, Reading)))
            record.flush_in_time()
            if record.error is not None or self._lease.lost:
                break
            if stop_by is None and (silent := self._watch.restart_if_silent()):
                if record.is_finished:
                    break  # nothing is missing but the end of a process
                record.handle(silent)
            if self._signals and stop_by is None:
                if record.first_step_at is None:
                    break  # nothing has been trained that could be saved
                stop_by = time.monotonic() + workers.stop_grace_s
                workers.request_stop()
                self._display.say("saving a checkpoint and stopping; Ctrl-C again stops at once")
            if stop_by is not None and (len(self._signals) > 1 or time.monotonic() > stop_by):
                break
        failure = workers.failure
        if self._signals or record.error is not None or record.is_complete:
            failure = ""  # it follows from the end that was asked for
        return self._finish(record, failure)

    def _prepare(self) -> bool:
        """Look at the data; return False when that was stopped, or failed.

        Raises:
            InputError: the data cannot be used.
            UnreachableError: nor reached.
        """
        workers = self._workers
        workers.prepare(self._config)
        while not workers.is_done:
            if self._signals:
                return False
            if self._lease.lost:
                raise InputError(self._lease.lost)
            events = workers.poll()
            self._watch.hear(*events)
            if silent := self._watch.restart_if_silent():
                self._display.show(silent)
            for event in events:
                if isinstance(event, Reading):
                    share = event.done / max(event.total, 1)
                    self._display.phase(f"reading the data: {share:.0%}", transient=True)
                elif isinstance(event, Warned | Noted):
                    self._display.show(event)
            self._display.wait()
        self._watch.forget()
        if workers.found is None:
            return False
        if isinstance(workers.found, Exception):
            raise workers.found
        self._config = workers.found
        return True

    def _finish_early(self) -> int:
        """End before anything was recorded."""
        if self._signals or not self._workers.failure:
            return self._interrupted()
        self._display.close()
        self._print_failure(self._workers.failure, "could not begin")
        return self._workers.failure_code

    def _finish(self, record: RunRecord, failure: str) -> int:
        with contextlib.suppress(Exception):  # a worker may have found out first
            self._lease.confirm()
        if self._lease.lost:  # another process writes the record now
            record.abandon()
            self._display.close()
            print(f"error: {self._lease.lost}", file=sys.stderr)
            return exits.BAD_INPUT
        if failure:
            record.handle(Failed(message=failure))
        if record.is_finished or record.stopped_at is not None:
            self._display.phase("writing the report")
        report = record.close()
        self._display.close()
        if record.is_finished and record.result is not None:
            options = self._options
            print_result(
                record.result,
                options.recipe,
                self._run_uri,
                settings=self._config.to_json(),
                report=report,
                as_json=options.json,
            )
            if record.error is not None:
                print(f"error: {record.error}", file=sys.stderr)
            return record.exit_code
        if failure:
            again = "The same command resumes it from its last checkpoint"
            self._print_failure(failure, "failed", again)
            return self._workers.failure_code
        if record.error is not None:
            print(f"error: {record.error}", file=sys.stderr)
            return record.exit_code
        return self._interrupted()

    def _print_failure(self, failure: str, what: str, *more: str) -> None:
        sentence = "; ".join(filter(None, (f"run {self._config.run!r} {what}", self._workers.logs)))
        print(f"{failure}\n\nerror: {'. '.join((sentence, *more))}", file=sys.stderr)

    def _interrupted(self) -> int:
        saved = self._record.stopped_at if self._record else None
        where = f" at step {saved}" if saved is not None else ""
        if not where and self._record and self._record.first_step_at:
            where = " without saving the last steps"
        print(
            f"stopped{where}; the same command with --run {self._config.run} resumes it",
            file=sys.stderr,
        )
        terminated = self._signals[:1] == [signal.SIGTERM]
        return exits.TERMINATED if terminated else exits.INTERRUPTED
