"""Mirror of a program's files: copied into the bucket while it runs, restored before the next
start.

    start = begin(bucket, nodes)           # on the head, once per start of the program on all nodes
    folders = {WORK: work, OUTPUT: output, HOME: home}
    mirror = open_mirror(folders, "s3://BUCKET/runs/RUN/output", node=1)
    mirror.restore(start)                  # folders hold the code, and nothing else
    mirror.start()                         # a thread, which saves a round every 30 s
    ...                                    # the program runs, and ends
    mirror.save()                          # what it wrote last
    mirror.close()

**A round** has each file as it was at Unix time T, which is the same for all nodes, so that a
restore finds what a power cut at T would have left on all of them. The node looks at its folders at
T and ``times.FILES_QUIET_S`` later, and sends what is as it was at T. A file that is not keeps the
round from being one, because it may be half of a checkpoint, as a folder does in which files came
or went just when the node looked. From the next round on, such a file is read at T itself. After
``_MAX_ROUNDS`` rounds in a row, a file that never rests is an exception: it is saved as it is when
it is read at T; one above ``_LOG`` bytes stays as it was saved last.

**A start**: ``begin`` chooses the newest round that all nodes of the start before have, and each
node restores it: its own files, and those of the other nodes where it has none, or has not written
to its own since an earlier start, which may be half of an old checkpoint. So a checkpoint
whose shards lie on several nodes is whole on each of them, also if there are fewer nodes. Nodes
that have survived begin with new folders too: what they have written since that round has no
counterpart on the others. Files of the code stay unsaved until the program changes them; a file
that has been changed in the code since it was saved is not restored.

The order of calls is all that keeps a node from harming its successors:

    a start:   claim it -> look for the newest round -> write it down as the base
    a round:   pieces -> list -> mark -> no newer start? -> it is saved
    removal:   which round do all nodes have? -> no newer start? -> remove what only older ones name

A newer start claims before it looks, so it sees the mark of each round that a node reports as
saved. No key is used twice: a deletion that arrives late finds nothing. A node removes only what it
has written in this start; the next start sweeps what is older.

Errors of the bucket are logged once and tried again. Only ``begin`` and ``restore`` raise one, if
trying again cannot help.
"""

import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from containers.host.machine import Clock, in_background
from containers.host.machine import say as say_to_log
from containers.program.files.disk import Content, Disk, FileState, Look, Moment
from containers.program.files.s3_files import (
    ERRORS,
    LONGEST_PAUSE_S,
    PARALLEL,
    PAUSE_S,
    PreparationStopped,
    open_bucket,
    until_answered,
)
from containers.program.files.selection import (
    above_limits,
    is_kept,
    limits,
    newest_work,
)
from containers.program.files.starts import ProgramStart, begin, newest_start
from contract import faults, files, runs, times
from contract.errors import InputError
from contract.files import Claim, FileList, Mark, SavedFile, common_round, sha256_of
from contract.text import byte_size, counted, listed
from store.bucket import Bucket

#: Rounds in a row that a file may keep from being complete before it counts as never at rest.
_MAX_ROUNDS: Final = 3
#: The largest file that is read at T, while others wait.
_LOG: Final = 64 * 2**20
#: So many files of an upload, the largest, are open from its beginning. A process may have 1,024.
_OPEN: Final = 256
#: A thread may wake up so much too early.
_TOLERANCE_S: Final = 0.01
#: Uploads see at once that there is no time left, unless they hang.
_GRACE_S: Final = 0.5


class ReplacedError(Exception):
    """A newer start of the program has taken over its files."""


def open_mirror(
    folders: Mapping[str, Path],
    address: str,
    *,
    client: Any = None,
    **options: Any,
) -> "Mirror":
    """The mirror of a node's folders.

    Args:
        folders: ``contract.files.WORK``, ``OUTPUT`` -> the folder.
        address: where the copy is kept: ``s3://BUCKET/`` and ``contract.runs.output_prefix``.
        client: of S3; boto3's by default.
        options: of ``Mirror``.
    """
    disk = Disk(folders, options.get("keep", ()))
    return Mirror(disk, open_bucket(address, client), **options)


