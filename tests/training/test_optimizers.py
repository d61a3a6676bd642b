"""Moments in the host's memory change no step, and are saved and loaded as others are."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from contract.errors import InputError
from tests.training.test_plan import setup, shape
from training.loop import optimizers
from training.models import estimates
from training.recipes.fsdp.settings import FsdpConfig


def built(*, offloads: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = optimizers.build(
        model, "adamw", lr=1e-2, weight_decay=0.1, device=torch.device("cpu"), offloads=offloads
    )
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_steps_are_those_of_adamw_also_after_a_load_by_either() -> None:
    whole, optimizer = built(offloads=False)
    train(whole, optimizer, range(6))
    for first, second in ((True, True), (True, False), (False, True)):
        model, optimizer = built(offloads=first)
        train(model, optimizer, range(3))
        saved = get_optimizer_state_dict(model, optimizer)
        assert len(saved["state"]) == 4
        resumed, other = built(offloads=second)
        resumed.load_state_dict(model.state_dict())
        set_optimizer_state_dict(resumed, other, saved)
        train(resumed, other, range(3, 6))
        for one, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, expected)


def test_the_moments_of_a_shard_are_on_the_host_and_sharded_as_it_is() -> None:
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        # A device that holds nothing stands for a GPU.
        mesh = init_device_mesh("meta", (2,), mesh_dim_names=("shard",))
        weight = distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [Shard(0)])
        found: Any = optimizers.on_host(weight)
    finally:
        torch.distributed.destroy_process_group()
    assert isinstance(found, DTensor)
    assert (found.placements, found.shape) == (weight.placements, weight.shape)
    local = found.to_local()
    assert (local.device.type, local.shape) == ("cpu", (3, 4))
    assert not local.any()


def test_the_plan_moves_eight_bytes_to_the_host_and_counts_their_way() -> None:
    here, there = (
        estimates.make(shape("6.9b"), setup(num_workers=4, offload_moments=offloads))
        for offloads in (False, True)
    )
    moved = 8 * shape("6.9b").parameters / 4
    assert here.memory.moments - there.memory.moments == moved
    assert there.host_memory == 4 * moved
    assert there.tokens_per_s < here.tokens_per_s
    assert not here.fits
    # It is proposed before adapters, which train otherwise.
    remedies = estimates.smaller(shape("6.9b"), here.setup)
    assert any(each.offload_moments and not each.lora_rank for each in remedies)


def test_moments_in_eight_bits_are_not_offloaded() -> None:
    settings: dict[str, Any] = {"recipe": "fsdp", "run": "r", "storage": "/s", "data": "d"}
    with pytest.raises(InputError, match="--offload-moments is of --optimizer adamw"):
        FsdpConfig(**settings, optimizer="adamw-8bit", offload_moments=True)
