"""A worker under Ray Train, and what Ray Train runs in its process.

Nothing here is imported by the command or by Ray's own actors: it needs torch.
"""

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from contract import faults
from contract.errors import InputError
from store import storage
from training import recipes
from training.loop.saving import Saves
from training.record.events import Event, Failed, Preempted
from training.runtime import outcome, processes
from training.system import devices

#: Between two questions whether the record has what was sent: the command looks ten times a second.
_RECORD_POLL_S: Final = 0.1


class RayWorker:
    """A process of Ray Train's worker group."""

    def __init__(self, *, run_uri: str, fence: int, events: Any) -> None:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.device = ray.train.torch.get_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # collectives of objects go by way of it
        self.run_uri, self.fence = run_uri, fence
        self._events = events
        self._answer: Any = None
        self._stop = False
        # Without spot there is no preemption watcher: the ranks need not agree after each report.
        self._is_watched = os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") == "1"
        self._lost_nodes: set[str] = set()
        # Ray Train is told of no checkpoint: it would write a list of them to storage, and end the
        # run when that fails; the list is of no use here (training.checkpoint.checkpoints).
        self.saves = Saves(self.emit, wait_for_record=self._wait_for_record)

    def _wait_for_record(self) -> None:
        """Wait until the command has taken and written down what this rank has sent."""
        if self.rank:
            return
        import ray

        num_sent, num_kept = ray.get(self._events.counts.remote())
        while num_kept < num_sent:
            time.sleep(_RECORD_POLL_S)
            _, num_kept = ray.get(self._events.counts.remote())

    def emit(self, *events: Event) -> None:
        if self.rank == 0:
            self._answer = self._events.put.remote(list(events))

    def stop_requested(self) -> bool:
        self.saves.look()
        # The answer to the events sent last time: it has long arrived, nothing waits here.
        if self._answer is not None and not self._stop:
            import ray

            self._stop = bool(ray.get(self._answer))
            self._answer = None
        return self._stop

    def is_losing_a_node(self) -> bool:
        if not self._is_watched:
            return False
        import ray.train

        info = ray.train.get_preemption_info()
        if info is None:
            return False
        new = {*info.preempted_node_ids} - self._lost_nodes
        if new:
            self._lost_nodes |= new
            self.emit(Preempted(nodes=tuple(sorted(new)), time=time.time()))
        return True


def ray_entry(arguments: Mapping[str, Any]) -> None:
    """Entry point of each process of Ray Train: run the recipe's loop with a ``RayWorker``.

    A user's mistake is reported as an event and not raised: Ray would take it for a failure of
    the machine, retry, and print its traceback once per attempt.
    """
    import ray
    import ray.util

    processes.end_with_parent()
    config = recipes.config_from_json(arguments["config"])
    worker = RayWorker(
        run_uri=arguments["run_uri"], fence=arguments["fence"], events=arguments["events"]
    )
    hosts = outcome.introduce(  # a collective: NCCL has chosen its network
        worker,
        node=ray.get_runtime_context().get_node_id(),
        host=ray.util.get_node_ip_address(),
    )
    try:
        devices.check_efa(os.environ, backend=dist.get_backend(), num_hosts=len({*hosts}))
        recipes.by_name(config.recipe).train()(worker, config)
        worker.saves.finish()
    except Exception as error:  # the worker's boundary
        reported = faults.explained(error)
        if isinstance(reported, InputError | storage.FullError):
            worker.saves.finish()
            failed = Failed(message=str(reported), code=faults.exit_code(reported))
            ray.get(worker._events.put.remote([failed]))
        else:  # of a class that the command knows, and that can be sent
            raise reported from (None if reported is error else error)
