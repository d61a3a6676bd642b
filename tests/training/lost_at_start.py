"""A callback of Ray Train's that loses a worker at a certain moment of the workers' start, once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.train.v2._internal.execution.callback import WorkerGroupCallback


class LosesAWorker(WorkerGroupCallback):
    """Named in ``RAY_TRAIN_CALLBACKS``, it is called before Ray Train's own."""

    def __init__(self) -> None:
        self._moment = os.environ["LOSE_A_WORKER"]
        self._done = Path(os.environ["LOST_A_WORKER"])
        self._group: Any = None

    @contextmanager
    def on_worker_group_start(self) -> Iterator[None]:
        yield
        self._lose("before they are told to train")

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group
        self._lose("before they know each other")

    def _lose(self, moment: str) -> None:
        if moment == self._moment and not self._done.exists():
            self._done.touch()
            os.kill(self._group.get_workers()[1].metadata.pid, signal.SIGKILL)
