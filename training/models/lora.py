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
from training.models import language_models, nf4
from training.models.model_shapes import ALL, target_names

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
# What peft calls the only adapters of a model, within the names of their weights.
_NAME: Final = ".default."
_MARKS: Final = (".lora_A.", ".lora_B.")

# Reasons against adapters, after the names of matrices. Fine-tuning leaves routers as they are, but
# they may be named.
_ROUTER: Final = "chooses experts"
_STATE: Final = "is read by its state-space layer, which would not train adapters"
_MORE: Final = "does more than a product, to which those of adapters could be added"
_EXPERTS: Final = "experts."
#: Names of the layer that chooses the experts of a token, beside "router".
_GATES: Final = frozenset({"gate", "wg"})
#: Matrices of state-space layers that these, or their CUDA kernels, read and do not call; peft
#: refuses the second one.
_READ: Final = ("dt_proj", "out_proj")


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
        The matrices that ``all`` leaves out, and the reasons, for the user; empty if none.

    Raises:
        InputError: the package peft is missing or refuses, the blocks have no such matrices, or
            adapters beside them would not be trained.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(
            "--lora-rank needs the package peft: install it, or leave the option out"
        ) from None
    reasons = reasons_against(model)
    settings = LoraConfig(
        r=rank,
        lora_alpha=alpha_of(rank, alpha),
        target_modules=_chosen(reasons, targets),
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
    return _left_out(reasons | _no_matrices(model)) if targets == ALL else ""


def reasons_against(model: nn.Module) -> dict[str, str]:
    """Reason against adapters beside each matrix of the blocks, by its name within the blocks;
    empty where there is none."""
    state_space = language_models.state_space_layers(model)
    found = {}
    for name, layer in language_models.matrices(model):
        parent, _, last = name.rpartition(".")
        found[name] = ""
        if parent in state_space and last in _READ:
            found[name] = _STATE
        elif isinstance(layer, nn.Linear) and not nf4.is_plain(layer):
            found[name] = _MORE
        elif _is_router(model, name, layer):
            found[name] = _ROUTER
    return found


def _no_matrices(model: nn.Module) -> dict[str, str]:
    """Reason against adapters beside each weight of the blocks that is no matrix of its own."""
    inside = tuple(f"{name}." for name, _ in language_models.matrices(model))
    others = {
        name.removesuffix(".weight"): parameter
        for name, parameter in language_models.blocks(model).named_parameters()
        if parameter.ndim > 1 and not name.startswith(inside)
    }
    size = sum(each.numel() for name, each in others.items() if _EXPERTS in name)
    fused = f"fused experts, {size / language_models.num_parameters(model):.0%} of the weights"
    reasons = ((_EXPERTS, fused), ("router", _ROUTER), ("gate", _ROUTER), ("", "no matrix"))
    return {name: next(why for part, why in reasons if part in name) for name in others}


def _is_router(model: Any, name: str, layer: Any) -> bool:
    """Tell by its name, or its place and size, that a matrix chooses the experts of a token."""
    parts = name.split(".")
    if any("router" in part for part in parts):
        return True
    num_experts = language_models.num_experts(model.config)
    return not _GATES.isdisjoint(parts) and getattr(layer, "out_features", 0) == num_experts


def _chosen(reasons: Mapping[str, str], targets: str) -> list[str]:
    """Names of the matrices that get adapters.

    Args:
        targets: last parts of names, separated by commas; or ``all``, which is all but those with a
            reason against it.

    Raises:
        InputError: there are none of such a name, or adapters beside them are impossible.
    """
    names = target_names(map(_last, reasons), targets)
    allowed = ("",) if targets == ALL else ("", _ROUTER)
    possible = [name for name, reason in reasons.items() if reason in allowed]
    chosen = [name for name in possible if _last(name) in names]
    if targets != ALL and (none := sorted(names - {*map(_last, chosen)})):
        why = next(reason for name, reason in reasons.items() if _last(name) == none[0])
        raise InputError(
            f"--lora-targets names {none[0]!r}, which {why}: choose of "
            f"{', '.join(sorted({*map(_last, possible)}))}"
        )
    if not chosen:
        raise InputError("this model's blocks have no matrices for adapters: leave --lora-rank out")
    return chosen


def _left_out(reasons: Mapping[str, str]) -> str:
    """The matrices that ``all`` leaves out, and the reasons, for the user; empty if none."""
    names: dict[str, set[str]] = {}
    for name, reason in reasons.items():
        if reason:
            names.setdefault(reason, set()).add(_last(name))
    parts = [f"{', '.join(sorted(names[why]))} ({why})" for why in sorted(names)]
    return f"no adapters are put beside {'; '.join(parts)}" if parts else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]


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
        weights: the adapters' own, by the names that they have in the model, and those of
            embeddings that became larger, which peft writes beside them, too.
        base: the base model that the folder names: a folder or a Hugging Face id.
        revision: of the base model on the Hugging Face Hub; empty: the newest.
        kind: ``model_type`` of the base model.

    Raises:
        InputError: peft would put them beside other matrices of such a model.
    """
    from peft import LoraConfig
    from safetensors.torch import save

    matrices = sorted({_last(_matrix(name)) for name in weights if "lora_" in name})
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
    """Check that peft puts adapters for ``matrices`` beside those, and not beside other matrices
    that had their names in transformers 4."""
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
