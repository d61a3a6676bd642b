"""Advice about GPU memory for runs of the FSDP recipe."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from contract.errors import InputError
from contract.instance_types import INSTANCE_TYPES
from training.fsdp.settings import FsdpConfig
from training.models import built_shapes, language_models, lora, nf4
from training.models.estimates import GIB, Setup, differences, keeps_whole, make, smaller
from training.models.model_shapes import UnknownShapeError, of_config


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


def fit(model_config: Mapping[str, Any], config: FsdpConfig, gpu_name: str) -> tuple[str, bool]:
    """A warning about a run that does not fit its GPUs, empty where the GPU or the model is not
    known; and whether memory is left for weights and gradients that stay whole between the passes
    of a step, so that fewer bytes are sent.

    Args:
        model_config: transformers' configuration.
        gpu_name: as ``torch.cuda.get_device_name`` has it; empty on a CPU, which has memory left.
    """
    machines = [each for each in INSTANCE_TYPES.values() if each.gpu and each.gpu.name == gpu_name]
    if not machines:
        return "", not gpu_name and config.num_workers > 1 and config.num_microbatches > 1
    # The host is not known: assume the one with the most memory, so that no warning is wrong.
    machine = max(machines, key=lambda each: each.memory_mib / each.num_gpus)
    try:
        shape = of_config(model_config, model=config.model, build=built_shapes.built)
    except UnknownShapeError:
        return "", False
    settings = {**config.to_json(), "microbatch": config.sequences_per_pass}
    setup = Setup.of(settings, machine, num_workers=config.num_workers)
    found = make(shape, setup)
    if found.fits:
        return "", keeps_whole(shape, setup)
    remedies = smaller(shape, setup)
    return (
        f"by the arithmetic of training.plan this needs {found.memory.total / GIB:.1f} GiB of each "
        f"GPU, and {setup.available / GIB:.1f} are free: "
        + (f"{differences(setup, remedies[0])} would fit" if remedies else "give more --workers")
    ), False


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
