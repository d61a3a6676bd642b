"""Cache on this host's disk: what is fetched or made once for all processes and jobs of a host.

What needs several steps is done within ``locked``; a file appears whole or not at all.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from contract.errors import InputError

CACHE_VARIABLE: Final = "TRAINING_CACHE_DIR"


def cache_dir() -> Path:
    """This machine's cache: ``$TRAINING_CACHE_DIR``, or a folder under the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ecs-training"


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that one process of a machine can have; its file and the folders above are made.
    On Windows, any number can.

    Raises:
        InputError: they cannot be made.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("w")
    except OSError as error:
        raise not_writable(file.parent, error) from None
    with opened:
        try:
            import fcntl
        except ImportError:
            pass
        else:
            fcntl.flock(opened, fcntl.LOCK_EX)  # closing it ends it
        yield


def not_writable(folder: Path, error: OSError) -> InputError:
    """The error for a folder of the cache that cannot be made or written."""
    return InputError(
        f"cache folder {folder} cannot be written ({error.strerror}): set {CACHE_VARIABLE} to a "
        "folder that can be"
    )