class Mirror:
    """Keeps the copy of one node's folders, for one start of its program."""

    def __init__(
        self,
        disk: Disk,
        bucket: Bucket,
        *,
        node: int = 0,
        every_s: float = times.FILES_EVERY_S,
        quiet_s: float = times.FILES_QUIET_S,
        limit_bytes: int = runs.OUTPUT_LIMIT_BYTES,
        keep: Sequence[str] = (),
        skip: Sequence[str] = (),
        say: Callable[[str], None] = say_to_log,
        clock: Clock = time,
        make_pool: Callable[[], Executor] = lambda: ThreadPoolExecutor(PARALLEL),
    ) -> None:
        """Args:
        limit_bytes: of more than that, ``OUTPUT`` is kept first, and then the newest files.
        keep: patterns of files that count as those in ``OUTPUT`` do.
        skip: patterns of files that are not saved.
        make_pool: threads for uploads and downloads.
        """
        self.bucket = bucket
        self.lost: list[str] = []
        """Names of the files that the last round, or ``save``, has not saved as they are."""
        self.is_replaced = False
        """Another start has taken over the files of the run."""
        self.newest_ns = 0
        """Unix nanoseconds of the last change that was seen, of what is saved; 0: nothing is."""
        self.worked_ns = 0
        """The same, without files of trackers: their threads write in a deadlock, too."""
        self._disk, self._node, self._every_s, self._quiet_s = disk, node, every_s, quiet_s
        self._limit_bytes, self._keep, self._skip = limit_bytes, keep, skip
        self._say, self._clock = say, clock
        self._began = clock.time()  # the program, once restore() has ended
        self._whole_ns = 0.0  # T of the newest round that is saved
        self._make_pool = make_pool
        self._start: ProgramStart  # set by restore()
        self._is_on = False  # between the restore and the end of this start
        self._until = math.inf  # by the monotonic clock: the files must have been sent
        self._trouble: Exception | None = None  # in the last round
        self._said: set[str] = set()
        # Save one in so many rounds if the last one took longer than a round. A power of two, so
        # that slow and fast nodes save the same rounds.
        self._stride = 1
        self._code: dict[str, str] | None = None  # name -> SHA-256, or target of a link
        self._received: dict[
            str, FileState
        ] = {}  # files of the code or of other nodes, as they were given
        self._known: dict[
            str, tuple[FileState, SavedFile]
        ] = {}  # how a file lay here, and its entry
        self._waits: dict[str, int] = {}  # what was late once -> rounds in a row that it is
        self._objects: dict[str, str] = {}  # SHA-256 -> key of what the bucket has
        self._written: set[str] = set()  # keys of this start
        self._lists: dict[int, set[str]] = {}  # round -> keys that its list needs, its own included
        self._count = itertools.count(1)
        self._busy = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # --- restore
    def restore(
        self, start: ProgramStart | None = None, *, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Bring the base of a start into folders that hold the code.

        Args:
            start: of the program on all nodes; by default it is begun here, on this node only.
            should_stop: true if the node has to end; asked while files are downloaded.

        Raises:
            InputError: the bucket refuses, or holds what it should not, or another job has taken
                over the files.
            UnreachableError: the bucket does not answer.
            Stopped: ``should_stop`` returned true. Nothing is saved from then on: what is here is
                less than what the bucket has.
        """
        answered = functools.partial(
            until_answered, say=self._tell, clock=self._clock, should_stop=should_stop
        )
        self._start = start or answered(lambda: begin(self.bucket, [self._node]))
        num = answered(lambda: self._restore(should_stop))
        self._is_on, self._began = True, self._clock.time()
        if num:
            self._tell(f"{num} restored from {self.bucket.uri}")

    def _restore(self, should_stop: Callable[[], bool]) -> int:
        """Restore the base of the start; return the number of files.

        Of files with one name, the latest start's counts: with other nodes, other ranks may lie on
        each; then own files, then those of other nodes by number, which are not saved as this
        node's own. The first node takes over the files of nodes that no longer take part.
        """
        base, present = self._start.base, self._start.nodes
        mine = {self._node}
        if self._node == min(present):
            mine |= base.keys() - {*present}
        look = self._disk.look()
        if self._code is None:
            # Once: later, files of a restore that failed lie beside it.
            self._code = {
                name: seen.link or self._disk.digest(name) for name, seen in look.files.items()
            }

        # Of each name, the newest file.
        wanted: dict[str, tuple[int, SavedFile]] = {}
        for node in sorted(base, key=lambda node: (node != self._node, node)):
            for file in FileList.from_json(self._get(base[node])).files:
                before = wanted.get(file.name)
                is_newer = before is None or before[1].start < file.start
                if is_newer and not self._is_older_than_its_code(file):
                    wanted[file.name] = (node, file)

        # Links come last: no file is written through one.
        in_order = sorted((file for _, file in wanted.values()), key=lambda file: file.link != "")
        saved = [file for file in in_order if self._create(file.name)]
        self._download(saved, should_stop)
        found = {file.name: self._disk.finish(file) for file in saved}

        # Later rounds know what lies here by now, and what of it is this node's.
        self._received = {name: look.files[name] for name in self._code} | found
        for name, seen in found.items():
            node, file = wanted[name]
            if node in mine:
                del self._received[name]
                self._known[name] = (seen, file)
        self._objects = {sha256_of(key): key for key in self._pieces}
        return len(found)

    def _download(self, saved: Sequence[SavedFile], should_stop: Callable[[], bool]) -> None:
        """Write the content of files that were begun."""
        is_over = threading.Event()

        def fetch(name: str, offset: int, key: str) -> None:
            data = self._get(key)
            if not is_over.is_set():  # the folders may be another start's by now
                self._disk.write(name, offset, data)

        pool = self._make_pool()
        try:
            pending = {
                pool.submit(fetch, file.name, index * files.PIECE, key)
                for file in saved
                for index, key in enumerate(file.pieces)
            }
            while pending:
                done, pending = wait(pending, _GRACE_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                if should_stop():
                    raise PreparationStopped
        finally:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _create(self, name: str) -> bool:
        """Begin a file that is restored; return false if the code is in its way."""
        try:
            self._disk.create(name)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            self._say_once(f"{name} is not restored: the code has a folder or a file in its way")
            return False
        return True

    def _get(self, key: str) -> bytes:
        """An object of the base."""
        data = self.bucket.get(key) or b""
        if sha256(data).hexdigest() != sha256_of(key):
            try:
                self._check_is_current()
            except ReplacedError:
                raise InputError("another job has just taken them over") from None
            raise InputError(f"{key} is damaged")
        return data

    def _is_older_than_its_code(self, file: SavedFile) -> bool:
        """True if a file came with the code, was changed by the program, and has since been changed
        in the code: what the user has now counts."""
        has = (self._code or {}).get(file.name, "")
        if not has or file.code == has:
            return False
        self._say_once(
            f"{file.name} is not restored: it comes from the code, which has changed since"
        )
        return True

    # --- the thread
    def start(self) -> None:
        """Save rounds from now on, in a thread."""
        assert self._is_on, "restore() comes first, or it would not know the code's files"
        self._thread = in_background(self._run)

    def close(self) -> None:
        """End the thread, without a round."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=times.FILES_QUIET_S)

    def _run(self) -> None:
        is_first = True
        while not self._ended.wait(self.until_next_round()):
            moment = self.look()
            if self._ended.wait(self._quiet_s):
                return
            self.round(moment)
            if is_first:
                self._warn_of_others()
            is_first = False

    def until_next_round(self) -> float:
        """Seconds until T of the next round.

        By the clock and not from the start, so that all nodes save the same moments.
        """
        step = self._every_s * self._stride
        return step - (self._clock.time() + _TOLERANCE_S) % step + _TOLERANCE_S

    def hurry(self, within_s: float) -> None:
        """The node has to end: what is being copied, or will be, must be done by then."""
        self._until = min(self._until, self._clock.monotonic() + within_s)

    def _has_time(self, seconds: float = 0) -> bool:
        """True if more seconds than these are left."""
        return self._until - self._clock.monotonic() > seconds

    # --- rounds
    def _number(self) -> int:
        return int((self._clock.time() + _TOLERANCE_S) // self._every_s)

    def look(self) -> Moment:
        """Look at the folders at T, which is now, and send the files that do not rest."""
        with self._busy:
            number = self._number()
            moment = self._look(number, number * self._every_s * 1e9)
            due, as_they_are = {}, set()
            for name, seen in moment.own.items():
                num = self._waits.get(name, 0 if "" in self._waits else None)
                if num is None or seen.size > _LOG:
                    continue
                if num >= _MAX_ROUNDS:
                    as_they_are.add(name)
                if num >= _MAX_ROUNDS or seen.changed_ns <= moment.at_ns:
                    due[name] = seen
            trouble = self._upload(due, as_they_are=as_they_are) if self._is_on else None
            return replace(moment, trouble=trouble)

    def _look(self, number: int, at_ns: float) -> Moment:
        look = self._disk.look()
        for sentence in look.refused:
            self._say_once(sentence)
        own = {
            name: seen
            for name, seen in look.files.items()
            if self._received.get(name) != seen and not files.matches(name, self._skip)
        }
        changed = {
            name: seen.changed_ns
            for name, seen in own.items()
            # What an earlier start has saved is no change.
            if not (self._has(name, seen) and self._known[name][1].start < self._start.number)
        }
        self.newest_ns = max(changed.values(), default=0)
        self.worked_ns = newest_work(changed)
        left_out = above_limits(own, keep=self._keep, limit_bytes=self._limit_bytes)
        if left_out:
            self._say_once(
                limits(own, left_out, limit_bytes=self._limit_bytes),
                subject=f"limit {len(left_out).bit_length()}",  # again when it is twice as many
            )
        lost = {
            name
            for name in left_out
            if is_kept(name, self._keep) or changed.get(name, 0) > self._whole_ns
        }
        own = {name: seen for name, seen in own.items() if name not in left_out}
        # Until it is known to be saved.
        self.lost = sorted(lost | {name for name in own if not self._has(name, own[name])})
        return Moment(number, at_ns, look, own, lost)

    def _warn_of_others(self) -> None:
        """Name the files in other places that the program has written so far."""
        if found := self._disk.others(self._began):
            size = byte_size(sum(size for _, size in found))
            self._say_once(
                f"warning: {counted(len(found), 'file')} ({size}) outside the working folder and "
                f"HOME will not be kept: {listed([name for name, _ in found], most=3)}; to keep "
                "files, write them to $TRAIN_OUTPUT",
                subject=f"others {len(found).bit_length()}",  # again when it is twice as many
            )

    def round(self, moment: Moment) -> bool:
        """Save what was there at T; return true if all of it is saved."""
        with self._busy:
            return self._round(moment) and not self.lost

    def save(self, within_s: float | None = None) -> bool:
        """Save everything as it is: the program has ended. What fails is tried again.

        What time will not change, such as a right that is missing, or a file that a process left
        behind keeps writing, is given up after ``times.FILES_REFUSED_S``: hosts are billed. Then
        ``download`` gets what is saved, and the next start restores the last complete round.

        Args:
            within_s: how long that may take, from now on; None: as long as it needs.

        Returns:
            True if all is saved. ``lost`` names what is not.
        """
        if not self._is_on:
            return not self.is_replaced  # the program has not run since its files were saved
        if within_s is not None:
            # Also those of a round in progress: its list is written after its files.
            self.hurry(within_s - min(within_s / 6, times.FILES_LIST_S))
        if self._has_time(times.FILES_SAVE_S):
            self._warn_of_others()
        is_saved = self._busy.acquire(timeout=-1 if within_s is None else within_s)
        if is_saved:
            try:
                is_saved = self._save()
            finally:
                self._busy.release()
        if not is_saved:
            # If no file is missing, the list of them is.
            self.lost = self.lost or ["the list of files"]
            self._tell(f"not saved at the program's end: {listed(self.lost)}")
        return is_saved

    def _save(self) -> bool:
        began, pause = self._clock.monotonic(), min(PAUSE_S, self._every_s)
        while True:
            # The end counts for later rounds, and not for one that other nodes are saving now.
            if self._round(self._look(self._number() + 1, math.inf)):
                return not self.lost  # what is above the limit stays so
            trouble = self._trouble
            may_pass = trouble is not None and faults.is_passing(trouble)
            may_pass = may_pass and getattr(trouble, "errno", None) is None  # no error of a disk
            waited = self._clock.monotonic() - began
            is_over = waited > times.FILES_REFUSED_S and not may_pass
            if is_over or not self._is_on or not self._has_time(pause):
                return False
            self._clock.sleep(pause)
            pause = min(2 * pause, self._every_s, LONGEST_PAUSE_S)

    def _round(self, moment: Moment) -> bool:
        """Save a round; return true if it is complete."""
        if not self._is_on:
            return False
        before, self._trouble = self._trouble, None
        try:
            is_round = self._copy(moment)
        except ReplacedError:
            if self.is_replaced:
                self._is_on = False
                self._tell("another job has taken over the files of the run; nothing is saved here")
            return False
        except Exception as error:  # any error of a disk or a network
            self._trouble = error
            if before is None:
                self._tell(f"not saved: {faults.text(error)}; trying again")
            return False
        if before is not None and is_round:
            self._tell("saved again")
        return is_round

    def _copy(self, moment: Moment) -> bool:
        """Save a round; return true if it is complete. ``lost`` names what it lacks.

        Raises:
            what the bucket raises, and ReplacedError.
        """
        began, is_final = self._clock.monotonic(), moment.is_final
        now = moment.look if is_final else self._disk.look()
        rests = {
            name: then
            for name, then in moment.own.items()
            if now.files.get(name) == then and then.changed_ns <= moment.at_ns
        }
        trouble = moment.trouble or self._upload(rests, goes_on=is_final)
        if trouble is not None and not is_final:
            raise trouble  # what is there already is not sent again
        found, late = self._entries(moment, now, rests)
        if late:
            self.lost = sorted(late.union(moment.lost))
            if is_final:
                self._publish(moment.number, "part", found)  # for ``trainctl download``
            self._check_is_current()
            if trouble is not None:
                raise trouble
            return False
        self._publish(moment.number, "end" if is_final else "", found)
        self.lost = sorted(moment.lost)
        if is_final:
            return True

        # What the next round needs.
        self._whole_ns = self._whole_ns if moment.lost else moment.at_ns
        self._known = {name: each for name, each in self._known.items() if name in now.files}
        took_s = max(self._every_s, self._clock.monotonic() - began)
        self._stride = 2 ** math.ceil(math.log2(took_s / self._every_s))
        with contextlib.suppress(*ERRORS):
            self._remove_unused()
        return True

    def _entries(
        self, moment: Moment, now: Look, rests: Collection[str]
    ) -> tuple[FileList, set[str]]:
        """The files of a round, and the names of those that keep it from being one: they are not
        saved as they were, and may be soon."""
        waits = {name: 0 for name in self._waits if name in now.files}
        entries: list[SavedFile] = []
        late: set[str] = set()

        def wait_for(name: str, key: str) -> bool:
            """Count a round that lacks a file as it was; true if it is none for that reason."""
            waits[key] = self._waits.get(key, 0) + 1
            if is_late := waits[key] <= _MAX_ROUNDS or moment.is_final:
                late.add(name)
            return is_late

        for folder, changed_ns in moment.look.folders.items():
            if changed_ns > moment.at_ns:  # a file that was there at T may have been removed
                wait_for(folder, "")
        for name, then in sorted(moment.own.items()):
            if self._has(name, then):
                if name not in rests and self._waits.get(name, 0) >= _MAX_ROUNDS:
                    waits[name] = self._waits[name]  # saved as it is, and still without rest
            # Files of changing names may come and go all the time.
            elif wait_for(name, name if name in now.files else ""):
                continue
            elif name in now.files:
                self._say_once(
                    f"{name} keeps changing and is too large to copy meanwhile; it is saved "
                    "once it stops changing"
                )
            if name in self._known:
                entries.append(self._known[name][1])
        self._waits = waits
        return FileList(files=tuple(entries)), late

    def _has(self, name: str, seen: FileState) -> bool:
        """True if a file has been sent as it was seen."""
        return name in self._known and self._known[name][0] == seen

    @property
    def _pieces(self) -> set[str]:
        """Keys of the objects that make up the known files."""
        return {key for _, file in self._known.values() for key in file.pieces}

    # --- uploads
    def _upload(
        self,
        due: Mapping[str, FileState],
        *,
        as_they_are: Collection[str] = (),
        goes_on: bool = False,
    ) -> Exception | None:
        """Send files, which are known then; others could not be read, or have changed.

        Args:
            as_they_are: files that may change meanwhile.
            goes_on: send the other files after an error of the bucket.

        Returns:
            The first error of the bucket.
        """
        trouble: Exception | None = None
        # Small files first: others may take their names while the large ones are sent.
        names = [name for name, seen in due.items() if not self._has(name, seen)]
        names.sort(key=lambda name: due[name].size)
        pool = self._make_pool()
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: pool.shutdown(self._has_time(), cancel_futures=True))
            opened: dict[str, Content] = {}
            # By descriptor: a rename or removal during a long upload does no harm.
            for name in names[-_OPEN:]:
                with contextlib.suppress(OSError):
                    opened[name] = stack.enter_context(self._disk.open(name))

            def send(name: str, offset: int) -> str | None:
                if not self._has_time():
                    raise TimeoutError("no time is left")
                try:
                    content = opened.get(name) or self._disk.open(name)
                except OSError:
                    return None  # removed, or replaced by something else
                with contextlib.nullcontext() if name in opened else content:
                    data = content.read(offset, files.PIECE)
                    if name not in as_they_are and not content.is_as(due[name]):
                        return None
                return self._put(data)

            parts = {
                name: [pool.submit(send, name, offset) for offset in due[name].offsets]
                for name in names
            }
            pending = {each for futures in parts.values() for each in futures}
            # An upload that hangs, or that botocore tries again, must not keep the list waiting.
            while pending and self._has_time(-_GRACE_S) and (goes_on or trouble is None):
                done, pending = wait(pending, _GRACE_S, FIRST_EXCEPTION)
                for each in done:
                    if isinstance(error := each.exception(), Exception):
                        trouble = error
            for name, futures in parts.items():
                keys = [each.result() for each in futures if each.done() and not each.exception()]
                if len(pieces := tuple(filter(None, keys))) == len(futures):
                    seen = due[name]
                    file = SavedFile(
                        name=name,
                        size=seen.size,
                        pieces=pieces,
                        mode=seen.mode,
                        modified_ns=seen.modified_ns,
                        link=seen.link,
                        code=(self._code or {}).get(name, ""),
                        start=self._start.number,
                    )
                    self._known[name] = (seen, file)
        return trouble

    def _put(self, data: bytes) -> str:
        """Key of an object with this content, which is uploaded unless it is there already."""
        name = sha256(data).hexdigest()
        if name not in self._objects:
            key = files.object_key(self._start.number, self._node, next(self._count), name)
            self._written.add(key)
            self.bucket.put(key, data)
            self._objects[name] = key
        return self._objects[name]

    def _publish(self, number: int, kind: str, found: FileList) -> None:
        key = self._put(found.to_json())
        # Noted before the mark, which may arrive although no answer comes.
        self._lists.setdefault(number, set()).update(found.keys, [key])
        mark = Mark(start=self._start.number, round=number, node=self._node, kind=kind)
        self.bucket.put(mark.key, key.encode())
        self._check_is_current()

    def _check_is_current(self) -> None:
        """Raise ReplacedError if there is a newer start."""
        newest = newest_start(self.bucket)
        if newest > self._start.number:
            claim = self.bucket.get(files.start_key(newest))
            # The same head is about to tell this node.
            is_same_job = claim and Claim.from_json(claim).writer == self._start.writer
            self.is_replaced = not is_same_job
            raise ReplacedError

    def _remove_unused(self) -> None:
        """Remove own objects that no round needs which a start could still restore."""
        marks = Mark.of(self.bucket.keys(files.rounds_prefix(self._start.number)))
        own = common_round(marks, self._start.nodes).get(self._node)
        if own is None:
            return
        self._check_is_current()
        older = [number for number in self._lists if number < own.round]
        for number in older:
            del self._lists[number]
        dead = self._written - self._pieces.union(*self._lists.values())
        # First: a request that fails may have removed them.
        self._objects = {name: key for name, key in self._objects.items() if key not in dead}
        old = [Mark(start=self._start.number, round=each, node=self._node).key for each in older]
        self.bucket.delete([*old, *sorted(dead)])
        self._written -= dead

    def _tell(self, text: str) -> None:
        self._say(f"files: {text}")

    def _say_once(self, text: str, *, subject: str = "") -> None:
        if (subject or text) not in self._said:
            self._said.add(subject or text)
            self._tell(text)
