"""Advice about GPU memory for runs of the FSDP recipe."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from contract.errors import InputError
from contract.instance_types import INSTANCE_TYPES
from training.fsdp.settings import FsdpConfig
from training.models import estimates, language_models, lora, nf4
from training.models.estimates import GIB, Setup, differences, make, smaller
from training.models.model_shapes import ModelShape, UnknownShapeError


def advice(config: FsdpConfig, model: nn.Module) -> str:
    """Settings for a run that ran out of memory, in a sentence.

    Args:
        model: on the meta device, without adapters.
    """
    options = []
    if config.microbatch > 1:
        options.append(f"--microbatch {max(1, config.microbatch // 2)}")
    if config.recompute != "full":
        options.append("--recompute full")
    if config.optimizer == "adamw":
        options.append("--optimizer adamw-8bit (another --run)")
    if not config.lora_rank:
        if "" in lora.reasons_against(model).values():
            options.append("--lora-rank 16 (another --run)")
    elif (
        config.lora_bits == 16
        and nf4.packable(language_models.blocks(model))
        and not language_models.state_space_layers(model)
    ):
        options.append("--lora-bits 4 (another --run)")
    if not options:
        return "Give more --workers; training.plan computes what fits"
    return f"Give more --workers, or one of: {', '.join(options)}; training.plan computes what fits"


def warning(model_config: Mapping[str, Any], config: FsdpConfig, gpu_name: str) -> str:
    """Warn that a run does not fit its GPUs; empty where it fits, or where the GPU or the model is
    not known.

    Args:
        model_config: transformers' configuration.
        gpu_name: as ``torch.cuda.get_device_name`` has it.
    """
    known = _known(model_config, config, gpu_name)
    if known is None:
        return ""
    shape, setup = known
    found = make(shape, setup)
    if found.fits:
        return ""
    remedies = smaller(shape, setup)
    return (
        f"by the arithmetic of training.plan this needs {found.memory.total / GIB:.1f} GiB of each "
        f"GPU, and {setup.available / GIB:.1f} are free: "
    ) + (f"{differences(setup, remedies[0])} would fit" if remedies else "give more --workers")


def _known(
    model_config: Mapping[str, Any], config: FsdpConfig, gpu_name: str
) -> tuple[ModelShape, Setup] | None:
    """A run as the plan computes it; None where the GPU or the model is not known."""
    machines = [each for each in INSTANCE_TYPES.values() if each.gpu and each.gpu.name == gpu_name]
    if not machines:
        return None
    # The host is not known: assume the one with the most memory, so that no warning is wrong.
    machine = max(machines, key=lambda each: each.memory_mib / each.num_gpus)
    try:
        shape = ModelShape.from_config(model_config)
    except UnknownShapeError:
        return None
    settings = {**config.to_json(), "microbatch": config.sequences_per_pass}
    return shape, Setup.of(settings, machine, num_workers=config.num_workers)


def keeps_whole(model_config: Mapping[str, Any], config: FsdpConfig, device: torch.device) -> bool:
    """Whether weights and gradients stay whole between the passes of a step: fewer bytes are sent,
    where memory allows. A CPU's does."""
    if device.type != "cuda":
        return config.num_workers > 1 and config.num_microbatches > 1
    known = _known(model_config, config, torch.cuda.get_device_name(device))
    return known is not None and estimates.keeps_whole(*known)


def check_fits(model: nn.Module, free: int, gpu_name: str) -> None:
    """Fail if a model's weights, not yet loaded, need more than the free memory of one GPU.

    Args:
        model: on the meta device.
        free: in bytes.

    Raises:
        InputError: they do.
    """
    needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if needed > free:
        raise InputError(
            f"the weights need {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free on {gpu_name}:"
            " use a larger GPU, or the CPU (CUDA_VISIBLE_DEVICES='')"
        )
