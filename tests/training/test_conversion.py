"""Weights published as pickles become the same weights in safetensors, and nothing that such a file
may hold beside them is executed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contract.errors import InputError
from training.models import conversion, pretrained
from training.models.weight_files import PICKLED, PICKLED_INDEX

pytestmark = pytest.mark.usefixtures("cache")

CONFIG = '{"model_type": "gpt_neox"}'


def weights() -> dict[str, torch.Tensor]:
    """As first versions of models were saved: with buffers, in half precision."""
    torch.manual_seed(3)
    matrices = {f"gpt_neox.layers.{number}.weight": torch.randn(8, 4).half() for number in range(9)}
    return {**matrices, "gpt_neox.layers.0.attention.bias": torch.ones(9, 9, dtype=torch.uint8)}


def write(folder: Path, *parts: dict[str, torch.Tensor]) -> Path:
    """A model's folder, its weights in one file or in several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    if len(parts) == 1:
        torch.save(parts[0], folder / PICKLED)
        return folder
    names: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"pytorch_model-{number:05d}-of-{len(parts):05d}.bin"
        torch.save(part, folder / file)
        names |= dict.fromkeys(part, file)
    (folder / PICKLED_INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


def halves(whole: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = sorted(whole)
    middle = len(names) // 2
    return [{name: whole[name] for name in part} for part in (names[:middle], names[middle:])]


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


@pytest.mark.parametrize("in_parts", [False, True])
def test_weights_are_the_same_and_converted_once(tmp_path: Path, in_parts: bool) -> None:
    whole = weights()
    folder = write(tmp_path / "model", *(halves(whole) if in_parts else [whole]))
    found = pretrained.weights_folder(str(folder), runs="runs")
    assert found != folder
    assert read(found).keys() == whole.keys()
    for name, tensor in read(found).items():
        assert tensor.dtype == whole[name].dtype
        assert torch.equal(tensor, whole[name])
    files = {path: path.stat().st_mtime_ns for path in found.iterdir()}
    assert pretrained.weights_folder(str(folder), runs="runs") == found
    assert {path: path.stat().st_mtime_ns for path in found.iterdir()} == files
    # The original stays as it is, and is converted again when it changes.
    assert not list(folder.glob("*.safetensors"))
    write(tmp_path / "other", whole)
    assert pretrained.weights_folder(str(tmp_path / "other"), runs="runs") != found


def test_parts_are_bounded_and_shared_weights_are_written_as_such(tmp_path: Path) -> None:
    shared = torch.arange(1000.0)
    whole = {"a": shared, "b": shared, "c": shared.view(10, 100).t(), "d": torch.ones(3)}
    into = tmp_path / "out"
    into.mkdir()
    conversion.convert(write(tmp_path / "m", whole), into, part_bytes=5000)
    names = json.loads((into / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*names.values()}) == 2
    for name, tensor in read(into).items():
        assert torch.equal(tensor, whole[name])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("missing", r"lacks pytorch_model-00002-of-00002\.bin: download it again"),
        ("outside", r"is not an index of weights|must"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(tmp_path: Path, content: str, words: str) -> None:
    folder = write(tmp_path / "m", {"a": torch.ones(1)}, {"b": torch.ones(1)})
    if content == "missing":
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
    else:
        (folder / PICKLED_INDEX).write_text('{"weight_map": {"a": "../a.bin"}}')
    with pytest.raises(InputError, match=words):
        pretrained.weights_folder(str(folder), runs="runs")


def test_a_model_without_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(InputError, match=f"model {tmp_path} has no weights that can be used"):
        pretrained.check_weights(str(tmp_path), runs="runs")
    (tmp_path / PICKLED).touch()
    pretrained.check_weights(str(tmp_path), runs="runs")


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(1).expand(10**12), id="a value repeated"),
        pytest.param(torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(torch.empty(3, device="meta"), id="without values"),
        pytest.param(torch.zeros(3, dtype=torch.complex128), id="complex"),
    ],
)
def test_a_tensor_that_is_no_models_weight_is_refused_before_it_takes_memory(
    tmp_path: Path, weight: torch.Tensor
) -> None:
    folder = write(tmp_path / "m", {"a": weight})
    with pytest.raises(InputError, match="safetensors"):
        conversion.convert(folder, tmp_path)
