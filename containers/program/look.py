"""What lies in a node's folders, and which files are still being written.

Copies are taken while a program runs, so each look asks the system: a file that a process has open
for writing is half a file. Nothing here changes or copies anything.
"""

import contextlib
import os
import stat
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from contract import files
from contract.errors import InputError
from contract.runs import check_relative, safe_join

#: Folders that programs make again by themselves.
CACHES: Final = frozenset(
    {"__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
)
#: A file that marks its folder as a cache: pip, Hugging Face, pytest and others write one. See
#: https://bford.info/cachedir/
_CACHE_TAG: Final = "CACHEDIR.TAG"
_LONGEST_NAME: Final = 900  # bytes; a key of S3 has at most 1,024 with what stands before it
_WRITES: Final = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Seen:
    """A file at one moment; equal at two moments when nothing has been written between them."""

    size: int
    modified_ns: int
    device: int
    inode: int
    mode: int = field(compare=False)

    @classmethod
    def of(cls, status: os.stat_result) -> "Seen":
        return cls(
            size=status.st_size,
            modified_ns=status.st_mtime_ns,
            device=status.st_dev,
            inode=status.st_ino,
            mode=stat.S_IMODE(status.st_mode) & 0o777,
        )


@dataclass(slots=True)
class Look:
    """What lies in a node's folders at one moment, by name: ``work/checkpoints/last.pt``."""

    at: float
    """Unix time."""
    files: dict[str, Seen] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links that stay in their folder -> relative target."""
    empty: list[str] = field(default_factory=list)
    """Folders with nothing in them."""
    refused: list[str] = field(default_factory=list)
    """Sentences about names that cannot be saved."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files.values())


class Folders:
    """A node's folders, by the first part of the names of what lies in them."""

    def __init__(self, folders: Mapping[str, Path], *, excluded: Collection[str] = ()) -> None:
        """Args:
        folders: first part of the names -> where it lies.
        excluded: names of files and folders that are left out with all below them.
        """
        self._folders, self._excluded = dict(folders), frozenset(excluded)

    def root(self, name: str) -> Path:
        """The folder that a name belongs to. Raises InputError when there is none."""
        first = name.partition("/")[0]
        if first not in self._folders:
            raise InputError(
                f"file {name!r} is refused: it lies in none of {', '.join(self._folders)}"
            )
        return self._folders[first]

    def path(self, name: str) -> Path:
        """Where a name lies. Raises InputError when that is outside of its folder."""
        return safe_join(self.root(name), name.partition("/")[2], what="file")

    def look(self) -> Look:
        """Look at all files; links are not followed, sockets and pipes left out."""
        found = Look(at=time.time())
        for first, folder in self._folders.items():
            _walk(found, folder, folder, first, self._excluded)
        return found


def _walk(found: Look, root: Path, folder: Path, name: str, excluded: Collection[str]) -> bool:
    """Add what lies below a folder; return whether there was anything, left out or not."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return False  # removed meanwhile
    except OSError as error:
        found.refused.append(f"{name} cannot be read ({error.strerror})")
        return True
    if folder != root and any(entry.name == _CACHE_TAG for entry in entries):
        return True
    for entry in entries:
        inner = f"{name}/{entry.name}"
        if inner in excluded or entry.name in CACHES:
            continue
        try:
            check_relative(inner, what="file")
            size = len(inner.encode())
        except (InputError, UnicodeEncodeError):
            found.refused.append(f"{inner!r} is no name that the bucket can hold")
            continue
        if size > _LONGEST_NAME:
            found.refused.append(f"{inner[:60]}... is {size} bytes long, more than {_LONGEST_NAME}")
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                _add_link(found, root, Path(entry.path), inner)
            elif stat.S_ISDIR(status.st_mode):
                if not _walk(found, root, Path(entry.path), inner, excluded):
                    found.empty.append(inner)
            elif stat.S_ISREG(status.st_mode):
                found.files[inner] = Seen.of(status)
        except FileNotFoundError:
            continue
    return bool(entries)


def _add_link(found: Look, root: Path, link: Path, name: str) -> None:
    target = os.readlink(link)
    if os.path.isabs(target):
        # The folder lies elsewhere at the next start.
        target = os.path.relpath(target, link.parent)
    try:
        files.check_link(name, target)
    except InputError:
        found.refused.append(f"link {name} leads out of its folder to {os.readlink(link)}")
        return
    if not link.resolve().is_relative_to(root.resolve()):
        found.refused.append(f"link {name} leads out of its folder to {os.readlink(link)}")
        return
    found.links[name] = target


def being_written() -> set[tuple[int, int]] | None:
    """Device and inode of each file that a process of this container has open for writing.

    None where the system does not tell (it is no Linux).
    """
    processes = Path("/proc")
    if not (processes / "self" / "fdinfo").is_dir():
        return None
    found: set[tuple[int, int]] = set()
    for process in processes.iterdir():
        if not process.name.isdigit():
            continue
        try:
            numbers = os.listdir(process / "fdinfo")
        except OSError:
            continue  # it has ended, or belongs to another user
        for number in numbers:
            with contextlib.suppress(OSError):  # closed meanwhile
                if _flags((process / "fdinfo" / number).read_text()) & _WRITES:
                    status = (process / "fd" / number).stat()
                    if stat.S_ISREG(status.st_mode):
                        found.add((status.st_dev, status.st_ino))
    return found


def _flags(text: str) -> int:
    """What a file was opened with, of the text that Linux gives about a descriptor."""
    for line in text.splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    return 0
