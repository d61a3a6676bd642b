"""Snapshots of a node's folders, taken while a program writes to them."""

import contextlib
import errno
import hashlib
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from contract import files
from contract.errors import InputError
from contract.files import HOME, SavedFile, matches
from contract.nodes import CACHE_DIR, SHARED_DIR
from contract.runs import check_relative
from contract.secret_text import FILES

#: Folders that programs recreate.
CACHES: Final = frozenset(
    {"__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
)
#: Files that mark their folder as one: a cache (pip, Hugging Face, uv, pytest and others write it,
#: see https://bford.info/cachedir/), and a virtual environment.
_MARKS: Final = frozenset({"CACHEDIR.TAG", "pyvenv.cfg"})
#: Caches that have no such mark, below a program's HOME.
_OF_HOME: Final = frozenset(
    f"{HOME}/{folder}{name}"
    for folder, names in {
        "": "nltk_data scikit_learn_data tensorflow_datasets",
        ".cache/": "torch torch_extensions uv pip matplotlib fontconfig wandb kagglehub vllm "
        "flashinfer modelscope clip whisper nvidia mesa_shader_cache conda",
        # Not all of it: some programs save their models here.
        ".cache/huggingface/": "hub datasets assets modules metrics evaluate accelerate xet "
        "diffusers lerobot token stored_tokens",
    }.items()
    for name in names.split()
)
#: Beside a program's folders, and directly in a temporary one: what its node, Ray, torchrun and
#: compilers write, and temporary files that Python has named.
_OURS: Final = frozenset({"code", "errors", "names", "watch"})
_TEMPORARY: Final = re.compile(
    r"(ray|program|matplotlib|.*-(notice|shell\.json.*)|tmp\w{8}|pymp-.*|"
    r"(code|job|node|program|questions|requirements)-\w{8}|"
    r"torch(inductor|elastic)_.*|\.(X11|ICE|font)-unix|(uv|pip|cuda|nv|triton|hsperfdata).*)"
)
#: Folders of the system, in which no program writes files.
_SYSTEM: Final = frozenset(map(Path, ("/proc", "/sys", "/dev")))
#: Longest search of other folders.
_LOOK_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class FileState:
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

    @property
    def offsets(self) -> range:
        """Offsets of its pieces in the bucket; a link has none."""
        return range(0, 0 if self.link else self.size, files.PIECE)

    @classmethod
    def of(cls, status: os.stat_result, link: str = "") -> "FileState":
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

    files: dict[str, FileState] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    """Folder -> when an entry was last added or removed, Unix time in nanoseconds."""
    refused: list[str] = field(default_factory=list)
    """Sentences about what cannot be saved."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The folders at T, the Unix time of a round (see ``program_files``)."""

    number: int
    """Number of the round."""
    at_ns: float
    """T in Unix nanoseconds; infinite if it is final."""
    look: Look
    own: Mapping[str, FileState]
    """The files that the round should have."""
    lost: Collection[str]
    """Names of those that are above the limits and matter."""
    trouble: Exception | None = None
    """Error of the bucket, for what had to be read at T."""

    @property
    def is_final(self) -> bool:
        """True once the program has ended: nothing changes any more."""
        return self.at_ns == math.inf


class Content(contextlib.AbstractContextManager["Content"]):
    """A file that was opened: stays readable when another one takes its name."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes."""
        return os.pread(self._number, size, offset)

    def is_as(self, seen: FileState) -> bool:
        """True if it has the content that was seen. A rename over it changes its ctime."""
        now = FileState.of(os.fstat(self._number))
        return replace(now, changed_ns=seen.changed_ns) == seen

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


class Disk:
    """A node's folders, by the first part of the names of what lies in them."""

    def __init__(self, folders: Mapping[str, Path], keep: Collection[str] = ()) -> None:
        """
        Args:
            folders: first part of the names -> where it lies; all on one disk.
            keep: patterns of files that the user wants to be saved.
        """
        self._folders, self._keep = dict(folders), keep

    def _path(self, name: str) -> Path:
        """Path of a name from a list, which was checked when it was read."""
        first, _, rest = name.partition("/")
        return self._folders[first] / rest

    def look(self) -> Look:
        """Look at all files; links are not followed, sockets and pipes left out."""
        found = Look()
        pending = [*self._folders.items()]
        while pending:
            name, path = pending.pop()
            try:
                check_relative(name, what="the name")
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    inner = {*os.listdir(path)} - CACHES
                    if not _MARKS & inner or path in self._folders.values():
                        found.folders[name] = path.lstat().st_ctime_ns  # after it was listed
                        entries = [(f"{name}/{each}", path / each) for each in inner]
                        pending += [each for each in entries if not self._is_left_out(each[0])]
                elif stat.S_ISLNK(status.st_mode):
                    found.files[name] = FileState.of(status, self._target(path))
                elif stat.S_ISREG(status.st_mode):
                    if not os.access(path, os.R_OK):
                        raise PermissionError(os.strerror(errno.EACCES))
                    found.files[name] = FileState.of(status)
            except FileNotFoundError:
                # It has left its folder since that was listed, unless it is no entry of one.
                if name not in self._folders:
                    found.folders[name.rpartition("/")[0]] = time.time_ns()
            except (OSError, InputError) as error:
                found.refused.append(f"{name!r} is not saved: {error}")
        return found

    def _is_left_out(self, name: str) -> bool:
        """Check if an entry of HOME is not saved: caches, and where tools keep credentials. These
        are hidden files and folders of its top, but for ``.cache``, where programs keep models."""
        top, _, rest = name.partition("/")
        if top != HOME or any(
            each.startswith(rest) or matches(name, [each]) for each in self._keep
        ):
            return False
        is_hidden = rest.startswith(".") and rest.partition("/")[0] != ".cache"
        return is_hidden or name in _OF_HOME or bool(FILES.fullmatch(name.rpartition("/")[2]))

    def others(self, since: float) -> list[tuple[str, int]]:
        """Files in other places that were written since, which are not saved: path and bytes, the
        largest first.

        Args:
            since: Unix time.
        """
        folders = [path.resolve() for path in self._folders.values()]
        base = folders[0].parent
        places = [base, *({*_writable()} - {base})]  # the nearest folders come first
        known = {*folders, *places, *(base / each for each in _OURS)}
        known |= {*_SYSTEM, Path(CACHE_DIR), Path(SHARED_DIR)}
        temporary = _temporary()
        found, until = list[tuple[str, int]](), time.monotonic() + _LOOK_S
        for place in places:
            if time.monotonic() > until:
                break
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                for entry in entries:
                    path = place / entry.name
                    is_ours = place in temporary and _TEMPORARY.fullmatch(entry.name)
                    if is_ours or path in known or entry.name in CACHES:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        places.append(path)
                    elif size := _written(entry, since):
                        name = os.path.relpath(path, folders[0])
                        found.append((name if path.is_relative_to(base) else str(path), size))
        return sorted(found, key=lambda each: -each[1])

    def _target(self, link: Path) -> str:
        target = os.readlink(link)
        if any(f"{target}/".startswith(f"{folder}/") for folder in self._folders.values()):
            # The folders lie elsewhere at the next start, side by side again.
            target = os.path.relpath(target, link.parent)
        if not target.isprintable():
            raise InputError(f"a link to {target!r}")
        return target

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

    def finish(self, file: SavedFile) -> FileState:
        """Make a file, which was written, what it was; return how it lies here."""
        path = self._path(file.name)
        if file.link:
            path.unlink()
            path.symlink_to(file.link)
        else:
            path.chmod(file.mode | 0o600)  # this node must be able to replace it
            os.utime(path, ns=(file.modified_ns, file.modified_ns))
        return FileState.of(path.lstat(), file.link)


def _temporary() -> set[Path]:
    return {Path(path).resolve() for path in (tempfile.gettempdir(), "/tmp", "/var/tmp")}


def _writable() -> list[Path]:
    """Folders outside of a program's own in which it may write."""
    found = _temporary()
    if os.geteuid():  # root may write everywhere
        tops = {*Path("/").iterdir()} - _SYSTEM
        inner: list[Path] = []
        # A temporary folder is searched as a whole, but for what Ray and others write.
        for top in tops - found:
            with contextlib.suppress(OSError):
                inner += top.iterdir()
        for path in [*tops, *inner]:
            if os.access(path, os.W_OK) and path.is_dir() and not path.is_symlink():
                found.add(path.resolve())
    return [*found]


def _written(entry: os.DirEntry[str], since: float) -> int:
    """Bytes of a file that was written since a Unix time; 0 of all else."""
    with contextlib.suppress(OSError):  # it was removed
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_ctime >= since:
            return status.st_size
    return 0
