"""What follows a step in the recipes that keep the whole model on every worker.

Report, evaluate, save, stop: in this order and by the same rules, whatever is trained.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

import torch

from training import metrics
from training.checkpoint import checkpoints
from training.checkpoint.timetable import Timetable
from training.models import replicas
from training.recipes import communication
from training.recipes.settings import ReplicaConfig
from training.record.events import Finished, Stopped, Warned
from training.record.result import Classification
from training.worker import Worker

_PHASES: Final = ("data", "forward", "backward", "optimizer")


class Outcome(Protocol):
    """What an evaluation found; every rank has the same."""

    @property
    def loss(self) -> float:
        """Mean per image."""

    @property
    def measures(self) -> dict[str, float]:
        """By the names of the recipe's measures."""


E = TypeVar("E", bound=Outcome)


class Reports(Generic[E]):
    """Times a run's steps, and does all that follows them. Each rank has one, and calls its
    methods at the same steps as the others."""

    def __init__(
        self,
        worker: Worker,
        config: ReplicaConfig,
        course: metrics.Course,
        *,
        snapshot: checkpoints.Snapshot | None,
        copy: Callable[..., checkpoints.Snapshot],
        statistics: Callable[[], Iterable[torch.Tensor]],
        evaluate: Callable[[], E],
        warnings: Callable[[], list[Warned]] = list,
    ) -> None:
        """
        Args:
            snapshot: what the run continues from; None at its beginning.
            copy: copies all that a checkpoint holds, given the ``position``; called on rank 0.
            statistics: running statistics, of which each worker has those of its own images.
            evaluate: evaluates the model, with all ranks.
            warnings: what has come up since the last evaluation, from all ranks.
        """
        self._worker, self._config, self._course = worker, config, course
        self._copy, self._statistics = copy, statistics
        self._evaluate, self._warnings = evaluate, warnings
        self._snapshot = snapshot
        self._evaluation: E | None = None
        self._position = snapshot.position if snapshot else checkpoints.Position()
        self._clock = metrics.Clock(earlier_s=self._position.seconds)
        self._timetable = Timetable(config.checkpoint_minutes)
        self._log = metrics.StepLog(worker.device)
        self._watch = communication.Watch(
            worker.device, world_size=worker.world_size, evaluates=course.ends_epoch
        )
        self.timer = metrics.StepTimer(_PHASES, worker.device)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Time a step, counted from 0; within, ``done`` is called in the end."""
        self.timer.start()
        with self._watch.step(step + 1):
            yield

    def done(self, *, loss_sum: torch.Tensor, norm: torch.Tensor, size: int, items: int) -> None:
        """Note what a step came to.

        Args:
            loss_sum: of this rank's images, a scalar.
            norm: of the gradient before clipping, a scalar.
            size: images of all ranks.
            items: images of this rank.
        """
        self._log.add(loss_sum=loss_sum, norm=norm, size=size)
        # The watching takes time of its own: such a step is not among those that are timed.
        self.timer.mark("optimizer", items=0 if self._watch.is_watching else items)

    def after(self, step: int) -> bool:
        """Report, evaluate and save after ``step``, counted from 0, where any of that is due.

        Returns:
            Whether to go on; False when the run was asked to stop, and has been saved.
        """
        worker, config, position = self._worker, self._config, self._position
        num_done = step + 1
        evaluates, last = self._course.ends_epoch(num_done), num_done == self._course.total_steps
        if not evaluates and num_done % config.report_every:
            return True

        # One small reduction per report: the losses since the last one, and whether any worker
        # was asked to stop or has a checkpoint due, so that all of them do so at the same step.
        steps, stopping = self._log.collect(
            stop=worker.stop_requested(), save=self._timetable.is_due()
        )
        # Checked before every save, so a diverged model never becomes a checkpoint.
        checkpoints.stop_if_diverged(steps, num_done - len(steps) + 1, lr=config.lr, worker=worker)
        position.advance(num_done, steps)
        worker.emit(*self._course.steps(steps, last=num_done))

        # With a node about to go, every report is saved: what is lost is what comes after it.
        saves_now = worker.is_losing_a_node() or self._log.save_asked or stopping
        if evaluates or saves_now:
            replicas.average_over_workers(self._statistics(), worker.world_size)
        if evaluates:
            self._report_evaluation(num_done)
        epoch, rest = divmod(num_done, self._course.steps_per_epoch)
        if saves_now or last or (rest == 0 and epoch % config.checkpoint_every_epochs == 0):
            self._timetable.saved()
            position.seconds = self._clock.seconds()
            if worker.rank == 0:
                self._snapshot = self._copy(position=position)
            checkpoints.save_in_background(worker, self._snapshot, keep=config.checkpoints_to_keep)
        if stopping and not last:
            worker.finish_saves(retry=True)
            worker.emit(Stopped(step=num_done))
            return False
        return True

    def finish(self, describe: Callable[[E], Classification] | None = None) -> None:
        """After the last step: wait for its checkpoint, publish the model, say how good it is."""
        # None: resumed after the last step was saved and before the end was noted.
        evaluation = self._evaluation or self._evaluate()
        self._worker.finish_saves(retry=True)
        if self._worker.rank:
            return
        assert self._snapshot is not None
        checkpoints.publish_model(self._worker.run_uri, self._snapshot)
        self._worker.emit(
            Finished(
                step=self._course.total_steps,
                loss=evaluation.loss,
                measures=evaluation.measures,
                seconds=self._clock.seconds(),
                evaluation=describe(evaluation) if describe else None,
            )
        )

    def _report_evaluation(self, num_done: int) -> None:
        device = self._worker.device
        epoch, rest = divmod(num_done, self._course.steps_per_epoch)
        ranks = self._course.ranks(
            self.timer.means(),
            step=num_done,
            epoch=epoch if rest == 0 else num_done / self._course.steps_per_epoch,
            communication_s=self._watch.seconds(),
        )
        self._evaluation = self._evaluate()
        evaluated = self._course.evaluation(
            ranks,
            loss=self._evaluation.loss,
            measures=self._evaluation.measures,
            train_loss=self._position.take_train_loss(),
            seconds=self._clock.seconds(),
            memory_bytes=metrics.peak_memory(device) if device.type == "cuda" else None,
        )
        warnings = [*self._warnings(), *self._watch.warnings(ranks)]
        self._worker.emit(*warnings, *ranks, evaluated)
