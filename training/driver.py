"""Runs a recipe under Ray Train: starts Ray or joins its cluster, keeps the record, ends cleanly.

The trainer runs in a thread of its own; the main thread reads events, shows them and waits for
signals. The first Ctrl-C lets the workers save and leave; a second one, or ten seconds, ends them
as they are.
"""

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from training import contract, launch, machine, record, storage
from training.config import RunConfig
from training.contract import Event, InputError, phase
from training.progress import make_display

_POLL_S: Final = 0.2
_STOP_GRACE_S: Final = 10.0
#: How often a run with a range of workers looks whether it can have more. Each change costs a
#: start of all workers and the steps since the last checkpoint.
_RESIZE_EVERY_S: Final = 30.0
# Plasma is not used here, but Ray would take a third of the memory for it.
_OBJECT_STORE_BYTES: Final = 100 * 2**20


class Driver:
    """One submission of a run to Ray."""

    def __init__(self, config: RunConfig, options: argparse.Namespace) -> None:
        self._config = config
        self._options = options
        self._run_uri = storage.join(config.storage, config.run)
        self._display = make_display()
        self._record: record.RunRecord | None = None
        self._signals: list[int] = []
        self._lost: BaseException | None = None

    def run(self) -> int:
        """Train; return the exit code.

        Raises:
            InputError: The data cannot be used, or no cluster is there.
        """
        done = record.read_json(self._run_uri, contract.RESULT_FILE)
        if done is not None and done.get("status") == "succeeded":
            self._display.close()
            print(
                f"run {self._config.run!r} is already complete; --overwrite starts it afresh",
                file=sys.stderr,
            )
            self._print_result(done)
            return contract.EXIT_OK
        self._catch_signals()
        try:
            return self._run()
        finally:
            self._display.close()
            import ray

            ray.shutdown()

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.append(number)

    def _run(self) -> int:
        self._display.phase("starting Ray")
        self._set_environment()
        # torch and the data load while Ray's processes start.
        prepared = _Background(self._prepare)
        self._start_ray()
        self._catch_signals()  # Ray has put its own handlers in place
        trainer_class, self._config = prepared.result()
        _start_coordinator()
        if self._signals:
            return self._interrupted()

        self._record = record.RunRecord(
            self._run_uri, self._config, record.environment(), self._display
        )
        self._record.handle(phase("ray_ready"))
        self._display.phase("starting workers")
        events = start_events()
        # Ray's list of checkpoints is not used: see training.checkpoints.
        storage.remove_file(storage.join(self._run_uri, "checkpoint_manager_snapshot.json"))
        fit = _Background(lambda: self._trainer(trainer_class, events).fit())
        stop_by: float | None = None
        while not fit.wait(_POLL_S):
            if not self._take(events):
                break
            if self._record.error is not None:
                break
            if self._record.is_complete and self._options.local:
                break  # all is saved, and this Ray ends with the command: no need to wait for it
            if self._signals and stop_by is None:
                if self._record.first_step_at is None:
                    break  # nothing has been trained that could be saved
                stop_by = time.monotonic() + _STOP_GRACE_S
                events.request_stop.remote()
                self._display.say("saving a checkpoint and stopping; Ctrl-C again stops at once")
            if stop_by is not None and (len(self._signals) > 1 or time.monotonic() > stop_by):
                break
        if fit.is_done and self._record.error is None:
            self._take(events)
        failure = self._lost or fit.failure
        if self._signals or self._record.error is not None or self._record.is_complete:
            failure = None  # it follows from the end that was asked for
        return self._finish(failure)

    def _prepare(self) -> tuple[Any, RunConfig]:
        from ray.train.torch import TorchTrainer

        from training import recipes

        config = recipes.prepare(self._config, self._on_reading)
        return _quick_trainer(TorchTrainer), config

    def _on_reading(self, done: int, total: int) -> None:
        self._display.phase(f"reading the text: {done / max(total, 1):.0%}", transient=True)

    def _set_environment(self) -> None:
        """Ray reads these when it is first imported, so they come before the thread that does."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it prints every line twice
        os.environ.setdefault(
            "RAY_TRAIN_METRICS_ENABLED", "0"
        )  # for a Prometheus that is not there
        if self._options.local:
            # A token of this command's own, so that no file in the home folder is needed.
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            # Ray's default of 15 lets anything else on the machine starve the training.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Each of these starts a process, and on a laptop they compete with the training.
            os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

    def _start_ray(self) -> None:
        import ray

        settings: dict[str, Any] = {
            "log_to_driver": self._options.verbose,
            "configure_logging": self._options.verbose,
        }
        if not self._options.local:
            try:
                ray.init(address="auto", **settings)
            except ConnectionError:
                raise InputError(
                    "no Ray cluster runs on this machine: add --local to train here, or run "
                    "this on the head node of a cluster"
                ) from None
            return
        # In the main thread: Ray's processes end with the thread that started them.
        ray.init(
            address="local",
            num_cpus=max(machine.num_cpus(), self._config.num_workers),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **settings,
        )

    def _trainer(self, trainer_class: Any, events: Any) -> Any:
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

        from training import worker

        job = _job_hosts()
        scaling: Any = ScalingConfig  # declared as its predecessor, which knew no ranges
        on_gpus = job["GPU"] > 0 if job else ray.cluster_resources().get("GPU", 0) > 0
        # Without GPUs, workers share the CPUs of one machine, and take a whole host of a job; Ray
        # sizes their thread pools by it.
        per_worker = None
        if not on_gpus and job:
            per_worker = {"CPU": job["CPU"]}
        elif not on_gpus and self._options.local:
            per_worker = {"CPU": max(1, machine.num_cpus() // self._config.num_workers)}
        most = self._config.num_workers
        least = contract.worker_range(self._options.workers or str(most))[0]
        return trainer_class(
            worker.ray_entry,
            train_loop_config={
                "config": self._config.to_json(),
                "run_uri": self._run_uri,
                "events": events,
            },
            scaling_config=scaling(
                num_workers=most if least == most else (least, most),
                elastic_resize_monitor_interval_s=_RESIZE_EVERY_S,
                use_gpu=on_gpus,
                resources_per_worker=per_worker,
                # GPUs of one host talk faster than hosts do. Without GPUs it is the processors
                # that count, so every host takes its share.
                placement_strategy="PACK" if on_gpus or self._options.local else "SPREAD",
            ),
            run_config=RunConfig(
                name=self._config.run,
                storage_path=self._config.storage,
                # A host that is taken away, with notice, is no failure: those are not counted.
                failure_config=FailureConfig(max_failures=self._options.max_failures),
                checkpoint_config=CheckpointConfig(),
            ),
        )

    def _take(self, events: Any) -> bool:
        """Record what has come in; return False when Ray is gone."""
        import ray

        assert self._record is not None
        try:
            for event in ray.get(events.take.remote()):
                self._record.handle(event)
        except ray.exceptions.RayError as error:
            self._lost = error
            return False
        return True

    def _finish(self, failure: BaseException | None) -> int:
        assert self._record is not None
        kept = self._record
        if failure is not None:
            kept.handle({"type": "error", "message": str(failure)})
        if kept.is_complete or kept.stopped_at is not None:
            self._display.phase("writing the report")
        report = kept.close()
        self._display.close()
        if kept.is_complete:
            self._print_result(kept.result, report)
            return contract.EXIT_OK
        if failure is not None:
            print(
                f"{failure}\n\nerror: run {self._config.run!r} failed; Ray's logs are in "
                f"{_ray_logs()}. The same command resumes it from its last checkpoint",
                file=sys.stderr,
            )
            return contract.EXIT_FAILED
        if kept.error is not None:
            print(f"error: {kept.error}", file=sys.stderr)
            return contract.EXIT_BAD_INPUT
        return self._interrupted()

    def _interrupted(self) -> int:
        saved = self._record.stopped_at if self._record else None
        where = f" at step {saved}" if saved is not None else ""
        print(
            f"stopped{where}; the same command with --run {self._config.run} resumes it",
            file=sys.stderr,
        )
        terminated = self._signals[:1] == [signal.SIGTERM]
        return contract.EXIT_TERMINATED if terminated else contract.EXIT_INTERRUPTED

    def _print_result(self, result: Event, report: Path | None = None) -> None:
        places = launch.places(self._run_uri, self._config.recipe)
        if report is not None:
            places["report"] = os.path.relpath(report)
        launch.print_result(result, places, as_json=self._options.json)


def _job_hosts() -> dict[str, int] | None:
    """What each worker node of the job that this runs in has; None outside a job.

    They may not be there yet: Ray starts them because somebody asks for what they have.
    """
    if contract.ENV_JOB not in os.environ:
        return None
    return {
        "CPU": int(os.environ.get(contract.ENV_WORKER_CPUS, "1")),
        "GPU": int(os.environ.get(contract.ENV_WORKER_GPUS, "0")),
    }


def _start_coordinator() -> None:
    """Start the actor that Ray Train's controller asks for resources, and waits for, before the
    controller does: both then load at the same time. Nothing depends on it having been done."""
    with contextlib.suppress(ImportError):
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        get_or_create_autoscaling_coordinator()


def _quick_trainer(trainer_class: Any) -> Any:
    """A trainer without two helpers that are not needed here.

    Ray Train starts a process that cleans up after a lost controller, which ends with this command
    anyway, as its placement group does, and one that serves Ray Data's data sets, of which there
    are none: together 3 of 15 seconds from command to first step on two cores.
    """
    unneeded = {"PlacementGroupCleanerCallback", "DatasetsCallback"}

    class QuickTrainer(trainer_class):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [each for each in callbacks if type(each).__name__ not in unneeded]

    return QuickTrainer


def start_events() -> Any:
    """Start the actor ``_Events`` on this node: with any other, which may go, the run would end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0)(_Events)
    return actor.options(scheduling_strategy=here).remote()


class _Events:
    """Ray actor between the workers and the command: events one way, the wish to stop the other."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False

    def put(self, events: list[Event]) -> bool:
        self._events += events
        return self._stop

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def request_stop(self) -> None:
        self._stop = True


class _Background:
    """A function in a daemon thread, its result or its exception."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._result: Any = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self.failure = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; return whether the function has ended."""
        self._thread.join(timeout_s)
        return self.is_done

    def result(self) -> Any:
        """Wait for the function; return its result or raise its exception."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        return self._result


def _ray_logs() -> str:
    import ray

    node = getattr(ray._private.worker, "_global_node", None)
    return node.get_logs_dir_path() if node is not None else "/tmp/ray/session_latest/logs"
