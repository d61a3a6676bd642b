"""Runs a recipe under Ray Train: starts Ray or joins its cluster, keeps the record, ends cleanly.

The trainer runs in a Ray task (``training.runtime.trainer``); this process reads events, shows
them and waits for signals. The first Ctrl-C or SIGTERM lets the workers save and leave; a second
one ends them as they are, and so do ten seconds on one machine, or ``CHECKPOINT_STOP_S`` on a
cluster.
"""

import contextlib
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from contract import exits, nodes
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import Gpus, Range
from contract.runs import RunPaths
from contract.times import CHECKPOINT_STOP_S, WORKER_ANSWER_S
from training import machine
from training.lease import Lease
from training.recipes.command import Command
from training.recipes.settings import RunConfig
from training.record import progress
from training.record.display import make_display
from training.record.environment import environment
from training.record.events import Failed, Reading, Warned, phase
from training.record.result import Result
from training.record.writer import RunRecord
from training.runtime import forkserver, local_ray, trainer
from training.runtime.forkserver import ForkServer
from training.runtime.result import print_result
from training.runtime.silence import Watch
from training.runtime.trainer import Submission

#: A person does not notice a tenth of a second, nor does a processor.
_POLL_S: Final = 0.1
_STOP_GRACE_S: Final = 10.0
#: Of Ray's last answers, once its work has ended.
_LAST_EVENTS_S: Final = 10.0
#: How often Ray's logs are searched for a worker that ended before it joined.
_LOOK_EVERY_S: Final = 0.5
#: A worker that is slow to start is waited for so long; Ray's and Ray Train's defaults are 60.
_START_S: Final = "600"


