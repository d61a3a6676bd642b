"""Causal language models of transformers: built without weights, filled shard by shard.

A model is made on the meta device, sharded there, and only then given memory: each process holds
its shards and, for a moment, one tensor. Whatever transformers has as a causal language model will
do; its own loss is not used, because it stores the logits.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from contract.errors import InputError
from contract.runs import check_relative
from training.losses import linear_cross_entropy

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"

_aten: Final = torch.ops.aten
# What selective recomputation keeps: all that takes more than a pass over memory.
_KEPT: Final = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


class WithLoss(nn.Module):
    """A model whose call is its loss: what DDP and FSDP2 must see of a step passes through here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, *, predict: bool = False
    ) -> Tensor:
        """Mean loss, in nats per token, of predicting each token from those before it.

        Args:
            tokens: ids ``[num_sequences, seq_len + 1]``: inputs and labels overlap in all but one.
            positions: of the inputs within their documents, ``[num_sequences, seq_len]``;
                attention then stays within a document. Without them it reaches over the whole
                sequence.
            predict: return the logits of the token after the last one instead,
                ``[num_sequences, vocab]`` in fp32; ``tokens`` are then only inputs.
        """
        model: Any = self.model
        base = model.get_submodule(model.base_model_prefix)
        arguments = {} if positions is None else {"position_ids": positions}
        inputs = tokens if predict else tokens[:, :-1]
        hidden = base(input_ids=inputs, **arguments).last_hidden_state
        weight = model.get_output_embeddings().weight
        if predict:
            logits: Tensor = (hidden[:, -1] @ weight.t()).float()
            return logits
        return linear_cross_entropy(hidden.flatten(0, 1), weight, tokens[:, 1:].flatten())


def build_on_meta(config: Any) -> nn.Module:
    """A causal language model of a transformers configuration, without memory for its weights.

    Raises:
        InputError: transformers has no causal language model of that kind, or its logits are not
            a plain product with the output embedding.
    """
    from transformers import AutoModelForCausalLM

    if getattr(config, "final_logit_softcapping", None):
        raise InputError(
            f"models of type {config.model_type!r} bend their logits (final_logit_softcapping), "
            "which the loss here does not do: choose another model"
        )
    config.use_cache = False
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InputError(f"no causal language model for {config.model_type!r}: {error}") from None
    return model


def blocks(model: nn.Module) -> nn.ModuleList:
    """The stack of equal transformer blocks: what is sharded, and recomputed, one at a time."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    stacks = [each for each in lists if len({type(block) for block in each}) == 1]
    if not stacks:
        raise InputError(f"{type(model).__name__} has no stack of equal blocks to shard")
    return max(stacks, key=lambda each: sum(p.numel() for p in each.parameters()))


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Floating-point operations of one forward and backward pass, per token.

    Six per parameter that multiplies, four where it is frozen and has no gradient, and the
    products of attention, which no parameter stands for: 12 per block, position and width (PaLM,
    appendix B). The input embedding is looked up and not multiplied. Recomputation is not counted:
    it is no progress.
    """
    of: Any = model  # transformers' own methods
    looked_up, output = of.get_input_embeddings().weight, of.get_output_embeddings().weight
    products = sum(
        (6 if parameter.requires_grad else 4) * parameter.numel()
        for parameter in model.parameters()
        if parameter is not looked_up or output is looked_up
    )
    attention = 12 * int(of.config.num_hidden_layers) * int(of.config.hidden_size) * seq_len
    return float(products + attention)


def recompute(model: nn.Module, mode: str) -> None:
    """Compute activations again in backward instead of keeping them.

    Args:
        mode: ``none``; ``selective``, which keeps what matrix products and attention give and
            makes the cheap rest again; or ``full``, which keeps only each block's input.
    """
    if mode == "none":
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [*_KEPT])
    of: Any = model  # transformers' own method
    of.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)


def shard(trained: WithLoss, mesh: DeviceMesh, *, bf16: bool) -> None:
    """Shard a model block by block over ``mesh``, so that only one block is ever whole.

    Args:
        mesh: one dimension shards over all its processes; of two, the first replicates and the
            second shards, which sends less where a part of the processes holds the whole model.
        bf16: compute in bf16; gradients are reduced in fp32, and what is kept is fp32 either way.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    stack: list[Any] = [*blocks(trained.model)]
    for block in stack:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Ask for the next block while this one computes, and not only once it is due.
    for block, after in pairwise(stack):
        block.set_modules_to_forward_prefetch([after])
    for block, before in pairwise(reversed(stack)):
        block.set_modules_to_backward_prefetch([before])
    fully_shard(trained, mesh=mesh, mp_policy=policy)  # last: takes what the blocks left over


def generate(trained: nn.Module, prompts: Tensor, *, num: int, seed: int) -> Tensor:
    """Continue each prompt by ``num`` tokens drawn from the model's own distribution.

    Args:
        trained: a ``WithLoss``; where it is sharded, every rank calls this and gets the same.
        prompts: ids ``[num_prompts, length]``.
        seed: of the draws.

    Returns:
        Prompts and what follows, ``[num_prompts, length + num]``. Each token is a pass over all so
        far: for samples, not for serving.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training = trained.training
    trained.eval()
    tokens = prompts
    with torch.no_grad():
        for _ in range(num):
            logits = trained(tokens, predict=True).float().cpu()
            drawn = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)
            drawn = drawn.to(tokens.device)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(drawn, src=0)  # hosts may round differently
            tokens = torch.cat([tokens, drawn], dim=1)
    trained.train(was_training)
    return tokens


