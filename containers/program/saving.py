"""One copy of a node's folders into the bucket, while their program runs or after its end.

Each changed file is uploaded to a new object, ``objects/WRITER/ROUND/SHA256``; then the list that
names them all is written, and only then are the objects removed that it does not name. No key is
used twice, so a writer that has been replaced can neither overwrite nor remove what the list of its
successor names: at any moment, the list and its objects are a state that the node had.

Copies are taken while the program runs, so the system is asked which files are still open for
writing: such a file is half a file.
"""

import contextlib
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from containers.program import bucket as store
from containers.program.bucket import Deadline, NodeBucket, OutOfTimeError, digest
from contract import runs, times
from contract.errors import InputError
from contract.runs import OUTPUT, Manifest, SavedFile, check_relative, safe_join
from contract.text import listed

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
        runs.check_link(name, target)
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


OBJECTS: Final = "objects"  # below a node's prefix: the content of its files
#: Read at once. Larger files are read twice, and must not change in between.
_SMALL: Final = 8 * 2**20
#: A file that grows above this is no log; it is copied when its program has closed it.
_LOG: Final = 64 * 2**20
#: A new folder waits for this many rounds, at most, until nothing in it changes.
_PATIENCE: Final = 3
#: Uploads see at once that there is no time left, unless they hang.
_GRACE_S: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A file as it was read."""

    seen: Seen
    size: int
    """Bytes that were read: of a log that grows, fewer than it may have now."""
    sha256: str
    is_whole: bool = True
    """False: it is looked at again in the next round though it seems unchanged."""


@dataclass(slots=True)
class _Room:
    """What is left of the limits of a node's files."""

    size: int
    num: int

    def take(self, sizes: Sequence[int]) -> bool:
        """Use it for files of these sizes; return False where there is not enough for all."""
        if sum(sizes) > self.size or len(sizes) > self.num:
            return False
        self.size -= sum(sizes)
        self.num -= len(sizes)
        return True


