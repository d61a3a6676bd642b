"""Accelerate: a small network fits a sine, with any launcher.

    accelerate launch --num_processes 2 train.py      # or torchrun --nproc-per-node 2 train.py

It resumes from the folder ``checkpoint`` in the working directory.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = Path("checkpoint")
OLD = CHECKPOINT.with_suffix(".old")


class EpochCount:
    """How far the training is; accelerate saves it with the rest."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def save(accelerator: Accelerator) -> None:
    """Write a checkpoint beside the old one and then put it in its place.

    Each process writes its own random state, so every node has a folder: the first process of each
    moves it. The old one is removed last, so that a process that is killed leaves one of them.
    """
    new = CHECKPOINT.with_suffix(".new")
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        shutil.rmtree(OLD, ignore_errors=True)
        if CHECKPOINT.exists():
            CHECKPOINT.rename(OLD)
        new.rename(CHECKPOINT)
        shutil.rmtree(OLD, ignore_errors=True)
    accelerator.wait_for_everyone()


def recover(accelerator: Accelerator) -> None:
    """Put the old checkpoint back where ``save`` was killed before the new one took its place."""
    if accelerator.is_local_main_process and OLD.exists() and not CHECKPOINT.exists():
        OLD.rename(CHECKPOINT)
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # Without a GPU accelerate does not start a process group unless it is told.
    # The order of the rows follows from the seed and the epoch, also after a restart.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(given.seed)

    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, torch.sin(x)), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = EpochCount()
    accelerator.register_for_checkpointing(progress)

    recover(accelerator)
    # The folders of the nodes may differ: the first process decides for all of them.
    (resume,) = broadcast_object_list([CHECKPOINT.exists()])
    if resume:
        accelerator.load_state(str(CHECKPOINT))
    rank, world = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {world} starts at epoch {progress.epoch}", flush=True)

    loss = torch.zeros(())
    for epoch in range(progress.epoch, given.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        progress.epoch = epoch + 1
        accelerator.print(f"epoch {epoch + 1} loss {loss.item():.6f}", flush=True)
        save(accelerator)

    if accelerator.is_main_process:
        with torch.no_grad():
            fit = nn.functional.mse_loss(model(x.to(accelerator.device)), torch.sin(x))
        result = {"epochs": progress.epoch, "world_size": world, "loss": fit.item()}
        Path("result.json").write_text(json.dumps(result))
        print(f"result {json.dumps(result)}", flush=True)
    # The model, which DDP wraps, must be gone before its process group: freed afterwards, DDP can
    # wait forever for a thread of gloo that waits for Python's lock, and the process never ends.
    del model, optimizer, loss
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
