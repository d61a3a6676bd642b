"""Ray Train: linear regression on two workers, resumed from the newest checkpoint.

    python train.py

In a job, storage and name of the run are given; elsewhere Ray Train keeps it in ``~/ray_results``.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = ray.train.torch.get_device()

    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    print(f"rank {rank} of {world} starts at epoch {start}", flush=True)

    truth = torch.tensor([[1.0], [-2.0], [3.0], [-4.0]])
    for epoch in range(start, config["epochs"]):
        order = torch.Generator().manual_seed(epoch * world + rank)
        inputs = torch.randn(64, 4, generator=order)
        loss = nn.functional.mse_loss(model(inputs.to(device)), (inputs @ truth).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"epoch": epoch + 1, "loss": loss.item(), "world_size": world}
        with tempfile.TemporaryDirectory() as folder:
            new = None
            if rank == 0 and ((epoch + 1) % 5 == 0 or epoch + 1 == config["epochs"]):
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1,
                }
                print(f"epoch {epoch + 1} loss {loss.item():.4f}", flush=True)
                torch.save(state, Path(folder) / "state.pt")
                new = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    ray.init()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": given.epochs},
        scaling_config=ray.train.ScalingConfig(
            num_workers=given.workers, use_gpu=ray.cluster_resources().get("GPU", 0) > 0
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    found = trainer.fit()
    print(f"result {json.dumps(found.metrics)}", flush=True)


if __name__ == "__main__":
    main()
