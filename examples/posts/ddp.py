"""ResNet18 on FashionMNIST with Ray Train: the data-parallel job of the post about Ray on ECS.

    python ddp.py                 # ten epochs on two workers
    python ddp.py --epochs 1 --data FOLDER_OR_HTTPS_ADDRESS

Model, data, batch size, optimizer, number of epochs and the calls of Ray Train are the post's. What
differs:

* The data are fetched once for all workers.
* Every epoch is shuffled anew, evaluated over all workers and saved, and a run that was interrupted
  resumes after its last whole epoch. The post evaluates one worker's half, once, and saves once.
* The name of the network interface and the bucket are not written here: a job sets both.
"""

import argparse
import gzip
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision.models import resnet18

FASHION_MNIST = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
)
BATCH = 128  # images per worker and step


def read(source: str, name: str, header: int) -> np.ndarray:
    """One of the four files of a folder or an address: its bytes after the header."""
    file = f"{source}/{name}"
    if source.startswith("https://"):
        file, _ = urllib.request.urlretrieve(file)
    return np.frombuffer(gzip.open(file).read(), np.uint8, offset=header)


def fashion_mnist(config: dict[str, Any], part: str) -> TensorDataset:
    """Images of shape (N, 1, 28, 28) between -1 and 1, and labels of shape (N,)."""
    images, labels = (torch.from_numpy(each.copy()) for each in ray.get(config[part]))
    return TensorDataset(images.view(-1, 1, 28, 28) / 127.5 - 1, labels.long())


def train_func(config: dict[str, Any]) -> None:
    """What each worker runs."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()

    # Model and optimizer. `prepare_model` moves the model to the GPU and wraps it in DDP.
    torch.manual_seed(0)
    network = resnet18(num_classes=10)
    network.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    # Data. `prepare_data_loader` gives each worker its share of every epoch.
    train_data = fashion_mnist(config, "train")
    train_loader = DataLoader(train_data, batch_size=BATCH, shuffle=True)
    train_loader = ray.train.torch.prepare_data_loader(train_loader)
    test_data = fashion_mnist(config, "t10k")
    own_test_data = Subset(test_data, range(rank, len(test_data), world))

    # Resume from the newest checkpoint of the run, if there is one.
    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt", map_location=device)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    print(f"rank {rank} of {world} starts at epoch {start}", flush=True)

    for epoch in range(start, config["epochs"]):
        # Train. Without `set_epoch` every epoch would have the same order.
        begun = time.time()
        model.train()
        if world > 1:
            train_loader.sampler.set_epoch(epoch)
        for images, labels in train_loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(
            f"epoch {epoch} | rank {rank} | {device} | batch {BATCH} | {len(train_loader)} steps | "
            f"{time.time() - begun:.1f} s",
            flush=True,
        )

        # Evaluate: each worker its share of the test set, then the sum over all workers.
        model.eval()
        sums = torch.zeros(2, device=device)
        with torch.no_grad():
            for images, labels in DataLoader(own_test_data, batch_size=BATCH):
                logits, labels = network(images.to(device)), labels.to(device)
                sums[0] += cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
        if world > 1:
            dist.all_reduce(sums)
        loss_mean, accuracy = (sums / len(test_data)).tolist()
        metrics = {"epoch": epoch, "loss": loss_mean, "accuracy": accuracy, "world_size": world}

        # Save: rank 0 only, as all workers have the same weights.
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"epoch": epoch}, Path(folder) / "model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=FASHION_MNIST, help="folder or address of the four files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    ray.init()
    # Read once, on the head; Ray brings the bytes to each node.
    data = {
        part: ray.put(
            (
                read(given.data, f"{part}-images-idx3-ubyte.gz", 16),
                read(given.data, f"{part}-labels-idx1-ubyte.gz", 8),
            )
        )
        for part in ("train", "t10k")
    }
    trainer = ray.train.torch.TorchTrainer(
        train_func,
        train_loop_config={**data, "epochs": given.epochs},
        scaling_config=ScalingConfig(
            num_workers=given.workers, use_gpu=ray.cluster_resources().get("GPU", 0) > 0
        ),
        # In a job, where results are stored and the name of the run are set already.
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    print(f"result {json.dumps(trainer.fit().metrics)}", flush=True)