def add_adapters(model: nn.Module, *, rank: int) -> None:
    """Freeze a model and put low-rank adapters (LoRA, arXiv 2106.09685) beside each matrix of its
    blocks; the embeddings stay as they are.

    Raises:
        InputError: the package peft is not there.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(
            "--lora-rank needs the package peft: install it, or leave the option out"
        ) from None
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with torch.device("meta"):
        inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


# --- weights --------------------------------------------------------------------------------------
def allocate(model: nn.Module, device: torch.device) -> None:
    """Give a model from the meta device memory; its weights are then anything."""
    model.to_empty(device=device)
    # Buffers that are computed and not saved are lost on the meta device, such as the angles of
    # rotary embeddings: their modules are made again from the configuration.
    config: Any = model.config
    for name, module in [*model.named_modules()]:
        if module._non_persistent_buffers_set and not [*module.parameters()]:
            parent, _, own = name.rpartition(".")
            fresh = type(module)(config).to(device)
            setattr(model.get_submodule(parent), own, fresh)
    _tie(model)


def initialise(model: nn.Module, *, seed: int) -> None:
    """Fill a model with random weights that depend only on the seed and each weight's name.

    So they are the same on any number of processes, however the model is sharded. Matrices are
    normal with the configuration's ``initializer_range``, vectors 0, weights of norms 1.
    """
    for name, parameter in model.named_parameters():
        _initialise(model, name, parameter, seed=seed)


def _initialise(model: nn.Module, name: str, parameter: Tensor, *, seed: int) -> None:
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    is_zero, is_one = parameter.dim() < 2 or "lora_B" in name, False
    if parameter.dim() < 2:
        is_one = name.endswith("weight")
    elif "lora_A" in name:
        deviation = parameter.shape[1] ** -0.5
    digest = hashlib.sha256(f"{seed}/{_base_name(name)}".encode()).digest()

    def make() -> Tensor:
        if is_zero:
            return torch.full(parameter.shape, float(is_one))
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(parameter.shape, generator=generator) * deviation

    _fill(parameter, make)


def load(model: nn.Module, folder: Path, *, seed: int = 0) -> None:
    """Fill a model from a Hugging Face folder of safetensors; each process reads its part.

    Adapters, which no folder has, begin as ``initialise`` makes them from ``seed``.

    Raises:
        InputError: the folder has no safetensors, or not the weights of this model.
    """
    from safetensors import safe_open

    files = _files(folder)
    missing = []
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            _initialise(model, name, parameter, seed=seed)
            continue
        candidates = _names_on_disk(model, _base_name(name))
        found = next((each for each in candidates if each in files), None)
        if found is None:
            missing.append(name)
            continue
        with safe_open(files[found], framework="pt") as content:
            part = content.get_slice(found)
            if [*part.get_shape()] != [*parameter.shape]:
                raise InputError(
                    f"{folder}: {found} has shape {part.get_shape()}, the model's configuration "
                    f"says {[*parameter.shape]}"
                )
            first, last = _rows(parameter)
            with torch.no_grad():
                local(parameter).copy_(part[first:last] if parameter.dim() else part[:])
    if missing:
        raise InputError(
            f"{folder} lacks weights of this model: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}; is it a folder of another model?"
        )


def _files(folder: Path) -> dict[str, Path]:
    """Name of a weight -> the file that holds it."""
    from safetensors import safe_open

    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        try:
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise InputError(f"{index} is not an index of safetensors: {error!r}") from None
        files = {check_relative(name, what=f"{index}: file") for name in places.values()}
        lacking = {name for name in files if not (folder / name).exists()}
        if lacking:
            raise InputError(f"{folder} lacks {', '.join(sorted(lacking))}: download it again")
        return {name: folder / file for name, file in places.items()}
    if single.exists():
        try:
            with safe_open(single, framework="pt") as content:
                return dict.fromkeys(content.keys(), single)
        except Exception as error:  # the library has an exception of its own, not exported
            raise InputError(f"{single} cannot be read: {error}") from None
    raise InputError(f"{folder} has no {SINGLE_FILE}: give a model that is saved as safetensors")


def _base_name(name: str) -> str:
    """What a weight was called before adapters were put beside it."""
    return name.replace(".base_layer.", ".")


def _names_on_disk(model: nn.Module, name: str) -> Iterator[str]:
    """What a weight may be called in a file; transformers renames the output embedding."""
    yield name
    if name.startswith("lm_head."):
        yield name.replace("lm_head.", "embed_out.")
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and name.startswith(f"{prefix}."):
        yield name.removeprefix(f"{prefix}.")


def _tie(model: nn.Module) -> None:
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None and getattr(model.config, "tie_word_embeddings", False):
        tie()


def local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
    return part


def _rows(parameter: Tensor) -> tuple[int, int]:
    """First and last row of a parameter that this process holds; FSDP2 shards dimension 0."""
    if not hasattr(parameter, "device_mesh"):
        return 0, parameter.shape[0] if parameter.dim() else 1
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape,
        parameter.device_mesh,
        parameter.placements,  # type: ignore[attr-defined]
    )
    return offset[0], offset[0] + shape[0]


def _fill(parameter: Tensor, make: Any) -> None:
    first, last = _rows(parameter)
    with torch.no_grad():
        local(parameter).copy_(make()[first:last])
