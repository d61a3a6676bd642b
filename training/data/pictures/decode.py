"""From the bytes of a picture to its pixels. Imports no torch: decoders start in no time."""

import io
import warnings
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from training.data.pictures.index import RAW, Entry

try:
    import simplejpeg  # twice as fast as Pillow; laptops do without
except ImportError:
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]

#: A picture of more pixels than this would take gigabytes: it is a mistake or an attack.
MOST_PIXELS: Final = 200_000_000
Image.MAX_IMAGE_PIXELS = MOST_PIXELS


class DamagedError(Exception):
    """These bytes are not a whole picture; the message tells why."""


def decode(content: bytes, *, size: int) -> Pixels:
    """Pixels of a picture, shrunk where it does not fit into a square of ``size`` pixels.

    Returns:
        uint8 ``[height, width, 3]``; the aspect ratio is kept, and small pictures stay small.

    Raises:
        DamagedError: it is none, or breaks off.
    """
    if simplejpeg is not None and content[:2] == b"\xff\xd8":
        found = _fast(content, size)
        if found is not None:
            return found
    return np.asarray(fitted(content, size=size))


def fitted(content: bytes, *, size: int) -> Image.Image:
    """The same with Pillow alone, as its RGB image."""
    if not content:
        raise DamagedError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strange EXIF data and the like
            file = Image.open(io.BytesIO(content))
            # libjpeg leaves out what is not needed, down to an eighth, but not below the size.
            file.draft("RGB", (size, size))
            image = _flat(file) if file.mode != "RGB" else file
            image.load()
    except UnidentifiedImageError:
        raise DamagedError("this is no picture of a known format") from None
    except Image.DecompressionBombError as error:
        raise DamagedError(f"it has more than {MOST_PIXELS:,} pixels: {error}") from None
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        raise DamagedError(str(error) or type(error).__name__) from None
    return _shrunk(image, size)


def raw(content: bytes, entry: Entry) -> Pixels:
    """Pixels that were packed without compression.

    Raises:
        DamagedError: their number is not that of the index.
    """
    expected = entry.height * entry.width * 3
    if len(content) != expected or not expected:
        raise DamagedError(f"it has {len(content):,} bytes, its index says {expected:,}")
    return np.frombuffer(content, np.uint8).reshape(entry.height, entry.width, 3)


def pixels(content: bytes, entry: Entry, *, size: int, encoding: str) -> Pixels:
    """Pixels of a picture of a set; see ``decode``."""
    if encoding != RAW:
        return decode(content, size=size)
    found = raw(content, entry)
    if max(found.shape) <= size:
        return found
    return np.asarray(_shrunk(Image.fromarray(found), size))


def _fast(content: bytes, size: int) -> Pixels | None:
    """With libjpeg-turbo and nothing around it; None for what it leaves to Pillow."""
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(content)
        if colors == "CMYK" or max(height, width) > size:
            return None
        found: Pixels = simplejpeg.decode_jpeg(content, fastupsample=True)
    except ValueError:
        return None  # Pillow finds the words for what is wrong with it, or reads it all the same
    return found


def _flat(image: Image.Image) -> Image.Image:
    """Grey, palette, CMYK and transparent pictures as RGB, on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _shrunk(image: Image.Image, size: int) -> Image.Image:
    longest = max(image.size)
    if longest <= size:
        return image
    width, height = (max(1, round(each * size / longest)) for each in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)
