"""PyTorch Lightning: a small network fits a sine.

    python train.py                  # on several nodes, with NUM_NODES, NODE_RANK and MASTER_ADDR

It resumes from ``checkpoints/last.ckpt`` in the working directory.
"""

import argparse
import json
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sine(lightning.LightningModule):
    """A network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.network(inputs), targets)

    def on_train_start(self) -> None:
        rank, world = self.global_rank, self.trainer.world_size
        print(f"rank {rank} of {world} starts at epoch {self.current_epoch}", flush=True)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("loss", self._loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch + 1} loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    lightning.seed_everything(0)
    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    data = TensorDataset(x, torch.sin(x))

    # Lightning gives each process its share of the data, in an order that follows from the epoch.
    trainer = lightning.Trainer(
        strategy="ddp",
        num_nodes=int(os.environ.get("NUM_NODES", "1")),
        max_epochs=given.epochs,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
        enable_progress_bar=False,
        logger=False,
    )
    model, shown = Sine(), DataLoader(data, batch_size=256)
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True), shown, ckpt_path="last")
    (metrics,) = trainer.validate(model, shown, verbose=False)
    if trainer.is_global_zero:
        loss = metrics["loss"]
        result = {"epochs": trainer.current_epoch, "world_size": trainer.world_size, "loss": loss}
        Path("result.json").write_text(json.dumps(result))
        print(f"result {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
