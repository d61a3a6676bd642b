"""Steps of the sharded recipe with random weights and tokens: tokens/s, MFU, memory, profile.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.gpu_fsdp --model new:6.9b [--json]

Needs torch and transformers, not Ray. On a machine without a GPU it runs the tiny shape, which
shows that the script works and says nothing about a GPU. The model, its sharding, its loss and its
optimizer are the recipe's own; only data and checkpoints are left out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.output import report, say
from training import metrics, optimizers
from training.models import language_models, model_weights, pretrained
from training.models.estimates import RECOMPUTE
from training.models.language_models import WithLoss
from training.recipes.fsdp.loop import clip, make_mesh, reduce_gradients
from training.recipes.fsdp.settings import OPTIMIZERS, FsdpConfig
from training.runtime.torchrun import TorchrunWorker

WARM_UP: Final = 3


def parser(on_gpu: bool) -> argparse.ArgumentParser:
    """The options, whose defaults suit a GPU or a CPU."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu_fsdp", description=__doc__)
    found.add_argument("--model", default="new:6.9b" if on_gpu else "new:tiny")
    found.add_argument("--seq-len", type=int, default=2048 if on_gpu else 128)
    found.add_argument("--microbatch", type=int, default=4, help="sequences per pass (default: 4)")
    found.add_argument("--passes", type=int, default=2, help="passes per step (default: 2)")
    found.add_argument("--steps", type=int, default=8, help="timed steps (default: 8)")
    found.add_argument("--recompute", choices=RECOMPUTE, default="selective")
    found.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    found.add_argument("--compile", action="store_true")
    found.add_argument("--profile", metavar="FILE", help="write the kernels of one step there")
    found.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return found


@contextmanager
def profiled(file: str) -> Iterator[None]:
    """Write the kernels of what is done inside to a file, the longest first."""
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    with open(file, "w", encoding="utf-8") as lines:
        lines.write(profile.key_averages().table(sort_by=order, row_limit=25))


def main() -> int:
    on_gpu = torch.cuda.is_available()
    options = parser(on_gpu).parse_args()

    worker = TorchrunWorker(run_uri="")
    device, world_size = worker.device, worker.world_size
    config = FsdpConfig(
        recipe="fsdp",
        run="benchmark",
        storage="/nowhere",
        data="random",
        model=options.model,
        seq_len=options.seq_len,
        microbatch=options.microbatch,
        global_batch=options.microbatch * options.passes * world_size,
        num_workers=world_size,
        optimizer=options.optimizer,
    )
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    model = language_models.build_on_meta(pretrained.model_config(options.model, runs=""))
    language_models.recompute(model, options.recompute)
    if options.compile:
        for block in language_models.blocks(model):
            block.compile()
    trained: Any = WithLoss(model)
    language_models.shard(
        trained, make_mesh(device, world_size=world_size, replicas=1), bf16=on_gpu
    )
    model_weights.allocate(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            local = language_models.local(parameter)
            local.normal_(std=0.02) if parameter.dim() > 1 else local.fill_(0.5)
    optimizer = optimizers.build(
        model, config.optimizer, lr=config.lr, weight_decay=config.weight_decay, device=device
    )
    vocab = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens = torch.randint(vocab, (options.microbatch, options.seq_len + 1), device=device)

    def step() -> Any:
        loss = None
        for number in range(1, options.passes + 1):
            reduce_gradients(trained, config.reduce_gradients, is_last=number == options.passes)
            loss = trained(tokens) / options.passes
            loss.backward()
        clip(model, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    seconds = []
    for number in range(WARM_UP + options.steps):
        wait()
        began = time.perf_counter()
        loss = step()
        wait()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
        if worker.rank == 0:
            spent = time.perf_counter() - began
            say(f"step {number}: {spent:.3f} s, loss {loss.item() * options.passes:.3f}")
    with metrics.Communication(device) as watched:
        step()
    if options.profile:
        with profiled(options.profile) if worker.rank == 0 else nullcontext():
            step()
            wait()

    per_step = config.global_batch * options.seq_len
    tokens_per_s = per_step / statistics.median(seconds)
    flops = language_models.flops_per_token(model, options.seq_len)
    peak = metrics.peak_flops(device)
    result = {
        "benchmark": "gpu_fsdp",
        # What the reference reaches of its peak (docs/fsdp.md); nothing is compared on a CPU.
        "ratio": (flops * tokens_per_s / (world_size * peak)) / 0.066 if peak else 0.0,
        "model": options.model,
        "parameters": language_models.num_parameters(model),
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU: says nothing of a GPU",
        "world_size": world_size,
        "seq_len": options.seq_len,
        "tokens_per_step": per_step,
        "recompute": options.recompute,
        "optimizer": options.optimizer,
        "compile": options.compile,
        "seconds_per_step": statistics.median(seconds),
        "tokens_per_s": tokens_per_s,
        "mfu": metrics.model_flops_utilization(
            flops_per_s=flops * tokens_per_s, num_workers=world_size, peak=peak
        ),
        "communication_s": watched.seconds(),
        "peak_memory_bytes": metrics.peak_memory(device),
    }
    if worker.rank == 0:
        report(result, as_json=options.json)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
