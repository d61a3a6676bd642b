"""Files of a program survive: copied into the bucket while it runs, restored before the next start.

    start = begin(bucket, nodes)           # on the head, once per start of the program on all nodes
    mirror = open_mirror({WORK: work, OUTPUT: output}, "s3://BUCKET/runs/RUN/output", node=1)
    mirror.restore(start)                  # folders hold the code, and nothing else
    mirror.start()                         # a thread, which saves a round every 30 s
    ...                                    # the program runs, and ends
    mirror.save()                          # what it wrote last
    mirror.close()

``begin`` chooses the newest round that all nodes of the start before have (``containers.program.
rounds``), and each node restores it: its own files, then those of the other nodes where it has
none. So a checkpoint whose shards lie on several nodes is whole on each of them, also if there are
fewer nodes. Nodes that have survived begin with new folders too: what they have written since that
round has no counterpart on the others, and a new node, for which they must wait, fetches as much. A
program that all nodes could save at its end, such as after a spot notice, goes on with that. Files
of the code stay unsaved until the program changes them; a file that has been changed in the code
since it was saved is not restored.

An elastic program goes on when nodes join or leave: ``claim`` then begins a new start, and
``Mirror.renumber`` tells the nodes, which keep their files.

Errors of the bucket are logged once and tried again. Only ``begin`` and ``restore`` raise one, if
trying again cannot help.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from containers.host.machine import Clock
from containers.host.machine import say as say_to_log
from containers.program import bucket as store
from containers.program.bucket import LONGEST_PAUSE_S, PARALLEL, PAUSE_S, Bucket
from containers.program.disk import Disk
from containers.program.requirements import Stopped
from containers.program.rounds import (
    Deadline,
    Moment,
    ReplacedError,
    Rounds,
    Start,
    SupersededError,
)
from contract import files, runs, times
from contract.errors import InputError
from contract.files import Claim, FileList, Mark
from contract.text import listed

_NOT_RESTORED: Final = "the files of the run cannot be restored"
#: A thread may wake up so much too early.
_TOLERANCE_S: Final = 0.01


# --- a start
def begin(
    bucket: Bucket,
    nodes: Sequence[int],
    *,
    writer: str = "",
    say: Callable[[str], None] = say_to_log,
    clock: Clock = time,
    should_stop: Callable[[], bool] | None = None,
) -> Start:
    """``claim``, tried again until the bucket answers.

    Raises:
        InputError: it refuses, or holds what it should not.
        Stopped: ``should_stop`` returned true.
    """

    def attempt() -> Start:
        return store.until_answered(
            lambda: claim(bucket, nodes, writer=writer or uuid.uuid4().hex),
            what=_NOT_RESTORED,
            say=say,
            clock=clock,
            should_stop=should_stop,
        )

    return store.interruptible(attempt, should_stop)


def claim(bucket: Bucket, nodes: Sequence[int], *, writer: str, is_joined: bool = False) -> Start:
    """Begin a start of a program on some nodes; earlier starts save nothing from then on.

    Args:
        writer: name of the process that begins it; the same for all starts of a job.
        is_joined: see ``Start``.

    Raises:
        what the bucket raises, and InputError.
    """
    number = max([0, *files.start_numbers(bucket.list(files.STARTS))]) + 1
    content = Claim(writer=writer, nodes=tuple(nodes)).to_json()
    while not bucket.create(files.start_key(number), content):
        number += 1
    # Only now: what counts as saved is seen here, or its node sees the claim.
    base = _newest(bucket, number)
    bucket.create(files.base_key(number), files.base_to_json(base))
    if files.start_numbers(bucket.list(files.STARTS))[-1] == number:
        with contextlib.suppress(*store.ERRORS):
            _sweep(bucket, number, base)
    return Start(number=number, nodes=tuple(nodes), writer=writer, base=base, is_joined=is_joined)


def _newest(bucket: Bucket, before: int) -> dict[int, str]:
    """Node -> list, of the newest round that all nodes of a start have; or else what it restored.

    Starts that ended before they had restored anything are passed over.
    """
    starts = files.start_numbers(bucket.list(files.STARTS))
    for number in reversed([each for each in starts if each < before]):
        nodes = Claim.from_json(bucket.get(files.start_key(number)) or b"").nodes
        marks = Mark.of(bucket.list(files.rounds_prefix(number)))
        if common := files.common_round(marks, nodes):
            keys = {node: bucket.get(mark.key) or b"" for node, mark in common.items()}
            return {node: key.decode() for node, key in keys.items()}
        if (base := bucket.get(files.base_key(number))) is not None:
            return files.base_from_json(base)
    return {}


def _sweep(bucket: Bucket, number: int, base: Mapping[int, str]) -> None:
    """Remove what earlier starts have left, apart from the base."""
    used = {*base.values()}
    for key in base.values():
        for file in FileList.from_json(bucket.get(key) or b"").files:
            used.update(file.pieces)
    keys = [*bucket.list(files.OBJECTS), *bucket.list(files.ROUNDS)]
    old = [key for key in keys if (files.start_of(key) or number) < number]
    bucket.delete([key for key in old if key not in used])


# --- a node
def open_mirror(
    folders: Mapping[str, Path],
    address: str,
    *,
    excluded: Collection[str] = (),
    client: Any = None,
    **options: Any,
) -> "Mirror":
    """The mirror of a node's folders.

    Args:
        folders: ``contract.files.WORK``, ``OUTPUT`` -> the folder; all on one disk.
        address: where the copy is kept: ``s3://BUCKET/`` and ``contract.runs.output_prefix``.
        excluded: names that are never saved, such as ``work/.venv``.
        client: of S3; boto3's by default.
        options: of ``Mirror``.
    """
    return Mirror(Disk(folders, excluded=excluded), Bucket(address, client), **options)


class Mirror:
    """Keeps the copy of one node's folders, for one program at a time."""

    def __init__(
        self,
        disk: Disk,
        bucket: Bucket,
        *,
        node: int = 0,
        every_s: float = times.FILES_EVERY_S,
        quiet_s: float = times.FILES_QUIET_S,
        limit_bytes: int = runs.OUTPUT_LIMIT_BYTES,
        say: Callable[[str], None] = say_to_log,
        clock: Clock = time,
        make_pool: Callable[[], Executor] = lambda: ThreadPoolExecutor(PARALLEL),
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        limit_bytes: of folders with more, ``OUTPUT`` is kept first, and then the newest files.
        on_replaced: called once when another start has taken over the files of the run, so that
            what the program writes here from then on is lost.
        """
        self.bucket = bucket
        self._node, self._every_s, self._quiet_s = node, every_s, quiet_s
        self._say, self._clock, self._on_replaced = say, clock, on_replaced
        self.lost: list[str] = []
        """Names of the files that ``save`` could not save."""
        self.is_replaced = False
        """Another start has taken over the files of the run."""
        self._said: set[str] = set()
        self._deadline = Deadline(clock)
        self._rounds = Rounds(
            disk,
            bucket,
            node=node,
            clock=clock,
            deadline=self._deadline,
            limit_bytes=limit_bytes,
            every_s=every_s,
            make_pool=make_pool,
            say_once=self._say_once,
        )
        self._is_restored = self._is_broken_off = False
        self._is_in_trouble = False  # the bucket, in the last round, and may be well in the next
        self._next: Start | None = None
        self._busy = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def restore(
        self, start: Start | None = None, *, should_stop: Callable[[], bool] | None = None
    ) -> None:
        """Bring the folders to the base of a start.

        Args:
            start: of the program on all nodes; by default it is begun here, on this node only.
            should_stop: whether the node has to end; asked while files are on their way.

        Raises:
            InputError: the bucket refuses, or holds what it should not, or another job has taken
                over the files. A bucket that does not answer is asked until ``should_stop``.
            Stopped: ``should_stop`` returned true. Nothing is saved from then on: what is here is
                less than what the bucket has.
        """
        self._is_restored, self._next = False, None
        try:
            own = start or begin(
                self.bucket,
                [self._node],
                say=self._tell,
                clock=self._clock,
                should_stop=should_stop,
            )
            num = store.interruptible(lambda: self._restore(own), should_stop)
        except Stopped:
            self._is_broken_off = True
            raise
        self._is_restored = True
        if num:
            self._tell(f"{num} restored from {self.bucket.address}")

    def _restore(self, start: Start) -> int:
        def check() -> None:
            if self._is_broken_off:
                raise Stopped

        def attempt() -> int:
            try:
                with self._busy:
                    return self._rounds.restore(start, check=check)
            except ReplacedError:
                raise InputError("another job has just taken them over") from None

        return store.until_answered(
            attempt,
            what=_NOT_RESTORED,
            say=self._tell,
            clock=self._clock,
            should_stop=lambda: self._is_broken_off,
        )

    def renumber(self, start: Start) -> None:
        """Go on in a new start, without a change of the files here: nodes have joined or left."""
        self._next = start  # before the next round: this one may take long

    def start(self) -> None:
        """Save rounds from now on, in a thread."""
        assert self._is_restored, "restore() comes first, or it would not know the code's files"
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="files", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, without a round."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=times.FILES_QUIET_S)
            self._thread = None

    def hurry(self, within_s: float) -> None:
        """The node has to end: what is being copied, or will be, must be done by then."""
        self._deadline.bring_forward(within_s)

    # --- rounds
    def _run(self) -> None:
        while not self._ended.wait(self.until_next_round()):
            moment = self.look()
            if self._ended.wait(self._quiet_s):
                return
            self.round(moment)

    def until_next_round(self) -> float:
        """Seconds until T of the next round.

        By the clock and not from the start, so that all nodes save the same moments.
        """
        step = self._every_s * self._rounds.stride
        return step - (self._clock.time() + _TOLERANCE_S) % step + _TOLERANCE_S

    def look(self) -> Moment:
        """Look at the folders at T, which is now."""
        with self._busy:
            return self._rounds.moment(self._number())

    def round(self, moment: Moment) -> bool:
        """Save what was there at T; return whether all of it is saved."""
        with self._busy:
            return bool(self._round(moment)) and not self._rounds.unsaved

    def _number(self) -> int:
        return int((self._clock.time() + _TOLERANCE_S) // self._every_s)

    def save(self, within_s: float | None = None) -> bool:
        """Save everything as it is: the program has ended. What fails is tried again.

        What time will not change, such as a right that is missing, or a file that a process left
        behind keeps writing, is given up after ``times.FILES_REFUSED_S``: hosts are billed. Then
        ``download`` gets what is saved, and the next start restores the last complete round.

        Args:
            within_s: how long that may take; None: as long as it needs. ``lost`` names what is not
                saved by then.

        Returns:
            Whether all is saved.
        """
        if self._is_broken_off:
            return True  # the program has not run since its files were saved
        until = None
        if within_s is not None:
            # Of a round that is being made, too. The list is written after the files.
            self._deadline.bring_forward(within_s - min(within_s / 6, times.FILES_LIST_S))
            until = self._deadline.at
        if not self._busy.acquire(timeout=-1 if within_s is None else within_s):
            self._tell(f"not saved: the last round did not end within {within_s} s")
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
        # If no file is missing, the list of them is.
        self.lost = [] if is_complete else [*self._rounds.unsaved] or ["the list of files"]
        if self.lost:
            self._tell(f"not saved at the program's end: {listed(self.lost)}")
        return is_complete

    def _save_or_try_again(self) -> bool:
        began, pause = self._clock.monotonic(), min(PAUSE_S, self._every_s)
        while self._is_restored:
            # The end counts for later rounds, and not for one that other nodes are saving now.
            moment = self._rounds.moment(self._number() + 1, final=True)
            if self._round(moment):
                return not self._rounds.unsaved  # what is above the limit stays so
            waited = self._clock.monotonic() - began
            is_over = waited > times.FILES_REFUSED_S and not self._is_in_trouble
            if is_over or self.is_replaced or not self._deadline.leaves(pause):
                break
            self._clock.sleep(pause)
            pause = min(2 * pause, self._every_s, LONGEST_PAUSE_S)
        if self._is_restored and not self.is_replaced:
            with contextlib.suppress(*store.ERRORS, ReplacedError):
                self._rounds.leave_part(self._number() + 1)
        return False

    def _round(self, moment: Moment) -> bool | None:
        """Save a round; return whether it is one, None if it could not be tried."""
        if self.is_replaced or self._is_broken_off or not self._is_restored:
            return None
        self._is_in_trouble = False
        try:
            if self._next is not None:
                self._rounds.renumber(self._next)
                self._next = None
            is_round = self._rounds.copy(moment)
            if self._rounds.error is not None:
                raise self._rounds.error
        except SupersededError:
            return None
        except ReplacedError:
            self.is_replaced = True
            self._tell("another job has taken over the files of the run; nothing is saved here")
            self._on_replaced()
            return None
        except Exception as error:  # what disks and networks come up with
            self._is_in_trouble = isinstance(error, store.ERRORS) and store.is_temporary(error)
            self._say_once("save", f"not saved: {store.explained(error)}; trying again")
            return None
        if is_round and "save" in self._said:
            self._said.discard("save")
            self._tell("saved again")
        return is_round

    def _tell(self, text: str) -> None:
        self._say(f"files: {text}")

    def _say_once(self, subject: str, text: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            self._tell(text)
