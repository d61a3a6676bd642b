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
        DamagedError: it is none, or breaks off.
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
        DamagedError: it is none, or breaks off.
    """
    if encoding != RAW:
        return decode(content, size=size)
    expected = entry.height * entry.width * 3
    if len(content) != expected or not expected:
        raise DamagedError(f"it has {len(content):,} bytes, its index says {expected:,}")
    found = np.frombuffer(content, np.uint8).reshape(entry.height, entry.width, 3)
    if min(entry.height, entry.width) <= size:
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
        if colors == "CMYK" or min(height, width) > size:
            return None
        found: Pixels = simplejpeg.decode_jpeg(content, fastupsample=True)
    except ValueError:
        return None  # Pillow finds the words for what is wrong with it, or reads it all the same
    return found