class Driver:
    """One submission of a run to Ray."""

    def __init__(
        self, config: RunConfig, command: Command, *, workers: Range, lease: Lease
    ) -> None:
        self._config = config
        self._options = command
        self._workers, self._lease = workers, lease
        self._run_uri = RunPaths.of(config.storage, config.run).uri
        self._display = make_display(command.recipe.measures)
        self._record: RunRecord | None = None
        self._signals: list[int] = []
        self._failure: BaseException | None = None
        self._asked: Any = None
        self._look_at = 0.0
        self._lost_workers = local_ray.LostWorkers()
        self._lost: str | None = None
        self._watch = Watch(self._run_uri)

    def run(self) -> int:
        """Train; return the exit code.

        Raises:
            InputError: The data cannot be used, or no cluster is there.
        """
        self._catch_signals()
        server: ForkServer | None = None
        try:
            self._display.phase("starting Ray")
            set_environment(local=self._options.local)
            if self._options.local:
                server = ForkServer.start(
                    modules=["training.runtime.trainer", self._options.recipe.loop],
                    show_log=self._options.verbose,
                )
            return self._run(server)
        finally:
            self._display.close()
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()
            if server is not None:
                server.close()

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.append(number)

    def _run(self, server: ForkServer | None) -> int:
        self._start_ray(server)
        self._catch_signals()  # Ray has put its own handlers in place
        events = trainer.start_events()
        if not self._prepare(events):
            return self._finish_early()

        job, spending = progress.of_job()
        self._record = RunRecord(
            self._run_uri,
            run=self._config.run,
            recipe=self._config.recipe,
            settings=self._config.to_json(),
            environment=environment(),
            display=self._display,
            measures=self._options.recipe.measures,
            job=job,
            spending=spending,
        )
        self._record.handle(phase("ray_ready"))
        self._display.phase("starting workers")
        fit = trainer.start_fit(self._submission(), events)
        stop_by: float | None = None
        while not self._has_ended(fit):
            if not self._take(events) or self._record.error is not None or self._lease.lost:
                break
            self._record.flush_in_time()
            if stop_by is None and (silent := self._watch.restart_if_silent()):
                self._record.handle(silent)
            if self._record.is_complete and self._options.local:
                break  # all is saved, and this Ray ends with the command: no need to wait for it
            if self._signals and stop_by is None:
                if self._record.first_step_at is None:
                    break  # nothing has been trained that could be saved
                grace_s = _STOP_GRACE_S if self._options.local else CHECKPOINT_STOP_S
                stop_by = time.monotonic() + grace_s
                events.request_stop.remote()
                self._display.say("saving a checkpoint and stopping; Ctrl-C again stops at once")
            if stop_by is not None and (len(self._signals) > 1 or time.monotonic() > stop_by):
                break
        else:
            # What was asked for before the end may not have the last events.
            if self._failure is None and self._take(events, timeout_s=_LAST_EVENTS_S):
                self._take(events, timeout_s=_LAST_EVENTS_S)
            if wrong := self._result_of(fit):
                self._failure = RuntimeError(wrong)
        if server is not None and (complaint := server.complaint()):
            self._display.say(f"note: not all of Ray's processes started quickly: {complaint}")
        failure = self._failure
        if self._signals or self._record.error is not None or self._record.is_complete:
            failure = None  # it follows from the end that was asked for
        return self._finish(failure)

    def _prepare(self, events: Any) -> bool:
        """Look at the data, in a task; return False when the command was told to stop.

        Raises:
            InputError: the data cannot be used.
            UnreachableError: nor reached.
        """
        task = trainer.start_prepare(self._submission(), events)
        while not self._has_ended(task):
            if self._signals or not self._take(events):
                return False
        found = self._result_of(task)
        if found is None:
            return False
        if isinstance(found, Exception):
            raise found
        self._config = found
        return True

    def _submission(self) -> Submission:
        return Submission(
            config=self._config,
            run_uri=self._run_uri,
            fence=self._lease.number,
            local=self._options.local,
            workers=self._workers,
            max_failures=self._options.max_failures,
            environment=trainer.command_environment(os.environ),
            folder=os.getcwd(),
        )

    def _has_ended(self, task: Any) -> bool:
        """Wait a moment for a task; return whether it has ended, or cannot begin."""
        import ray

        try:
            if ray.wait([task], timeout=_POLL_S)[0]:
                return True
        except ray.exceptions.RayError as error:
            self._failure = error
            return True
        if not self._options.local or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        said = self._lost_workers.look(_ray_logs())
        # Seen twice, because its log may have been written between the two looks into it.
        if said and self._lost == said:
            self._failure = RuntimeError(f"Ray could not start a worker process:\n{said}")
            return True
        self._lost = said
        return False

    def _result_of(self, task: Any) -> Any:
        """Result of a task that has ended; None where it has none, or failed."""
        import ray

        if self._failure is not None:
            return None
        try:
            return ray.get(task)
        except ray.exceptions.RayError as error:
            # Ray colors the traceback of a task, also for files and pipes.
            self._failure = RuntimeError(re.sub(r"\x1b\[[0-9;]*m", "", str(error)))
            return None

    def _start_ray(self, server: ForkServer | None) -> None:
        if not self._options.local:
            join_cluster(verbose=self._options.verbose)
            return
        # In the main thread: Ray's processes end with the thread that started them.
        local_ray.start(
            num_cpus=max(machine.num_cpus(), self._config.num_workers),
            verbose=self._options.verbose,
            server=server,
            expect=["", self._options.recipe.preloads],
        )

    def _take(self, events: Any, *, timeout_s: float = 0.0) -> bool:
        """Record what has come in; return False when Ray is gone."""
        import ray

        try:
            if self._asked is None:
                self._asked = events.take.remote()
            # Not waited for longer: the actor may still have to be started.
            if not ray.wait([self._asked], timeout=timeout_s)[0]:
                return True
            found, self._asked = ray.get(self._asked), None
        except ray.exceptions.RayError as error:
            self._failure = error
            return False
        self._watch.hear(*found)
        for event in found:
            if isinstance(event, Reading) and self._record is None:  # else it comes late
                share = event.done / max(event.total, 1)
                self._display.phase(f"reading the data: {share:.0%}", transient=True)
            elif isinstance(event, Warned) and self._record is None:
                self._display.show(event)
        if self._record is not None:
            self._record.handle(*(each for each in found if not isinstance(each, Reading)))
        return True

    def _finish_early(self) -> int:
        """End before anything was recorded."""
        if self._failure is None or self._signals:
            return self._interrupted()
        self._display.close()
        print(
            f"{self._failure}\n\nerror: run {self._config.run!r} could not begin; Ray's logs are "
            f"in {_ray_logs()}",
            file=sys.stderr,
        )
        return exits.FAILED

    def _finish(self, failure: BaseException | None) -> int:
        assert self._record is not None
        kept = self._record
        with contextlib.suppress(Exception):  # a worker may have found out first
            self._lease.confirm()
        if self._lease.lost:  # another process writes the record now
            kept.abandon()
            self._display.close()
            print(f"error: {self._lease.lost}", file=sys.stderr)
            return exits.BAD_INPUT
        if failure is not None:
            kept.handle(Failed(message=str(failure)))
        if kept.is_finished or kept.stopped_at is not None:
            self._display.phase("writing the report")
        report = kept.close()
        self._display.close()
        if kept.is_finished and kept.result is not None:
            self._print_result(kept.result, report)
            if kept.error is not None:
                print(f"error: {kept.error}", file=sys.stderr)
            return kept.exit_code
        if failure is not None:
            print(
                f"{failure}\n\nerror: run {self._config.run!r} failed; Ray's logs are in "
                f"{_ray_logs()}. The same command resumes it from its last checkpoint",
                file=sys.stderr,
            )
            return exits.FAILED
        if kept.error is not None:
            print(f"error: {kept.error}", file=sys.stderr)
            return kept.exit_code
        return self._interrupted()

    def _interrupted(self) -> int:
        saved = self._record.stopped_at if self._record else None
        where = f" at step {saved}" if saved is not None else ""
        print(
            f"stopped{where}; the same command with --run {self._config.run} resumes it",
            file=sys.stderr,
        )
        terminated = self._signals[:1] == [signal.SIGTERM]
        return exits.TERMINATED if terminated else exits.INTERRUPTED

    def _print_result(self, result: Result, report: Path | None = None) -> None:
        print_result(
            result,
            self._options.recipe,
            self._run_uri,
            report=report,
            as_json=self._options.json,
        )


