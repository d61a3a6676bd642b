"""A rank's file of a sharded checkpoint, in the format of ``torch.distributed.checkpoint``.

Torch's writer passes each tensor through a Python stream in forty pieces, and all ranks plan each
save anew. Here numbers go from their buffer to the storage in one piece, hashed on the way, and the
plan is kept while the entries are the same ones. Torch reads the files.
"""

import functools
import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config

from store import storage
from training.checkpoint.dcp import StorageFiles
from training.checkpoint.manifest import File

StateDict = dict[str, Any]
"""Nested dictionaries of tensors and plain values, as torch.distributed.checkpoint takes them."""


class Written(NamedTuple):
    """The file of a rank."""

    name: str
    file: File
    places: dict[MetadataIndex, _StorageInfo]
    """Where each entry lies in it."""


class Share:
    """What one rank has of a model's state, for one save after the other."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        # Its buffers in host memory are made once: fresh pages cost more than the copy.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._planner = DefaultSavePlanner()
        self._kinds: Sequence[object] = ()
        self._local = SavePlan([])
        self._items: Sequence[WriteItem] = ()
        self._metadata: Metadata | None = None  # on the first rank
        self.entries: StateDict = {}
        """Copies of this rank's tensors in host memory, and plain values, by their names."""
        self.is_planned = False
        """Whether the ranks have agreed who writes which entry: until others are copied."""

    @torch.no_grad()
    def copy(self, state: StateDict) -> Self:
        """Copy the state to host memory; the copy before is overwritten."""
        self._planner.set_up_planner(state)
        live = self._planner.state_dict
        kinds = [
            (name, type(value), getattr(value, "dtype", None), getattr(value, "shape", None))
            for name, value in live.items()
        ]
        if kinds != self._kinds:
            self._kinds, self.is_planned = kinds, False
            self._local = self._planner.create_local_plan()
        # Of a DTensor only what is here: torch would copy its mesh too, each time.
        here: StateDict = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in live.items()
        }
        self.entries = cast(StateDict, self._stager.stage(here))
        return self

    def plan(self, group: dist.ProcessGroup) -> None:
        """Agree with all ranks which of them writes what several have.

        Raises:
            CheckpointException: that failed on one of them.
        """

        def merge(plans: list[SavePlan]) -> list[SavePlan]:
            merged, metadata = self._planner.create_global_plan(plans)
            self._metadata = replace(metadata, version=CURRENT_DCP_VERSION)
            return merged

        self.is_planned = False
        ranks = _DistWrapper(group, use_dist=True, coordinator_rank=0)
        self._items = ranks.reduce_scatter("plan", lambda: self._local, merge).items
        self.is_planned = True

    def write(self, uri: str, rank: int) -> Written:
        """Write the file of this rank, so that it survives a loss of power."""
        name = f"__{rank}_0{DEFAULT_SUFFIX}"
        files, digest, size, places = StorageFiles(), hashlib.sha256(), 0, {}
        path = files.init_path(storage.join(uri, name))
        with files.create_stream(path, "wb") as stream:
            for item in self._items:
                begins = size
                for piece in _archive(self.entries[item.index.fqn]):
                    digest.update(piece)
                    stream.write(piece)
                    size += len(piece)
                    storage.Written.add(len(piece))
                places[item.index] = _StorageInfo(name, begins, size - begins)
            if not storage.is_s3(uri):
                stream.flush()
                os.fsync(stream.fileno())
        return Written(name, File(size, digest.hexdigest()), places)

    def metadata(self, written: Iterable[Written]) -> bytes:
        """Torch's metadata of the checkpoint, on the first rank."""
        assert self._metadata is not None
        places = {index: place for each in written for index, place in each.places.items()}
        return pickle.dumps(replace(self._metadata, storage_data=places))


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
    """What ``torch.save`` writes before and after the numbers of a tensor."""
    tensor, found = torch.empty(shape, dtype=dtype), io.BytesIO()
    # Without a checksum of the numbers: the manifest has one of each file.
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        torch.save(tensor, found)
    found.seek(0)
    reader: Any = torch._C.PyTorchFileReader(found)
    begins = reader.get_record_offset("data/0")
    content = found.getbuffer()
    return bytes(content[:begins]), bytes(content[begins + tensor.nbytes :])
