"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen matrices of a language model.

peft puts them into the model and reads what ``files`` writes. Their weights are ``lora_A`` and
``lora_B`` of each matrix; nothing else is trained.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from contract.errors import InputError
from training.models.language_models import matrices
from training.models.model_shapes import ALL, names_of

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
# What peft calls the only adapters of a model, within the names of their weights.
_NAME: Final = ".default."
_MARKS: Final = (".lora_A.", ".lora_B.")


def alpha_of(rank: int, alpha: int) -> int:
    """Twice the rank, unless something else was asked for: adapters count ``alpha / rank``."""
    return alpha or 2 * rank


def add(
    model: nn.Module, *, rank: int, alpha: int = 0, targets: str = ALL, dropout: float = 0.0
) -> None:
    """Freeze a model on the meta device and put adapters beside matrices of its blocks.

    Args:
        alpha: the adapters' product counts ``alpha / rank``; 0: twice the rank.
        targets: names of the matrices, separated by commas, such as ``q_proj,v_proj``; or ``all``.
        dropout: part of an adapter's inputs that is dropped while training.

    Raises:
        InputError: the package peft is not there, or refuses, or the blocks have no such matrices.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(
            "--lora-rank needs the package peft: install it, or leave the option out"
        ) from None
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha_of(rank, alpha),
        target_modules=_targets(model, targets),
        lora_dropout=dropout,
    )
    try:
        with torch.device("meta"):
            inject_adapter_in_model(settings, model)
    except ValueError as error:  # some layers of state-space models
        raise InputError(
            f"peft refuses such adapters ({error}): name other matrices in --lora-targets"
        ) from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _targets(model: nn.Module, targets: str) -> list[str] | str:
    if targets == ALL:
        return "all-linear"
    return [*names_of(targets, {name.rpartition(".")[2] for name, _ in matrices(model)})]


def files(
    weights: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: int,
    dropout: float,
    base: str,
    revision: str = "",
) -> dict[str, bytes]:
    """The two files of a folder that peft reads, by name.

    Args:
        weights: the adapters' own, by the names that they have in the model.
        base: what the folder says that its base model is: a folder or a Hugging Face id.
        revision: of the base model on the Hugging Face Hub; empty: the newest.
    """
    from peft import LoraConfig
    from safetensors.torch import save

    matrices = sorted({_matrix(name).rpartition(".")[2] for name in weights})
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha_of(rank, alpha),
        target_modules=matrices,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision or None,
        inference_mode=True,
    )
    of: Any = settings
    values: dict[str, Any] = of.to_dict()
    values["target_modules"] = matrices  # a set there, which JSON does not have
    tensors = {
        f"base_model.model.{name.replace(_NAME, '.')}": each.contiguous()
        for name, each in weights.items()
    }
    text = json.dumps(values, indent=1, sort_keys=True, default=str)
    return {WEIGHTS_FILE: save(tensors, {"format": "pt"}), CONFIG_FILE: text.encode()}


def _matrix(name: str) -> str:
    """Name of the matrix that the weight of an adapter stands beside."""
    mark = next(mark for mark in _MARKS if mark in name)
    return name.partition(mark)[0]
