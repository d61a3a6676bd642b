"""The sharded step of this project beside accelerate's FSDP2, on two gloo ranks.

    python -m benchmarks.sharded [--json]

Both train the same GPT-NeoX from the same weights on the same sequences, in fp32, two passes a
step: once reducing gradients after each pass, and once only after the last. They take turns, step
by step. Memory is measured in processes of its own: what a rank holds at most in a step, above what
it held before it had a model. Bytes are those handed to collectives. It says nothing of GPUs.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import processes
from benchmarks.loading import Watch
from benchmarks.output import report, say
from training import optimizers
from training.models import language_models, model_weights, pretrained
from training.models.language_models import WithLoss
from training.recipes.fsdp.loop import clip, make_mesh, reduce_gradients
from training.runtime.torchrun import TorchrunWorker

WORKERS: Final = 2
SEQ_LEN: Final = 128
MICROBATCH: Final = 4
PASSES: Final = 2
ROUNDS: Final = 5
LR: Final = 1e-3
MODES: Final = ("pass", "step")
WAYS: Final = ("own", "accelerate")
SHAPE: Final = {
    "model_type": "gpt_neox",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_cache": False,
}

Step = Callable[[torch.Tensor], float]
"""Trains one step on ``[PASSES, MICROBATCH, SEQ_LEN + 1]`` tokens and returns its mean loss."""


def own_step(when: str) -> Step:
    """A step as the recipe takes it; gradients are reduced after each ``pass`` or ``step``."""
    model = language_models.build_on_meta(pretrained.config_of(SHAPE))
    trained = WithLoss(model)
    mesh = make_mesh(torch.device("cpu"), world_size=dist.get_world_size(), replicas=1)
    language_models.shard(trained, mesh, bf16=False)
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=0)
    optimizer = optimizers.build(
        model, "adamw", lr=LR, weight_decay=0.1, device=torch.device("cpu")
    )

    def step(tokens: torch.Tensor) -> float:
        total = 0.0
        for number, part in enumerate(tokens, start=1):
            reduce_gradients(trained, when, is_last=number == PASSES)
            loss = trained(part) / PASSES
            loss.backward()
            total += loss.item()
        clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def accelerate_step(when: str) -> Step:
    """The same with accelerate's FSDP2: blocks wrapped, fused AdamW, the model's own loss."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    # On a CPU accelerate would quietly take DDP instead.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPTNeoXLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator: Any = Accelerator(fsdp_plugin=plugin, mixed_precision="no")
    model: Any = language_models.build_on_meta(pretrained.config_of(SHAPE))
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=0)
    made = optimizers.build(model, "adamw", lr=LR, weight_decay=0.1, device=torch.device("cpu"))
    model, optimizer = accelerator.prepare(model, made)
    assert hasattr(model, "set_requires_gradient_sync"), "accelerate has not sharded the model"

    def step(tokens: torch.Tensor) -> float:
        total = 0.0
        for number, part in enumerate(tokens, start=1):
            reduces = when == "pass" or number == PASSES
            with nullcontext() if reduces else accelerator.no_sync(model):
                labels = part[:, 1:].contiguous()
                loss = model(input_ids=part[:, :-1], labels=labels, shift_labels=labels).loss
                accelerator.backward(loss / PASSES)
                total += loss.item() / PASSES
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


_MAKE: Final = {"own": own_step, "accelerate": accelerate_step}


def batch(number: int) -> torch.Tensor:
    """Tokens of a step, another part for each rank."""
    generator = torch.Generator().manual_seed(number * WORKERS + dist.get_rank())
    # Few of the vocabulary, so that there is something to learn.
    return torch.randint(64, (PASSES, MICROBATCH, SEQ_LEN + 1), generator=generator)


class _Bytes(TorchDispatchMode):
    """Counts what is handed to collectives: the largest tensor of each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = torch.utils._pytree.tree_leaves((args, kwargs, found))
            self.total += max((x.nbytes for x in tensors if isinstance(x, torch.Tensor)), default=0)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Of one rank: seconds of each step, and losses, by way."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]


def take_turns(when: str) -> Timed:
    """Train in both ways, step by step."""
    worker = TorchrunWorker(run_uri="")
    steps = {way: _MAKE[way](when) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(ROUNDS + 1):
        for way, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            losses[way].append(step(batch(number)))
            dist.barrier()
            if number:  # the first makes the buffers
                seconds[way].append(time.perf_counter() - began)
        if worker.rank == 0 and number:
            words = ", ".join(f"{way} {seconds[way][-1]:.2f} s" for way in WAYS)
            say(f"reduced each {when}, round {number} of {ROUNDS}: {words}")
    return Timed(seconds=seconds, losses=losses)


def memory_and_bytes(way: str, when: str) -> tuple[int, int]:
    """Most memory that a rank holds in a step, and what it hands to collectives."""
    TorchrunWorker(run_uri="")
    # What is imported on the way is no part of it.
    for name in ("accelerate", "torch._dynamo"):
        importlib.import_module(name)
    language_models.build_on_meta(pretrained.config_of(SHAPE))
    before = Watch._now()
    step = _MAKE[way](when)
    step(batch(0))
    with _Bytes() as counted:
        step(batch(1))
    held = Watch._now() - before
    with Watch() as watch:
        step(batch(2))
    return held + watch.peak, counted.total


def compare(when: str) -> dict[str, object]:
    """Both ways in one mode."""
    timed = processes.run(WORKERS, take_turns, when)
    other = {way: processes.run(WORKERS, memory_and_bytes, way, when) for way in WAYS}
    tokens = WORKERS * PASSES * MICROBATCH * SEQ_LEN
    rates = {way: tokens / statistics.median(timed[0].seconds[way]) for way in WAYS}
    losses = [
        (one, two)
        for each in timed
        for one, two in zip(each.losses["own"], each.losses["accelerate"], strict=True)
    ]
    return {
        "ratio": rates["own"] / rates["accelerate"],
        "tokens_per_s": rates,
        "peak_memory_bytes": {way: max(each[0] for each in other[way]) for way in WAYS},
        "bytes_to_collectives": {way: max(each[1] for each in other[way]) for way in WAYS},
        "last_losses": {way: timed[0].losses[way][-1] for way in WAYS},
        "largest_difference_of_losses": max(abs(one - two) for one, two in losses),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)
    found = {when: compare(when) for when in MODES}
    model = language_models.build_on_meta(pretrained.config_of(SHAPE))
    result = {
        "benchmark": "sharded",
        "ratio": found["pass"]["ratio"],
        "ratio_is_of": "tokens/s to accelerate's FSDP2, both reducing gradients after each pass",
        "parameters": language_models.num_parameters(model),
        "reduced_after_each_pass": found["pass"],
        "reduced_once_a_step": found["step"],
    }
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
