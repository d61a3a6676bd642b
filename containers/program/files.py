"""A node's files survive: copied into the bucket while its program runs, restored before the next.

    mirror = Mirror({WORK: work, OUTPUT: output}, "s3://BUCKET/runs/RUN/output/node-1")
    mirror.restore("s3://BUCKET/runs/RUN/output/node-0")  # folders hold the code, and nothing else
    mirror.start()                                        # a thread, which copies every 30 s
    ...                                                   # the program runs, and ends
    mirror.save()                                         # what it wrote last
    mirror.close()

``restore`` takes what is in the folders for the code: files that stay as they are then are not
saved. Where node 0 has files that this node never wrote, it gets them too, and they are not saved
as its own: a checkpoint that node 0 writes for all reaches each node, at each start, in the version
that node 0 has. Called again, before the program starts again on a node that has survived, it
brings only those up to date; all surviving nodes must have saved before, and node 0 have restored.

Errors of the bucket are logged once and tried again: by the next copy, and by ``restore`` and
``save`` themselves. Only ``restore`` raises one, where trying again cannot help.
"""

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from containers.host.machine import Clock
from containers.host.machine import say as say_to_log
from containers.program import bucket as store
from containers.program.bucket import Deadline, NodeBucket, ReplacedError, digest
from containers.program.requirements import Stopped
from containers.program.saving import OBJECTS, Folders, Saver
from contract import runs, times
from contract.errors import InputError
from contract.runs import MANIFEST, Manifest, SavedFile
from contract.text import listed

_POLL_S: Final = 0.1
#: Between two attempts at what the bucket did not take or give; doubled from one to the other.
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10.0


