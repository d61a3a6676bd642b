"""Cache on this host's disk: what is fetched or made once for all processes and jobs of a host.

What needs several steps is done within ``locked``; a file appears whole or not at all.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from contract import faults
from contract.errors import InputError
from store import storage

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


def made(name: str, content: Callable[[], bytes]) -> Path:
    """A file of the cache, which ``content`` gives where it is not there yet."""
    file = cache_dir() / name
    if not file.exists():
        storage.write_bytes(str(file), content())
    return file


def fetch(url: str, target: Path, *, check: Callable[[Path], None] = lambda _: None) -> None:
    """Fetch a file in S3 to a place in the cache. To be called within ``locked``.

    Args:
        check: called with what was fetched, before it has its name.

    Raises:
        InputError: it is missing, or the disk is full.
        UnreachableError: S3 does not answer.
        Exception: of ``check``.
    """
    # The same name each time: what a killed process has left takes up room once.
    part = target.with_name(f".{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with storage.given(url):
            storage.download(url, part)
        check(part)
        part.replace(target)
    except OSError as error:
        if faults.is_full(error):
            raise not_writable(target.parent, error) from None
        raise
    finally:
        part.unlink(missing_ok=True)
