"""Bookkeeping after each step of a training recipe: report, save, evaluate, stop.

The same rules for all recipes, in this order. A recipe's loop keeps the algorithm: data, forward,
backward, optimizer.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from contract.errors import InputError
from training.checkpoint import checkpoints, divergence
from training.checkpoint.checkpoints import Position
from training.loop import metrics
from training.loop.compiled import CompiledCode
from training.loop.worker import Worker, expect_steps
from training.record import reader
from training.record.events import (
    PERPLEXITY,
    Evaluation,
    Finished,
    Noted,
    Stopped,
    Warned,
    described,
)
from training.record.result import HeldOutText, Table
from training.settings import LENGTH, NO_BEST, TOO_LATE, TrainingConfig

_PHASES: Final = ("data", "forward", "backward", "optimizer", "checkpoint")
#: Longer steps are reported one by one: at reports ranks hear of a spot notice, two minutes ahead.
_SLOW_STEP_S: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Result of an evaluation; every rank has the same."""

    loss: float
    """Mean per image or token."""
    measures: Mapping[str, float]
    """Values by the names of the recipe's measures."""
    details: HeldOutText | Table | None = None
    """Details for the report."""


class Judge:
    """Best evaluation of a run so far, by one measure, and the number of evaluations since."""

    def __init__(self, config: TrainingConfig) -> None:
        self.keeps = config.keep_best != NO_BEST
        self._measure = described(config.keep_best if self.keeps else "loss", (PERPLEXITY,))
        self._max_since = config.patience
        self.best_step, self._best = 0, math.nan
        self.last_step = self._num_since = 0

    def take(self, step: int, found: Score | Evaluation) -> bool:
        """Take an evaluation; return True if it is the best so far."""
        name = self._measure.name
        value = found.loss if name == "loss" else found.measures.get(name)
        value = math.nan if value is None else value
        better = value > self._best if self._measure.higher_is_better else value < self._best
        is_best = better or (math.isnan(self._best) and not math.isnan(value))
        self.last_step = step
        self._num_since = 0 if is_best else self._num_since + 1
        if is_best:
            self.best_step, self._best = step, value
        return is_best

    def read(self, run_uri: str, until: int) -> None:
        """Take the evaluations of a run's record after the first step, up to a step."""
        for each in reader.read_metrics(run_uri).of(Evaluation):
            if 0 < each.step <= until:
                self.take(each.step, each)

    @property
    def is_over(self) -> bool:
        """True after too many evaluations without a better one."""
        return 0 < self._max_since <= self._num_since

    def words(self) -> str:
        return f"{self._measure.title} {self._measure.words(self._best)} at step {self.best_step:,}"


def best_step(run_uri: str, config: TrainingConfig) -> int:
    """Step of the checkpoint that ``--keep-best`` has kept of a run.

    Raises:
        InputError: there is none.
    """
    judge = Judge(config)
    judge.read(run_uri, until=sys.maxsize)
    if not (judge.keeps and judge.best_step):
        raise InputError(
            f"{run_uri} has no best checkpoint: it was trained without --keep-best, or is not "
            "evaluated yet. Leave --best out for the newest"
        )
    return judge.best_step


def check_longer(
    config: TrainingConfig, recorded: Mapping[str, Any], position: Position, steps_per_epoch: int
) -> None:
    """Check that a run which is made longer would have come to its checkpoint in the same way.

    Args:
        recorded: settings in the checkpoint; empty without one.

    Raises:
        InputError: its learning rate has begun to fall.
    """
    before = replace(config, **{name: recorded.get(name, getattr(config, name)) for name in LENGTH})
    ends = before.num_steps(steps_per_epoch)
    is_late = config.schedule == "wsd" and position.step > before.decay_begins(ends)
    if is_late and config.num_steps(steps_per_epoch) > ends:
        raise InputError(f"{TOO_LATE}. Its checkpoint is of step {position.step:,} of {ends:,}")


