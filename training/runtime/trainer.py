"""What of a run happens inside Ray, outside its workers: looking at the data, and Ray Train's fit.

Both are tasks on the node of the command and not its own code, so that the command imports neither
torch nor Ray Train: with a fork server (``training.runtime.forkserver``) a task has both already.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from contract import nodes
from contract.errors import InputError
from contract.nodes import Range
from contract.times import COLLECTIVE_START_S
from training import machine, recipes, storage
from training.recipes.settings import RunConfig
from training.record.events import Event, Reading, Start, Warned
from training.runtime.forkserver import PRELOAD, SWITCH
from training.storage import UnreachableError

#: How often a run with a range of workers looks whether it can have more. Each change costs a
#: start of all workers and the steps since the last checkpoint.
_RESIZE_EVERY_S: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What a task is told of a run."""

    config: RunConfig
    run_uri: str
    fence: int
    """Number of the lease that the run is written under."""
    local: bool
    workers: Range
    """How many there are at most, and with how few it continues."""
    max_failures: int
    environment: dict[str, str]
    """The command's: see ``command_environment``."""
    folder: str
    """The command's, in which relative paths are looked up."""


def here() -> dict[str, object]:
    """Options of a task or actor that must run on this node: with any other, the run might end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }


def start_events() -> Any:
    """Start the actor ``_Events`` on this node."""
    import ray

    actor: Any = ray.remote(_Events)
    return actor.options(**here()).remote()


def start_prepare(submission: Submission, events: Any) -> Any:
    """Start ``_prepare``; return what to get its result by."""
    import ray

    return ray.remote(_prepare).options(**here(), max_retries=0).remote(submission, events)


def start_fit(submission: Submission, events: Any) -> Any:
    """Start ``_fit``; return what to get its result by."""
    import ray

    return ray.remote(_fit).options(**here(), max_retries=0).remote(submission, events)


class _Events:
    """Ray actor between the workers and the command: events one way, the wish to stop the other."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._begun_at = 0

    def put(self, events: list[Event]) -> bool:
        self._events += events
        for event in events:
            if isinstance(event, Start):
                self._begun_at = event.step
        return self._stop

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def begun_at(self) -> int:
        """The step that the workers began at when they last did."""
        return self._begun_at

    def request_stop(self) -> None:
        self._stop = True


def _prepare(submission: Submission, events: Any) -> RunConfig | InputError | UnreachableError:
    """Look at the data; return the settings with what was decided, or what is wrong."""
    _take_over(submission)
    _start_coordinator()

    def report(done: int, total: int) -> None:
        events.put.remote([Reading(done=done, total=total)])

    def warn(message: str) -> None:
        events.put.remote([Warned(message=message)])

    try:
        config = submission.config
        prepare = recipes.by_name(config.recipe).prepare
        return storage.retried(lambda: prepare(config, report), say=warn)
    except (InputError, UnreachableError) as error:
        return error.with_traceback(None)


def _fit(submission: Submission, events: Any) -> str:
    """Train; return why that failed, or nothing."""
    from ray.train import TrainingFailedError

    _take_over(submission)
    try:
        _trainer(submission, events).fit()
    except TrainingFailedError as error:
        return str(error)
    return ""


def command_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a task takes over of the command's environment: a token for a model hub, say, but not
    what Ray starts each process with, nor the token of the cluster."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RAY_") or name.startswith("RAY_TRAIN_")
    }


def _take_over(submission: Submission) -> None:
    """Make this process see what the command sees."""
    os.environ.update(submission.environment)
    with contextlib.suppress(OSError):  # on a cluster, it may have no such folder
        os.chdir(submission.folder)


