"""Reports, saves and evaluations follow a step in one order, so that a run that stops leaves the
right checkpoint."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from contract.errors import InputError
from contract.runs import METRICS_FILE
from contract.times import COLLECTIVE_S
from training import bookkeeping
from training.bookkeeping import Bookkeeping, Score, Timetable
from training.checkpoint.checkpoints import Position
from training.ddp.settings import DdpConfig
from training.loop import metrics
from training.record.events import Event, RankTimes

pytestmark = pytest.mark.usefixtures("group")

CPU = torch.device("cpu")
END = "Finished"
CONFIG = DdpConfig(recipe="ddp", run="r", storage="", data="", report_every=2)
COURSE = metrics.Course(
    items="images",
    items_per_step=8,
    global_batch=8,
    steps_per_epoch=4,
    total_steps=8,
    learning_rate=lambda _: 0.1,
    flops_per_item=1.0,
    world_size=1,
    device=CPU,
)


@dataclass
class Run:
    """A run of eight steps of loss 2.0, four an epoch, that notes what is done."""

    stops_at: int = 0
    """The step after which it is asked to stop; 0: none."""
    loses_a_node_at: int = 0
    bad: tuple[int, ...] = ()
    """Steps whose loss is not finite."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Of evaluations, by step; those of others are 0.5."""
    saves_every: int = 4
    done: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    saved: list[Position] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)
    """Steps after which it was made ready for saves."""
    step: int = 0
    run_uri: str = "no/such/run"
    rank, world_size, device, fence = 0, 1, CPU, 0

    def emit(self, *events: Event) -> None:
        self.events += events
        self.done += [type(each).__name__ for each in events]

    def stop_requested(self) -> bool:
        return self.step == self.stops_at

    def is_losing_a_node(self) -> bool:
        return self.step == self.loses_a_node_at

    @property
    def saves(self) -> "Run":
        return self

    def finish(self, *, retry: bool = False) -> None:
        self.done.append("finished, or raised" if retry else "finished")

    def _save(self, position: Position) -> None:
        self.done.append(f"saved {position.step}")
        self.saved.append(replace(position))

    def _evaluate(self) -> Score:
        self.done.append("evaluated")
        return Score(loss=self.losses.get(self.step, 0.5), measures={})

    def train(
        self,
        config: DdpConfig = CONFIG,
        *,
        start: int = 0,
        allowed: int = 0,
        course: metrics.Course = COURSE,
    ) -> list[str]:
        worker: Any = self
        self.step = start
        books = Bookkeeping(
            worker,
            config,
            course,
            lr=0.1,
            position=Position(step=start, seconds=1000.0 * start),
            evaluate_every=course.steps_per_epoch,
            evaluate=self._evaluate,
            save_every=self.saves_every,
            save=self._save,
            prepare=lambda: self.prepared.append(self.step),
            keep=lambda step: self.done.append(f"kept {step}"),
            settle=lambda: self.done.append("settled"),
            num_bad_allowed=allowed,
        )
        for step in books.steps:
            self.step = step + 1
            with books.step(step):
                loss = math.nan if self.step in self.bad else 16.0
                books.done(loss_sum=torch.tensor(loss), norm=torch.tensor(1.0), size=8, items=8)
            if not books.after(step):
                break
        books.finish(
            restore=lambda step: self.done.append(f"restored {step}"),
            publish=lambda: self.done.append("published"),
        )
        return self.done


def test_an_epoch_is_saved_before_its_evaluation_and_the_model_published_last() -> None:
    epoch = ["Step", "Step", "Step", "Step", "settled", "saved 4", "evaluated"]
    epoch += ["RankTimes", "Evaluation"]
    end = ["finished, or raised", "published", "Finished"]
    assert Run().train() == [*epoch, *(each.replace("4", "8") for each in epoch), *end]


def test_use_of_the_gpu_is_read_at_reports_and_is_that_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, use = Run(), Mock()
    use.take.side_effect = lambda: 0.1 if run.done[-1] == "evaluated" else 0.9
    use.drop.side_effect = lambda: run.done.append("dropped")
    monkeypatch.setattr(metrics, "GpuUse", lambda _: use)
    monkeypatch.setattr(metrics.StepTimer, "has_compiled", lambda _: run.step in (1, 5))
    code = Mock()
    monkeypatch.setattr(bookkeeping, "CompiledCode", Mock(return_value=code))
    done = run.train()
    ranks = [each for each in run.events if isinstance(each, RankTimes)]
    assert [each.gpu_utilization for each in ranks] == [0.9, 0.9]
    assert all(each.phases["checkpoint"] > 0 for each in ranks)
    assert use.read.call_count >= 4
    use.read.assert_any_call(now=True)
    assert use.take.call_count == 4, "what an evaluation used is dropped"
    before = ["", *done]
    assert [before[number] for number, each in enumerate(done) if each == "dropped"] == [
        *("", "saved 4", "Evaluation", "saved 8")
    ]
    assert code.keep.call_count >= 4, "what has been compiled, at each report"


def saved(run: Run, config: DdpConfig = CONFIG) -> list[tuple[int, int]]:
    """Step of each checkpoint, and the items of the epoch whose losses it has."""
    run.train(config)
    return [(each.step, each.epoch_items) for each in run.saved]


