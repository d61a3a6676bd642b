"""Snapshots of a node's folders, taken while a program writes to them."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from contract.errors import InputError
from contract.files import SavedFile
from contract.runs import check_relative

#: Folders that programs recreate.
CACHES: Final = frozenset(
    {"__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
)
#: A file that marks its folder as a cache: pip, Hugging Face, pytest and others write one. See
#: https://bford.info/cachedir/
_CACHE_TAG: Final = "CACHEDIR.TAG"


@dataclass(frozen=True, slots=True)
class Seen:
    """A file or symbolic link at one moment; equal at two if nothing was written between them."""

    size: int
    changed_ns: int
    """Its ctime, which neither ``cp -p`` nor ``tar`` can set, and which a rename changes too."""
    modified_ns: int
    device: int
    inode: int
    mode: int = field(compare=False)
    link: str = ""
    """Target of a link."""

    @classmethod
    def of(cls, status: os.stat_result, link: str = "") -> "Seen":
        return cls(
            size=status.st_size,
            changed_ns=status.st_ctime_ns,
            modified_ns=status.st_mtime_ns,
            device=status.st_dev,
            inode=status.st_ino,
            mode=stat.S_IMODE(status.st_mode) & 0o777,
            link=link,
        )


@dataclass(slots=True)
class Look:
    """Files in a node's folders at one moment, by name: ``work/checkpoints/last.pt``."""

    files: dict[str, Seen] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    """Folder -> when an entry was last added or removed, Unix time in nanoseconds."""
    refused: list[str] = field(default_factory=list)
    """Sentences about names that cannot be saved."""


class Content(contextlib.AbstractContextManager["Content"]):
    """A file that was opened: stays readable when another one takes its name."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes."""
        return os.pread(self._number, size, offset)

    def is_as(self, seen: Seen) -> bool:
        """True if it has the content that was seen. A rename over it changes its ctime."""
        now = Seen.of(os.fstat(self._number))
        return replace(now, changed_ns=seen.changed_ns) == seen

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


class Disk:
    """A node's folders, by the first part of the names of what lies in them."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """``folders``: first part of the names -> where it lies; all on one disk."""
        self._folders = dict(folders)

    def _path(self, name: str) -> Path:
        """Path of a name from a list, which was checked when it was read."""
        first, _, rest = name.partition("/")
        return self._folders[first] / rest

    def look(self) -> Look:
        """Look at all files; links are not followed, sockets and pipes left out."""
        found = Look()
        for first, folder in self._folders.items():
            self._walk(found, folder, folder, first)
        return found

    def _walk(self, found: Look, root: Path, folder: Path, name: str) -> None:
        try:
            found.folders[name] = folder.stat().st_ctime_ns
            entries = [*os.scandir(folder)]
        except FileNotFoundError:
            return  # removed meanwhile
        except OSError as error:
            found.refused.append(f"{name} cannot be read ({error.strerror})")
            return
        if folder != root and any(entry.name == _CACHE_TAG for entry in entries):
            return
        for entry in entries:
            inner, path = f"{name}/{entry.name}", Path(entry.path)
            if entry.name in CACHES:
                continue
            try:
                check_relative(inner, what="file").encode()
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    self._walk(found, root, path, inner)
                elif stat.S_ISLNK(status.st_mode):
                    target = os.readlink(path)
                    if target.startswith(f"{root}/"):
                        # The folder lies elsewhere at the next start.
                        target = os.path.relpath(target, folder)
                    if target.isprintable():
                        found.files[inner] = Seen.of(status, target)
                elif not os.access(path, os.R_OK):
                    found.refused.append(f"{inner} cannot be read")
                elif stat.S_ISREG(status.st_mode):
                    found.files[inner] = Seen.of(status)
            except FileNotFoundError:
                continue
            except (InputError, UnicodeEncodeError):
                found.refused.append(f"{inner!r} is not a name that a list can hold")

    def open(self, name: str) -> Content:
        """A file to read. Raises OSError."""
        return Content(self._path(name))

    def digest(self, name: str) -> str:
        """SHA-256 of a file."""
        with self._path(name).open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    # --- restore
    def create(self, name: str) -> None:
        """Begin a file, in place of what the code has under its name."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch()

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write some of a file that was begun."""
        with self._path(name).open("r+b", buffering=0) as file:
            file.seek(offset)
            while data:
                data = data[file.write(data) :]

    def finish(self, file: SavedFile) -> Seen:
        """Make a file, which was written, what it was; return how it lies here."""
        path = self._path(file.name)
        if file.link:
            path.unlink()
            path.symlink_to(file.link)
        else:
            path.chmod(file.mode | 0o600)  # this node must be able to replace it
            os.utime(path, ns=(file.modified_ns, file.modified_ns))
        return Seen.of(path.lstat(), file.link)
