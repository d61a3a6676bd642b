"""Proves the parts of the recipe's loop: its schedule, its batches, its exact evaluation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from contract.errors import InputError
from tests import forks
from tests.training.test_config import config
from tests.training.test_data import write_images
from training.checkpoint import checkpoints
from training.data import small_images
from training.ddp import train as ddp
from training.models.resnet import ResNet18
from training.record.result import Table
from training.runtime.torchrun import TorchrunWorker

CPU = torch.device("cpu")


def place(rank: int, world_size: int) -> Any:
    """One process among the others; all that the functions below ask of a worker."""
    return SimpleNamespace(rank=rank, world_size=world_size, device=CPU, emit=lambda *_: None)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    course = config(lr=0.1, warmup_fraction=0.25)
    rates = [ddp.learning_rate(course, step, 1000) for step in (0, 125, 249, 625, 999)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.05, 0], abs=1e-3)
    assert ddp.learning_rate(config(warmup_fraction=0.0), 0, 10_000) == pytest.approx(1e-3)


def test_weight_decay_spares_biases_and_normalisation() -> None:
    model = ResNet18()
    decayed, spared = ddp.build_optimizer(model, config(weight_decay=0.1), CPU).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in spared["params"])
    num = sum(p.numel() for group in (decayed, spared) for p in group["params"])
    assert num == 11_175_370


@pytest.mark.parametrize("flip", [False, True])
def test_the_ranks_parts_are_the_whole_batch_on_any_number_of_workers(
    flip: bool, tmp_path: Path
) -> None:
    image_set = small_images.load(str(write_images(tmp_path, num_train=100)))
    chosen = config(flip=flip, global_batch=32)
    split = small_images.DeviceImages(image_set, CPU)
    order = small_images.BatchOrder(num_images=100, global_batch=32, seed=0)
    for step in (0, 2, 5):
        pixels, labels, size = ddp._batch(split, order, chosen, step, place(0, 1))
        assert size == len(labels)
        for world_size in (2, 3):
            parts = [
                ddp._batch(split, order, chosen, step, place(rank, world_size))
                for rank in range(world_size)
            ]
            assert torch.equal(torch.cat([part[0] for part in parts]), pixels)
            assert torch.equal(torch.cat([part[1] for part in parts]), labels)
            assert {part[2] for part in parts} == {size}


def evaluated(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = ResNet18()
    image_set = small_images.load(folder)
    split = small_images.DeviceImages(image_set, CPU, is_test=True)
    worker = place(dist.get_rank(), dist.get_world_size())
    found = ddp.evaluate(model, image_set, split, worker=worker, use_bf16=False)
    assert model.training
    model.train(False)
    with torch.no_grad():
        pixels, labels = split.batch(torch.arange(len(split)))
        logits = model(pixels).logits
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-5)
    correct = (logits.argmax(1) == labels).sum().item()
    assert found.measures == {"accuracy": correct / len(split)}
    shown = found.details
    assert isinstance(shown, Table)
    assert sum(map(sum, shown.rows)) == len(split)
    assert sum(shown.rows[i][i] for i in range(10)) == correct
    assert shown.heads == shown.names == tuple(image_set.class_names)


def test_evaluation_is_exact_over_uneven_parts(tmp_path: Path) -> None:
    folder = write_images(tmp_path, num_test=51)
    forks.run(2, evaluated, str(folder))


def resumed_with_other_images(run: str, data: str) -> None:
    model = ResNet18()
    snapshot = checkpoints.take_snapshot(
        model,
        ddp.build_optimizer(model, config(), CPU),
        position=checkpoints.Position(step=1),
        config={},
        data="fingerprint of other images",
    )
    checkpoints.save(run, snapshot, keep=1)
    worker = TorchrunWorker(run_uri=run)
    with pytest.raises(InputError, match="'r' was trained on other images than those in"):
        ddp.train(worker, config(data=data))
    worker.close()
    assert checkpoints.names(run) == ["step-00000001"]


def test_a_run_is_not_resumed_with_other_images(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "data", num_train=100)
    run = str(tmp_path / "run")
    forks.run(1, resumed_with_other_images, run, str(folder))
