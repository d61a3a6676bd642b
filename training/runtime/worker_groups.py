"""Ray Train's worker group, ended as a whole where it does not start as a whole.

Ray Train 2.60 forgets a group that loses a worker while the others set up ``torch.distributed``:
nothing ends those, which wait for the lost one, and the next group waits for the CPUs or GPUs that
they hold until its own start times out, again and again. A worker lost a moment later, when the
group is told to train, ends the run however many failures it may have. Both are failures of
workers here, counted like those during training.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import WorkerGroupError

from contract import host_check, nodes
from contract.times import HOST_CHECK_S
from training.runtime.processes import on_nodes

_log = logging.getLogger(__name__)
_LOST: Final = "a worker was lost while the workers started"
#: The actor that knows is on the same node.
_ASK_S: Final = 10.0


#: Parts of it are declared without types.
_Group: Any = WorkerGroup
_Policy: Any = DefaultFailurePolicy


class WholeWorkerGroup(_Group):  # type: ignore[misc]
    """A group of which nothing is left when it cannot start."""

    def _start(self) -> None:
        try:
            super()._start()
        except (RayActorError, WorkerGroupStartupFailedError) as error:
            if self.has_started():
                self._worker_group_state.shutdown()
                self._clear_state()
            lost = error if isinstance(error, RayActorError) else error.__cause__
            raise WorkerGroupError(
                f"{_LOST}: {lost or error}",
                {0: lost if isinstance(lost, Exception) else error},  # its rank is not known
            ) from error


class UseWholeWorkerGroups(ControllerCallback):
    """Has Ray Train's controller, in whose process it is called, start such groups."""

    def after_controller_start(self, _train_run_context: Any) -> None:
        TrainController.worker_group_cls = WholeWorkerGroup


def _host_faults() -> list[str]:
    """Have the hosts of all nodes checked."""
    if nodes.ENV_HOST_CHECK not in os.environ:
        return []  # a machine of the user's own
    here = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    # Tasks are processes that still have to be started, on a node that may be in trouble.
    answers = on_nodes(host_check.ask, dict.fromkeys(here, ()), HOST_CHECK_S + _ASK_S)
    return [fault for answer in answers if isinstance(answer, list) for fault in answer]


class FailuresInARow(_Policy):  # type: ignore[misc]
    """Counts failures anew once the workers have resumed from a later checkpoint than before: a run
    of weeks is not ended by the third failure of its life, one that gets nowhere is.

    A failure is not counted where a host is found unfit after it. That host's node leaves, so that
    the workers do not start there again."""

    def __init__(
        self,
        failure_config: Any,
        events: Any,
        *,
        host_faults: Callable[[], list[str]] | None = None,
    ) -> None:
        """
        Args:
            failure_config: how many failures are allowed.
            events: the actor that hears of the workers' events.
            host_faults: has all nodes check their hosts; returns the faults.
        """
        super().__init__(failure_config)
        self._events, self._begun_at = events, 0
        self._host_faults = host_faults or _host_faults

    def make_decision(self, training_failed_error: Any) -> Any:
        with contextlib.suppress(ray.exceptions.RayError):
            begun_at = ray.get(self._events.begun_at.remote(), timeout=_ASK_S)
            if begun_at > self._begun_at:
                self._worker_group_failures, self._begun_at = 0, begun_at
        is_counted = isinstance(training_failed_error, WorkerGroupError)
        is_counted = is_counted and not _is_preemption_failure(training_failed_error)
        if is_counted and (faults := self._host_faults()):
            _log.warning("this failure is not counted: %s", "; ".join(faults))
            self._worker_group_failures -= 1  # it is counted below
        return super().make_decision(training_failed_error)
