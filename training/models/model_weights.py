"""Weights of causal language models: memory for them, first values, and their names in files.

Each process fills its own shards and holds, for a moment, one more tensor, or four new ones. What
weights are called in a published file, and how they lie there, differs from one kind of model to
the next and from what they are in memory: transformers' own conversions are applied in both
directions.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from contract.errors import InputError
from training.models import nf4
from training.models.language_models import local
from training.models.weight_files import SAFETENSORS, SAFETENSORS_INDEX, indexed

#: Weights that are drawn at the same time, each of them whole in memory.
_DRAWING: Final = 4


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
    """Whether a part of a buffer has been given no value."""
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
    elif "lora_A" in name:
        deviation = parameter.shape[1] ** -0.5
    digest = hashlib.sha256(f"{seed}/{_base_name(name)}".encode()).digest()

    def make() -> Tensor:
        if is_zero:
            return torch.full(shape, float(is_one))
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * deviation

    _fill(parameter, make())


# --- weights from files ---------------------------------------------------------------------------
def load(model: nn.Module, folder: Path, *, seed: int = 0) -> None:
    """Fill a model from a Hugging Face folder of safetensors; each process reads its part.

    Where files have what the model holds as one tensor in many, such as the experts of a block, a
    process holds that tensor whole for a moment. Adapters, which no folder has, begin as
    ``initialise`` makes them from ``seed``.

    Raises:
        InputError: the folder has no safetensors, or not the weights of this model.
    """
    files = _files(folder)
    stored = {_base_name(name): each for name, each in model.state_dict(keep_vars=True).items()}
    loaded: set[int] = set()
    for name, sources in _sources(model, files, stored).items():
        if isinstance(sources, str):
            _read_part(stored[name], files[sources], sources, folder=folder)
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


def _sources(
    model: nn.Module, files: Mapping[str, Path], stored: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What each weight is made of: the name of one in a file, or a conversion with its parts."""
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
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in stored and name in stored:
            target, pattern = rename(name, [], [])
        if target not in stored:
            continue  # of no part that is trained, such as a second head
        if pattern is None:
            found.setdefault(target, name)
            continue
        conversion = found.setdefault(target, deepcopy(by_pattern[pattern]))
        conversion.add_tensor(target, name, pattern, partial(_read, files[name], name))
    return found


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        tensor: Tensor = content.get_tensor(name)
        return tensor


def _read_part(parameter: Tensor, file: Path, name: str, *, folder: Path) -> None:
    """Read of a weight what this process holds."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        part = content.get_slice(name)
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
    """What a weight was called before adapters were put beside it and before it was packed."""
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
