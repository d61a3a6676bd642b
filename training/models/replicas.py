"""Helpers of the recipes that keep the whole model on every worker."""

import math
from collections.abc import Iterable
from typing import Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.system import devices

#: Gradients that are sent together, in MB: small enough that sending begins while backward is still
#: at work.
_BUCKET_MB: Final = 4.0
#: Shapes for which a function is compiled: a growing picture has some 20 sizes at most.
_MOST_SHAPES: Final = 32


def keep_shapes_exact() -> None:
    """Have torch compile a graph for each shape of its inputs. By default a second shape makes it
    compile one for any shape, which is slower and also replaces the first (pytorch 174704)."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = _MOST_SHAPES


def distribute(model: nn.Module, *, compiles: bool = False, has_graphs: bool = False) -> nn.Module:
    """Wrap the model so that backward averages its gradients over the workers. Of a single worker,
    whose GPU would wait for what the wrapper does at each gradient, it stays as it is.

    Args:
        compiles: compile the model.
        has_graphs: of a single worker, launch forward and backward as a CUDA graph each: for models
            so small that a GPU waits for launches. Begin each step with ``begin_step``.

    Raises:
        InputError: there is no compiler.
    """
    replica: nn.Module = model
    is_alone = dist.get_world_size() == 1
    if not is_alone:
        replica = DistributedDataParallel(
            model,
            # Running statistics, which only evaluation uses, are averaged then; the default sends
            # them at every step.
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_BUCKET_MB,
        )
    if not compiles:
        return replica
    devices.check_compiler("--compile")
    keep_shapes_exact()
    mode = "reduce-overhead" if has_graphs and is_alone else None
    return cast("nn.Module", torch.compile(replica, mode=mode))


def begin_step() -> None:
    """Let CUDA graphs overwrite what those of the step before have returned."""
    torch.compiler.cudagraph_mark_step_begin()


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
