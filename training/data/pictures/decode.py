"""From the bytes of a picture to its pixels. Imports no torch: decoders start in no time."""

from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.data.pictures.index import RAW, Entry
from training.data.pictures.picture import DamagedError, fitted, shrunk

try:
    import simplejpeg  # twice as fast as Pillow
except ImportError:  # an environment that was made before it was asked for
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]
Extent = tuple[int, int]
"""Height and width."""

#: Whether JPEGs are decoded by simplejpeg.
FAST: Final = simplejpeg is not None


def draw(content: bytes | memoryview, entry: Entry, canvas: Pixels, *, encoding: str) -> Extent:
    """Write a set's picture into the top left corner of a square canvas, and black beside it.

    Args:
        canvas: uint8 ``[size, size, 3]``; whatever it held is gone, also where this fails.

    Returns:
        Height and width of the picture.

    Raises:
        DamagedError: it is none, or breaks off.
    """
    extent = _straight(content, canvas) if encoding != RAW else None
    if extent is None:
        found = pixels(content, entry, size=len(canvas), encoding=encoding)
        height, width = extent = found.shape[0], found.shape[1]
        canvas[:height, :width] = found
        canvas[:height, width:] = 0
    canvas[extent[0] :] = 0
    return extent


def _straight(content: bytes | memoryview, canvas: Pixels) -> Extent | None:
    """Decode a JPEG that is as wide as its canvas to where it belongs: a copy of its pixels takes a
    sixth of the time. None for all others."""
    if simplejpeg is None or content[:2] != b"\xff\xd8":
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(content)
        if colors == "CMYK" or width != len(canvas) or height > width:
            return None
        simplejpeg.decode_jpeg(content, fastupsample=True, buffer=canvas[:height])
    except ValueError:
        return None  # as in _fast
    return height, width


def pixels(content: bytes | memoryview, entry: Entry, *, size: int, encoding: str) -> Pixels:
    """Pixels of a set's picture, shrunk where it does not fit into a square of ``size`` pixels.

    Returns:
        uint8 ``[height, width, 3]``; the aspect ratio is kept, and small pictures stay small.

    Raises:
        DamagedError: it is none, or breaks off.
    """
    if encoding != RAW:
        return decode(content, size=size)
    expected = entry.height * entry.width * 3
    if len(content) != expected or not expected:
        raise DamagedError(f"it has {len(content):,} bytes, its index says {expected:,}")
    found = np.frombuffer(content, np.uint8).reshape(entry.height, entry.width, 3)
    if max(entry.height, entry.width) <= size:
        return found
    return np.asarray(shrunk(Image.fromarray(found), size))


def decode(content: bytes | memoryview, *, size: int) -> Pixels:
    """The same of a JPEG, or of what else Pillow reads."""
    if simplejpeg is not None and content[:2] == b"\xff\xd8":
        found = _fast(content, size)
        if found is not None:
            return found
    return np.asarray(fitted(content, size=size))


def _fast(content: bytes | memoryview, size: int) -> Pixels | None:
    """With libjpeg-turbo and nothing around it; None for what it leaves to Pillow."""
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(content)
        if colors == "CMYK" or max(height, width) > size:
            return None
        found: Pixels = simplejpeg.decode_jpeg(content, fastupsample=True)
    except ValueError:
        return None  # Pillow finds the words for what is wrong with it, or reads it all the same
    return found