class Saver:
    """Copies one node's folders, again and again, and remembers what it has copied."""

    def __init__(
        self,
        folders: Folders,
        bucket: NodeBucket,
        *,
        deadline: Deadline,
        limit_bytes: int,
        say_once: Callable[[str, str], None],
    ) -> None:
        """Args:
        deadline: of the copy that is being made, or of the next one.
        say_once: says a sentence about a subject, unless it has been said.
        """
        self._folders, self._bucket, self._deadline = folders, bucket, deadline
        self._limit_bytes, self._say_once = limit_bytes, say_once
        self.given: dict[str, str] = {}
        """Name -> SHA-256 of what is not this node's own: code, and files of node 0."""
        self.code: dict[str, str] = {}
        """Of those, the code's."""
        self.code_links: dict[str, str] = {}
        """Symbolic links of the code -> target."""
        self._known: dict[str, _Read] = {}
        self._last = Look(at=0)
        self._logs: dict[str, tuple[int, str]] = {}  # open files: size and SHA-256 at the last look
        self._waits: dict[str, int] = {}  # new folder -> rounds that it has waited
        self._hot: set[str] = set()  # large files that changed while they were read
        self._unreadable: set[str] = set()
        self.error: Exception | None = None
        """What kept a file of the last copy from being uploaded."""
        self._round = 0
        self._is_unsure = False  # which list the bucket has: no answer came when one was written
        self._uploaded: dict[str, str] = {}  # SHA-256 -> key of what no list names yet
        self.unsaved: list[str] = []
        """Names of the files that the last copy has not saved as they are."""

    def remember(self, name: str, sha256: str) -> None:
        """A file lies here as it was saved."""
        seen = Seen.of(self._folders.path(name).stat())
        self._known[name] = _Read(seen=seen, size=seen.size, sha256=sha256)

    def save(self, manifest: Manifest, *, final: bool) -> tuple[Manifest, list[str]]:
        """Copy what has changed; afterwards, ``unsaved`` names what is not saved as it is.

        Args:
            manifest: what is saved already.
            final: the program has ended, so that no file is half written. A file that cannot be
                uploaded does not keep the others out of the list then.

        Returns:
            What is saved now, and the names of files that another copy may save.

        Raises:
            what the bucket raises, and ReplacedError.
        """
        found = self._folders.look()
        self._unreadable.clear()
        for sentence in found.refused:
            self._say_once(sentence, f"{sentence}; it is not saved")
        kept = self._within_limits(found)
        left_out = found.files.keys() - kept
        old = {file.name: file for file in manifest.files}
        changed = {name for name in kept if not self._is_known(name, found.files[name])}
        self.unsaved = sorted(changed | left_out)
        late = set() if final else self._unfinished(found, changed, old)
        self._last = found
        self._round, self.error = self._round + 1, None
        self._objects = {file.sha256: file.object for file in manifest.files} | self._uploaded
        self._new = f"{OBJECTS}/{manifest.writer}/{self._round}"
        done = self._save_all(sorted(changed - late), found, final=final)
        late |= changed - done.keys() - self._unreadable
        torn = self._in_torn_folders(done, late, old)
        waiting = {done.pop(name).sha256 for name in torn}
        late |= torn
        listed_now = kept | self._still_fitting(found, kept, done, old)
        entries = self._entries(listed_now, done, old)
        entries += [
            SavedFile(name=name, link=link)
            for name, link in found.links.items()
            if self.code_links.get(name) != link
        ]
        wanted = replace(
            manifest,
            files=tuple(sorted(entries, key=lambda file: file.name)),
            empty=tuple(sorted(found.empty)),
        )
        if wanted != manifest or self._is_unsure:
            self._is_unsure = True
            self._bucket.commit(wanted)
            self._is_unsure = False
        # Only now: what did not get into the list has to be read again.
        self._known |= done
        self._known = {name: self._known[name] for name in listed_now if name in self._known}
        self.unsaved = sorted(
            late | {name for name in left_out if not self._is_known(name, found.files[name])}
        )
        self._remove_unused(wanted, manifest, waiting)
        return wanted, sorted(late)

    def _is_known(self, name: str, seen: Seen) -> bool:
        known = self._known.get(name)
        return known is not None and known.is_whole and known.seen == seen

    def _within_limits(self, found: Look) -> set[str]:
        """Names of the files that are kept: of ``OUTPUT`` first, then the newest.

        What the node was given does not count.
        """
        own = {name: seen for name, seen in found.files.items() if name not in self.given}
        kept = found.files.keys() - own.keys()
        room = self._room()
        for names in _by_importance(own):
            sizes = [own[name].size for name in names]
            if room.take(sizes):
                kept.update(names)
            elif not self._room().take(sizes):  # else: half a checkpoint is worse than none
                kept.update(name for name in names if room.take([own[name].size]))
        if left_out := sorted(own.keys() - kept):
            size = sum(seen.size for seen in own.values())
            self._say_once(
                f"limit {len(left_out).bit_length()}",  # again when it is twice as many
                f"{len(left_out):,} files are not saved: {listed(left_out)}. The folders hold "
                f"{_gib(size)} in {len(own):,} files, and at most {_gib(self._limit_bytes)} in "
                f"{runs.OUTPUT_LIMIT_FILES:,} files are kept, those in $TRAIN_OUTPUT first, then "
                "the newest. Write data and caches to /tmp, or remove old checkpoints",
            )
        return kept

    def _room(self) -> "_Room":
        return _Room(self._limit_bytes, runs.OUTPUT_LIMIT_FILES)

    def _still_fitting(
        self,
        found: Look,
        kept: set[str],
        done: Mapping[str, _Read],
        old: Mapping[str, SavedFile],
    ) -> set[str]:
        """Names of saved files that are above the limit only together with files that are not
        saved yet: an older checkpoint makes room for a newer one when that one is saved."""
        own = {name: seen for name, seen in found.files.items() if name not in self.given}
        room = self._room()
        saved = [name for name in own if name in kept and (name in done or name in old)]
        room.take([own[name].size for name in saved])
        fitting: set[str] = set()
        for names in _by_importance(own):
            left_out = [name for name in names if name in old and name not in kept]
            if room.take([old[name].size for name in left_out]):
                fitting.update(left_out)
        return fitting

    # --- what must wait
    def _unfinished(self, found: Look, changed: set[str], old: Mapping[str, SavedFile]) -> set[str]:
        """Of changed files, those that are being written, and new folders that are."""
        writers = being_written()
        late = set()
        logs: dict[str, tuple[int, str]] = {}
        for name in changed:
            seen = found.files[name]
            if writers is None:
                if found.at - seen.modified_ns / 1e9 < times.FILES_QUIET_S:
                    late.add(name)
            elif (seen.device, seen.inode) in writers and self._last.files.get(name) != seen:
                is_log, content = self._looks_like_a_log(name, seen)
                if content:
                    logs[name] = content
                if not is_log:
                    late.add(name)
        self._logs = logs
        fresh = {
            name
            for name in changed
            if found.at - found.files[name].modified_ns / 1e9 < times.FILES_QUIET_S
        }
        folder_of = _new_folders(changed, old)
        waiting = {folder_of[name] for name in late | fresh} - {""}
        self._waits = {folder: self._waits.get(folder, 0) + 1 for folder in waiting}
        waiting = {folder for folder in waiting if self._waits[folder] <= _PATIENCE}
        return late | {name for name in changed if folder_of[name] in waiting}

    def _looks_like_a_log(self, name: str, seen: Seen) -> tuple[bool, tuple[int, str] | None]:
        """Whether a file that is open has only grown: what it had at the last look is there
        unchanged. With it, what to compare the next time."""
        if seen.size > _LOG:
            return False, None
        before = self._logs.get(name)
        try:
            with self._folders.path(name).open("rb") as content:
                has_grown = (
                    before is not None
                    and before[0] <= seen.size
                    and digest(content, size=before[0]) == before[1]
                )
                content.seek(0)
                return has_grown, (seen.size, digest(content, size=seen.size))
        except OSError:
            return False, None

    def _in_torn_folders(
        self, done: Mapping[str, _Read], late: set[str], old: Mapping[str, SavedFile]
    ) -> set[str]:
        """New files beside which another one is missing: half a checkpoint is worse than none."""
        folder_of = _new_folders(late | done.keys(), old)
        torn = {folder_of[name] for name in late} - {""}
        torn = {folder for folder in torn if self._waits.get(folder, 0) <= _PATIENCE}
        return {name for name in done if folder_of[name] in torn}

    # --- the files
    def _save_all(self, names: Sequence[str], found: Look, *, final: bool) -> dict[str, _Read]:
        """Read and upload files, as many as there is time for."""
        pool = ThreadPoolExecutor(store.PARALLEL)
        try:
            futures = {
                pool.submit(self._save_one, name, found, final=final): name for name in names
            }
            left: set[Future[_Read | None]] = set(futures)
            # An upload that hangs, or that botocore tries again, must not keep the list waiting.
            while left and not self._deadline.is_over(by_s=_GRACE_S):
                left = wait(left, timeout=_GRACE_S, return_when=FIRST_EXCEPTION).not_done
                for future in futures.keys() - left:
                    future.result()  # raises what it has raised
            reads = {name: future.result() for future, name in futures.items() if future.done()}
        finally:
            pool.shutdown(wait=not self._deadline.is_over(), cancel_futures=True)
        return {name: read for name, read in reads.items() if read}

    def _save_one(self, name: str, found: Look, *, final: bool) -> _Read | None:
        """Read a file, and upload it if its content is new; None where it must wait."""
        try:
            with self._folders.path(name).open("rb") as file:
                return self._save_open(name, file, found.files[name])
        except (FileNotFoundError, OutOfTimeError):
            return None
        except PermissionError:
            self._unreadable.add(name)
            self._say_once(f"open {name}", f"{name} cannot be read; it is not saved")
            return None
        except store.ERRORS as error:
            # While the program runs, files of one moment belong together: all of them wait.
            if not final:
                raise
            self.error = error
            return None

    def _save_open(self, name: str, file: BinaryIO, seen: Seen) -> _Read | None:
        is_log = name in self._logs

        def has_changed() -> bool:
            # Of the file that was opened: another one may have its name by now.
            return not is_log and Seen.of(os.fstat(file.fileno())) != seen

        with contextlib.ExitStack() as stack:
            content = file
            if is_log or seen.size <= _SMALL:
                content = io.BytesIO(file.read(seen.size))
            elif name in self._hot:
                # Written anew all the time, and slower to upload than that; a disk is faster.
                content = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(file, content)
                content.seek(0)
            sha256 = digest(content, deadline=self._deadline)
            if has_changed():
                self._hot.add(name)
                return None
            if sha256 != self.given.get(name) and sha256 not in self._objects:
                content.seek(0)
                key = f"{self._new}/{sha256}"
                self._bucket.upload(key, content, self._deadline)
                self._objects[sha256] = self._uploaded[sha256] = key
                if content is file and has_changed():
                    self._hot.add(name)
                    return None
        self._hot.discard(name)
        return _Read(seen=seen, size=seen.size, sha256=sha256, is_whole=not is_log)

    # --- the list
    def _entries(
        self, names: Collection[str], done: Mapping[str, _Read], old: Mapping[str, SavedFile]
    ) -> list[SavedFile]:
        """The files of the new list: those read now, and the others as they were saved."""
        entries = []
        for name in names:
            before = old.get(name)
            read = done.get(name)
            if read is None:
                if before is not None and not before.link:
                    entries.append(before)
                continue
            if read.sha256 == self.given.get(name):
                continue  # the code's, or another node's
            entries.append(
                SavedFile(
                    name=name,
                    size=read.size,
                    sha256=read.sha256,
                    mode=read.seen.mode,
                    modified_ns=read.seen.modified_ns,
                    key=self._objects[read.sha256],
                    code=self.code.get(name, ""),
                )
            )
        return entries

    def _remove_unused(self, manifest: Manifest, old: Manifest, waiting: Collection[str]) -> None:
        """Remove the objects that a list named and the one that was just written does not.

        Args:
            waiting: SHA-256 of what has been uploaded for a later list.
        """
        uploaded = dict(self._uploaded)  # an upload that hung may end at any time
        self._uploaded = {sha256: key for sha256, key in uploaded.items() if sha256 in waiting}
        unused = {*(file.object for file in old.files), *uploaded.values()}
        unused -= {*(file.object for file in manifest.files), *self._uploaded.values()}
        unused = {key for key in unused if key.startswith(f"{OBJECTS}/")}
        if unused and self._deadline.leaves(times.FILES_SAVE_S):
            # What stays is removed at the next start of the node.
            with contextlib.suppress(*store.ERRORS):
                self._bucket.remove(sorted(unused))


