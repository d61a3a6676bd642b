"""The cache of a host: models, data sets and packages that outlive the task that fetched them.

One folder of the host's disk, mounted into every container at the same path. All jobs of a
deployment that run on the host share it, see docs/security.md. What was used least recently goes
first when the disk gets full; nothing in it is needed that could not be fetched again.
"""

import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from containers.host.machine import say
from contract.nodes import CACHE_DIR

#: Of the file system that the cache is on: less than this share free, and the oldest things go. The
#: images are on it too, where the host has no disk of its own for the cache.
KEEP_FREE: Final = 0.2
#: Where nothing outlives the task: an image that is run without the host's folder.
FALLBACK: Final = Path("/tmp/train-cache")

PACKAGES: Final = "packages"  # installed requirements, a folder for each list of them
USED: Final = "used"  # a file in each of them; its time says when a job last used them
_HUGGING_FACE: Final = "huggingface"
#: What is removed as a whole. Whatever else lies directly below the cache's folders is, too.
_DEEPER: Final = (
    f"{_HUGGING_FACE}/hub/*--*",
    f"{_HUGGING_FACE}/datasets/*",
    "torch/hub/checkpoints/*",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Of a file system, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Something in the cache that is used and removed as a whole."""

    path: Path
    used: float
    """Unix time at which it was last read or written."""


def space_of(folder: Path) -> Space:
    """Of the file system that ``folder`` is on."""
    found = shutil.disk_usage(folder)
    return Space(total=found.total, free=found.free)


class Cache:
    """The cache below one folder."""

    def __init__(self, root: Path, *, space: Callable[[Path], Space] = space_of) -> None:
        """``space`` tells how full the disk is; a test gives another."""
        self.root, self._space = root, space

    @classmethod
    def of_node(cls) -> "Cache":
        """The host's; one of the container's own where that cannot be written."""
        if _is_usable(Path(CACHE_DIR)):
            return cls(Path(CACHE_DIR))
        say(f"{CACHE_DIR} cannot be written: what is installed here ends with this container")
        FALLBACK.mkdir(exist_ok=True)
        return cls(FALLBACK)

    def entries(self) -> list[Entry]:
        """All that can be removed, the least recently used first."""
        deeper = {path for pattern in _DEEPER for path in self.root.glob(pattern)}
        above = {parent for path in deeper for parent in path.parents}
        others = {
            path
            for path in self.root.glob("*/*")
            if path not in above and not path.name.endswith(".lock")
        }
        found = [Entry(path=path, used=_last_use(path)) for path in deeper | others]
        return sorted(found, key=lambda entry: (entry.used, entry.path))

    def trim(self) -> list[str]:
        """Remove what was used least recently until enough of the disk is free; return the names.

        What another container uses or installs just now stays.
        """
        removed: list[str] = []
        if self._has_room():
            return removed
        for entry in self.entries():
            if self._remove(entry.path):
                removed.append(str(entry.path.relative_to(self.root)))
            if self._has_room():
                break
        if removed:
            say(f"the disk is nearly full: removed from the cache: {', '.join(removed)}")
        return removed

    def _has_room(self) -> bool:
        found = self._space(self.root)
        return found.free >= KEEP_FREE * found.total

    def _remove(self, path: Path) -> bool:
        """Remove an entry, unless it is in use or another container was faster."""
        if path.parent != self.root / PACKAGES:
            return _remove(path)
        with self.lock_file(path.name.removeprefix(".").partition("~")[0]) as file:
            return try_lock(file) and _remove(path)

    # --- installed requirements, and who uses them ----------------------------------------------
    def packages(self, key: str) -> Path:
        """Where the packages of a list of requirements lie; it exists once they are complete."""
        return self.root / PACKAGES / key

    def draft(self, key: str) -> Path:
        """A new folder in which ``packages(key)`` is made; ``finish`` gives it that name."""
        folder = self.root / PACKAGES / f".{key}~{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        return folder

    def finish(self, key: str, draft: Path) -> Path:
        """Put a complete draft in its place, in one step; return that."""
        return draft.rename(self.packages(key))

    def lock_file(self, key: str) -> IO[bytes]:
        """The open file whose lock guards ``packages(key)``; the lock ends when it is closed."""
        folder = self.root / PACKAGES
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{key}.lock").open("ab")


def start_trimming(root: Path | None = None) -> threading.Thread | None:
    """Trim the cache in a thread, which is returned: models and data of earlier jobs may have
    filled the disk, also where this one installs nothing.

    Args:
        root: its folder; default: the host's. Where that cannot be written there is no thread.
    """
    root = root or Path(CACHE_DIR)
    if not _is_usable(root):
        return None
    thread = threading.Thread(target=_trim, args=(root,), name="cache", daemon=True)
    thread.start()
    return thread


def _trim(root: Path) -> None:
    try:
        Cache(root).trim()
    except OSError as error:  # another container is at work in it, too
        say(f"the cache is not trimmed: {error}")


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Take the lock of an open file if that is possible now; it also changes a lock's kind."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def variables(root: Path | None = None) -> dict[str, str]:
    """Variables that let programs keep models and data in the host's cache.

    Args:
        root: its folder; default: the host's. Where that cannot be written there are none, and
            programs keep to the container.
    """
    root = root or Path(CACHE_DIR)
    if not _is_usable(root):
        return {}
    return {
        "HF_HOME": str(root / _HUGGING_FACE),
        # It would be below HF_HOME, where the jobs of other people read it.
        "HF_TOKEN_PATH": "/tmp/huggingface-token",
        "TORCH_HOME": str(root / "torch"),
        "TRAINING_CACHE_DIR": str(root / "data"),
    }


def _remove(path: Path) -> bool:
    # First its name goes, so that half of it is never taken for all of it.
    gone = path.with_name(f".gone~{uuid.uuid4().hex}")
    try:
        path.rename(gone)
    except OSError:
        return False
    if gone.is_dir() and not gone.is_symlink():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)
    return True


def _is_usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _last_use(path: Path) -> float:
    """Of what is below ``path``: when a file was last read or written.

    A folder's own times tell nothing: looking at it, as this does, counts as a use.
    """
    if (path / USED).is_file():
        return (path / USED).stat().st_mtime
    times = [0.0]
    files = [path] if not path.is_dir() or path.is_symlink() else path.rglob("*")
    for each in files:
        try:
            found = each.lstat()
        except OSError:
            continue
        if not each.is_dir() or each.is_symlink():
            times.append(max(found.st_atime, found.st_mtime))
    return max(times)
