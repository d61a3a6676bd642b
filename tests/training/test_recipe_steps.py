"""Proves on two and three ranks what a step of each recipe is: every image or token of it has the
same weight however it is shared out, and one that is not a number changes nothing."""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from contract.instance_types import instance_type
from contract.runs import RunPaths
from store.cache import CACHE_VARIABLE
from tests import forks
from tests.training.test_data import write_images
from training import recipes
from training.ddp.settings import DdpConfig
from training.fsdp import inputs
from training.fsdp import train as fsdp
from training.fsdp.settings import FsdpConfig
from training.imagenet.settings import ImagenetConfig
from training.models import language_models
from training.models.average import WeightAverage
from training.plan import expected
from training.record.events import Event, Skipped, Step, Warned
from training.runtime.torchrun import TorchrunWorker
from training.settings import RunConfig

SPOILED = ("loss", "gradient")
#: FSDP's collectives: their largest argument is what all ranks have together.
WHOLE = ("all_gather_single", "reduce_scatter_single")


@dataclass
class Found:
    """What one rank saw of a run."""

    events: list[Event] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    """Sum of the squares of this rank's weights, before each step's update."""
    num_beside: int = 0
    """Forward passes beside those of the steps."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of whole weights that were gathered in the steps' passes, and of gradients reduced."""
    num_weights: int = 0
    seeds: list[int] = field(default_factory=list)
    """Of torch in each step."""

    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm, by step."""
        steps = [each for each in self.events if isinstance(each, Step)]
        return {each.step: (each.loss, each.grad_norm) for each in steps}


def chats(folder: Path) -> FsdpConfig:
    """Two steps over conversations whose answers have from 2 to 60 letters."""
    rows = [
        {"prompt": f"Write {n}.", "completion": "abcdefghij"[n % 10] * (2 + 58 * (n % 3 == 0))}
        for n in range(60)
    ]
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FsdpConfig(
        recipe="fsdp",
        run="whole",
        storage=str(folder),
        data=str(data),
        tokenizer="bytes",
        packing=False,
        num_workers=2,
        seq_len=96,
        global_batch=6,
        microbatch=3,
        max_steps=2,
        lr=1e-2,
        warmup_fraction=0.0,
        held_out_every=10,
        eval_sequences=3,
        report_every=1,
        evaluate_every=1,
        checkpoint_every=1,
        max_skipped_steps=1,
    )


def prepared(config: FsdpConfig) -> FsdpConfig:
    """The configuration, with its text in the cache that its ranks have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, f"{config.storage}/cache")
        return inputs.prepare(config)


def in_passes(config: FsdpConfig) -> FsdpConfig:
    """The same steps in more passes, sending less, with samples."""
    less: dict[str, Any] = {"recompute": "selective", "reduce_dtype": "bf16"}
    return replace(config, run="passes", microbatch=1, sample_tokens=3, **less)


