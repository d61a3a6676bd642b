"""A small GPT in one file, trained on the bytes that ``prepare.py`` has written to ``data/``.

    python prepare.py && torchrun --nproc-per-node 2 train.py

Also without torchrun, in one process. It resumes from ``out/checkpoint.pt``, and is asked to end by
SIGTERM, as on a spot host: it saves first.
"""

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

DATA = Path("data")
OUT = Path("out")


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> the same."""
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) of bytes -> (batch, length, 256)."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.bytes.weight.T


def batch_of(
    text: torch.Tensor, *, seed: int, size: int, context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bytes and of the bytes that follow them, both (size, context)."""
    order = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (size,), generator=order)
    rows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, help="in steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="rows per process and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())

    gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    )
    rank, world = 0, 1
    if parallel := "RANK" in os.environ:
        dist.init_process_group("nccl" if gpu else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    if gpu:
        torch.cuda.set_device(device)

    def read(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray((DATA / name).read_bytes()), dtype=torch.uint8)

    train, held_out = read("train.bin"), read("held-out.bin")
    torch.manual_seed(given.seed)
    gpt = Gpt(layers=given.layers, heads=4, width=given.width, context=given.context).to(device)
    model = DistributedDataParallel(gpt) if parallel else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)

    file, start = OUT / "checkpoint.pt", 0
    box = [torch.load(file, map_location="cpu") if file.exists() else None]
    if parallel:
        # Rank 0 saves; once a node was replaced it may be another one: the newest file counts.
        steps = [0] * world
        dist.all_gather_object(steps, box[0]["step"] if box[0] else 0)
        dist.broadcast_object_list(box, src=steps.index(max(steps)))
    if saved := box[0]:
        gpt.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    def save(done: int) -> None:
        OUT.mkdir(exist_ok=True)
        state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state, OUT / "checkpoint.new")
        (OUT / "checkpoint.new").replace(file)

    for step in range(start, given.steps):
        seed = (given.seed * 1_000_003 + step) * world + rank
        batch = batch_of(train, seed=seed, size=given.batch, context=given.context, device=device)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        if rank == 0 and (done % given.save_every == 0 or done == given.steps):
            print(f"step {done} loss {loss.item():.4f}", flush=True)
            save(done)
        # One process may hear of the end before the others: they agree on the step to stop at.
        stop = torch.tensor(float(asked_to_end.is_set()), device=device)
        if parallel:
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            if rank == 0:
                save(done)
                print(f"asked to end: saved at step {done}", flush=True)
            raise SystemExit(128 + signal.SIGTERM)

    with torch.no_grad():
        batch = batch_of(held_out, seed=1, size=64, context=given.context, device=device)
        loss = loss_of(gpt, batch)
    if rank == 0:
        result = {"steps": given.steps, "world_size": world, "loss": loss.item()}
        Path("result.json").write_text(json.dumps(result))
        print(f"result {json.dumps(result)}", flush=True)
    if parallel:
        # DDP must be gone before its process group: freed afterwards, it can wait forever for a
        # thread of gloo that waits for Python's lock, and the process never ends.
        del model, loss
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