def test_what_is_due_is_saved_with_the_losses_so_far_and_the_last_step_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert saved(Run()) == [(4, 0), (8, 0)], "the evaluation reports them"
    assert saved(run := Run(saves_every=5)) == [(5, 8), (8, 0)]
    assert run.done.index("settled") < run.done.index("evaluated"), "without a save too"
    assert saved(Run(loses_a_node_at=2)) == [(2, 16), (4, 0), (8, 0)]
    by_time = replace(CONFIG, checkpoint_minutes=1e-9)
    # The first step is reported, and after it every second one, or every one that takes long.
    assert saved(Run(), by_time) == [(1, 8), (2, 16), (4, 0), (6, 16), (8, 0)]
    monkeypatch.setattr(bookkeeping, "_SLOW_STEP_S", -1.0)
    assert [step for step, _ in saved(Run(), by_time)] == [*range(1, 9)]


def test_saves_are_prepared_after_the_first_step_unless_there_is_only_the_last() -> None:
    def prepared(*, start: int = 0, saves_every: int = 8, **settings: Any) -> list[int]:
        run = Run(saves_every=saves_every)
        run.train(replace(CONFIG, **settings), start=start)
        return run.prepared

    assert prepared(saves_every=7) == [1]
    assert prepared(saves_every=8) == []
    assert prepared(saves_every=4, start=3) == [4], "before the save of this step"
    assert prepared(saves_every=4, start=4) == []
    assert prepared(keep_best="loss") == [1], "an evaluation may save"
    assert prepared(checkpoint_minutes=1e-9) == [1]
    assert prepared(checkpoint_minutes=1e9) == []
    assert prepared(checkpoint_minutes=1e-9, start=5) == [6]
    assert prepared(checkpoint_minutes=1e-9, start=6) == [], "it ends before the other half"


def evaluation(step: int, loss: float) -> str:
    return json.dumps({"type": "evaluation", "step": step, "epoch": 1.0, "loss": loss}) + "\n"


def test_the_best_checkpoint_is_kept_and_published_though_the_last_is_worse() -> None:
    config = replace(CONFIG, keep_best="loss")
    run = Run(losses={4: 0.3, 8: 0.5}, saves_every=8)
    done = run.train(config)
    assert [each for each in done if " " in each][:3] == ["saved 4", "kept 4", "saved 8"]
    after = done[done.index("restored 4") :]
    assert after == ["restored 4", "evaluated", "finished, or raised", "Noted", "published", END]
    better = Run(losses={4: 0.5, 8: 0.3}).train(config)
    kept = [each for each in better if each.startswith(("kept", "restored"))]
    assert kept == ["kept 4", "kept 8"]


def test_a_run_ends_after_evaluations_without_a_better_one(tmp_path: Path) -> None:
    config = replace(CONFIG, patience=1)
    course = replace(COURSE, total_steps=16)
    losses = {4: 0.5, 8: 0.6, 12: 0.4, 16: 0.4}
    run = Run(losses=losses, run_uri=str(tmp_path))
    done = run.train(config, course=course)
    assert [each.step for each in run.saved] == [4, 8]
    assert done[-4:] == ["Noted", "finished, or raised", "published", END]
    assert "Stopped" not in done

    # Resumed, it ends at the same step, whether the record has the evaluation or lacks it.
    for recorded in (evaluation(4, 0.5) + evaluation(8, 0.6), evaluation(4, 0.5)):
        (tmp_path / METRICS_FILE).write_text(recorded)
        resumed = Run(losses=losses, run_uri=str(tmp_path))
        assert resumed.train(config, course=course, start=8)[-1] == END
        assert not resumed.saved


def test_a_checkpoint_is_due_when_its_time_has_passed_since_the_last() -> None:
    now = [100.0]
    timetable = Timetable(15, clock=lambda: now[0])
    never = Timetable(0, clock=lambda: now[0])
    now[0] += 449
    assert not timetable.is_due(0.5)
    now[0] += 450
    assert timetable.is_due(0.5)
    assert not timetable.is_due()
    now[0] += 1
    assert timetable.is_due()
    assert not never.is_due()
    assert not never.is_due(0.5)
    timetable.saved()
    assert not timetable.is_due()
    now[0] += 900
    assert timetable.is_due()


def test_a_run_that_is_asked_to_stop_saves_and_waits_for_the_save() -> None:
    run = Run(stops_at=6)
    assert run.train(start=4) == [
        *("Step", "Step", "settled", "saved 6", "finished, or raised", "Stopped")
    ]
    assert run.saved[0].seconds > 4000, "of all attempts"
    assert Run(stops_at=8).train()[-1] == "Finished", "it has come to its end"


def test_a_model_that_the_last_steps_have_ruined_is_not_published() -> None:
    run = Run(losses={8: math.nan})
    with pytest.raises(InputError, match=r"nan.*--run"):
        run.train()
    assert "published" not in run.done


def test_bad_steps_in_a_row_are_counted_over_reports_and_nothing_more_is_saved() -> None:
    run = Run(bad=(2, 3))
    run.train(allowed=2)
    assert run.done.count("Skipped") == 2
    run = Run(bad=(2, 3))
    with pytest.raises(InputError, match="diverged at step 3, the last of 2"):
        run.train(allowed=1)
    run = Run(bad=(4,))
    with pytest.raises(InputError, match="diverged at step 4"):
        run.train()
    assert run.saved == []


def test_a_run_that_resumes_after_its_last_step_is_evaluated_for_its_result() -> None:
    end = ["evaluated", "finished, or raised", "published", "Finished"]
    assert Run().train(start=8) == end


def test_after_the_first_report_other_ranks_are_waited_for_as_steps_are() -> None:
    def limit() -> timedelta:
        group: Any = dist.group.WORLD
        found: timedelta = group._get_backend(CPU).options._timeout
        return found

    assert limit() != timedelta(seconds=COLLECTIVE_S)
    Run().train()
    assert limit() == timedelta(seconds=COLLECTIVE_S)
