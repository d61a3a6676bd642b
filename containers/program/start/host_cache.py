"""Cache on a host's disk: models, data sets and packages that outlive the task that fetched them.

One folder of the host's disk, mounted into every container at the same path. All jobs of a
deployment that run on the host share it, see docs/security.md. The least recently used entries are
removed when the disk fills up; everything in it can be fetched again.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from containers.host.machine import Clock, say
from contract.nodes import CACHE_DIR

ROOT: Final = Path(CACHE_DIR)
#: Share of the cache's file system: with less free, the oldest entries are removed. The
#: images are on it too, where the host has no disk of its own for the cache.
KEEP_FREE: Final = 0.2
#: uv's own cache, which is removed as a whole.
UV: Final = "packages/uv"
#: Held while uv's cache is used (shared) or removed.
_LOCK: Final = ".lock"
#: Held by a container while Ray starts in it.
_TURN: Final = ".starting"
_TURN_EVERY_S: Final = 0.5
_HUGGING_FACE: Final = "huggingface"
#: Folders that are removed as a whole.
_ENTRIES: Final = (
    f"{_HUGGING_FACE}/hub/*",
    f"{_HUGGING_FACE}/datasets/*",
    "torch/hub/*",
    "data/*",
    UV,
)


def entries(root: Path) -> list[Path]:
    """Entries that can be removed, the least recently used first."""
    found = [path for pattern in _ENTRIES for path in root.glob(pattern)]
    return sorted(found, key=lambda path: (_last_use(path), path))


def trim(root: Path, *, space: Callable[[Path], Any] = shutil.disk_usage) -> list[str]:
    """Remove what was used least recently until enough of the disk is free; return the names.

    uv's cache stays while a container installs from it.

    Args:
        space: tells how full the disk is: an object with ``free`` and ``total``, in bytes.
    """

    def has_room() -> bool:
        found = space(root)
        return bool(found.free >= KEEP_FREE * found.total)

    removed: list[str] = []
    with (root / _LOCK).open("ab") as lock:
        for path in [] if has_room() else entries(root):
            # Who installs meanwhile waits for the lock, and finds an empty cache.
            if (path != root / UV or _is_free(lock)) and _remove(path):
                removed.append(str(path.relative_to(root)))
            if has_room():
                break
    if removed:
        say(f"the disk is nearly full: removed from the cache: {', '.join(removed)}")
    return removed


def make_room(root: Path = ROOT) -> None:
    """Trim the cache before this task uses it: models and data of earlier jobs may have filled the
    disk.

    Args:
        root: its folder; default: the host's. Where that cannot be written nothing is done.
    """
    if _is_usable(root):
        try:
            trim(root)
        except OSError as error:  # another container is at work in it, too
            say(f"the cache is not trimmed: {error}")


@contextlib.contextmanager
def installing(root: Path = ROOT) -> Iterator[None]:
    """While uv installs: no container of this host removes its cache.

    uv has a lock too, but takes it after it has made the folder in which the lock is.
    """
    if not _is_usable(root):
        yield
        return
    with (root / _LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def turn(
    *, within_s: float, should_stop: Callable[[], bool], root: Path = ROOT, clock: Clock = time
) -> Iterator[None]:
    """Wait until no other container of this host is in here, but not for longer than that.

    Args:
        within_s: seconds, after which this container goes on all the same.
        should_stop: true where it need not wait any more.
        root: the cache's folder; where that cannot be written, nothing is waited for.
    """
    if not _is_usable(root):
        yield
        return
    until = clock.monotonic() + within_s
    with (root / _TURN).open("ab") as lock:
        while not _is_free(lock) and clock.monotonic() < until and not should_stop():
            clock.sleep(_TURN_EVERY_S)
        yield


def variables(root: Path = ROOT) -> dict[str, str]:
    """Variables that let programs keep models and data in the host's cache.

    Args:
        root: its folder; default: the host's. Where that cannot be written there are none, and
            programs keep to the container.
    """
    if not _is_usable(root):
        return {}
    return {
        # Not HF_HOME, which holds a token too: the jobs of other people read what is here.
        "HF_HUB_CACHE": str(root / _HUGGING_FACE / "hub"),
        "HF_DATASETS_CACHE": str(root / _HUGGING_FACE / "datasets"),
        "TORCH_HOME": str(root / "torch"),
        "TRAINING_CACHE_DIR": str(root / "data"),
        "UV_CACHE_DIR": str(root / UV),
    }


def _remove(path: Path) -> bool:
    """Remove an entry, unless another container was faster."""
    # Rename before deleting, so that a half-deleted entry is never used.
    gone = path.with_name(f".gone~{uuid.uuid4().hex}")
    try:
        path.rename(gone)
    except OSError:
        return False
    gone.unlink() if gone.is_file() else shutil.rmtree(gone, ignore_errors=True)
    return True


def _is_free(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _last_use(path: Path) -> float:
    """Last time that a file below ``path`` was read or written.

    A folder's own times tell nothing: looking at it, as this does, counts as a use.
    """
    times = [0.0]
    for each in [path, *path.rglob("*")]:
        with contextlib.suppress(OSError):
            if stat.S_ISREG((found := each.lstat()).st_mode):
                times.append(max(found.st_atime, found.st_mtime))
    return max(times)
