"""Benchmark of checkpoints: seconds that training waits for a save.

    python -m benchmarks.checkpoint [--storage PLACE] [--mb 600] [--rounds 5]

Two ranks share a model and its AdamW state. In this project's way and in the competent one,
``torch.distributed.checkpoint.async_save`` as torch has it, each rank copies its shards to host
memory and goes on, while they are written. This project's way also hashes what it writes. In the
plain way rank 0 gathers everything, writes it, and all wait. They take turns, on the same storage.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import rank_groups
from benchmarks.tables import report, say
from store import storage
from training.checkpoint import sharded_checkpoints
from training.checkpoint.checkpoints import Position
from training.models import language_models, model_weights
from training.models.language_models import WithLoss
from training.runtime.torchrun import TorchrunWorker

ROUNDS: Final = 5
WORKERS: Final = 2
_WIDTH: Final = 768
_VOCAB: Final = 512
_BYTES_PER_PARAMETER: Final = 12  # a weight and two moments, fp32


class ShardedState:
    """A sharded GPT-NeoX with moments, of about ``mb`` megabytes altogether."""

    def __init__(self, run_uri: str, mb: int) -> None:
        from transformers import GPTNeoXConfig

        make: Any = GPTNeoXConfig
        per_layer = 12 * _WIDTH**2
        layers = max(1, round(mb * 1e6 / _BYTES_PER_PARAMETER / per_layer))
        config = make(
            vocab_size=_VOCAB,
            hidden_size=_WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=12,
            intermediate_size=4 * _WIDTH,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
        self.worker = TorchrunWorker(run_uri=run_uri)
        self.model = language_models.build_on_meta(config)
        mesh = init_device_mesh("cpu", (self.worker.world_size,))
        self.trained = WithLoss(self.model)
        language_models.shard(self.trained, mesh, bf16=False)
        model_weights.allocate(self.model, torch.device("cpu"))
        model_weights.initialise(self.model, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step()
        self.saver = sharded_checkpoints.ShardedSaver(
            self.worker, self.model, self.optimizer, files={}, settings={}, keep=2
        )

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_PARAMETER * language_models.num_parameters(self.model)

    def step(self) -> None:
        """Train on a few tokens."""
        self.trained(torch.arange(130).view(2, 65)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Seconds that one rank waited in each round, by the way of saving."""

    own: tuple[float, ...]
    async_save: tuple[float, ...]
    gathered: tuple[float, ...]
    state_bytes: int


def measure(run_uri: str, mb: int, rounds: int) -> Rounds:
    """Save in all ways, in turn."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    state = ShardedState(run_uri, mb)
    group = dist.new_group(backend="gloo")
    step = 0

    def own() -> Callable[[], bool]:
        state.saver.save(Position(step=step))
        return lambda: state.worker.saves.is_saving

    def by_async_save() -> Callable[[], bool]:
        parts = sharded_checkpoints.state_of(state.model, state.optimizer)
        # No sync: torch would sync the whole machine, and S3 has nothing to sync.
        writer = FsspecWriter(storage.join(run_uri, "async"), sync_files=False, overwrite=True)
        saving: Any = async_save(parts, storage_writer=writer, process_group=group)
        return lambda: not saving.done()

    owns, others, gathers = [], [], []
    for step in range(1, rounds + 2):
        owns.append(waited_for(own, state))
        state.worker.saves.finish()
        others.append(waited_for(by_async_save, state))
        gathers.append(save_gathered(state, storage.join(run_uri, "gathered.pt")))
        if state.worker.rank == 0:
            say(
                f"round {step - 1} of {rounds}: waited {owns[-1]:.3f} s, async_save "
                f"{others[-1]:.3f} s, gathered {gathers[-1]:.2f} s"
            )
    return Rounds(  # the first makes the buffers
        own=tuple(owns[1:]),
        async_save=tuple(others[1:]),
        gathered=tuple(gathers[1:]),
        state_bytes=state.num_bytes,
    )


def waited_for(begin: Callable[[], Callable[[], bool]], state: ShardedState) -> float:
    """Begin a save and train until it is written on all ranks; return the seconds before training
    continued.

    Args:
        begin: starts the save; returns a function that is true while it is being written.
    """
    dist.barrier()
    began = time.perf_counter()
    is_saving = begin()
    waited = time.perf_counter() - began
    votes = torch.ones(1)
    while votes.item():
        state.step()
        votes = torch.tensor([float(is_saving())])
        dist.all_reduce(votes)
    return waited


def save_gathered(state: ShardedState, uri: str) -> float:
    """Save in the plain way: rank 0 gathers and writes everything, and all wait; return seconds."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    dist.barrier()
    began = time.perf_counter()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(state.model, state.optimizer, options=options)
    if state.worker.rank == 0:
        with storage.filesystem(uri).open(uri, "wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
    dist.barrier()
    return time.perf_counter() - began


def _slowest(ranks: Sequence[Sequence[float]]) -> float:
    """Median over rounds; a step waits for its slowest rank."""
    return float(statistics.median(max(times) for times in zip(*ranks, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--storage", help="folder or s3:// address (default: a folder)")
    parser.add_argument("--mb", type=int, default=600, help="size of the state (default: 600)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default: {ROUNDS})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as scratch:
        root = options.storage or scratch
        found = rank_groups.run(
            WORKERS, measure, storage.join(root, "timed"), options.mb, options.rounds
        )
    waited = {
        way: _slowest([getattr(each, way) for each in found])
        for way in ("own", "async_save", "gathered")
    }
    result = {
        "benchmark": "checkpoint",
        "ratio": waited["async_save"] / waited["own"],
        "reference_ratio": waited["gathered"] / waited["own"],
        "ratio_is_of": "seconds that training waits for dcp.async_save to those it waits here",
        "reference_ratio_is_of": "the same, gathered and written by rank 0",
        "seconds_training_waits": waited,
        "state_bytes": found[0].state_bytes,
        "storage": "s3" if storage.is_s3(root) else "disk",
    }
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