class Mirror:
    """Keeps the copy of one node's folders, for one program at a time."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        address: str,
        *,
        excluded: Collection[str] = (),
        every_s: float = times.FILES_EVERY_S,
        limit_bytes: int = runs.OUTPUT_LIMIT_BYTES,
        say: Callable[[str], None] = say_to_log,
        client: Any = None,
        clock: Clock = time,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        folders: ``contract.runs.WORK``, ``OUTPUT`` -> the folder; all on one disk.
        address: where the copy is kept: ``s3://BUCKET/`` and ``contract.runs.output_prefix``.
        excluded: names that are never saved, such as ``work/.venv``.
        every_s: between two copies, counted from midnight, so that all nodes copy together.
        limit_bytes: of folders with more, ``OUTPUT`` is kept first, and then the newest files.
        client: of S3; boto3's by default.
        on_replaced: called once when another start of this node has taken over its files, so that
            what the program writes here from then on is lost.
        """
        self._folders = Folders(folders, excluded=excluded)
        self._beside = next(iter(folders.values())).parent
        self._bucket, self.client = NodeBucket(address, client), client
        self._every_s, self._say = every_s, say
        self._clock, self._on_replaced = clock, on_replaced
        self.lost: list[str] = []
        """Names of the files that ``save`` could not save."""
        self._said: set[str] = set()
        self._deadline = Deadline(clock)
        self._saver = Saver(
            self._folders,
            self._bucket,
            deadline=self._deadline,
            limit_bytes=limit_bytes,
            say_once=self._say_once,
        )
        self._manifest = Manifest(generation=0, writer=uuid.uuid4().hex)
        self._is_code_known = self._is_restored = self._is_broken_off = False
        self._is_in_trouble = False  # the bucket, in the last round, and may be well in the next
        self.is_replaced = False
        """Another start of this node has taken over its files."""
        self._restoring = Deadline(clock)  # of a restore, once it has to be broken off
        self._busy = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def restore(
        self, fallback: str = "", *, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Bring back what the run's program wrote on this node, and take over its copy.

        Args:
            fallback: address of node 0, whose files are taken where this node has none.
            should_stop: whether the node has to end; asked while files are on their way.

        Raises:
            InputError: the bucket refuses, or holds what it should not. To start without the files
                would be to lose them. A bucket that does not answer is asked until ``should_stop``.
            Stopped: ``should_stop`` returned true. Nothing is saved from then on: what is here is
                less than what the bucket has.
        """
        done: Future[None] = Future()
        threading.Thread(target=self._fulfil, args=(done, fallback), daemon=True).start()
        while not wait([done], timeout=_POLL_S).done:
            if should_stop():
                self._is_broken_off = True
                self._restoring.bring_forward(0)
                raise Stopped
        done.result()

    def _fulfil(self, done: "Future[None]", fallback: str) -> None:
        try:
            self._restore_or_try_again(fallback)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _restore_or_try_again(self, fallback: str) -> None:
        began, pause = self._clock.monotonic(), min(_PAUSE_S, self._every_s)
        while True:
            self._restoring.check()
            try:
                with self._busy:
                    self._restore(fallback)
                return
            except ReplacedError:
                # Two starts at once, of which the other was first; this one is the later.
                reason = "another node has just been started in its place"
            except store.ERRORS as error:
                reason = store.explained(error)
                is_over = self._clock.monotonic() - began > times.FILES_REFUSED_S
                if is_over and not store.is_temporary(error):
                    raise self._not_restored(reason) from None
            except InputError as error:
                raise self._not_restored(str(error)) from None
            self._restoring.check()
            self._say_once("restore", f"not restored: {reason}; trying again")
            self._clock.sleep(pause)
            pause = min(2 * pause, self._every_s, _LONGEST_PAUSE_S)

    def _not_restored(self, reason: str) -> InputError:
        return InputError(
            f"the files of {self._bucket.address} cannot be restored: {reason}. The program is not "
            "started without them: submit the run again, or under another name to begin anew"
        )

    def start(self) -> None:
        """Copy from now on, in a thread."""
        assert self._is_restored, "restore() comes first, or it would not know the code's files"
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="files", daemon=True)
            self._thread.start()

    def save(self, within_s: float | None = None) -> bool:
        """Copy everything as it is: the program has ended. What fails is tried again.

        What time will not change, such as a right that is missing, or a file that a process left
        behind keeps writing, is given up after ``times.FILES_REFUSED_S``: hosts are billed.

        Args:
            within_s: how long that may take; None: as long as it needs. What is left then is as it
                was copied last, and ``lost`` names it.

        Returns:
            Whether the copy is complete.
        """
        if self._is_broken_off:
            return True  # the program has not run since its files were saved
        until = None
        if within_s is not None:
            # Of a copy that is being made, too. The list is written after the files.
            self._deadline.bring_forward(within_s - min(within_s / 6, times.FILES_LIST_S))
            until = self._deadline.at
        if not self._busy.acquire(timeout=-1 if within_s is None else within_s):
            self._tell(f"not saved: the last copy did not end within {within_s} s")
            is_complete = False
        else:
            try:
                if until is not None:
                    # Again: a save that has ended meanwhile has reset it.
                    self._deadline.bring_forward(until - self._clock.monotonic())
                is_complete = self._save_or_try_again()
            finally:
                self._deadline.at = None
                self._busy.release()
        # Where no file is missing, the list of them is.
        self.lost = [] if is_complete else [*self._saver.unsaved] or [MANIFEST]
        if self.lost:
            self._tell(f"not saved at the program's end: {listed(self.lost)}")
        return is_complete

    def _save_or_try_again(self) -> bool:
        began, pause = self._clock.monotonic(), min(_PAUSE_S, self._every_s)
        while True:
            self._is_in_trouble = False
            late = self._round(final=True)
            if late is not None and not late:
                return not self._saver.unsaved  # what is above the limit stays so
            is_over = (
                self._clock.monotonic() - began > times.FILES_REFUSED_S and not self._is_in_trouble
            )
            if is_over or self.is_replaced or not self._is_restored:
                return False
            if not self._deadline.leaves(pause):
                return False
            self._clock.sleep(pause)
            pause = min(2 * pause, self._every_s, _LONGEST_PAUSE_S)

    def copy(self) -> bool:
        """One copy while the program runs, as the thread makes it; return whether it is complete.

        Files that are being written are left for the next one.
        """
        with self._busy:
            return self._round(final=False) == [] and not self._saver.unsaved

    def hurry(self, within_s: float) -> None:
        """The node has to end: what is being copied, or will be, must be done by then."""
        self._deadline.bring_forward(within_s)

    def close(self) -> None:
        """End the thread, without a copy."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=times.FILES_QUIET_S)
            self._thread = None

    def _run(self) -> None:
        while not self._ended.wait(self.until_next_copy()):
            self.copy()

    def until_next_copy(self) -> float:
        """Seconds until the thread copies again.

        By the clock and not from the start: nodes that copy at the same moment save what belongs
        together, such as the same step.
        """
        return self._every_s - self._clock.time() % self._every_s

    def _round(self, *, final: bool) -> list[str] | None:
        """Save; return the names of files that another round may save, None where all failed."""
        if self.is_replaced or self._is_broken_off or not self._is_restored:
            return None
        try:
            self._manifest, late = self._saver.save(self._manifest, final=final)
            if late and self._saver.error is not None:
                raise self._saver.error
        except ReplacedError:
            self.is_replaced = True
            self._tell("this node has been started again elsewhere; its files are not saved here")
            self._on_replaced()
            return None
        except Exception as error:  # what disks and networks come up with
            self._is_in_trouble = isinstance(error, store.ERRORS) and store.is_temporary(error)
            self._say_once("save", f"not saved: {store.explained(error)}; trying again")
            return None
        if "save" in self._said and not (late and final):
            self._said.discard("save")
            self._tell("saved again")
        return late

    def _tell(self, text: str) -> None:
        self._say(f"files: {text}")

    def _say_once(self, subject: str, text: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            self._tell(text)

    # --- restore
    def _restore(self, fallback: str) -> None:
        if not self._is_restored:
            self._take_over()
            self._is_restored = True
        if fallback and fallback.rstrip("/") != self._bucket.address:
            self._borrow(NodeBucket(fallback, self.client))

    def _take_over(self) -> None:
        if not self._is_code_known:
            # Once: later, what an attempt that failed has brought lies beside it.
            seen = self._folders.look()
            self._saver.code = {name: self._digest(name) for name in seen.files}
            self._saver.code_links = seen.links
            self._is_code_known = True
        given = dict(self._saver.code)
        found = self._bucket.manifest()
        # Listed before the take-over: what a later start uploads is never among them.
        objects = self._bucket.list(OBJECTS)
        # Before anything is read: an earlier start that still writes loses from here on.
        manifest = replace(
            found or self._manifest,
            generation=(found.generation if found else 0) + 1,
            writer=self._manifest.writer,
        )
        self._bucket.commit(manifest)
        used = {file.object for file in manifest.files}
        self._bucket.remove([key for key in objects if key not in used])
        wanted = [file for file in manifest.files if not self._is_older_than_its_code(file)]
        damaged = self._fetch(self._bucket, wanted)
        restored = [file for file in wanted if file.name not in damaged]
        for file in restored:
            if not file.link:
                self._saver.remember(file.name, file.sha256)
        for name in manifest.empty:
            self._folders.path(name).mkdir(parents=True, exist_ok=True)
        self._saver.given = given
        # What was not restored is not saved either, from the next copy on.
        self._manifest = replace(manifest, files=tuple(restored))
        if restored:
            self._tell(f"{len(restored)} restored from {self._bucket.address}")

    def _borrow(self, other: NodeBucket) -> None:
        """Take the files of another node of which this node has none of its own."""
        found = other.manifest()
        saver, own = self._saver, {file.name for file in self._manifest.files}
        wanted = [
            file
            for file in (found.files if found else ())
            if file.name not in own
            and not self._is_older_than_its_code(file)
            and self._is_not_its_own(file.name)
        ]
        for name in saver.given.keys() - saver.code.keys() - {file.name for file in wanted}:
            # The other node had it the last time and has removed it since.
            if self._is_not_its_own(name):
                self._folders.path(name).unlink(missing_ok=True)
                del saver.given[name]
        fresh = [
            file
            for file in wanted
            if file.link
            or saver.given.get(file.name) != file.sha256
            or not self._folders.path(file.name).exists()
        ]
        damaged = self._fetch(other, fresh)
        for file in wanted:
            if file.name not in damaged and not file.link:
                saver.given[file.name] = file.sha256
        if fresh:
            self._tell(f"{len(fresh) - len(damaged)} restored from {other.address}")

    def _is_older_than_its_code(self, file: SavedFile) -> bool:
        """Whether a file came with the code, was changed by the program, and has since been changed
        in the code: what the user has now counts."""
        has = self._saver.code.get(file.name, "")
        if not has or file.code == has:
            return False
        self._tell(f"{file.name} is not restored: it comes from the code, which has changed since")
        return True

    def _is_not_its_own(self, name: str) -> bool:
        """Whether a file is missing here, or lies here as it was given to this node."""
        path = self._folders.path(name)
        if path.is_symlink() or not path.exists():
            return True
        return path.is_file() and self._saver.given.get(name) == self._digest(name)

    def _fetch(self, source: NodeBucket, files: Collection[SavedFile]) -> set[str]:
        """Fetch files into the folders; return the names of those that are damaged."""
        real = [file for file in files if not file.link]
        with tempfile.TemporaryDirectory(prefix=".files-", dir=self._beside) as folder:

            def fetch(file: SavedFile) -> bool:
                target = self._folders.path(file.name)
                if not source.download(file, Path(folder), target, self._restoring):
                    return False
                os.utime(target, ns=(file.modified_ns, file.modified_ns))
                return True

            with ThreadPoolExecutor(store.PARALLEL) as pool:
                done = [*pool.map(fetch, real)]
        damaged = {file.name for file, is_there in zip(real, done, strict=True) if not is_there}
        damaged |= {file.name for file in files if file.link and not self._link(file)}
        for name in sorted(damaged):
            self._tell(f"{name} is damaged in {source.address}: it is not restored")
        return damaged

    def _link(self, file: SavedFile) -> bool:
        """Make a symbolic link; return whether it stays in its folder."""
        if file.name in self._saver.code_links:
            return True  # what the user has now counts
        root = self._folders.root(file.name)
        path = root / file.name.partition("/")[2]
        if path.is_symlink():
            path.unlink()
        path = self._folders.path(file.name)
        if path.exists():
            return True  # a file or folder of the code
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(file.link)
        if path.resolve().is_relative_to(root.resolve()):
            return True
        path.unlink()  # by way of another link
        return False

    def _digest(self, name: str) -> str:
        with self._folders.path(name).open("rb") as content:
            return digest(content, deadline=self._restoring)


def report_lost(what: str, *, storage: str, run: str, job: str, client: Any = None) -> None:
    """Report files that a job has lost: in the log, and to the function that writes its outcome.

    Args:
        what: in words.
        storage: ``s3://BUCKET``.
        client: of S3; boto3's by default.
    """
    say_to_log(f"error: not saved: {what}")
    try:
        store.write(storage, runs.job_lost_files(run, job), what, client)
    except store.ERRORS as error:
        say_to_log(f"the outcome cannot name them: {store.explained(error)}")