@dataclass(eq=False)
class Bookkeeping:
    """Times the steps of a run and does what follows each of them.

    Each rank has one, and calls its methods at the same steps as the others.
    """

    worker: Worker
    config: TrainingConfig
    course: metrics.Course
    _: KW_ONLY
    lr: float
    """As configured, for the error of a run that diverges."""
    position: Position
    """Start of the run; afterwards the last step that was reported."""
    score: Score | None = None
    """Last evaluation; at first that before the first step, if any."""
    evaluate_every: int
    """Steps from one evaluation to the next; one follows the last step, too."""
    evaluate: Callable[[], Score]
    """Evaluates the model with all ranks."""
    save_every: int
    """Steps from one checkpoint to the next; one follows the last step, too."""
    save: Callable[[Position], object]
    """Saves a checkpoint; called on every rank."""
    keep: Callable[[int], object]
    """Keeps the checkpoint of a step, which has been saved."""
    prepare: Callable[[], object] = lambda: None
    """Makes ready for saves, after the first step, on each rank by itself; not called in a run of a
    single save, its last."""
    compiled: CompiledCode | None = None
    """Artifacts of the compiler, where the recipe has compiled before its first step."""
    settle: Callable[[], None] = lambda: None
    """Makes the ranks' statistics equal before an evaluation or a checkpoint."""
    warnings: Callable[[], list[Warned]] = list
    """Warnings since the last evaluation, from all ranks."""
    num_bad_allowed: int = 0
    """Number of steps in a row that may have a NaN or infinite loss or gradient; the loop skips
    their updates."""

    def __post_init__(self) -> None:
        self._evaluates = partial(self.course.is_due, every=self.evaluate_every)
        self._saves = partial(self.course.is_due, every=self.save_every)
        self.is_stopped = False
        """True if the run was asked to stop before its end."""
        self._judge = self._judged()
        start, end = self.position.step, self.course.total_steps
        self.steps = range(start, start if self._judge.is_over else end)
        """The steps to do, counted from 0."""
        self._is_prepared = False
        self._num_bad = 0
        self._began = time.monotonic() - self.position.seconds
        self._timetable = Timetable(self.config.checkpoint_minutes)
        device = self.worker.device
        self._log = metrics.StepLog(device)
        self._gpu_use = metrics.GpuUse(device)
        self._watch = metrics.StepWatch(
            device, world_size=self.worker.world_size, evaluates=self._evaluates
        )
        self.timer = metrics.StepTimer(_PHASES, device)
        self._compiled = self.compiled or CompiledCode(self.worker, self.config.to_json())

    def _judged(self) -> Judge:
        """The evaluations so far. One that the record lacks, because the run ended between a save
        and the evaluation after it, is done again."""
        judge, step, run_uri = Judge(self.config), self.position.step, self.worker.run_uri
        if not (judge.keeps or self.config.patience) or not step:
            return judge
        if self.worker.rank == 0:
            judge.read(run_uri, step)
        (judge, *_) = checkpoints.on_all_ranks(lambda: judge)
        if judge.last_step < step and self._evaluates(step):
            score = self.score = self.score or self.evaluate()
            epoch = step / self.course.steps_per_epoch
            judge.take(step, score)
            self.worker.emit(
                Evaluation(step=step, epoch=epoch, loss=score.loss, measures=score.measures)
            )
        if judge.keeps:
            self.keep(judge.best_step)
        return judge

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
        if self.timer.has_compiled():
            self._gpu_use.drop()

    def after(self, step: int) -> bool:
        """Report, save and evaluate after ``step``, counted from 0, where any of them is due.

        Returns:
            False if this was the last step: the run was asked to stop, or no longer gets better. It
            has been saved.

        Raises:
            InputError: the run has diverged.
        """
        worker, num_done = self.worker, step + 1
        self._prepare(num_done)
        evaluates, saves = self._evaluates(num_done), self._saves(num_done)
        is_due = not num_done % self.config.report_every or self._log.step_s > _SLOW_STEP_S
        if not (evaluates or saves or is_due):
            return True

        # Report. One small reduction: the losses since the last report, and whether any worker was
        # asked to stop or has a checkpoint due, so that all of them act at the same step.
        self._compiled.keep()
        steps, stopping = self._log.collect(
            stop=worker.stop_requested(), save=self._timetable.is_due()
        )
        self._gpu_use.read()
        # Before every save, so that a diverged model never becomes a checkpoint.
        self._num_bad = divergence.stop_if_diverged(
            steps,
            num_done - len(steps) + 1,
            lr=self.lr,
            worker=worker,
            in_a_row=self._num_bad,
            limit=self.num_bad_allowed + 1,
        )
        self.position.advance(num_done, steps)
        worker.emit(*self.course.steps(steps, last=num_done))
        expect_steps()

        # Save. When a node is about to be lost, at every report.
        saves = worker.is_losing_a_node() or saves or stopping or self._log.save_asked
        if saves or evaluates:
            self.settle()
        if saves:
            self._gpu_use.read(now=True)
            self._checkpoint(is_reported=evaluates)
            self.timer.mark("checkpoint")
            self._gpu_use.drop()

        # Evaluate. The best checkpoint is kept.
        if evaluates:
            is_best = self._judge.take(num_done, self._report_evaluation(num_done))
            is_kept = is_best and self._judge.keeps
            if not saves and (is_kept or self._judge.is_over):
                self._checkpoint(is_reported=True)
            if is_kept:
                self.keep(num_done)

        # Stop
        if stopping and num_done < self.course.total_steps:
            worker.saves.finish(retry=True)
            worker.emit(Stopped(step=num_done, seconds=self._seconds()))
            self.is_stopped = True
        return not (self.is_stopped or self._judge.is_over)

    def _prepare(self, num_done: int) -> None:
        """Make ready for saves once there will be one before that of the last step."""
        left = self.course.total_steps - num_done
        every = [self.save_every, *[self.evaluate_every] * self._judge.keeps]
        by_time = self._timetable.is_due(0.5) and left > num_done - self.steps.start
        if not self._is_prepared and (by_time or any(-num_done % each < left for each in every)):
            self._is_prepared = True
            self.prepare()

    def finish(
        self,
        *,
        restore: Callable[[int], None] | None = None,
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the last checkpoint, publish the model, and report the result; do nothing if the
        run was asked to stop.

        Args:
            restore: goes back to the checkpoint of a step; called on every rank.
            publish: publishes the model; called on every rank.

        Raises:
            InputError: the last updates have ruined the model.
        """
        if self.is_stopped:
            return
        judge, last = self._judge, self.position.step
        if judge.is_over:
            self.worker.emit(Noted(message=f"no better since {judge.words()}: the run ends"))
        if judge.keeps and 0 < judge.best_step < last and restore is not None:
            self.worker.saves.finish(retry=True)
            restore(judge.best_step)
            self.score = None
        # None: the run resumes after its last step was saved and before its end was recorded.
        score = self.score or self.evaluate()
        self.worker.saves.finish(retry=True)
        if judge.keeps:
            self.worker.emit(Noted(message=f"best checkpoint: {judge.words()}"))
        if not math.isfinite(score.loss):
            raise divergence.diverged(
                self.worker,
                f"in its last steps: the evaluation loss is {score.loss}",
                lr=self.lr,
                after=last,
            )
        publish()
        self.worker.emit(
            Finished(
                step=last,
                loss=score.loss,
                measures=score.measures,
                seconds=self._seconds(),
                evaluation=score.details,
            )
        )

    def _checkpoint(self, *, is_reported: bool) -> None:
        """Save a checkpoint.

        Args:
            is_reported: an evaluation after this step reports the training loss up to here; a
                resumed run must not report it again.
        """
        self._timetable.saved()
        position = self.position
        position.seconds = self._seconds()
        reported = Position(step=position.step, seconds=position.seconds)
        self.save(reported if is_reported else position)

    def _seconds(self) -> float:
        """Spent training, over all attempts."""
        return time.monotonic() - self._began

    def _report_evaluation(self, num_done: int) -> Score:
        epoch, rest = divmod(num_done, self.course.steps_per_epoch)
        ranks = self.course.ranks(
            self.timer.means(),
            step=num_done,
            epoch=epoch if rest == 0 else num_done / self.course.steps_per_epoch,
            communication_s=self._watch.seconds(),
            memory_bytes=float(metrics.peak_memory(self.worker.device)),
            gpu_utilization=self._gpu_use.take(),
        )
        self.score = self.evaluate()
        self._gpu_use.take()  # that of the evaluation does not count
        evaluated = self.course.evaluation(
            ranks,
            loss=self.score.loss,
            measures=self.score.measures,
            train_loss=self.position.take_train_loss(),
            seconds=self._seconds(),
        )
        self._watch.rest(ranks)
        self.worker.emit(*self.warnings(), *ranks, evaluated)
        return self.score


class Timetable:
    """Schedule of checkpoints by the clock, however long the steps take."""

    def __init__(self, minutes: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            minutes: at most so long between two checkpoints; 0: never due.
            clock: seconds, from any beginning.
        """
        self._every_s, self._clock = 60 * minutes, clock
        self._saved_at = clock()

    def is_due(self, share: float = 1) -> bool:
        """True once this share of the time until the next checkpoint has passed."""
        return self._every_s > 0 and self._clock() - self._saved_at >= share * self._every_s

    def saved(self) -> None:
        """Take note that a checkpoint is being saved."""
        self._saved_at = self._clock()
