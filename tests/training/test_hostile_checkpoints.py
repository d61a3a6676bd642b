"""A checkpoint made to attack runs nothing: its pickles may name what torch writes, and no more."""

import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from contract.errors import InputError
from store import storage
from training.checkpoint import sharded_checkpoints
from training.checkpoint.dcp import CheckpointReader, LoadPlanner, parse_metadata
from training.checkpoint.manifest import DamagedError, File, Manifest
from training.models.conversion import convert
from training.models.weight_files import PICKLED

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._mark), "w"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as torch writes it: one tensor and one plain value."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000001"
    writer = FsspecWriter(str(folder), sync_files=False)
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "optimizer": {"lr": 0.1}}
    save(state, storage_writer=writer, no_dist=True)
    position = {"step": 1, "epoch_loss_sum": 0.0, "epoch_items": 0, "seconds": 0.0}
    text = json.dumps({"position": position, "config": {}}).encode()
    (folder / "state.json").write_bytes(text)
    complete(folder)
    return folder


def complete(folder: Path) -> None:
    """Write the manifest that fits the files: who can change those can do this too."""
    files = {
        path.name: File(path.stat().st_size, storage.sha256(str(path)))
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    (folder / "manifest.json").write_bytes(Manifest(files=files).to_json())


class Getattr:
    """As early releases of Python 3.11 pickle a member of an enumeration."""

    def __init__(self, kind: Any, name: str) -> None:
        self._call = (getattr, (kind, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def test_metadata_of_early_releases_of_python_is_read_and_no_more_than_that(
    monkeypatch: pytest.MonkeyPatch, sharded: Path
) -> None:
    encoding = parts._MEM_FORMAT_ENCODING
    with (sharded / ".metadata").open("rb") as file:
        found = pickle.load(file)
    with monkeypatch.context() as patch:
        by_name = lambda self, _: (getattr, (encoding, self.name))  # noqa: E731
        patch.setattr(encoding, "__reduce_ex__", by_name)
        content = pickle.dumps(found)
    assert b"getattr" in content
    assert parse_metadata(content) == found
    for kind, name in ((encoding, "__class__"), (torch.Size, "count")):
        with pytest.raises(DamagedError, match="cannot be read"):
            parse_metadata(pickle.dumps(Getattr(kind, name)))


def attack_by_metadata(evil: Evil, sharded: Path) -> None:
    (sharded / ".metadata").write_bytes(pickle.dumps(evil))
    complete(sharded)
    sharded_checkpoints.ShardedCheckpoint(str(sharded))


def attack_by_a_value(evil: Evil, sharded: Path) -> None:
    folder = str(sharded / "values")
    writer = FsspecWriter(folder, sync_files=False)
    save({"optimizer": {"lr": evil}}, storage_writer=writer, no_dist=True)
    reader, planner = CheckpointReader(folder), LoadPlanner()
    load({"optimizer": {"lr": 0.0}}, storage_reader=reader, planner=planner, no_dist=True)


def attack_by_weights(evil: Evil, sharded: Path, *, is_archive: bool = True) -> None:
    torch.save({"b": evil}, sharded / PICKLED, _use_new_zipfile_serialization=is_archive)
    convert(sharded, sharded)


@pytest.mark.parametrize(
    "attack",
    [
        attack_by_metadata,
        attack_by_a_value,
        attack_by_weights,
        partial(attack_by_weights, is_archive=False),
    ],
    ids=["metadata", "value", "weights", "old weights"],
)
def test_what_is_made_to_attack_does_nothing(
    attack: Callable[[Evil, Path], None], sharded: Path, tmp_path: Path
) -> None:
    evil = Evil(tmp_path / "mark")
    copy = Path(shutil.copytree(sharded, tmp_path / "step-00000001"))
    with pytest.raises((InputError, DamagedError, CheckpointException, pickle.UnpicklingError)):
        attack(evil, copy)
    assert not (tmp_path / "mark").exists()
    pickle.loads(pickle.dumps(evil)).close()
    assert (tmp_path / "mark").exists(), "a plain pickle would have done it"


@pytest.mark.parametrize("name", ["ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"])
def test_metadata_cannot_change_classes(sharded: Path, name: str) -> None:
    """By the operation that sets an object's attributes, applied to a class."""
    changed = pickle.dumps({"__init__": torch.Size}, protocol=2)[2:-1]
    content = f"c{parts.__name__}\n{name}\nN".encode() + changed + pickle.TUPLE2 + b"b."
    with pytest.raises(DamagedError):
        parse_metadata(content)
    assert parse_metadata((sharded / ".metadata").read_bytes()).state_dict_metadata


def test_metadata_that_names_other_files_is_refused(sharded: Path) -> None:
    content = (sharded / ".metadata").read_bytes()
    assert content.count(b"__0_0.distcp")
    moved = content.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0c../../../x/y")
    assert moved != content
    with pytest.raises(DamagedError, match="is refused"):
        parse_metadata(moved)
