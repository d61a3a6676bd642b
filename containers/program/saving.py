"""One copy of a node's folders into the bucket, while their program runs or after its end.

Each changed file is uploaded to a name of its own, ``changed/SHA256``; then the list that names
them all is written, and only then are they copied, within S3, to the names that they have on the
node. So at any moment, also when a copy breaks off or a second writer is at work, the list and what
it names are a state that the node had; and people find the files under their own names.
"""

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

from containers.program import bucket as store
from containers.program.bucket import Deadline, NodeBucket, OutOfTimeError, digest
from containers.program.look import Folders, Look, Seen, being_written
from contract import runs, times
from contract.files import Manifest, SavedFile

CHANGED: Final = "changed"  # below a node's prefix: content that has no object of its name yet
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
        self._uploaded: set[str] = set()  # keys below CHANGED

    def remember(self, name: str, sha256: str) -> None:
        """A file lies here as it was saved."""
        seen = Seen.of(self._folders.path(name).stat())
        self._known[name] = _Read(seen=seen, size=seen.size, sha256=sha256)

    def save(self, manifest: Manifest, *, final: bool) -> tuple[Manifest, list[str]]:
        """Copy what has changed.

        Args:
            manifest: what is saved already.
            final: the program has ended, so that no file is half written.

        Returns:
            What is saved now, and the names of files that are left for the next time.

        Raises:
            what the bucket raises, and ReplacedError.
        """
        found = self._folders.look()
        self._unreadable.clear()
        for sentence in found.refused:
            self._say_once(sentence, f"{sentence}; it is not saved")
        if not self._is_within_limits(found):
            return manifest, [*found.files]
        old = {file.name: file for file in manifest.files}
        changed = {name for name, seen in found.files.items() if not self._is_known(name, seen)}
        late = set() if final else self._unfinished(found, changed, old)
        self._last = found
        done = self._save_all(sorted(changed - late), found, old)
        late |= changed - done.keys() - self._unreadable
        for name in self._in_torn_folders(done, late, old):
            del done[name]
            late.add(name)
        entries = self._entries(found, done, old)
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
        if wanted != manifest:
            self._bucket.commit(wanted)
        # Only now: what did not get into the list has to be uploaded again.
        self._known |= done
        self._known = {name: self._known[name] for name in found.files if name in self._known}
        if self._deadline.leaves(times.FILES_SAVE_S):
            wanted = self._promote(wanted, old)
        return wanted, sorted(late)

    def _is_known(self, name: str, seen: Seen) -> bool:
        known = self._known.get(name)
        return known is not None and known.is_whole and known.seen == seen

    def _is_within_limits(self, found: Look) -> bool:
        size, num = found.size, len(found.files)
        if size <= self._limit_bytes and num <= runs.OUTPUT_LIMIT_FILES:
            return True
        self._say_once(
            "limit",
            f"not saved: the folders hold {_gib(size)} in {num:,} files, and at most "
            f"{_gib(self._limit_bytes)} in {runs.OUTPUT_LIMIT_FILES:,} files are copied; what was "
            "saved before stays. Write data and caches to /tmp, or remove old checkpoints",
        )
        return False

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
    def _save_all(
        self, names: Sequence[str], found: Look, old: Mapping[str, SavedFile]
    ) -> dict[str, _Read]:
        """Read and upload files, as many as there is time for."""
        pool = ThreadPoolExecutor(store.PARALLEL)
        try:
            futures = {pool.submit(self._save_one, name, found, old): name for name in names}
            left: set[Future[_Read | None]] = set(futures)
            # An upload that hangs, or that botocore tries again, must not keep the list waiting.
            while left and not self._deadline.is_over(by_s=_GRACE_S):
                left = wait(left, timeout=_GRACE_S, return_when=FIRST_EXCEPTION).not_done
                for future in futures.keys() - left:
                    future.result()  # raises what it has raised
            reads = {futures[future]: future.result() for future in futures.keys() - left}
        finally:
            pool.shutdown(wait=not self._deadline.is_over(), cancel_futures=True)
        return {name: read for name, read in reads.items() if read}

    def _save_one(self, name: str, found: Look, old: Mapping[str, SavedFile]) -> _Read | None:
        """Read a file, and upload it if its content is new; None where it must wait."""
        try:
            with self._folders.path(name).open("rb") as file:
                return self._save_open(name, file, found.files[name], old.get(name))
        except (FileNotFoundError, OutOfTimeError):
            return None
        except PermissionError:
            self._unreadable.add(name)
            self._say_once(f"open {name}", f"{name} cannot be read; it is not saved")
            return None

    def _save_open(
        self, name: str, file: BinaryIO, seen: Seen, before: SavedFile | None
    ) -> _Read | None:
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
            if sha256 != self.given.get(name) and (before is None or before.sha256 != sha256):
                content.seek(0)
                key = f"{CHANGED}/{sha256}"
                self._uploaded.add(key)
                self._bucket.upload(key, content, self._deadline)
                if content is file and has_changed():
                    self._hot.add(name)
                    return None
        self._hot.discard(name)
        return _Read(seen=seen, size=seen.size, sha256=sha256, is_whole=not is_log)

    # --- the list
    def _entries(
        self, found: Look, done: Mapping[str, _Read], old: Mapping[str, SavedFile]
    ) -> list[SavedFile]:
        """The files of the new list: those read now, and the others as they were saved."""
        entries = []
        for name in found.files:
            before = old.get(name)
            read = done.get(name)
            if read is None:
                if before is not None and not before.link:
                    entries.append(before)
                continue
            if read.sha256 == self.given.get(name):
                continue  # the code's, or another node's
            is_there = before is not None and before.sha256 == read.sha256
            entries.append(
                SavedFile(
                    name=name,
                    size=read.size,
                    sha256=read.sha256,
                    mode=read.seen.mode,
                    modified_ns=read.seen.modified_ns,
                    key=before.key if before and is_there else f"{CHANGED}/{read.sha256}",
                    code=self.code.get(name, ""),
                )
            )
        return entries

    def _promote(self, manifest: Manifest, old: Mapping[str, SavedFile]) -> Manifest:
        """Give the objects of a list the names of their files, and remove those of no file."""
        moved = [file for file in manifest.files if file.key]
        with ThreadPoolExecutor(store.PARALLEL) as pool:
            for _ in pool.map(lambda file: self._bucket.promote(file.key, file.name), moved):
                pass
        if moved:
            manifest = replace(
                manifest, files=tuple(replace(file, key="") for file in manifest.files)
            )
            self._bucket.commit(manifest)
        kept = {file.name for file in manifest.files if not file.link}
        gone = {file.name for file in old.values() if not file.link} - kept
        gone |= {file.key for file in moved} | self._uploaded
        if gone:
            self._bucket.remove(sorted(gone))
        self._uploaded.clear()
        return manifest


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
