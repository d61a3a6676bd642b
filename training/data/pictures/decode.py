"""Decoding of a picture's bytes into the shared ring, in the processes of a ``PictureReader``.

``Decoder`` is the data set of torch's DataLoader. Its items are not pictures but tasks: it decodes
a task's pictures into shared memory, and only returns how large they are.
"""

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import simplejpeg  # twice as fast as Pillow
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from contract.errors import InputError
from training.data.pictures.index import RAW, Entry
from training.data.pictures.library import Split
from training.data.pictures.picture import DamagedPictureError, fitted, shrunk

Pixels = npt.NDArray[np.uint8]
Extent = tuple[int, int]
"""Height and width."""

#: Shards are kept open; files of trees are not.
_MOST_OPEN: Final = 512
_SHORT: Final = "its file ends before it does"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingTask:
    """Pictures to decode into neighboring canvases."""

    canvas: int
    """Place of the first one's canvas in the ring."""
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Result of a task: a value for each of its pictures."""

    labels: list[int]
    extents: list[Extent]
    """(0, 0) for a damaged picture."""
    damaged: dict[str, str]
    """``<class>/<file>`` -> what is wrong."""


class Decoder(Dataset[Done | InputError]):
    """Decodes pictures of a split into a ring of shared memory."""

    def __init__(
        self,
        split: Split,
        *,
        root: str,
        encoding: str,
        size: int,
        ring: Pixels,
        current: npt.NDArray[np.int64],
    ) -> None:
        """
        Args:
            root: folder of the set.
            encoding: of its pictures.
            size: most pixels of the shorter side of a picture.
            ring: shared canvases, uint8 ``[num, side, side, 3]``, side being
                ``canvas_side(size)``.
            current: shared, a value per process: the sample that it decodes, for the error message
                if the process is killed.
        """
        self._split = split
        self._encoding = encoding
        self._size = size
        self._ring = ring
        self._current = current
        self._files = Files(root)

    def __getitem__(self, task: DecodingTask) -> Done | InputError:
        """Decode the pictures of a task; the rest of each canvas becomes black.

        Returns:
            An error where the index is damaged: raised here, it would arrive with a traceback
            around its sentence.
        """
        worker = get_worker_info()
        assert worker is not None
        done = Done(labels=[], extents=[], damaged={})
        try:
            for canvas, sample in zip(self._ring[task.canvas :], task.samples, strict=False):
                self._current[worker.id] = sample
                self._decode(self._split.entry(sample), canvas, done)
        except InputError as error:
            return error
        self._current[worker.id] = -1
        return done

    def _decode(self, entry: Entry, canvas: Pixels, done: Done) -> None:
        extent = (0, 0)
        try:
            content = self._files.read(entry)
            extent = draw(content, entry, canvas, size=self._size, encoding=self._encoding)
        except DamagedPictureError as error:
            done.damaged[entry.name] = str(error)
        done.labels.append(entry.label)
        done.extents.append(extent)


class Files:
    """Reads the bytes of pictures of one set from a folder."""

    def __init__(self, root: str) -> None:
        self._root = root
        # The least recently used one closes itself.
        self._opened = functools.lru_cache(_MOST_OPEN)(functools.partial(open, mode="rb"))
        self._buffer = bytearray()

    def read(self, entry: Entry) -> bytes | memoryview:
        """Bytes of a picture, valid until the next call.

        Raises:
            DamagedPictureError: they are not all there, or cannot be read.
        """
        path = f"{self._root}/{entry.file}"  # its line was checked to stay below
        try:
            if not path.endswith(".tar"):
                with open(path, "rb") as file:
                    whole = file.read()
                if entry.size not in (-1, len(whole)):
                    raise DamagedPictureError(_SHORT)
                return whole
            # Always the same memory: fresh pages would take longer than reading.
            if len(self._buffer) < entry.size:
                self._buffer = bytearray(entry.size)
            content = memoryview(self._buffer)[: entry.size]
            num = os.preadv(self._opened(path).fileno(), [content], entry.offset)
        except OSError as error:
            raise DamagedPictureError(f"it cannot be read: {error.strerror or error}") from None
        if num != entry.size:
            raise DamagedPictureError(_SHORT)
        return content


def draw(
    content: bytes | memoryview, entry: Entry, canvas: Pixels, *, size: int, encoding: str
) -> Extent:
    """Write a set's picture, or its middle, into the top left corner of a square canvas, and black
    beside it.

    Args:
        canvas: uint8 ``[side, side, 3]``, where side is ``canvas_side(size)``.
        size: most pixels of the picture's shorter side.

    Returns:
        Height and width of what is on the canvas.

    Raises:
        DamagedPictureError: it is none, or breaks off.
    """
    found = pixels(content, entry, size=size, encoding=encoding)
    side = len(canvas)
    top, left = (max(0, each - side) // 2 for each in found.shape[:2])
    found = found[top : top + side, left : left + side]
    height, width = found.shape[:2]
    canvas[:height, :width] = found
    canvas[:height, width:] = 0
    canvas[height:] = 0
    return height, width


def pixels(content: bytes | memoryview, entry: Entry, *, size: int, encoding: str) -> Pixels:
    """Pixels of a set's picture, shrunk where its shorter side has more than ``size`` pixels.

    Returns:
        uint8 ``[height, width, 3]``; the aspect ratio is kept, and small pictures stay small.

    Raises:
        DamagedPictureError: it is none, or breaks off.
    """
    if encoding != RAW:
        return decode(content, size=size)
    expected = entry.height * entry.width * 3
    if len(content) != expected or not expected:
        raise DamagedPictureError(f"it has {len(content):,} bytes, its index says {expected:,}")
    found = np.frombuffer(content, np.uint8).reshape(entry.height, entry.width, 3)
    if min(entry.height, entry.width) <= size:
        return found
    return np.asarray(shrunk(Image.fromarray(found), size))


def decode(content: bytes | memoryview, *, size: int) -> Pixels:
    """The same of a JPEG, or of what else Pillow reads."""
    if content[:2] == b"\xff\xd8":
        # Pillow finds the words for what is wrong with it, or reads it all the same.
        with contextlib.suppress(ValueError):
            height, width, colors, _ = simplejpeg.decode_jpeg_header(content)
            if colors != "CMYK" and min(height, width) <= size:
                found: Pixels = simplejpeg.decode_jpeg(content, fastupsample=True)
                return found
    return np.asarray(fitted(content, size=size))
