"""A program as users bring them: FSDP2 with torch's distributed checkpoint, of which each rank
writes the shards that it has.

    torchrun sharded_program.py STEPS
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class State(Stateful):
    """Model and optimizer, as torch's tutorial on distributed checkpoints has them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    images, labels = torch.randn(512, 64), torch.randint(10, (512,))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"state": State(model, optimizer)}

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    # The file of metadata is written last.
    start, found = 0, sorted(Path().glob("step-*/.metadata"))
    if found:
        load(state, checkpoint_id=found[-1].parent)
        start = int(found[-1].parent.name.removeprefix("step-"))
    print(f"rank {rank} of {world} starts at step {start} with loss {loss():.6f}", flush=True)

    for step in range(start + 1, steps + 1):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if step % 500 == 0 or step == steps:
            save(state, checkpoint_id=f"step-{step:06}")
            # Each node removes what it has of older ones, but for one.
            for old in sorted(Path().glob("step-*"))[:-2]:
                shutil.rmtree(old, ignore_errors=True)
    print(f"rank {rank} of {world} ends at step {steps} with loss {loss():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
