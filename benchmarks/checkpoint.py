"""Benchmark of checkpoints: what a save costs training.

    python -m benchmarks.checkpoint [--mb 100] [--rounds 7]

Two ranks share a model and its AdamW state. Beside this project's saver, which also hashes what it
writes, checks it and looks at the lease, there is ``torch.distributed.checkpoint.async_save`` as
people use it who know it: its stager kept from one save to the next, writing in a thread or in a
process of its own, with and without fsspec. They take turns, on the same disk. A save costs the
seconds that training waits, and the CPU seconds that are used beside the steps until all ranks have
written; those are exact on a busy machine too.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import rank_groups
from benchmarks.tables import cpu_seconds, report, say
from training.checkpoint import sharded_checkpoints
from training.checkpoint.checkpoints import Position
from training.models import language_models, model_weights, pretrained
from training.models.language_models import WithLoss
from training.models.model_shapes import SHAPES
from training.runtime.torchrun import TorchrunWorker

WORKERS: Final = 2
_STEPS: Final = 3
_WIDTH: Final = 768  # of the shape below
_BYTES_PER_PARAMETER: Final = 12  # a weight and two moments, fp32


class ShardedState:
    """A sharded GPT-NeoX with moments, of about ``mb`` megabytes altogether."""

    def __init__(self, run_uri: str, mb: int) -> None:
        layers = max(1, round(mb * 1e6 / _BYTES_PER_PARAMETER / (12 * _WIDTH**2)))
        shape = {**SHAPES["160m"], "num_hidden_layers": layers, "vocab_size": 512}
        self.worker = TorchrunWorker(run_uri=run_uri)
        self.model = language_models.build_on_meta(pretrained.config_of(shape))
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


class Cost(NamedTuple):
    """Of one save, on one rank."""

    waited: float
    """Seconds before training continued."""
    cpu: float
    """CPU seconds beside those of the steps, of this process and its children."""


def measure(run_uri: str, mb: int, rounds: int) -> tuple[dict[str, list[Cost]], int]:
    """Save in all ways, in turn; return the costs by way, and the bytes of the state."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    state = ShardedState(run_uri, mb)
    group = dist.new_group(backend="gloo")
    step = 0

    def own() -> Callable[[], bool]:
        state.saver.save(Position(step=step))
        return lambda: state.worker.saves.is_saving

    def by_torch(
        make: Any, name: str, kind: AsyncCheckpointerType, stager: DefaultStager
    ) -> Callable[[], bool]:
        saving: Any = async_save(
            sharded_checkpoints.state_of(state.model, state.optimizer),
            # No sync: torch would sync the whole machine.
            storage_writer=make(f"{run_uri}/{name}", sync_files=False),
            process_group=group,
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        written = getattr(saving, "upload_completion", saving)
        return lambda: not written.done()

    ways = {"own": own}
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    for name, make, kind in (
        ("thread", FsspecWriter, thread),
        ("thread_to_files", FileSystemWriter, thread),
        ("process_to_files", FileSystemWriter, process),
    ):
        stager = DefaultStager(StagingOptions(False, kind is process, False, False))
        ways[name] = partial(by_torch, make, name, kind, stager)
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for step in range(1, rounds + 2):
        for name, way in ways.items():
            costs[name].append(cost_of(way, state))
            state.worker.saves.finish()
            if state.worker.rank == 0:
                say(f"round {step - 1} of {rounds}, {name}: {costs[name][-1]}")
    return {name: each[1:] for name, each in costs.items()}, state.num_bytes  # buffers are made


def cost_of(begin: Callable[[], Callable[[], bool]], state: ShardedState) -> Cost:
    """Begin a save and train until it is written on all ranks, after some steps without one.

    Args:
        begin: starts the save; returns a function that is true while it is being written.
    """

    def step(is_saving: bool) -> bool:
        state.step()
        votes = torch.tensor([float(is_saving)])
        dist.all_reduce(votes)
        return votes.item() > 0

    dist.barrier()
    cpu = cpu_seconds()
    for _ in range(_STEPS):
        step(False)
    each_cpu = (cpu_seconds() - cpu) / _STEPS
    dist.barrier()
    began, cpu = time.perf_counter(), cpu_seconds()
    is_saving = begin()
    waited = time.perf_counter() - began
    num = 1
    while step(is_saving()):
        num += 1
    return Cost(
        waited,
        cpu_seconds() - cpu - num * each_cpu,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--mb", type=int, default=100, help="size of the state (default: 100)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        found = rank_groups.run(WORKERS, measure, folder, options.mb, options.rounds)
    # A step waits for its slowest rank; CPU seconds are those of both.
    medians = {
        way: {
            name: statistics.median(
                over(getattr(each, name) for each in costs)
                for costs in zip(*(ranks[way] for ranks, _ in found), strict=True)
            )
            for name, over in (("waited", max), ("cpu", sum))
        }
        for way in found[0][0]
    }
    own, *others = medians.values()
    result = {
        "benchmark": "checkpoint",
        "ratio": min(each["waited"] for each in others) / own["waited"],
        "seconds": medians,
        "state_bytes": found[0][1],
    }
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