def set_environment(*, local: bool) -> None:
    """Set what Ray reads when it is first imported, so before the thread that imports it starts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it prints every line twice
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")  # for a Prometheus that is not there
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", str(WORKER_ANSWER_S))
    if local:
        # A token of this command's own, so that no file in the home folder is needed.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray's default of 15 lets anything else on the machine starve the training.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Each of these starts a process, and on a laptop they compete with the training.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_worker_register_timeout_seconds", _START_S)
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _START_S)
        os.environ.setdefault(forkserver.PRELOAD, "")  # all of its processes are ours


def join_cluster(*, verbose: bool) -> None:
    """Join the Ray cluster whose head this is, unless that was done before.

    Raises:
        InputError: there is none.
    """
    set_environment(local=False)
    import ray

    if ray.is_initialized():
        return
    forked = {"env_vars": {forkserver.PRELOAD: ""}}  # by the node's server, if it has one
    try:
        ray.init(
            address="auto",
            log_to_driver=verbose,
            configure_logging=verbose,
            runtime_env=None if os.environ.get(forkserver.SWITCH) == "0" else forked,
        )
    except ConnectionError:
        raise InputError(
            "no Ray cluster runs on this machine: add --local to train here, or run "
            "this on the head node of a cluster"
        ) from None


def cluster_workers() -> Range:
    """How many workers a run has on the cluster that was joined, unless it is told: one for each
    GPU; without GPUs one for each worker node of a job, and otherwise one."""
    import ray

    gpus = round(ray.cluster_resources().get("GPU", 0))
    if nodes.ENV_JOB_SPEC not in os.environ:
        return Range(max(1, gpus), max(1, gpus))
    # The worker nodes of a job join when a run asks for them, so its order is what counts.
    hosts = JobSpec.from_json(os.environ[nodes.ENV_JOB_SPEC]).nodes
    own = Gpus.from_environment(os.environ)
    low, high = (own.num_workers(number) for number in (hosts.low, hosts.high))
    return Range(max(1, low), max(1, high))


def _ray_logs() -> Path:
    import ray

    node = getattr(ray._private.worker, "_global_node", None)
    return Path(node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs")
