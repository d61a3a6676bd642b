"""Weights of causal language models: memory for them, first values, and their names in files.

Each process fills its own shards and holds, for a moment, one more tensor, or four new ones. What
weights are called in a published file, and how they lie there, differs from one kind of model to
the next and from what they are in memory: transformers' own conversions are applied in both
directions.
"""

import hashlib
import os
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from contract.errors import InputError
from contract.text import counted
from training.models import language_models, nf4
from training.models.language_models import local
from training.models.weight_files import SAFETENSORS, SAFETENSORS_INDEX, indexed

#: Weights that are drawn at the same time, each of them whole in memory.
_DRAWING: Final = 4
#: Rows of two embeddings that are compared at a time.
_ROWS: Final = 4096


# --- memory ---------------------------------------------------------------------------------------
def allocate(model: nn.Module, device: torch.device) -> None:
    """Give a model from the meta device memory; its weights are then anything.

    Buffers that are computed and in no file, such as the angles of rotary embeddings, are lost on
    the meta device: they are computed again by the model's own rules.

    Raises:
        InputError: it has no rule for one of them.
    """
    from transformers import initialization

    model.to_empty(device=device)
    of: Any = model  # transformers' own methods
    of.tie_weights()
    for buffer in model.buffers():
        if buffer.dtype != torch.bool:
            buffer.fill_(_unset(buffer))
    # The rules leave alone what has this mark: the weights, which come next.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        with torch.no_grad(), initialization.guard_torch_init_functions():
            _apply_rules(model, of)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # of the device, and not of the model
    except RuntimeError as error:  # some work on whole weights only
        raise InputError(
            f"models of type {of.config.model_type!r} cannot be trained here: the rule that "
            f"computes a buffer fails ({error}); choose another model"
        ) from None
    for parameter in model.parameters():
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in saved and _is_unset(buffer):
            raise InputError(
                f"models of type {of.config.model_type!r} cannot be trained here: transformers has "
                f"no rule that computes {name}, which is in no file; choose another model"
            )


def _apply_rules(module: nn.Module, owner: Any) -> None:
    """Let each part of a model be initialized by the model, or model within it, that it is of."""
    owner = module if hasattr(module, "_init_weights") else owner
    for child in module.children():
        _apply_rules(child, owner)
    owner._init_weights(module)


def _unset(buffer: Tensor) -> float | int:
    """A value that no buffer has."""
    is_float = buffer.is_floating_point() or buffer.is_complex()
    return float("nan") if is_float else torch.iinfo(buffer.dtype).min


def _is_unset(buffer: Tensor) -> bool:
    """True if any element of a buffer was never assigned a value."""
    if buffer.dtype == torch.bool:
        return False
    value = _unset(buffer)
    return bool((buffer.isnan() if isinstance(value, float) else buffer == value).any())


# --- random weights -------------------------------------------------------------------------------
def initialise(model: nn.Module, *, seed: int) -> None:
    """Fill a model with random weights that depend only on the seed and each weight's name.

    So they are the same on any number of processes, however the model is sharded. Matrices are
    normal with the configuration's ``initializer_range``, vectors 0, weights of norms 1.
    """

    def fill(named: tuple[str, Tensor]) -> None:
        _initialise(model, *named, seed=seed)

    # Drawing from one generator uses one processor: 70 s for 7 billion numbers.
    with ThreadPoolExecutor(min(_DRAWING, os.cpu_count() or 1)) as threads:
        for _ in threads.map(fill, model.named_parameters()):
            pass


def _initialise(model: nn.Module, name: str, parameter: Tensor, *, seed: int) -> None:
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    shape = nf4.shape_of(parameter)
    is_zero, is_one = parameter.dim() < 2 or "lora_B" in name, False
    if parameter.dim() < 2:
        is_one = name.endswith("weight")
    digest = hashlib.sha256(f"{seed}/{_base_name(name)}".encode()).digest()

    def make() -> Tensor:
        if is_zero:
            return torch.full(shape, float(is_one))
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if "lora_A" in name:  # as in peft: kaiming_uniform_(a=sqrt(5))
            limit = float(shape[1] ** -0.5)
            return torch.empty(shape).uniform_(-limit, limit, generator=generator)
        return torch.randn(shape, generator=generator) * deviation

    _fill(parameter, make())


