"""Proves that a step whose loss or gradient is not a number changes nothing on any rank and is
counted, and that too many in a row end the run with the last good model kept."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks import processes
from contract.errors import InputError
from contract.runs import RunPaths
from tests import forks
from tests.training.test_checkpoint_times import fsdp
from training import recipes
from training.checkpoint import checkpoints
from training.loop.metrics import StepMetrics
from training.models import language_models
from training.recipes.fsdp import inputs, loop
from training.recipes.fsdp.settings import FsdpConfig
from training.record.display import PlainDisplay
from training.record.events import Event, Skipped, Step
from training.record.reader import read_result
from training.record.writer import RunRecord
from training.runtime.torchrun import TorchrunWorker

NAN = float("nan")


class Alone:
    """A worker that has nothing to save."""

    rank = 0
    run_uri = "nowhere"
    fence = 0

    def finish_saves(self) -> None:
        pass


def counted(losses: Sequence[float], *, in_a_row: int, limit: int) -> int:
    steps = [StepMetrics(loss=loss, grad_norm=1.0, size=8) for loss in losses]
    worker: TorchrunWorker = Alone()  # type: ignore[assignment]
    return checkpoints.stop_if_diverged(
        steps, 11, lr=0.1, worker=worker, in_a_row=in_a_row, limit=limit
    )


def test_only_steps_in_a_row_end_a_run_and_reports_do_not_part_them() -> None:
    assert counted([NAN, 1.0, NAN, NAN], in_a_row=2, limit=4) == 2
    assert counted([NAN], in_a_row=2, limit=4) == 3
    with pytest.raises(InputError, match="diverged at step 12, the last of 4: loss nan"):
        counted([NAN, NAN, 1.0], in_a_row=2, limit=4)
    with pytest.raises(InputError, match=r"diverged at step 12: .* lower --lr \(now 0.1\)"):
        counted([1.0, NAN], in_a_row=0, limit=1)


def cache_of(config: FsdpConfig) -> str:
    return str(Path(config.storage) / "cache")


def poisoned(
    config: FsdpConfig, bad: Sequence[int], bad_losses: Sequence[int]
) -> tuple[list[Event], list[float], str]:
    """Train as one of several ranks, of which the last one's gradients of the steps ``bad`` are
    spoiled, and its losses of the steps ``bad_losses``, which leaves gradients as they are.

    Returns:
        The events, this rank's sum of squared weights at each step, and why the run ended.
    """
    os.environ["TRAINING_CACHE_DIR"] = cache_of(config)  # a fork has its server's variables
    uri = RunPaths.of(config.storage, config.run).uri
    worker = TorchrunWorker(run_uri=uri)
    events: list[Event] = []
    kept: RunRecord | None = None
    if worker.rank == 0:
        kept = RunRecord(
            uri,
            run=config.run,
            recipe="fsdp",
            settings=config.to_json(),
            environment={},
            display=PlainDisplay(),
        )

        def note(*found: Event, record: RunRecord = kept) -> None:
            events.extend(found)
            record.handle(*found)

        worker.on_events = note
    sizes: list[float] = []
    real = loop.clip

    def clip(model: nn.Module, limit: float) -> Tensor:
        parts = [language_models.local(each) for each in model.parameters()]
        sizes.append(sum(part.double().square().sum().item() for part in parts))
        if len(sizes) in bad and worker.rank == worker.world_size - 1:
            gradient = next(each.grad for each in model.parameters() if each.grad is not None)
            language_models.local(gradient).fill_(NAN)
        return real(model, limit)

    trained: Any = language_models.WithLoss
    real_forward = trained.forward

    def forward(self: nn.Module, *inputs_of_pass: Tensor | None) -> Tensor:
        loss: Tensor = real_forward(self, *inputs_of_pass)
        is_spoiled = self.training and len(sizes) + 1 in bad_losses
        return loss + math.inf if is_spoiled and worker.rank == worker.world_size - 1 else loss

    loop.clip = clip
    trained.forward = forward
    ended = ""
    try:
        recipes.by_name("fsdp").train()(worker, config)
    except InputError as error:
        ended = str(error)
    worker.close()
    if kept is not None:
        kept.close()
    return events, sizes, ended


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_one_of_them_spoiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = fsdp(tmp_path)
    assert isinstance(few, FsdpConfig)
    monkeypatch.setenv("TRAINING_CACHE_DIR", cache_of(few))
    config = replace(
        few,
        num_workers=2,
        max_steps=8,
        max_skipped_steps=1,
        checkpoint_minutes=0.0,
        checkpoint_every=4,
    )
    config = inputs.prepare(config)
    (events, *first), (_, *second) = processes.run(
        2, poisoned, config, (2, 6), (5,), method=forks.METHOD
    )
    assert [each.step for each in events if isinstance(each, Step)] == [1, 3, 4]
    gradient, loss = [each for each in events if isinstance(each, Skipped)]
    assert (gradient.step, gradient.grad_norm) == (2, None)
    assert gradient.loss is not None
    assert (loss.step, loss.loss) == (5, None)
    assert loss.grad_norm is not None
    for sizes, ended in (first, second):
        changed = [n for n in range(1, 6) if sizes[n] != sizes[n - 1]]  # by step n
        assert changed == [1, 3, 4]
        assert "training diverged at step 6, the last of 2: " in ended
        assert "checkpoint step-00000004, which is kept" in ended
    result = read_result(RunPaths.of(config.storage, config.run).uri)
    assert result is not None
    assert result.skipped_steps == 2
