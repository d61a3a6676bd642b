"""``torch.distributed.checkpoint`` over this project's storage, without trust in what is read.

Torch takes a checkpoint for a program: it unpickles the metadata, and the entries that are no
tensors, which runs whatever they say. A run's folder may come from another person, or have been
written to by another job. So here only the classes that make up metadata are unpickled, and
entries as ``weights_only`` allows.

Torch's writer passes each tensor through a Python stream in forty pieces, and all ranks plan each
save anew. Here numbers go from their buffer to the storage in one piece, hashed on the way, and the
plan is kept while the entries are the same ones. The format is torch's.
"""

import functools
import hashlib
import io
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.serialization import config

from contract.errors import InputError
from contract.runs import check_relative
from store import storage
from training.checkpoint.manifest import DamagedError, File

METADATA_FILE: Final = ".metadata"
StateDict = dict[str, Any]
"""Nested dictionaries of tensors and plain values, as torch.distributed.checkpoint takes them."""
Places = dict[MetadataIndex, _StorageInfo]
"""Where each entry lies."""


def _member(kind: object, name: object) -> parts._MEM_FORMAT_ENCODING:
    """Replacement of ``getattr`` for the one class that early releases of Python 3.11 pickle by
    it."""
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


# --- writing --------------------------------------------------------------------------------------
#: So many tensors get their buffers before a save, which waits for these, makes the others.
_AT_ONCE: Final = 64


def _stager(*, pinned: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
    )


def _here(value: Any) -> Any:
    """This rank's part of a value."""
    return value.to_local() if isinstance(value, DTensor) else value


def _parts(here: Any) -> Any:
    """A tensor as torch's stager can copy it: of moments in 8 bits the tensors that they are made
    of, by name."""
    if not is_traceable_wrapper_subclass(here):
        return here
    names, _ = here.__tensor_flatten__()
    return {name: getattr(here, name) for name in names}


def _whole(here: Any, copied: Any) -> Any:
    """The copy of a tensor, from that of its ``_parts``."""
    if not is_traceable_wrapper_subclass(here):
        return copied
    _, context = here.__tensor_flatten__()
    return type(here).__tensor_unflatten__(copied, context, here.shape, here.stride())


class Share:
    """One rank's share of a model's state: it is copied, planned and written at each save."""

    def __init__(self) -> None:
        # Its buffers in host memory are made once: fresh pages cost more than the copy.
        self._stager = _stager(pinned=False)
        self._making: threading.Thread | None = None
        self._stops = threading.Event()
        self._failure: Exception | None = None
        self._shapes: StateDict = {}
        self._plan: Any = None
        self._items: Any = ()
        self.entries: StateDict = {}
        """Copies of this rank's tensors in host memory, and plain values, by their names."""
        self.is_planned = False
        """True once the ranks have agreed who writes which of these entries."""
        self.metadata: Any = None
        """Torch's, of a checkpoint, once they have: all but where the entries lie."""

    def prepare(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Begin to make the buffers for tensors in a thread, before the first ``copy``.

        For a GPU they are pinned, at 2.6 GB/s: more than the copy of a single save is worth.
        """
        if self._shapes:
            return
        self._stager = _stager(pinned=device.type == "cuda")
        self._making = threading.Thread(target=self._make, args=(tensors, device), name="buffers")
        self._making.start()

    @torch.no_grad()
    def _make(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        # Torch's stager makes a buffer where it first copies to it: this copy is overwritten.
        try:
            # A stream of this rank's GPU, on which training does not wait.
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            with torch.cuda.stream(stream):
                for begin in range(0, len(tensors), _AT_ONCE):
                    # A process that ends, for any reason, waits for its threads.
                    if self._stops.is_set() or not threading.main_thread().is_alive():
                        return
                    some = tensors[begin : begin + _AT_ONCE]
                    self._stager.stage({str(id(each)): _parts(_here(each)) for each in some})
        except Exception as error:  # returned by ``stop``
            self._failure = error

    def stop(self) -> Exception | None:
        """Stop making buffers; return the error of that thread, if any. ``copy`` makes the rest."""
        if self._making is not None:
            self._stops.set()
            self._making.join()
        failure, self._failure = self._failure, None
        return failure

    @torch.no_grad()
    def copy(self, state: StateDict) -> Self:
        """Copy the state to host memory; the copy before is overwritten."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(state)
        live = planner.state_dict
        shapes = {name: getattr(value, "shape", None) for name, value in live.items()}
        if shapes != self._shapes:
            self._shapes, self.is_planned = shapes, False
            self._plan = planner.create_local_plan()
        # Of a DTensor only what is here: torch would copy its mesh too, each time.
        here = {name: _here(value) for name, value in live.items()}
        parts: StateDict = {name: _parts(value) for name, value in here.items()}
        copied = cast(StateDict, self._stager.stage(parts))
        self.entries = {name: _whole(here[name], each) for name, each in copied.items()}
        return self

    def plan(self, group: dist.ProcessGroup) -> None:
        """Agree with all ranks which of them writes what several have."""
        plans: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(plans, self._plan, group)
        merged, metadata = DefaultSavePlanner().create_global_plan(plans)
        self._items = merged[dist.get_rank(group)].items
        self.metadata = replace(metadata, version=CURRENT_DCP_VERSION)
        self.is_planned = True

    def write(self, uri: str, rank: int) -> tuple[dict[str, File], Places]:
        """Write the file of this rank, so that it survives a loss of power."""
        name = f"__{rank}_0{DEFAULT_SUFFIX}"
        files, digest, places = StorageFiles(), hashlib.sha256(), {}
        path = files.init_path(storage.join(uri, name))
        with files.create_stream(path, "wb") as stream:
            for item in self._items:
                begins = stream.tell()
                for piece in _archive(self.entries[item.index.fqn]):
                    digest.update(piece)
                    stream.write(piece)
                    storage.Written.add(len(piece))
                places[item.index] = _StorageInfo(name, begins, stream.tell() - begins)
            file = File(stream.tell(), digest.hexdigest())
            if not storage.is_s3(uri):
                stream.flush()
                os.fsync(stream.fileno())
        return {name: file}, places


def _archive(value: object) -> tuple[Any, ...]:
    """Pieces of an entry, which together are what ``torch.save`` writes."""
    if type(value) is torch.Tensor:
        head, tail = _around(value.dtype, value.shape)
        # The buffer itself: nothing is copied.
        return head, value.contiguous().view(-1).view(torch.uint8).numpy().data, tail
    found = io.BytesIO()
    torch.save(value, found)  # a plain value, or moments in 8 bits
    return (found.getbuffer(),)


@functools.cache
def _around(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Bytes that ``torch.save`` writes before and after the numbers of a tensor."""
    tensor, found = torch.empty(shape, dtype=dtype), io.BytesIO()
    # Without a checksum of the numbers: the manifest has one of each file.
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(tensor, found)
    found.seek(0)
    reader: Any = torch._C.PyTorchFileReader(found)
    begins = reader.get_record_offset("data/0")
    content = found.getvalue()
    return content[:begins], content[begins + tensor.nbytes :]
