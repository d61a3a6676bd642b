"""``torch.distributed.checkpoint`` over this project's storage, without trust in what is read.

Torch takes a checkpoint for a program: it unpickles the metadata, and the entries that are no
tensors, which runs whatever they say. A run's folder may come from another person, or have been
written to by another job. So here only the classes that make up metadata are unpickled, and
entries as ``weights_only`` allows.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from contract.errors import InputError
from contract.runs import check_relative
from store import storage
from training.checkpoint.manifest import DamagedError

METADATA_FILE: Final = ".metadata"


def _member(kind: object, name: object) -> parts._MEM_FORMAT_ENCODING:
    """What ``getattr`` does for the one class that early releases of Python 3.11 pickle by it."""
    if kind is not parts._MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise pickle.UnpicklingError("it names builtins.getattr")
    return parts._MEM_FORMAT_ENCODING[name]


#: Classes that metadata has instances of.
_PARTS: Final = (
    parts.BytesStorageMetadata,
    parts.ChunkStorageMetadata,
    parts.Metadata,
    parts.MetadataIndex,
    parts.StorageMeta,
    parts.TensorProperties,
    parts.TensorStorageMetadata,
    _StorageInfo,
)
_CLASSES: Final[Mapping[tuple[str, str], Any]] = {
    **{(each.__module__, each.__name__): each for each in (*_PARTS, parts._MEM_FORMAT_ENCODING)},
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    **{
        ("torch", str(each).removeprefix("torch.")): each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype)
    },
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C makes room for as many entries as a pickle says it has."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None

    def load_build(self) -> None:
        # Pickle sets attributes of whatever is there: of a class, for the rest of the process.
        if not isinstance(self.stack[-2], _PARTS):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes what it did not make")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[Any] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def parse_metadata(content: bytes) -> Metadata:
    """Read the metadata of a checkpoint; nothing that it says is run.

    Raises:
        DamagedError: it is no metadata, or names files outside the checkpoint's folder.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check(found)
    except MemoryError:
        raise
    except RecursionError:
        raise DamagedError(f"{METADATA_FILE} cannot be read") from None
    except InputError as error:
        raise DamagedError(f"{METADATA_FILE}: {error}") from None
    except Exception as error:  # a pickle's operations fail in many ways
        reason = str(error).partition("\n")[0]
        raise DamagedError(f"{METADATA_FILE} cannot be read: {reason}") from None
    assert isinstance(found, Metadata)
    return found


def _check(found: Any) -> None:
    """
    Raises:
        Exception: it is no whole metadata.
    """
    _require(isinstance(found, Metadata))
    for name, entry in found.state_dict_metadata.items():
        _require(isinstance(name, str))
        if isinstance(entry, parts.BytesStorageMetadata):
            continue
        _require(isinstance(entry, parts.TensorStorageMetadata))
        _require(isinstance(entry.size, torch.Size))
        _require(isinstance(entry.properties.dtype, torch.dtype))
        for chunk in entry.chunks:
            _require(isinstance(chunk, parts.ChunkStorageMetadata))
            _require(len(chunk.offsets) == len(chunk.sizes) == len(entry.size))
    for index, info in found.storage_data.items():
        _require(isinstance(index, MetadataIndex) and isinstance(info, _StorageInfo))
        check_relative(info.relative_path, what="file")
        _require(min(info.offset, info.length) >= 0 and not info.transform_descriptors)


def _require(is_so: bool) -> None:
    if not is_so:
        raise ValueError("it is no whole metadata")


class StorageFiles(FileSystem):
    """Torch's file system, over the storage that all else goes through."""

    def init_path(self, path: Any, **_options: Any) -> Any:
        self.fs = storage.filesystem(str(path))
        return path


class CheckpointReader(FsspecReader):
    """Torch's reader, with ``parse_metadata``."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.fs = StorageFiles()  # type: ignore[assignment]
        self.path = self.fs.init_path(uri)
        self._metadata: Metadata | None = None

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The metadata, which is read once: torch takes any failure of this for a checkpoint of
        another kind.

        Raises:
            DamagedError: as with ``parse_metadata``, and where there is none.
        """
        if self._metadata is None:
            content = storage.read_bytes(storage.join(str(self.path), METADATA_FILE))
            if content is None:
                raise DamagedError(f"{METADATA_FILE} is missing")
            self._metadata = parse_metadata(content)
        self._metadata.storage_meta = parts.StorageMeta(load_id=self.load_id)
        return self._metadata


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, which makes tensors and plain values and nothing else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, map_location="cpu", weights_only=True)
        # What torch reads from there without a check, written by this process.
        checked = io.BytesIO()
        torch.save(plain, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
