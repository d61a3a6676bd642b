"""Plain PyTorch DDP: a small classifier of scikit-learn's digits, which come with the package.

    torchrun --nproc-per-node 2 train.py

It resumes from ``checkpoint.pt`` in the working directory, and saves when SIGTERM asks it to end,
as on a spot host. The batch of a step depends on the seed and the step only, so a run that was
interrupted ends like one that was not.
"""

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path("checkpoint.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="in steps")
    parser.add_argument("--batch", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(found.target, device=device)

    torch.manual_seed(given.seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)

    # Rank 0 saves, and once a node was replaced it may be on another one: the newest file counts.
    saved = torch.load(CHECKPOINT, map_location="cpu") if CHECKPOINT.exists() else None
    steps = [0] * world
    dist.all_gather_object(steps, saved["step"] if saved else 0)
    newest = steps.index(max(steps))
    box = [saved if rank == newest else None]
    dist.broadcast_object_list(box, src=newest)
    start = 0
    if saved := box[0]:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    loss = torch.zeros(())
    for step in range(start, given.steps):
        order = torch.Generator().manual_seed(given.seed * 1_000_003 + step)
        rows = torch.randint(len(labels), (world * given.batch,), generator=order)
        own = rows[rank * given.batch : (rank + 1) * given.batch].to(device)
        loss = nn.functional.cross_entropy(model(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        # One process may hear of the end before the others: they agree on the step to stop at.
        stop = torch.tensor(float(asked_to_end.is_set()), device=device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if rank == 0 and (stop or done % given.save_every == 0 or done == given.steps):
            print(f"step {done} loss {loss.item():.4f}", flush=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, "checkpoint.new")
            Path("checkpoint.new").replace(CHECKPOINT)  # a kill leaves the old one or the new one
        if stop:
            raise SystemExit(128 + signal.SIGTERM)

    with torch.no_grad():
        right = (net(images).argmax(1) == labels).float().mean().item()
    if rank == 0:
        result = {"steps": given.steps, "world_size": world, "accuracy": right}
        Path("result.json").write_text(json.dumps(result))
        print(f"result {json.dumps(result)}", flush=True)
    # DDP must be gone before its process group: freed afterwards, it can wait forever for a thread
    # of gloo that waits for Python's lock, and the process never ends.
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
