"""Tasks of a run inside Ray, outside its workers: preparing the data, and Ray Train's fit.

Both run in an actor on the node of the command, so that the command itself imports neither torch
nor Ray Train.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from contract import faults, host_check, nodes
from contract.errors import InputError, UnreachableError
from contract.job import JobSpec
from contract.nodes import Range
from contract.times import COLLECTIVE_START_S, HOST_CHECK_S
from training import recipes
from training.record.events import Event, Start
from training.runtime.outcome import Failures, prepared
from training.runtime.processes import on_nodes
from training.settings import RunConfig
from training.system import lease

#: How often a run with a range of workers looks whether it can have more. Each change costs a
#: start of all workers and the steps since the last checkpoint.
_RESIZE_EVERY_S: Final = 30.0
_PLACES_EVERY_S: Final = 1.0
#: The actor that knows is on the same node.
_ASK_S: Final = 10.0
#: Concurrency group of the actor's thread for ``prepare`` and ``fit``.
_TASK: Final = "task"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Arguments of a run for its tasks."""

    config: RunConfig
    run_uri: str
    fence: int
    """Number of the lease that the run is written under."""
    workers: Range
    """How many there are at most, and with how few it continues."""
    max_failures: int
    environment: dict[str, str]
    """The command's: see ``command_environment``."""
    folder: str
    """The command's, in which relative paths are looked up."""


def start_events() -> Any:
    """Start the actor ``_Events`` on this node: with any other, the run might end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote
    actor = remote(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        # A task has a thread of its own: events are taken meanwhile.
        concurrency_groups={_TASK: 1},
    )(_Events)
    return actor.remote()


def start(task: Callable[[Submission, Any], object], submission: Submission, events: Any) -> Any:
    """Start ``prepare`` or ``fit`` in the actor; return what to get its result by."""
    return events.run.options(concurrency_group=_TASK).remote(task, submission)


class _Events:
    """Ray actor between the workers and the command: events one way, the wish to stop the other.

    It runs the command's tasks too: a process of Ray takes seconds to start.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_put = self._num_taken = self._num_kept = 0
        self._stop = False
        self._begun_at = 0

    def run(self, task: Callable[[Submission, Any], object], submission: Submission) -> object:
        import ray

        return task(submission, ray.get_runtime_context().current_actor)

    def put(self, events: list[Event]) -> bool:
        self._events += events
        self._num_put += len(events)
        for event in events:
            if isinstance(event, Start):
                self._begun_at = event.step
        return self._stop

    def take(self) -> list[Event]:
        # The command asks again once it has brought to the record what it took before.
        self._num_kept, self._num_taken = self._num_taken, self._num_put
        events, self._events = self._events, []
        return events

    def counts(self) -> tuple[int, int]:
        """Events that were put so far, and those of them that were brought to the record."""
        return self._num_put, self._num_kept

    def begun_at(self) -> int:
        """The step that the workers began at when they last did."""
        return self._begun_at

    def request_stop(self) -> None:
        self._stop = True


def prepare(submission: Submission, events: Any) -> RunConfig | InputError | UnreachableError:
    """Look at the data, see ``prepared``."""
    import ray

    _take_over(submission)
    node = ray.get_runtime_context().get_node_id()
    return prepared(submission.config, events.put.remote, node=node)


def fit(submission: Submission, events: Any) -> str | UnreachableError:
    """Train; return why that failed, or nothing.

    Failures are counted here. Ray Train 2.60 counts those of a run's whole life; it forgets a group
    that loses a worker while the others set up ``torch.distributed``, so that these keep their GPUs
    and the next group waits for them; and one lost a moment later ends the run. A new ``fit`` has a
    new controller, and what the old one has left is removed with its placement group. A host that
    is taken away with notice is no failure: Ray Train starts the workers again by itself.
    """
    import ray
    from ray.train import TrainingFailedError

    _take_over(submission)
    failures, begun_at = Failures(submission.max_failures), 0
    while True:
        _wait_for_places(submission.workers.low)
        try:
            _trainer(submission, events).fit()
            return ""
        except TrainingFailedError as error:
            reason, is_failure = _reason(error), not _waits_for_hosts(error)
        _free_places()
        with contextlib.suppress(ray.exceptions.RayError):
            begun_at = ray.get(events.begun_at.remote(), timeout=_ASK_S)
        of_host = _host_faults() if is_failure else []
        for fault in of_host:
            _log.warning("this failure is not counted: %s", fault)
        if failures.is_one_too_many(begun_at, is_counted=is_failure and not of_host):
            return reason
        # Those that were cut off with their host may still be writing a checkpoint.
        try:
            fence = lease.follow(submission.run_uri, submission.fence)
        except Exception as error:
            if not faults.is_passing(error):
                raise
            return UnreachableError(faults.text(error))
        submission = replace(submission, fence=fence)


def _wait_for_places(least: int) -> None:
    """Wait until the nodes have room for ``least`` workers.

    Ray Train would wait too, in a new controller every few seconds, each of which keeps a processor
    busy: on a small machine the nodes that are waited for could not start beside it.
    """
    import ray

    order = os.environ.get(nodes.ENV_JOB_SPEC)
    if order and not JobSpec.from_json(order).nodes.low:
        return  # its nodes come only when Ray Train asks for them
    kind, each = _place()
    while ray.cluster_resources().get(kind, 0) < least * each:
        time.sleep(_PLACES_EVERY_S)