# --- weights from files ---------------------------------------------------------------------------
def load(model: nn.Module, folder: Path, *, seed: int = 0, num_tokens: int = 0) -> str:
    """Fill a model from a Hugging Face folder of safetensors; each process reads its part.

    Where files have what the model holds as one tensor in many, such as the experts of a block, a
    process holds that tensor whole for a moment. Adapters, which no folder has, begin as
    ``initialise`` makes them from ``seed``.

    Args:
        num_tokens: rows of the embeddings in the files, where the model has more of them: the new
            ones begin as the mean of the others, nearly as in transformers.

    Returns:
        The weights of the files that the model does not use, for the user; empty if none.

    Raises:
        InputError: the folder has no safetensors, or not the weights of this model.
    """
    files = _files(folder)
    stored = _stored(model)
    growing = {id(each) for each in embeddings(model)} if num_tokens else set()
    loaded: set[int] = set()
    found, unused = _sources(model, files, stored)
    note = _left_over(model, unused, folder=folder)
    for name, sources in found.items():
        if isinstance(sources, str):
            rows = num_tokens if id(stored[name]) in growing else 0
            _read_part(stored[name], files[sources], sources, folder=folder, rows=rows)
            loaded.add(id(stored[name]))
            continue
        try:
            made = sources.convert(name, model=model, config=model.config)
        except Exception as error:  # whatever transformers' operations come upon
            raise InputError(
                f"{folder}: {name} cannot be made of what the files have ({error}); is it a "
                "folder of another model?"
            ) from None
        for target, tensor in made.items():
            whole = tensor[0] if isinstance(tensor, list) else tensor
            _check_shape(stored[target], whole.shape, target, folder=folder)
            _fill(stored[target], whole)
            loaded.add(id(stored[target]))
    missing = []
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            _initialise(model, name, parameter, seed=seed)
        elif id(parameter) not in loaded:
            missing.append(_base_name(name))
    missing += [
        name
        for name, buffer in model.named_buffers()
        if id(buffer) not in loaded and _is_unset(buffer)
    ]
    if missing:
        raise InputError(
            f"{folder} lacks weights of this model: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}; is it a folder of another model?"
        )
    return note


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Weights with a row for each token: one or two embeddings, and the bias of the output."""
    of: Any = model  # transformers' own methods
    layers = (of.get_input_embeddings(), of.get_output_embeddings())
    return [each for layer in layers for each in layer.parameters()]


def untie(config: Any, folder: Path) -> str:
    """Untie the embeddings of a configuration if the files have two different ones, as transformers
    does; return what to tell the user, or nothing.

    They are left by a vocabulary that was made larger, or by training the output embedding.
    """
    if not config.tie_word_embeddings:
        return ""
    model: Any = language_models.build_on_meta(config)
    files = _files(folder)
    found, _ = _sources(model, files, _stored(model))
    for pair in model.all_tied_weights_keys.items():
        names = [each for each in map(found.get, pair) if isinstance(each, str)]
        if len(names) == 2 and _differ(files, *names):
            config.tie_word_embeddings = False
            return (
                f"{folder} ties the embeddings in its config.json and has two that differ, "
                f"{' and '.join(pair)}: they are not tied"
            )
    return ""


def _differ(files: Mapping[str, Path], *names: str) -> bool:
    from safetensors import safe_open

    with ExitStack() as stack:
        one, two = (
            stack.enter_context(safe_open(files[name], framework="pt")).get_slice(name)
            for name in names
        )
        rows = range(0, one.get_shape()[0], _ROWS)
        return one.get_shape() != two.get_shape() or any(
            not torch.equal(one[row : row + _ROWS], two[row : row + _ROWS]) for row in rows
        )


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model by the names that they have without adapters, unpacked."""
    return {_base_name(name): each for name, each in model.state_dict(keep_vars=True).items()}


def _left_over(model: nn.Module, unused: Mapping[str, str], *, folder: Path) -> str:
    """Name the weights that no part of a model takes; empty if there are none.

    Args:
        unused: name that a weight would have in the model -> its name in a file.

    Raises:
        InputError: some belong to a part that the model has, which computes without them something
            else than where they were trained: scales of quantized weights, biases.
    """
    of: Any = model
    report = SimpleNamespace(missing_keys=set(), unexpected_keys={*unused})
    of._adjust_missing_and_unexpected_keys(report)  # takes out what transformers knows of
    computed = dict(model.named_buffers())  # old versions saved those, too
    unknown = sorted(report.unexpected_keys - computed.keys())
    parts = dict(model.named_modules())
    inside = {id(each) for block in language_models.blocks(model) for each in block.modules()}
    own = [each for each in unknown if _is_inside(each, parts, inside)]
    names = [unused[each] for each in own or unknown]
    named = f"{counted(len(names), 'weight')}, {', '.join(names[:3])}{' …' * (len(names) > 3)}"
    if own:
        raise InputError(
            f"{folder} has {named}, in parts of the model that have no such weights: is it "
            "quantized, or a folder of another model?"
        )
    return f"{folder} has {named}, which the model does not use" if names else ""


