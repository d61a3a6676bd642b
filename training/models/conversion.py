"""Conversion of weights published as ``pytorch_model.bin`` to safetensors, once per node.

Such files are pickles, which can run code when they are loaded. They are read with
``weights_only=True``, which makes tensors and nothing else, and memory-mapped, so that no more
than one part of the result is ever in memory. Files that torch saved before version 1.6 (July 2020)
cannot be mapped, and are refused.
Models in safetensors are used as they are.
"""

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from contract.errors import InputError
from contract.runs import safe_join
from store import cache, storage
from training.models.weight_files import (
    PICKLED,
    PICKLED_INDEX,
    SAFETENSORS_INDEX,
    check_weights,
    has_safetensors,
    indexed,
)

if TYPE_CHECKING:
    import torch

#: Of each file that is written; while it is, twice as much is in memory.
PART_BYTES: Final = 10**9


def with_weights(folder: Path, place: str) -> Path:
    """A folder with the model of ``folder`` in safetensors: itself, or a converted copy in the
    node's cache.

    Args:
        folder: with ``config.json`` and weights.
        place: what a user calls the model.

    Raises:
        InputError: there are no weights, or they are not plain tensors.
    """
    files = {path.name: path for path in folder.iterdir()}
    if has_safetensors(files):
        return folder
    check_weights(files, place)
    states = [(name, path.stat()) for name, path in sorted(files.items()) if path.is_file()]
    text = str([(name, each.st_size, each.st_mtime_ns) for name, each in states])
    key = hashlib.sha256(f"{folder.resolve()} {text}".encode()).hexdigest()[:24]
    target = cache.cache_dir() / "converted" / key
    with cache.locked(target.with_name(f"{key}.lock")):
        if not target.exists():
            with storage.staged_folder(str(target)) as staging:
                convert(folder, staging)
    return target


def convert(folder: Path, into: Path, *, part_bytes: int = PART_BYTES) -> None:
    """Write the model of ``folder`` to ``into``, in safetensors files of about ``part_bytes``.

    Raises:
        InputError: a file of weights is missing, damaged, or no plain tensors.
    """
    from safetensors.torch import save_file

    names: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    size = 0

    def finish() -> None:
        nonlocal part, size
        file = f"model-{len({*names.values()}) + 1:05d}.safetensors"
        try:
            save_file(part, into / file, metadata={"format": "pt"})
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{folder} has weights that safetensors cannot hold ({error}): give a model that "
                "is saved as safetensors"
            ) from None
        names.update(dict.fromkeys(part, file))
        part, size = {}, 0

    for name, tensor in _tensors(folder):
        if name in names or name in part:
            raise InputError(f"{folder} has two weights called {name}: download it again")
        # A copy: the file is only mapped, and weights that share memory are not accepted.
        part[name] = tensor.detach().clone().contiguous()
        size += tensor.nbytes
        if size >= part_bytes:
            finish()
    if part:
        finish()
    for path in folder.glob("*.json"):
        if path.name != PICKLED_INDEX:
            shutil.copyfile(path, into / path.name)
    (into / SAFETENSORS_INDEX).write_text(
        json.dumps({"weight_map": names}, indent=1), encoding="utf-8"
    )


def _tensors(folder: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    import torch

    for file in _files(folder):
        try:
            found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:
            raise InputError(
                f"{file} holds more than tensors, and loading it could run code: give a model that "
                "is saved as safetensors"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # torch's reader fails in any way on what is damaged
            first = str(error).partition("\n")[0]
            raise InputError(
                f"{file} cannot be read ({type(error).__name__}: {first}): download it again, or "
                "give a model that is saved as safetensors"
            ) from None
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in found.items()
        ):
            raise InputError(f"{file} does not hold the weights of a model: a tensor for each name")
        for name, tensor in found.items():
            if not _is_plain(tensor, most_bytes=file.stat().st_size):
                raise InputError(
                    f"{file}: {name!r} is not a plain tensor with all of its values in the file: "
                    "give a model that is saved as safetensors"
                )
        yield from found.items()


def _is_plain(tensor: "torch.Tensor", *, most_bytes: int) -> bool:
    """True if a tensor can be copied without taking more bytes than its file has: a tensor that
    repeats one value can have any size."""
    import torch

    is_dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_dense and not tensor.is_meta and tensor.nbytes <= most_bytes


def _files(folder: Path) -> list[Path]:
    """The files with a model's weights, in order."""
    index = folder / PICKLED_INDEX
    if not index.exists():
        return [folder / PICKLED]
    return [safe_join(folder, name) for name in sorted({*indexed(index).values()})]