def _place() -> tuple[str, int]:
    """Kind and amount of the resource that a worker takes of a node."""
    import ray

    job = _job_hosts()
    if job["GPU"] > 0 if job else ray.cluster_resources().get("GPU", 0) > 0:
        return "GPU", 1
    # Without GPUs, a worker takes a whole host of a job; Ray sizes its thread pool by it.
    return "CPU", job["CPU"] if job else 1


def _reason(error: Exception) -> str | UnreachableError:
    """Why training failed; of that class if the storage failed on a worker, as others may have
    failed because of that one."""
    failures = getattr(error, "worker_failures", {}).values()
    found = [getattr(each, "_base_exc", each) for each in failures]
    if any(isinstance(each, UnreachableError) for each in found):
        return UnreachableError(str(error))
    return str(error)


def _free_places() -> None:
    """Remove the placement groups of a ``fit`` that has ended.

    Ray Train 2.60 keeps that of a group which lost a worker at its start, until the command ends:
    on a cluster that is just large enough, the next group would wait for it for ever.
    """
    import ray
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    job = ray.get_runtime_context().get_job_id()  # the end of the ids of all its groups
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))


def _waits_for_hosts(error: Exception) -> bool:
    """Check if there were too few hosts to start on, for as long as Ray Train waits for them."""
    reason = getattr(error, "controller_failure", None)
    return type(reason).__name__ == "WorkerGroupStartupTimeoutError"


def _host_faults() -> list[str]:
    """Have the hosts of all nodes checked; return their faults. The node of an unfit host leaves,
    so that the workers do not start there again."""
    import ray

    if nodes.ENV_HOST_CHECK not in os.environ:
        return []  # a machine of the user's own
    here = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    # Tasks are processes that still have to be started, on a node that may be in trouble.
    answers = on_nodes(host_check.ask, dict.fromkeys(here, ()), HOST_CHECK_S + _ASK_S)
    return [fault for answer in answers if isinstance(answer, list) for fault in answer]


def command_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that a task inherits from the command: a token for a model hub, for
    example, but neither those that Ray sets per process nor the cluster's token."""
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
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2._internal.callbacks import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    from training.runtime import ray_worker

    most, least = submission.workers.high, submission.workers.low

    class Fixed(FixedScalingPolicy):
        """A fixed number of workers, whose places the placement group requests."""

        def after_controller_start(self, train_run_context: Any) -> None:
            """Ask no coordinator."""

        def _maybe_send_resource_request(self) -> None:
            """Ask no coordinator."""

    class Trainer(TorchTrainer):
        """Ray Train without the actors that a recipe does not need: the process of each takes
        seconds to start, one after the other."""

        def _create_default_callbacks(self) -> list[Any]:
            # One frees what ``_free_places`` frees, one serves data sets of Ray's.
            without = (PlacementGroupCleanerCallback, DatasetsCallback)
            found: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
            return [each for each in found if not isinstance(each, without)]

        def _initialize_and_run_controller(self, **parts: Any) -> Any:
            # The controller's own, and that of a coordinator of data sets and elastic runs.
            if most == least:
                parts["scaling_policy"] = Fixed(parts["scaling_policy"].scaling_config)
            controller: Any = TrainController(**parts)
            asyncio.run(controller.run())
            return controller.get_result()

    config = submission.config
    kind, per_worker = _place()
    on_gpus = kind == "GPU"
    # Declared as their predecessors, which knew no ranges and no environment of the workers.
    scaling: Any = ScalingConfig
    run_config: Any = RayRunConfig
    failure_config: Any = FailureConfig
    if on_gpus:  # NCCL knows which of its ranks do not agree
        os.environ.setdefault("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "1")
        os.environ.setdefault("RAY_TRAIN_NCCL_RAS_ACTION", "fail")
        # Not sooner than a collective ends by itself: the first one may wait for a download.
        os.environ.setdefault("RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S", str(COLLECTIVE_START_S))
    return Trainer(
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
            elastic_resize_monitor_interval_s=float(
                os.environ.get(nodes.ENV_RESIZE, _RESIZE_EVERY_S)
            ),
            use_gpu=on_gpus,
            resources_per_worker={"CPU": per_worker} if not on_gpus else None,
            # GPUs of one host talk faster than hosts do. Without GPUs it is the processors
            # that count, so every host takes its share.
            placement_strategy="PACK" if on_gpus else "SPREAD",
        ),
        run_config=run_config(
            name=config.run,
            storage_path=config.storage,
            failure_config=failure_config(max_failures=0, controller_failure_limit=0),
            worker_runtime_env={"env_vars": {**recipes.by_name(config.recipe).variables}},
        ),
    )


def _job_hosts() -> dict[str, int] | None:
    """CPUs and GPUs of each worker node of this job; None outside a job.

    The nodes may not exist yet: Ray starts them when resources are requested.
    """
    if nodes.ENV_JOB not in os.environ:
        return None
    return {
        "CPU": int(os.environ.get(nodes.ENV_WORKER_CPUS, "1")),
        "GPU": int(os.environ.get(nodes.ENV_WORKER_GPUS, "0")),
    }