def _is_inside(name: str, parts: Mapping[str, nn.Module], inside: Container[int]) -> bool:
    """True if a weight would belong to a layer of the model, or to a layer inside its blocks.

    Masks, which old versions saved, lie beside the layers of a block: ``attn.bias`` of GPT-J.
    """
    owner, _, lacking = name.rpartition(".")
    while owner not in parts:
        owner, _, last = owner.rpartition(".")
        lacking = f"{last}.{lacking}"
    part = parts[owner]
    is_layer = hasattr(part, "base_layer") or not any(part.children())
    return is_layer or (id(part) in inside and "." in lacking)


def _sources(
    model: nn.Module, files: Mapping[str, Path], stored: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Source of each weight (a name in a file, or a conversion with its parts), and the unused
    weights: the name that a weight would have -> its name in a file."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    of: Any = model
    mapping = get_model_conversion_mapping(of)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    rename = partial(
        rename_source_key,
        base_model_prefix=of.base_model_prefix,
        meta_state_dict=dict(stored),
    )
    found: dict[str, Any] = {}
    unused: dict[str, str] = {}
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in stored and name in stored:
            target, pattern = rename(name, [], [])
        if target not in stored:
            unused[target] = name
            continue
        if pattern is None:
            found.setdefault(target, name)
            continue
        conversion = found.setdefault(target, deepcopy(by_pattern[pattern]))
        conversion.add_tensor(target, name, pattern, partial(_read, files[name], name))
    return found, unused


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        tensor: Tensor = content.get_tensor(name)
        return tensor


def _read_part(parameter: Tensor, file: Path, name: str, *, folder: Path, rows: int = 0) -> None:
    """Read of a weight what this process holds.

    Args:
        rows: in the file, of a weight that has more in the model.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        part = content.get_slice(name)
        if rows and rows == part.get_shape()[0]:
            whole = content.get_tensor(name).float()
            new = whole.mean(0, keepdim=True).expand(len(parameter) - rows, *whole.shape[1:])
            _fill(parameter, torch.cat([whole, new]))
            return
        _check_shape(parameter, part.get_shape(), name, folder=folder)
        first, last = _rows(parameter)
        # A number, such as one that scales, cannot be sliced.
        _put(parameter, part[first:last] if parameter.dim() else content.get_tensor(name))


def _check_shape(parameter: Tensor, shape: Iterable[int], name: str, *, folder: Path) -> None:
    if [*shape] != (expected := [*nf4.shape_of(parameter)]):
        raise InputError(
            f"{folder}: {name} has shape {[*shape]}, the model's configuration says {expected}"
        )


def _files(folder: Path) -> dict[str, Path]:
    """Name of a weight -> the file that holds it."""
    from safetensors import safe_open

    index, single = folder / SAFETENSORS_INDEX, folder / SAFETENSORS
    if index.exists():
        return {name: folder / file for name, file in indexed(index).items()}
    if single.exists():
        try:
            with safe_open(single, framework="pt") as content:
                return dict.fromkeys(content.keys(), single)
        except Exception as error:  # the library has an exception of its own, not exported
            raise InputError(f"{single} cannot be read: {error}") from None
    raise InputError(f"{folder} has no {SAFETENSORS}: give a model that is saved as safetensors")


# --- weights for files ----------------------------------------------------------------------------
def groups(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Names of weights, together where a file has what is made of several; of those that are one
    tensor in memory, such as tied embeddings, only the first.

    Args:
        model: of the same kind; it may be on the meta device.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    of: Any = model
    conversions = get_model_conversion_mapping(of, add_legacy=False)
    reverse = [each.reverse_transform() for each in reversed(conversions)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    tensors = model.state_dict(keep_vars=True)
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name in names:
        if (known := tensors.get(name)) is not None:
            if id(known) in seen:
                continue
            seen.add(id(known))
        found.setdefault(apply_converters(name, converters)[0], []).append(name)
    return [*found.values()]


def for_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights as a published model of this kind has them in its files.

    Args:
        model: of the same kind; it may be on the meta device.
        tensors: weights by the model's own names, each group of ``groups`` complete.
    """
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    return {name: each.contiguous() for name, each in made.items()}


# --- shards ---------------------------------------------------------------------------------------
def _base_name(name: str) -> str:
    """Original name of a weight, before adapters were added and before it was packed."""
    return nf4.unpacked_name(name).replace(".base_layer.", ".")


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


def _fill(parameter: Tensor, whole: Tensor) -> None:
    first, last = _rows(parameter)
    _put(parameter, whole[first:last] if parameter.dim() else whole)


def _put(parameter: Tensor, own: Tensor) -> None:
    """Fill what this process holds of a parameter, and pack it where the parameter is packed."""
    part = local(parameter)
    with torch.no_grad():
        if parameter.dtype == torch.uint8:
            own = nf4.pack(own.to(part.device))
        part.copy_(own)