def _by_importance(files: Mapping[str, Seen]) -> list[list[str]]:
    """Folders with the names of their files: those of ``OUTPUT`` first, then the newest.

    Files that lie in no folder of the program's own are one each.
    """
    folders: dict[str, list[str]] = {}
    for name in files:
        folder = name.rpartition("/")[0]
        folders.setdefault(folder if "/" in folder else name, []).append(name)

    def age(name: str) -> int:
        return -files[name].modified_ns

    groups = [sorted(names, key=age) for names in folders.values()]
    return sorted(
        groups, key=lambda names: (not names[0].startswith(f"{OUTPUT}/"), age(names[0]), names[0])
    )


def _new_folders(names: Collection[str], old: Mapping[str, SavedFile]) -> dict[str, str]:
    """For each name, the outermost folder around it of which nothing has been saved; empty: there
    is none.

    The folder in which the program runs counts as saved: files beside each other there are not
    parts of one thing.
    """
    saved = {folder for name in old for folder in _folders_around(name)}
    return {
        name: next((folder for folder in _folders_around(name) if folder not in saved), "")
        if name not in old
        else ""
        for name in names
    }


def _folders_around(name: str) -> list[str]:
    """``work/a`` and ``work/a/b`` of ``work/a/b/file``."""
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(2, len(parts))]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
