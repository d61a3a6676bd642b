"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen matrices of a language model.

peft puts them into the model and reads what ``files`` writes. Their weights are ``lora_A`` and
``lora_B`` of each matrix; nothing else is trained.
"""

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from contract.errors import InputError
from training.models import language_models, uses
from training.models.model_shapes import ALL

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
) -> str:
    """Freeze a model on the meta device and put adapters beside matrices of its blocks.

    Args:
        alpha: the adapters' product counts ``alpha / rank``; 0: twice the rank.
        targets: names of the matrices, separated by commas, such as ``q_proj,v_proj``; or ``all``.
        dropout: part of an adapter's inputs that is dropped while training.

    Returns:
        What was left out of ``all``, and why, for the user; empty where nothing was.

    Raises:
        InputError: the package peft is not there, or refuses, or the blocks have no such matrices,
            or adapters beside them would not be trained.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(
            "--lora-rank needs the package peft: install it, or leave the option out"
        ) from None
    matrices = uses.matrices_of(model)
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha_of(rank, alpha),
        target_modules=uses.with_adapters(matrices, targets),
        lora_dropout=dropout,
    )
    try:
        with torch.device("meta"):
            # Not into the whole model: in mixtures peft would take the names of a block's matrices
            # for those of the experts, which they had in transformers 4.
            inject_adapter_in_model(settings, language_models.blocks(model))
    except ValueError as error:
        raise InputError(
            f"peft refuses such adapters ({error}): name other matrices in --lora-targets"
        ) from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return uses.left_out(matrices.values(), targets)


def files(
    weights: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: int,
    dropout: float,
    base: str,
    revision: str = "",
    kind: str = "",
) -> dict[str, bytes]:
    """The two files of a folder that peft reads, by name.

    Args:
        weights: the adapters' own, by the names that they have in the model.
        base: what the folder says that its base model is: a folder or a Hugging Face id.
        revision: of the base model on the Hugging Face Hub; empty: the newest.
        kind: ``model_type`` of the base model.

    Raises:
        InputError: peft would put them beside other matrices of such a model.
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
    if not _finds(matrices, kind):
        raise InputError(
            f"peft would put the adapters beside other matrices of models of type {kind!r}, whose "
            "experts had the same names in transformers 4: leave --adapters out to export the "
            "model with the adapters merged into it"
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


def _finds(matrices: Sequence[str], kind: str) -> bool:
    """Whether peft puts adapters for ``matrices`` of a model beside those, and not beside what had
    their names in transformers 4."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    settings = LoraConfig(target_modules=[*matrices])
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    try:
        convert_peft_config_for_transformers(settings, model, conversions=None)
    except ValueError:  # what it took for experts lacks a part of them
        return False
    return {*(settings.target_modules or ())} == {*matrices}


def _matrix(name: str) -> str:
    """Name of the matrix that the weight of an adapter stands beside."""
    mark = next(mark for mark in _MARKS if mark in name)
    return name.partition(mark)[0]
