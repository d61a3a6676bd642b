"""Whether two runs computed the same: records, checkpoints and models compared bit for bit.

Clock readings and the places of the two runs differ in any case and are left out; everything else
counts. A difference in rounding is a difference.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from contract import runs
from training.record import events, reader
from training.record.events import Evaluation, Sample, Step

# What a run computes, of all that its events hold; the recipe's measures beside.
_COMPUTED: Final = frozenset(
    {"type", "step", "epoch", "loss", "lr", "grad_norm"} | {"train_loss", "text", "prompt"}
)
# Of a checkpoint: the seconds that training took, and where the run lies.
_NOT_COMPUTED: Final = ("position.seconds", "config.storage", "config.run")
_DCP_INDEX: Final = ".metadata"  # of torch.distributed.checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Whether two runs computed the same, and how much was compared."""

    equal: bool
    differences: tuple[str, ...]
    """The first ten, as text."""
    steps: int
    evaluations: int
    tensors: int
    files_with_equal_bytes: tuple[str, ...]
    """The others hold clock readings, and are compared by content."""
    files: int


def compare(one: Path, other: Path) -> Comparison:
    """Compare two complete runs.

    Args:
        one: Folder of a run.
        other: Folder of a run with the same settings.
    """
    lines, others = _lines(one), _lines(other)
    differences = list(_different(_numbered(lines), _numbered(others)))
    saved, others_saved = _saved_folders(one), _saved_folders(other)
    if saved.keys() != others_saved.keys():
        differences.append(f"saved: {sorted(saved)} against {sorted(others_saved)}")
    num_tensors = 0
    same_files, num_files = [], 0
    for name in sorted(saved.keys() & others_saved.keys()):
        contents, others_contents = _content(saved[name]), _content(others_saved[name])
        num_tensors += sum(isinstance(each, torch.Tensor) for each in contents.values())
        differences += [f"{name}/{each}" for each in _different(contents, others_contents)]
        for file in sorted(saved[name].iterdir()):
            num_files += 1
            twin = others_saved[name] / file.name
            if twin.is_file() and twin.read_bytes() == file.read_bytes():
                same_files.append(f"{name}/{file.name}")
    num_steps = sum(line["type"] == "step" for line in lines)
    if not num_steps or not num_tensors:
        differences.append(f"nothing to compare: {num_steps} steps, {num_tensors} tensors")
    return Comparison(
        equal=not differences,
        differences=tuple(differences[:10]),
        steps=num_steps,
        evaluations=sum(line["type"] == "evaluation" for line in lines),
        tensors=num_tensors,
        files_with_equal_bytes=tuple(same_files),
        files=num_files,
    )


def _lines(run: Path) -> list[dict[str, object]]:
    return [
        {name: value for name, value in events.to_json(event).items() if name in _COMPUTED}
        | (dict(event.measures) if isinstance(event, Evaluation) else {})
        for event in reader.read_metrics(str(run)).events
        if isinstance(event, Step | Evaluation | Sample)
    ]


def _numbered(lines: list[dict[str, object]]) -> dict[str, object]:
    return {f"event {number}": line for number, line in enumerate(lines)}


def _saved_folders(run: Path) -> dict[str, Path]:
    """The folders of a run that hold weights, by their path in the run."""
    folders = [*(run / runs.CHECKPOINTS_DIR).glob("step-*"), run / runs.MODEL_DIR]
    return {folder.relative_to(run).as_posix(): folder for folder in folders if folder.is_dir()}


def _content(folder: Path) -> dict[str, Any]:
    """Everything that a checkpoint or a model holds, by file and name."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if file.name == runs.MANIFEST_FILE:
            continue  # hashes of the others, some of which hold clock readings
        if file.suffix == ".safetensors":
            values: Any = load_file(file)
        elif file.suffix == ".pt":
            values = torch.load(file, weights_only=True)
        elif file.suffix == ".json":
            values = json.loads(file.read_text(encoding="utf-8"))
        elif file.name == _DCP_INDEX:
            values = _sharded(folder)
        else:
            continue  # .distcp: read through the index
        for name, value in _leaves(values, ""):
            if not name.endswith(_NOT_COMPUTED):
                found[f"{file.name}: {name}"] = value
    return found


def _sharded(folder: Path) -> Any:
    """State dict of a sharded checkpoint, put together in this process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "state.pt"
        dcp_to_torch_save(folder, whole)
        return torch.load(whole, weights_only=True)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{name}.{number}" if name else str(number))
    else:
        yield name, value


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """A line for each name whose values differ or that only one of the two has."""
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in one or name not in other:
            yield f"{name} is in {'the first' if name in one else 'the second'} only"
        elif not _same(one[name], other[name]):
            what = "" if isinstance(one[name], torch.Tensor) else f": {one[name]}, {other[name]}"
            yield f"{name} differs{what}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Bytes, because 0.0 equals -0.0 and NaN does not equal itself.
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
            _bytes(one), _bytes(other)
        )
    return type(one) is type(other) and repr(one) == repr(other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
