"""Helpers of the recipes that keep the whole model on every worker."""

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contract.errors import InputError
from training.system import machine


def distribute(
    model: nn.Module, *, compression: str, bucket_mb: float, compiles: bool = False
) -> nn.Module:
    """Wrap the model so that backward averages its gradients over the workers.

    Args:
        compression: number format in which gradients are sent: ``none``, ``bf16`` or ``fp16``.
        bucket_mb: gradients that are sent together, in MB; small enough that sending begins while
            backward is still at work.
        compiles: compile the model.

    Raises:
        InputError: the compression is bf16, and the workers have no GPUs; or there is no compiler.
    """
    replica = DistributedDataParallel(
        model,
        # Running statistics, which only evaluation uses, are averaged then; the default sends
        # them at every step.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
    )
    if compression != "none":
        if compression == "bf16" and dist.get_backend() != "nccl":
            raise InputError(
                "--gradient-compression is bf16, which needs GPUs (NCCL): use fp16 or none here"
            )
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        replica.register_comm_hook(None, hooks[compression])
    if not compiles:
        return replica
    machine.check_compiler("--compile")
    return cast("nn.Module", torch.compile(replica))


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float
) -> torch.Tensor:
    """Clip the gradients to a norm (0: never), take the optimizer's step, and drop them.

    Returns:
        Their norm before clipping, a scalar.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def average_over_workers(tensors: Iterable[torch.Tensor], world_size: int) -> None:
    """Make batch normalization's running statistics the same on every worker, in place: each
    becomes the mean of all workers'. Integers stay as they are."""
    statistics = [tensor for tensor in tensors if tensor.is_floating_point()]
    if world_size == 1 or not statistics:
        return
    flat = torch.cat([tensor.flatten() for tensor in statistics])
    dist.all_reduce(flat)
    flat /= world_size
    sizes = [tensor.numel() for tensor in statistics]
    for tensor, part in zip(statistics, torch.split(flat, sizes), strict=True):
        tensor.copy_(part.view_as(tensor))