def run(worker: TorchrunWorker, config: FsdpConfig, *, spoiled: str = "") -> Found:
    """Train with all ranks.

    Args:
        spoiled: ``loss`` or ``gradient``, of the last rank in the first step; the other is finite.
            ``sample``: none can be drawn.
    """
    found = Found()
    worker.run_uri = RunPaths.of(config.storage, config.run).uri
    worker.on_events = lambda *events: found.events.extend(events)
    real_clip = fsdp.clip
    real_forward: Any = language_models.WithLoss.forward
    real_collectives = {name: getattr(dist, name) for name in WHOLE}
    trains = False
    is_last = worker.rank == worker.world_size - 1

    def clip(model: nn.Module, limit: float) -> Tensor:
        parts = [language_models.local(each) for each in model.parameters()]
        found.sizes.append(sum(part.double().square().sum().item() for part in parts))
        found.seeds.append(torch.initial_seed())
        found.num_weights = language_models.num_parameters(model)
        if spoiled == "gradient" and is_last and len(found.sizes) == 1:
            gradient = next(each.grad for each in model.parameters() if each.grad is not None)
            language_models.local(gradient).fill_(math.nan)
        return real_clip(model, limit)

    def forward(self: nn.Module, *inputs_of_pass: Tensor | None, **more: Any) -> Tensor:
        nonlocal trains
        trains = self.training
        found.num_beside += not self.training
        loss: Tensor = real_forward(self, *inputs_of_pass, **more)
        is_spoiled = spoiled == "loss" and self.training and not found.sizes
        return loss + math.inf if is_spoiled and is_last else loss

    def collective(name: str, *given: Any, **more: Any) -> Any:
        tensors = [each for each in (*given, *more.values()) if isinstance(each, Tensor)]
        found.sent[name] += trains * max(each.nbytes for each in tensors)
        return real_collectives[name](*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in WHOLE:
            patch.setattr(dist, name, partial(collective, name))
        # Figures for display end no run.
        patch.setattr(language_models, "attention_width", lambda _config: 1 // 0)
        if spoiled == "sample":
            patch.setattr(language_models, "generate", lambda *_, **__: 1 // 0)
        patch.setattr(fsdp, "clip", clip)
        patch.setattr(language_models.WithLoss, "forward", forward)
        fsdp.train(worker, config)
    return found


def sharded_runs(config: FsdpConfig) -> dict[str, Found]:
    """Several runs of one group of ranks, by name."""
    os.environ[CACHE_VARIABLE] = f"{config.storage}/cache"  # a fork has its server's
    worker = TorchrunWorker(run_uri="")
    found = {"whole": run(worker, config)}
    if worker.world_size != 2:  # the same batch, shared out otherwise
        worker.close()
        return found
    found["passes"] = run(worker, in_passes(config))
    if worker.rank == 0:  # which chooses what all resume from
        shutil.rmtree(RunPaths.of(config.storage, "whole").checkpoint(2))
    found["resumed"] = run(worker, replace(config, sample_tokens=2), spoiled="sample")
    for what in SPOILED:
        found[what] = run(worker, replace(config, run=what), spoiled=what)
    worker.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    config = prepared(chats(tmp_path_factory.mktemp("runs")))
    return forks.run(2, sharded_runs, config)


def test_every_token_of_a_step_has_the_same_weight_however_memory_is_saved(
    ranks: list[dict[str, Found]],
) -> None:
    (said,) = [each for each in ranks[0]["whole"].events if isinstance(each, Warned)]
    assert said.message.startswith("MFU is not known (ZeroDivisionError")
    whole, passes = (ranks[0][name].steps() for name in ("whole", "passes"))
    assert sorted(whole) == [1, 2]
    for rank in ranks:
        assert rank["resumed"].seeds == rank["whole"].seeds[1:], "the same dropout"
    assert ranks[0]["resumed"].steps() == {2: pytest.approx(whole[2])}
    assert passes[1][0] == pytest.approx(whole[1][0], rel=1e-4)
    assert passes[1] == pytest.approx(whole[1], rel=1e-2)
    assert passes[1][1] != pytest.approx(whole[1][1], rel=1e-5), "sent in bf16, it is rounded"
    assert len({each["whole"].sizes[0] for each in ranks}) == 2, "each holds a part"
    assert passes[2] == pytest.approx(whole[2], rel=1e-2)


def test_passes_beside_the_steps_are_those_that_the_plan_prices(
    ranks: list[dict[str, Found]], tmp_path: Path
) -> None:
    config = in_passes(chats(tmp_path))
    planned = expected(config, instance_type("g5.12xlarge"), num_bytes=10**6)
    assert planned is not None
    assert planned.passes_hours > 0
    evaluated, sampled = 3 * 2, 2 * 3
    assert [planned.passes, evaluated + sampled] == [ranks[0]["passes"].num_beside] * 2
    assert ranks[0]["whole"].num_beside == 3 * 1, "a sharded model is sampled if that is asked for"
    said = [each.message for each in ranks[0]["resumed"].events if isinstance(each, Warned)]
    assert any(each.startswith("a sample is not known (ZeroDivisionError") for each in said)


@pytest.mark.parametrize("what", SPOILED)
def test_a_step_that_one_rank_spoiled_changes_no_weight_on_any(
    ranks: list[dict[str, Found]], what: str
) -> None:
    (skipped,) = [each for each in ranks[0][what].events if isinstance(each, Skipped)]
    assert skipped.step == 1
    assert (skipped.loss is None, skipped.grad_norm is None) == (what == "loss", what != "loss")
    for each in ranks:
        before, after = each["whole"].sizes
        assert before != after
        assert each[what].sizes == [before, before]


def test_three_ranks_with_unequal_shares_take_the_steps_of_one(tmp_path: Path) -> None:
    """Of 7 sequences, one rank has 3 and two have 2, which leaves these with an empty pass."""
    # Adam makes a step of this size out of the rounding of gradients that should be zero.
    config = prepared(replace(chats(tmp_path), global_batch=7, microbatch=1, lr=1e-5))
    one, three = (forks.run(num, sharded_runs, replace(config, run=f"on-{num}")) for num in (1, 3))
    steps = one[0]["whole"].steps()
    assert sorted(steps) == [1, 2]
    for step, found in three[0]["whole"].steps().items():
        assert found == pytest.approx(steps[step], rel=1e-5)
    # In three passes, weights are gathered once, and gradients reduced once.
    (weights,) = {each["whole"].num_weights for each in three}
    for each in three:
        for name in WHOLE:
            assert each["whole"].sent[name] == pytest.approx(2 * 4 * weights, rel=0.02), name


def weights_of_losses(config: RunConfig) -> tuple[int, float, list[float]]:
    """Train one step as one of several ranks.

    Returns:
        The number of its images, how much the sum of their losses counts in the gradient that is
        averaged over the ranks, and the sums of its averaged buffers in the end.
    """
    seen: list[tuple[int, float]] = []
    averaged: list[Tensor] = []
    worker = TorchrunWorker(run_uri=RunPaths.of(config.storage, config.run).uri)
    real: Callable[..., Tensor] = nn.functional.cross_entropy

    def loss(logits: Tensor, *arguments: Any, **named: Any) -> Tensor:
        found = real(logits, *arguments, **named)
        if found.requires_grad:
            found.register_hook(lambda weight: seen.append((len(logits), weight.item())))
        return found

    real_buffers = WeightAverage.buffers

    def buffers(self: WeightAverage, model: nn.Module) -> list[Tensor]:
        averaged[:] = real_buffers(self, model)
        return [*averaged]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "cross_entropy", loss)
        patch.setattr(WeightAverage, "buffers", buffers)
        recipes.by_name(config.recipe).train()(worker, config)
    worker.close()
    (only,) = seen
    return *only, [each.double().sum().item() for each in averaged]


@pytest.mark.parametrize("recipe", ["ddp", "imagenet"])
def test_every_image_of_a_step_has_the_same_weight_where_ranks_have_more_or_fewer(
    recipe: str, tmp_path: Path
) -> None:
    num = 3 if recipe == "ddp" else 2
    same: Mapping[str, Any] = {
        **{"recipe": recipe, "run": "r", "storage": str(tmp_path), "num_workers": num},
        **{"epochs": 1, "max_steps": 1, "report_every": 1},
    }
    config: RunConfig
    if recipe == "ddp":
        data = write_images(tmp_path / "data", num_train=25, num_test=4)
        config = DdpConfig(**same, data=str(data), global_batch=25)
    else:
        config = ImagenetConfig(
            **same,
            data="synthetic",
            synthetic_images=64,
            model="efficientnet-b0",
            image_size=32,
            global_batch=17,
            ema=0.9,
        )
    found = forks.run(num, weights_of_losses, config)
    sizes, weights, buffers = zip(*found, strict=True)
    assert len({*sizes}) > 1, "the shares are equal: nothing is shown"
    # The mean over the ranks of so many times a share of the whole: the same part for each image.
    assert weights == pytest.approx([num / sum(sizes)] * num)
    # The averaged statistics of normalization are those of all ranks.
    assert [*buffers] == [buffers[0]] * num
    assert bool(buffers[0]) == (recipe == "imagenet")


def test_torch_takes_the_seed_of_any_step_of_a_run_with_any_seed() -> None:
    largest = fsdp.seed_of(2**31 - 1, 10**9, 10**4)
    assert torch.Generator().manual_seed(largest).initial_seed() == largest
    assert fsdp.seed_of(0, 1, 2) == 65_539
