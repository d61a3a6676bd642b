"""Workers of a run on a Ray cluster, which this process joins and on which Ray Train starts them.

Looking at the data and Ray Train's ``fit`` are tasks of Ray (``training.runtime.trainer``), so that
the command imports neither torch nor Ray Train.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from contract import exits, nodes
from contract.errors import InputError, UnreachableError
from contract.job import JobSpec
from contract.nodes import Gpus, Range
from contract.times import CHECKPOINT_STOP_S, WORKER_ANSWER_S
from training.record.events import Event, Process, phase
from training.runtime import processes, trainer
from training.runtime.processes import ProcessState
from training.runtime.trainer import Submission
from training.settings import RunConfig

#: A person does not notice a tenth of a second, nor does a processor.
_POLL_S: Final = 0.1
#: Of Ray's last answers, once its work has ended.
_LAST_EVENTS_S: Final = 10.0


class RayWorkers:
    """Ray Train's worker group on the cluster whose head this is."""

    start_text = "joining the Ray cluster"
    stop_grace_s = float(CHECKPOINT_STOP_S)
    logs = "Ray's logs are in /tmp/ray/session_latest/logs"

    def __init__(self, *, workers: Range, max_failures: int, verbose: bool) -> None:
        """
        Args:
            workers: how many there are at most, and with how few the run continues.
            max_failures: failures in a row that the run survives.
            verbose: show Ray's log lines.
        """
        self.failure, self.failure_code = "", exits.FAILED
        self.found: RunConfig | InputError | UnreachableError | None = None
        self.is_done = False
        self._range, self._max_failures, self._is_verbose = workers, max_failures, verbose
        self._events: Any = None
        self._task: Any = None
        self._asked: Any = None
        self._is_training = False
        self._joined: list[Event] = []

    def start(self, num_workers: int) -> None:
        """
        Raises:
            InputError: there is no cluster.
        """
        del num_workers
        join_cluster(verbose=self._is_verbose)
        self._events = trainer.start_events()

    def prepare(self, config: RunConfig) -> None:
        self._task = trainer.start(trainer.prepare, self._submission(config), self._events)

    def train(self, config: RunConfig, run_uri: str, fence: int) -> None:
        self._is_training, self.is_done = True, False
        submission = self._submission(config, run_uri, fence)
        self._task = trainer.start(trainer.fit, submission, self._events)
        self._joined = [phase("ray_ready")]

    def _submission(self, config: RunConfig, run_uri: str = "", fence: int = 0) -> Submission:
        return Submission(
            config=config,
            run_uri=run_uri,
            fence=fence,
            workers=self._range,
            max_failures=self._max_failures,
            environment=trainer.command_environment(os.environ),
            folder=os.getcwd(),
        )

    def poll(self) -> list[Event]:
        import ray

        joined, self._joined = self._joined, []
        try:
            has_ended = bool(ray.wait([self._task], timeout=_POLL_S)[0])
            events = self._take(timeout_s=_LAST_EVENTS_S if has_ended else 0.0)
            if has_ended:
                # What was asked for before the end may not have the last events.
                events += self._take(timeout_s=_LAST_EVENTS_S)
                self.is_done, result = True, ray.get(self._task)
                if self._is_training:
                    self.failure = str(result)
                    if isinstance(result, UnreachableError):
                        self.failure_code = exits.STORAGE
                else:
                    self.found = result
            return [*joined, *events]
        except ray.exceptions.RayError as error:
            # Ray colors the traceback of a task, also for files and pipes.
            self.failure, self.is_done = re.sub(r"\x1b\[[0-9;]*m", "", str(error)), True
            if not isinstance(error, ray.exceptions.RayTaskError):
                self.failure_code = exits.RAY_FAILED  # it has lost the task, or its own actor
            return []

    def _take(self, *, timeout_s: float) -> list[Event]:
        import ray

        if self._asked is None:
            self._asked = self._events.take.remote()
        # Not waited for longer: the actor may still have to be started.
        if not ray.wait([self._asked], timeout=timeout_s)[0]:
            return []
        events, self._asked = ray.get(self._asked), None
        return [*events]

    def request_stop(self) -> None:
        self._events.request_stop.remote()

    def look(self, found: Sequence[Process]) -> list[ProcessState]:
        return processes.look_everywhere(found)

    def end(self, found: Sequence[Process]) -> None:
        processes.end_everywhere(found)

    def close(self) -> None:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def join_cluster(*, verbose: bool) -> None:
    """Join the Ray cluster whose head this is, unless that was done before.

    Raises:
        InputError: there is none.
    """
    # Read by Ray when it is first imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it prints every line twice
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")  # for a Prometheus that is not there
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", str(WORKER_ANSWER_S))
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=verbose, configure_logging=verbose)
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
