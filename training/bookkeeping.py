"""Bookkeeping after each step of a training recipe: report, save, evaluate, stop.

The same rules for all recipes, in this order. A recipe's loop keeps the algorithm: data, forward,
backward, optimizer.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from training.checkpoint import divergence
from training.checkpoint.checkpoints import Position
from training.loop import metrics
from training.loop.worker import Worker, expect_steps
from training.record.events import Finished, Stopped, Warned
from training.record.result import HeldOutText, Table
from training.settings import TrainingConfig

_PHASES: Final = ("data", "forward", "backward", "optimizer", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Result of an evaluation; every rank has the same."""

    loss: float
    """Mean per image or token."""
    measures: Mapping[str, float]
    """Values by the names of the recipe's measures."""
    details: HeldOutText | Table | None = None
    """What the report shows of it."""


class Bookkeeping:
    """Times the steps of a run and does what follows each of them.

    Each rank has one, and calls its methods at the same steps as the others.
    """

    def __init__(
        self,
        worker: Worker,
        config: TrainingConfig,
        course: metrics.Course,
        *,
        lr: float,
        position: Position,
        score: Score | None = None,
        evaluates: Callable[[int], bool],
        evaluate: Callable[[], Score],
        saves: Callable[[int], bool],
        save: Callable[[Position], object],
        settle: Callable[[], None] | None = None,
        warnings: Callable[[], list[Warned]] = list,
        num_bad_allowed: int = 0,
    ) -> None:
        """
        Args:
            lr: as configured, for the error of a run that diverges.
            position: where the run starts.
            score: of an evaluation before the first step.
            evaluates: whether an evaluation is due when so many steps are done.
            evaluate: evaluates the model with all ranks.
            saves: whether a checkpoint is due when so many steps are done.
            save: saves a checkpoint; called on every rank.
            settle: makes the ranks' statistics equal before an evaluation or a checkpoint.
            warnings: warnings since the last evaluation, from all ranks.
            num_bad_allowed: steps in a row whose loss or gradient may be NaN or infinite; the loop
                skips their updates.
        """
        self._worker, self._config, self._course, self._lr = worker, config, course, lr
        self._position, self._score = position, score
        self._evaluates, self._evaluate = evaluates, evaluate
        self._saves, self._save, self._settle = saves, save, settle
        self._warnings = warnings
        self._num_bad, self._num_bad_allowed = 0, num_bad_allowed
        self._began = time.monotonic() - position.seconds
        self._timetable = Timetable(config.checkpoint_minutes)
        self._log = metrics.StepLog(worker.device)
        self._watch = metrics.Watch(
            worker.device, world_size=worker.world_size, evaluates=evaluates
        )
        self.timer = metrics.StepTimer(_PHASES, worker.device)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Time a step, counted from 0; the last call inside is ``done``."""
        self.timer.start()
        with self._watch.step(step + 1):
            yield

    def done(self, *, loss_sum: torch.Tensor, norm: torch.Tensor, size: int, items: int) -> None:
        """Note the result of a step.

        Args:
            loss_sum: of this rank's images or tokens, a scalar.
            norm: of the gradient before clipping, a scalar.
            size: images or tokens of all ranks.
            items: images or tokens of this rank.
        """
        self._log.add(loss_sum=loss_sum, norm=norm, size=size)
        # Watching takes time: a watched step does not count in the means.
        self.timer.mark("optimizer", items=0 if self._watch.is_watching else items)

    def after(self, step: int) -> bool:
        """Report, save and evaluate after ``step``, counted from 0, where any of them is due.

        Returns:
            False if the run was asked to stop; it has been saved.

        Raises:
            InputError: the run has diverged.
        """
        worker, num_done = self._worker, step + 1
        is_last = num_done == self._course.total_steps
        evaluates = self._evaluates(num_done)
        saves = is_last or self._saves(num_done)
        if not (evaluates or saves) and num_done % self._config.report_every:
            return True

        # Report. One small reduction: the losses since the last report, and whether any worker was
        # asked to stop or has a checkpoint due, so that all of them act at the same step.
        steps, stopping = self._log.collect(
            stop=worker.stop_requested(), save=self._timetable.is_due()
        )
        # Before every save, so that a diverged model never becomes a checkpoint.
        self._num_bad = divergence.stop_if_diverged(
            steps,
            num_done - len(steps) + 1,
            lr=self._lr,
            worker=worker,
            in_a_row=self._num_bad,
            limit=self._num_bad_allowed + 1,
        )
        self._position.advance(num_done, steps)
        worker.emit(*self._course.steps(steps, last=num_done))
        expect_steps()

        # Save. When a node is about to be lost, at every report.
        saves = worker.is_losing_a_node() or saves or stopping or self._log.save_asked
        if (saves or evaluates) and self._settle is not None:
            self._settle()
        if saves:
            self._timetable.saved()
            seconds = self._position.seconds = self._seconds()
            # The evaluation below reports the training loss up to here; a resumed run must not
            # report it again.
            reported = Position(step=num_done, seconds=seconds)
            self._save(reported if evaluates else self._position)
            self.timer.mark("checkpoint")

        if evaluates:
            self._report_evaluation(num_done)

        if stopping and not is_last:
            worker.saves.finish(retry=True)
            worker.emit(Stopped(step=num_done))
            return False
        return True

    def finish(self, *, publish: Callable[[], None] | None = None) -> None:
        """Wait for the last checkpoint, publish the model, and report the result.

        Args:
            publish: publishes the model; called on every rank.

        Raises:
            InputError: the last updates have ruined the model.
        """
        # None: the run resumes after its last step was saved and before its end was recorded.
        score = self._score or self._evaluate()
        self._worker.saves.finish(retry=True)
        if not math.isfinite(score.loss):
            raise divergence.diverged(
                self._worker,
                f"in its last steps: the evaluation loss is {score.loss}",
                lr=self._lr,
                after=self._course.total_steps,
            )
        if publish is not None:
            publish()
        self._worker.emit(
            Finished(
                step=self._course.total_steps,
                loss=score.loss,
                measures=score.measures,
                seconds=self._seconds(),
                evaluation=score.details,
            )
        )

    def _seconds(self) -> float:
        """Spent training, over all attempts."""
        return time.monotonic() - self._began

    def _report_evaluation(self, num_done: int) -> None:
        epoch, rest = divmod(num_done, self._course.steps_per_epoch)
        ranks = self._course.ranks(
            self.timer.means(),
            step=num_done,
            epoch=epoch if rest == 0 else num_done / self._course.steps_per_epoch,
            communication_s=self._watch.seconds(),
            memory_bytes=float(metrics.peak_memory(self._worker.device)),
        )
        self._score = self._evaluate()
        evaluated = self._course.evaluation(
            ranks,
            loss=self._score.loss,
            measures=self._score.measures,
            train_loss=self._position.take_train_loss(),
            seconds=self._seconds(),
            memory_bytes=max(each.memory_bytes or 0.0 for each in ranks),
        )
        warnings = [*self._warnings(), *self._watch.warnings(ranks)]
        self._worker.emit(*warnings, *ranks, evaluated)


class Timetable:
    """When a checkpoint is due by the clock, however long the steps take."""

    def __init__(self, minutes: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            minutes: at most so long between two checkpoints; 0: never due.
            clock: seconds, from any beginning.
        """
        self._every_s, self._clock = 60 * minutes, clock
        self._saved_at = clock()

    def is_due(self) -> bool:
        return self._every_s > 0 and self._clock() - self._saved_at >= self._every_s

    def saved(self) -> None:
        """Take note that a checkpoint is being saved."""
        self._saved_at = self._clock()