def _trainer(submission: Submission, events: Any) -> Any:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig

    from training.runtime import ray_worker

    config = submission.config
    job = _job_hosts()
    # Declared as their predecessors, which knew no ranges and no environment of the workers.
    scaling: Any = ScalingConfig
    run_config: Any = RayRunConfig
    on_gpus = job["GPU"] > 0 if job else ray.cluster_resources().get("GPU", 0) > 0
    if on_gpus:  # NCCL knows which of its ranks do not agree
        os.environ.setdefault("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "1")
        os.environ.setdefault("RAY_TRAIN_NCCL_RAS_ACTION", "fail")
        # Not sooner than a collective ends by itself: the first one may wait for a download.
        os.environ.setdefault("RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S", str(COLLECTIVE_START_S))
    # Without GPUs, workers share the CPUs of one machine, and take a whole host of a job; Ray
    # sizes their thread pools by it.
    per_worker = None
    if not on_gpus and job:
        per_worker = {"CPU": job["CPU"]}
    elif not on_gpus and submission.local:
        per_worker = {"CPU": max(1, machine.num_cpus() // config.num_workers)}
    most, least = submission.workers.high, submission.workers.low
    return _quick_trainer(events)(
        ray_worker.ray_entry,
        train_loop_config={
            "config": submission.config.to_json(),
            "run_uri": submission.run_uri,
            "fence": submission.fence,
            "events": events,
        },
        torch_config=TorchConfig(timeout_s=COLLECTIVE_START_S),
        scaling_config=scaling(
            num_workers=most if least == most else (least, most),
            elastic_resize_monitor_interval_s=_RESIZE_EVERY_S,
            use_gpu=on_gpus,
            resources_per_worker=per_worker,
            # GPUs of one host talk faster than hosts do. Without GPUs it is the processors
            # that count, so every host takes its share.
            placement_strategy="PACK" if on_gpus or submission.local else "SPREAD",
        ),
        run_config=run_config(
            name=config.run,
            storage_path=config.storage,
            # A host that is taken away, with notice, is no failure: those are not counted.
            failure_config=FailureConfig(max_failures=submission.max_failures),
            checkpoint_config=CheckpointConfig(),
            worker_runtime_env={"env_vars": _variables(config.recipe)},
        ),
    )


def _variables(name: str) -> dict[str, str]:
    """Those of a recipe's workers; among them what lets them be forked, with what they import."""
    recipe = recipes.by_name(name)
    forked = {} if os.environ.get(SWITCH) == "0" else {PRELOAD: recipe.preloads}
    return {**recipe.variables, **forked}


def _job_hosts() -> dict[str, int] | None:
    """What each worker node of the job that this runs in has; None outside a job.

    They may not be there yet: Ray starts them when resources are requested.
    """
    if nodes.ENV_JOB not in os.environ:
        return None
    return {
        "CPU": int(os.environ.get(nodes.ENV_WORKER_CPUS, "1")),
        "GPU": int(os.environ.get(nodes.ENV_WORKER_GPUS, "0")),
    }


def _start_coordinator() -> None:
    """Start the actor that Ray Train's controller asks for resources, and waits for, before the
    controller does: both then load at the same time. Nothing depends on it having been done."""
    with contextlib.suppress(ImportError):
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        get_or_create_autoscaling_coordinator()


def _quick_trainer(events: Any) -> Any:
    """A trainer that ends what did not start, and counts failures in a row, without two helpers
    that are not needed here.

    Ray Train starts a process that cleans up after a lost controller, which ends with this command
    anyway, as its placement group does, and one that serves Ray Data's data sets, of which there
    are none.
    """
    from ray.train.torch import TorchTrainer

    from training.runtime.worker_groups import FailuresInARow, UseWholeWorkerGroups

    unneeded = {"PlacementGroupCleanerCallback", "DatasetsCallback"}

    base: Any = TorchTrainer

    class QuickTrainer(base):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            needed = [each for each in callbacks if type(each).__name__ not in unneeded]
            return [*needed, UseWholeWorkerGroups()]

        def _initialize_and_run_controller(self, **arguments: Any) -> Any:
            policy = FailuresInARow(self.run_config.failure_config, events)
            return super()._initialize_and_run_controller(**{**arguments, "failure_policy": policy})

    return QuickTrainer
