"""The bytes of a picture as an RGB image, with Pillow alone: laptops that prepare a set have no
more than that."""

import contextlib
import io
import warnings
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

#: A picture of more pixels than this would take gigabytes: it is a mistake or an attack.
MOST_PIXELS: Final = 200_000_000
Image.MAX_IMAGE_PIXELS = MOST_PIXELS


class DamagedPictureError(Exception):
    """These bytes are not a whole picture; the message tells why."""


def canvas_side(size: int) -> int:
    """Pixels of a side of the square that a picture is decoded into.

    It holds all of a picture up to 3:2, the widest format of most cameras, and the middle of a
    panorama. All canvases are as large as the largest, so a whole panorama would cost the memory of
    many pictures; shrunk until it fits, too little would be left of its height. Evaluation only
    ever looks at the middle.

    Args:
        size: of the shorter side of a picture, at most.
    """
    return -(-size * 3 // 2)


def fitted(content: bytes | memoryview, *, size: int = 0) -> Image.Image:
    """A picture, shrunk where its shorter side has more than ``size`` pixels.

    The aspect ratio is kept, and small pictures stay small.

    Args:
        size: 0: any number.

    Raises:
        DamagedPictureError: it is none, or breaks off.
    """
    if not content:
        raise DamagedPictureError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # strange EXIF data and the like
            file = Image.open(io.BytesIO(content))
            if size:
                # libjpeg leaves out what is not needed, down to an eighth, but not below the size.
                file.draft("RGB", (size, size))
            file.load()
            # As transformers' pipelines do, for those who use the model.
            with contextlib.suppress(Exception):  # of strange EXIF data
                ImageOps.exif_transpose(file, in_place=True)
            image = _flat(file) if file.mode != "RGB" else file
    except UnidentifiedImageError:
        raise DamagedPictureError("this is no picture of a known format") from None
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        raise DamagedPictureError(str(error) or type(error).__name__) from None
    return shrunk(image, size) if size else image


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """An image whose shorter side has ``size`` pixels, or fewer where it has fewer now."""
    shorter = min(image.size)
    if shorter <= size:
        return image
    width, height = (round(each * size / shorter) for each in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def _flat(image: Image.Image) -> Image.Image:
    """Grey, palette, CMYK and transparent pictures as RGB, on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode.startswith("I;16"):
        # Pillow would show all but the darkest of 65,536 levels as white.
        image = image.convert("I").point(lambda level: level / 257)
    return image.convert("RGB")
