"""A node's folders, whose files are copied while a program writes to them."""

import hashlib
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from contract.errors import InputError
from contract.files import SavedFile
from contract.runs import check_relative, safe_join

#: Folders that programs make again by themselves.
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
    """Target of a link that stays in its folder, relative."""

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
    """What lies in a node's folders at one moment, by name: ``work/checkpoints/last.pt``."""

    files: dict[str, Seen] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    """Folder -> when an entry was last added or removed, Unix time in nanoseconds."""
    refused: list[str] = field(default_factory=list)
    """Sentences about names that cannot be saved."""


class Content:
    """A file that was opened: stays readable when another one takes its name."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes."""
        return os.pread(self._number, size, offset)

    def is_as(self, seen: Seen) -> bool:
        """Whether it has the content that was seen. A rename over it changes its ctime."""
        now = Seen.of(os.fstat(self._number))
        return replace(now, changed_ns=seen.changed_ns) == seen

    def close(self) -> None:
        os.close(self._number)


class Disk:
    """A node's folders, by the first part of the names of what lies in them."""

    def __init__(self, folders: Mapping[str, Path], *, excluded: Collection[str] = ()) -> None:
        """Args:
        folders: first part of the names -> where it lies; all on one disk.
        excluded: names of files and folders that are left out with all below them.
        """
        self._folders, self._excluded = dict(folders), frozenset(excluded)

    def _root(self, name: str) -> Path:
        first = name.partition("/")[0]
        if first not in self._folders:
            raise InputError(
                f"file {name!r} is refused: it lies in none of {', '.join(self._folders)}"
            )
        return self._folders[first]

    def _path(self, name: str) -> Path:
        """Where a name lies. Raises InputError if that is outside of its folder."""
        return safe_join(self._root(name), name.partition("/")[2], what="file")

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
            if inner in self._excluded or entry.name in CACHES:
                continue
            try:
                check_relative(inner, what="file")
                inner.encode()
            except (InputError, UnicodeEncodeError):
                found.refused.append(f"{inner!r} is not a name that a list can hold")
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    _add_link(found, root, path, inner, status)
                elif stat.S_ISDIR(status.st_mode):
                    self._walk(found, root, path, inner)
                elif stat.S_ISREG(status.st_mode):
                    if os.access(path, os.R_OK):
                        found.files[inner] = Seen.of(status)
                    else:
                        found.refused.append(f"{inner} cannot be read")
            except FileNotFoundError:
                continue

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
        path.chmod(file.mode & 0o777 | 0o600)  # this node must be able to replace it
        os.utime(path, ns=(file.modified_ns, file.modified_ns))
        return Seen.of(path.stat())

    def make_links(self, links: Sequence[SavedFile]) -> dict[str, Seen]:
        """Make links, unless the code has something else there; return how they lie here."""
        paths = {file: self._path(file.name) for file in links}
        for file, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()
            if not path.exists():
                path.symlink_to(file.link)
        # Only now: one may lead out of its folder by way of another one.
        for file, path in paths.items():
            if path.is_symlink() and not _stays(path, self._root(file.name)):
                path.unlink()
        made = {file: path for file, path in paths.items() if path.is_symlink()}
        return {file.name: Seen.of(path.lstat(), file.link) for file, path in made.items()}


def _stays(link: Path, root: Path) -> bool:
    # Not Path.resolve, which raises RuntimeError for links in a circle.
    return Path(os.path.realpath(link)).is_relative_to(root.resolve())


def _add_link(found: Look, root: Path, link: Path, name: str, status: os.stat_result) -> None:
    target = os.readlink(link)
    if os.path.isabs(target):
        # The folder lies elsewhere at the next start.
        target = os.path.relpath(target, link.parent)
    if _stays(link, root) and target.isprintable():
        found.files[name] = Seen.of(status, target)
    else:
        found.refused.append(f"link {name} leads out of its folder to {os.readlink(link)}")
