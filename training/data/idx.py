"""Reader for the IDX-gz format of MNIST and its relatives.

Big-endian header: two zero bytes, a type code, the number of dimensions, then each dimension as
an unsigned 32-bit integer; the values follow (http://yann.lecun.com/exdb/mnist/, 1998). Only
unsigned bytes are read, the one type that image sets use.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from contract.errors import InputError

_UNSIGNED_BYTE = 0x08
_MAX_DIMENSIONS = 4


def decompress(path: Path) -> bytes:
    """Return the decompressed content of a gzip file.

    Raises:
        InputError: It is missing, unreadable, truncated or corrupt.
    """
    try:
        with gzip.open(path) as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path} is truncated or not a gzip file ({error}): copy it again from its source"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def parse(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """Return the array that IDX ``content`` holds, sharing its memory; ``name`` is for errors.

    Raises:
        InputError: The header is not IDX with unsigned bytes, or the length does not match it.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise InputError(
            f"{name} is not an IDX file of unsigned bytes: it begins with "
            f"{content[:4].hex(' ') or 'nothing'}, not with 00 00 08"
        )
    num_dimensions = content[3]
    start = 4 + 4 * num_dimensions
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS or len(content) < start:
        raise InputError(f"{name} has a damaged IDX header ({num_dimensions} dimensions)")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    size = len(content) - start
    if size != math.prod(shape):
        raise InputError(
            f"{name} is damaged: its header promises {' x '.join(map(str, shape))} = "
            f"{math.prod(shape):,} bytes and {size:,} follow"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
