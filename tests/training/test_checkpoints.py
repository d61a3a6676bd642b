"""Proves that a checkpoint is restored exactly, and that one that is not whole is never used."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from store import storage
from tests.training.test_checkpoint_faults import newest
from training.checkpoint import checkpoints
from training.checkpoint.checkpoints import Position, Snapshot
from training.models import classifiers as models
from training.models.resnet import ResNet18


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ResNet18(width=8)
    models.keep_live_taps(model, image_size=28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randn(8, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (8,), generator=generator)
    loss = F.cross_entropy(model(pixels).logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 3) -> Snapshot:
    return checkpoints.take_snapshot(
        model,
        optimizer,
        position=Position(step=number, epoch_loss_sum=1.5, epoch_items=24, seconds=2.0),
        config={"lr": 1e-3},
        data="fingerprint",
    )


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return snapshot_of(*trained(steps=1))


def with_step(snapshot: Snapshot, number: int) -> Snapshot:
    return replace(snapshot, position=Position(step=number))


def test_training_goes_on_as_if_it_had_not_stopped_also_with_kernels_that_are_channels_last(
    tmp_path: Path,
) -> None:
    model, _ = trained(steps=0)
    models.channels_last(model)
    # Fused, as on a GPU: it trusts that moments lie in memory as their weights do.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    assert any(not each.is_contiguous() for each in model.parameters())
    for number in range(3):
        step(model, optimizer, number)
    torch.manual_seed(42)
    checkpoints.save(str(tmp_path), snapshot_of(model, optimizer), keep=1)
    drawn = torch.rand(3)
    expected = [step(model, optimizer, number) for number in range(3, 6)]

    fresh, _ = trained(steps=0)
    models.channels_last(fresh)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-3, fused=True)
    found = newest(str(tmp_path))
    assert found is not None
    checkpoints.apply(found, fresh, fresh_optimizer)
    assert torch.equal(torch.rand(3), drawn)
    assert found.position == Position(step=3, epoch_loss_sum=1.5, epoch_items=24, seconds=2.0)
    assert (found.config, found.data) == ({"lr": 1e-3}, "fingerprint")
    assert any(not each.is_contiguous() for each in fresh.parameters())
    assert [step(fresh, fresh_optimizer, number) for number in range(3, 6)] == expected


def test_a_snapshot_does_not_change_while_training_goes_on() -> None:
    model, optimizer = trained(steps=1)
    position = Position(step=1)
    taken = checkpoints.take_snapshot(model, optimizer, position=position, config={}, data="")
    position.step = 2
    assert taken.position.step == 1
    before = {name: tensor.clone() for name, tensor in taken.model.items()}
    step(model, optimizer, 1)
    assert all(torch.equal(taken.model[name], tensor) for name, tensor in before.items())


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    run = str(tmp_path)
    for number in (4, 8):
        checkpoints.save(run, with_step(snapshot, number), keep=2)
    (tmp_path / "checkpoints" / "step-00000008" / "state.pt").unlink()
    warnings: list[str] = []
    found = newest(run, warnings.append)
    assert found is not None
    assert found.position.step == 4
    assert ["step-00000008" in each for each in warnings] == [True]
    # Out of the way of the step that training is about to write again, and counted no more.
    assert checkpoints.names(run) == ["step-00000004"]
    checkpoints.save(run, with_step(snapshot, 8), keep=2)
    again = newest(run)
    assert again is not None
    assert again.position.step == 8


def test_a_model_is_published_beside_what_a_user_has_put_there(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    users = [".git/HEAD", ".staging-area/a", "model/net.py"]
    ours = ("model/model.safetensors", ".staging-abcd_123/model.safetensors")
    for name in (*users, *ours, ".config.json.abcd_123"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a year of work")
    storage.remove_leftovers(str(tmp_path), "config.json")
    average = {name: torch.zeros(1) for name in snapshot.model}
    best = replace(snapshot, average=average)
    checkpoints.publish_model(str(tmp_path), best, processor={"size": 28})
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    published_files = ("model.safetensors", "config.json", "preprocessor_config.json")
    assert found == {*users, *(f"model/{name}" for name in published_files)}
    assert all((tmp_path / name).read_text() == "a year of work" for name in users)
    published = load_file(tmp_path / "model" / "model.safetensors")
    assert published.keys() == average.keys()
    assert not any(tensor.any() for tensor in published.values()), "the average is the model"
    assert (tmp_path / "model").stat().st_mode & 0o055 == 0o055, "others may read it"


def test_a_save_removes_only_parts_of_earlier_saves(tmp_path: Path) -> None:
    for name in (".step-00000003.part", ".mine.part", "drafts.part"):
        (tmp_path / name).mkdir()
    checkpoints.begin(str(tmp_path / "step-00000004"))
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {".step-00000004.part", ".mine.part", "drafts.part"}
