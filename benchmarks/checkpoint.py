"""How long training waits for a checkpoint: sharded and in the background, or gathered and written.

    python -m benchmarks.checkpoint [--storage PLACE] [--mb 600] [--json]

Two ranks share a model and its AdamW state. One way is this project's: each rank copies its shards
to host memory and goes on, while torch.distributed.checkpoint writes them. The other is the plain
one: rank 0 gathers everything, writes it, and all wait. They take turns, on the same storage. Then
all processes are killed while a checkpoint is being written, and a new pair must find the one
before it whole.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks import processes
from benchmarks.output import report, say
from rehearsal.local_aws import local_aws
from training import storage
from training.checkpoint import checkpoints, sharded_checkpoints
from training.checkpoint.checkpoints import Position
from training.models import language_models, model_weights
from training.models.language_models import WithLoss
from training.recipes.fsdp.loop import make_mesh
from training.runtime.torchrun import TorchrunWorker

ROUNDS: Final = 5
WORKERS: Final = 2
ROOT: Final = Path(__file__).parents[1]
_WIDTH: Final = 768
_VOCAB: Final = 512
_BYTES_PER_PARAMETER: Final = 12  # a weight and two moments, fp32


class State:
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
        mesh = make_mesh(torch.device("cpu"), world_size=self.worker.world_size, replicas=1)
        self.trained = WithLoss(self.model)
        language_models.shard(self.trained, mesh, bf16=False)
        model_weights.allocate(self.model, torch.device("cpu"))
        model_weights.initialise(self.model, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.trained(torch.arange(34).view(2, 17)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.saver = sharded_checkpoints.Saver(
            self.worker, self.model, self.optimizer, files={}, keep=2
        )

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_PARAMETER * language_models.num_parameters(self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waited:
    """Seconds that one rank waited, per round."""

    sharded: tuple[float, ...]
    gathered: tuple[float, ...]
    written: tuple[float, ...]
    """Until a sharded checkpoint was in storage."""
    state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """What was left after all processes died while they wrote the second checkpoint."""

    killed_after_s: float
    was_torn: bool
    """Whether the second checkpoint is not whole."""
    loaded_step: int


def measure(run_uri: str, mb: int) -> Waited:
    """Save in both ways, in turn."""
    state = State(run_uri, mb)
    stalls, gathers, written = [], [], []
    for number in range(1, ROUNDS + 2):
        dist.barrier()
        began = time.perf_counter()
        stall = state.saver.save(Position(step=number), {})
        state.worker.finish_saves()
        dist.barrier()
        whole = time.perf_counter() - began
        gathered = save_gathered(state, storage.join(run_uri, "gathered.pt"))
        if number > 1:  # the first makes the buffers
            stalls.append(stall)
            gathers.append(gathered)
            written.append(whole)
        if state.worker.rank == 0:
            say(f"round {number - 1} of {ROUNDS}: {stall:.3f} s against {gathered:.2f} s")
    return Waited(
        sharded=tuple(stalls),
        gathered=tuple(gathers),
        written=tuple(written),
        state_bytes=state.num_bytes,
    )


def save_gathered(state: State, uri: str) -> float:
    """The plain way: everything on rank 0, written before anyone goes on; seconds."""
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


def save_two(run_uri: str, mb: int, mark: str) -> None:
    """Save step 1, then begin step 2, say so, and wait to be killed."""
    state = State(run_uri, mb)
    state.saver.save(Position(step=1), {})
    state.worker.finish_saves()
    dist.barrier()
    state.saver.save(Position(step=2), {})
    Path(f"{mark}-{state.worker.rank}").touch()
    time.sleep(60)


def load_newest(run_uri: str, mb: int) -> int:
    """Step of the checkpoint that a new group chooses and loads."""
    state = State(run_uri, mb)
    found = sharded_checkpoints.newest(state.worker)
    if found is None:
        return 0
    found.load(state.model, state.optimizer)
    return found.position.step


def kill_while_writing(run_uri: str, mb: int, after_s: float) -> Killed:
    """What is left when all processes die ``after_s`` after the second checkpoint has begun."""
    with tempfile.TemporaryDirectory() as scratch:
        mark = str(Path(scratch) / "mark")
        group, _ = processes.start(WORKERS, save_two, run_uri, mb, mark)
        while not all(Path(f"{mark}-{rank}").exists() for rank in range(WORKERS)):
            if not all(process.is_alive() for process in group):
                raise RuntimeError("the processes to be killed ended by themselves")
            time.sleep(0.002)
        time.sleep(after_s)
        for process in group:
            os.kill(process.pid, signal.SIGKILL)
        for process in group:
            process.join()
    was_torn = checkpoints.names(run_uri) != ["step-00000001", "step-00000002"] or (
        storage.read_bytes(storage.join(run_uri, "checkpoints/step-00000002/manifest.json")) is None
    )
    steps = processes.run(WORKERS, load_newest, run_uri, mb)
    return Killed(killed_after_s=after_s, was_torn=was_torn, loaded_step=steps[0])


@contextmanager
def place(wanted: str | None) -> Iterator[str]:
    """Where the checkpoints go: what is wanted, or the S3 of the local AWS, or a folder."""
    if wanted:
        yield wanted
        return
    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    try:
        if not (ROOT / ".venv-aws" / "bin" / "python").exists():
            say("no AWS emulator (make venv-aws): checkpoints go to a folder")
            yield str(scratch)
            return
        with local_aws(scratch) as aws:
            os.environ |= aws.environment()
            storage.filesystem("s3://").mkdir("s3://checkpoints")
            yield "s3://checkpoints/runs"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--storage", help="folder or s3:// address (default: the emulator's S3)")
    parser.add_argument("--mb", type=int, default=600, help="size of the state (default: 600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    with place(options.storage) as root:
        found = processes.run(WORKERS, measure, storage.join(root, "timed"), options.mb)
        kills = []
        for number, after_s in enumerate((0.02, 0.15)):
            uri = storage.join(root, f"killed-{number}")
            kills.append(kill_while_writing(uri, options.mb, after_s))
            say(f"killed: {kills[-1]}")
    # A step waits for its slowest rank.
    sharded, gathered = (
        statistics.median(max(times) for times in zip(*ranks, strict=True))
        for ranks in ([each.sharded for each in found], [each.gathered for each in found])
    )
    result = {
        "benchmark": "checkpoint",
        "ratio": gathered / sharded,
        "seconds_training_waits": {"sharded": sharded, "gathered": gathered},
        "seconds_until_written": statistics.median(found[0].written),
        "state_bytes": found[0].state_bytes,
        "storage": "s3" if storage.is_s3(root) else "disk",
        "killed_while_writing": [asdict(each) for each in kills],
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
