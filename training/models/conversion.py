"""Weights that were published as ``pytorch_model.bin``, converted to safetensors once per node.

Such files are pickles, which can run code when they are loaded. They are read with
``weights_only=True``, which makes tensors and nothing else, and memory-mapped, so that no more
than one part of the result is ever in memory; only files in torch's first format are read whole.
Models in safetensors are used as they are.
"""

import hashlib
import json
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from contract.errors import InputError
from contract.runs import check_relative, safe_join
from training.data import sources
from training.models.weight_files import (
    PICKLED,
    PICKLED_INDEX,
    SAFETENSORS_INDEX,
    check_weights,
    has_safetensors,
)

if TYPE_CHECKING:
    import torch

#: Of each file that is written; while it is, twice as much is in memory.
PART_BYTES: Final = 10**9

#: How the first format of torch begins.
_LEGACY: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


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
    target = sources.cache_dir() / "converted" / key
    with sources.locked(target.with_name(f"{key}.lock")):
        if not target.exists():
            staging = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=target.parent))
            try:
                convert(folder, staging)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
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
        save_file(part, into / file, metadata={"format": "pt"})
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
            # What torch saved before version 1.6 cannot be mapped.
            is_mapped = not _is_legacy(file)
            found = torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=True)
        except pickle.UnpicklingError:
            raise InputError(
                f"{file} holds more than tensors, and loading it could run code: give a model that "
                "is saved as safetensors"
            ) from None
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(
                f"{file} cannot be read ({first}): download it again, or give a model that is "
                "saved as safetensors"
            ) from None
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in found.items()
        ):
            raise InputError(f"{file} does not hold the weights of a model: a tensor for each name")
        yield from found.items()


def _is_legacy(file: Path) -> bool:
    """Whether torch saved a file in its first format, a row of pickles, of which the first is a
    number that marks it."""
    with file.open("rb") as content:
        return content.read(len(_LEGACY)) == _LEGACY


def _files(folder: Path) -> list[Path]:
    """The files with a model's weights, in order."""
    index = folder / PICKLED_INDEX
    if not index.exists():
        return [folder / PICKLED]
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted({check_relative(name, what=f"{index}: file") for name in places})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"{index} is not an index of weights: {error!r}") from None
    lacking = [name for name in names if not (folder / name).exists()]
    if lacking:
        raise InputError(f"{folder} lacks {', '.join(lacking)}: download it again")
    return [safe_join(folder, name) for name in names]
