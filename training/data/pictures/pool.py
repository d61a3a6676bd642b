"""The decoder processes of a reader, and the ring of shared memory that they fill.

A thread gives them tasks, two at a time so that none waits for the next, and replaces one that
died: what it was about to do is done by another. Imports no torch.
"""

import contextlib
import math
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Final

import numpy as np

from contract.errors import InputError
from training.data.pictures import shard_cache
from training.data.pictures.decode import Pixels
from training.data.pictures.index import JPEG
from training.data.pictures.library import PictureSet
from training.data.pictures.messages import Done, Orders, Task, Unreachable
from training.data.pictures.picture import canvas_side

#: Pictures in a task: few enough that all decoders work on each batch, if it is large.
_MOST_IN_TASK: Final = 16
_TASKS_AT_ONCE: Final = 2
#: Decoders that die while they have the same picture, until it counts as damaged.
_LIVES: Final = 3
#: Decoders that may die while none does its work, until the reader gives up; and for each of them.
_MOST_DEATHS: Final = 6
_MOST_DEATHS_EACH: Final = 2
_END_TIMEOUT_S: Final = 5.0


class ReadingError(RuntimeError):
    """Pictures cannot be read any more, though nothing is wrong with them: their store does not
    answer, or decoders die or cannot be started. Another attempt may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A batch as its decoders left it."""

    lines: tuple[str, ...]
    """Of the table, as they were ordered."""
    pictures: Pixels
    """uint8 ``[n, side, side, 3]`` in the ring; those of damaged pictures hold anything."""
    extents: tuple[tuple[int, int], ...]
    """Height and width of each."""
    damaged: dict[int, str]
    """Place -> what is wrong."""


@dataclass(kw_only=True)
class _Slot:
    lines: tuple[str, ...]
    extents: list[tuple[int, int]]
    missing: int
    """Pictures whose decoder has not answered."""
    damaged: dict[int, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Decoder:
    process: subprocess.Popen[bytes]
    connection: Connection
    tasks: deque[Task] = field(default_factory=deque)
    """What it was given and has not answered, the one at work first."""


class Pool:
    """Decoders of one set; see ``Reader``, which knows what the pictures are for."""

    def __init__(
        self,
        pictures: PictureSet,
        *,
        size: int,
        batch: int,
        slots: int,
        decoders: int,
        fetches: bool,
    ) -> None:
        """
        Args:
            size: most pixels of the shorter side of a picture.
            batch: canvases in a slot.
            slots: of the ring.
            fetches: bring the shards of a set in S3 to this node in the background.
        """
        self._batch = batch
        self._orders = Orders(
            root=pictures.root,
            encoding=pictures.index.encoding if pictures.index.size else JPEG,
            size=size,
            capacity=slots * batch,
            cached=shard_cache.cached_paths(pictures),
        )
        side = canvas_side(size)
        num_bytes = slots * batch * side * side * 3
        self._descriptor = _shared_memory(num_bytes)
        memory = mmap.mmap(self._descriptor, num_bytes)
        self.memory: Pixels = np.frombuffer(memory, np.uint8)
        """All of the ring."""
        self._ring = self.memory.reshape(slots * batch, side, side, 3)
        self._changed = threading.Condition()
        self._slots: dict[int, _Slot] = {}
        self._tasks: dict[int, Task] = {}
        self._deaths: dict[int, int] = {}  # of the decoders of a task
        self._waiting: deque[int] = deque()
        self._numbers = 0
        self._num_deaths = 0  # since the last task that was done
        self._failure: Exception | None = None
        self._closing = False
        self._wakes, self._wake = Pipe(duplex=False)
        self._fetcher = shard_cache.Fetcher(pictures) if fetches else None
        self._decoders = [self._start() for _ in range(decoders)]
        self._thread = threading.Thread(target=self._run, name="pictures", daemon=True)
        self._thread.start()

    # --- called by the reader ---------------------------------------------------------------------
    def order(self, slot: int, lines: Sequence[str]) -> None:
        """Have a slot filled with the pictures of these lines of the set's table."""
        assert len(lines) <= self._batch, f"{len(lines)} pictures for a slot of {self._batch}"
        with self._changed:
            self._slots[slot] = _Slot(
                lines=tuple(lines), extents=[(0, 0)] * len(lines), missing=len(lines)
            )
            share = math.ceil(len(lines) / len(self._decoders))
            for start in range(0, len(lines), step := max(1, min(_MOST_IN_TASK, share))):
                self._add(slot * self._batch + start, lines[start : start + step])
        self._wake.send_bytes(b".")

    def filled(self, slot: int) -> Filled:
        """Wait for a slot that was ordered; it stays as it is until it is ordered again.

        Raises:
            ReadingError: decoders die again and again, or the set cannot be reached.
            InputError: its index is damaged.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._slots[slot].missing or self._failure)
            if self._failure:
                raise self._failure
            found = self._slots.pop(slot)
        first = slot * self._batch
        return Filled(
            lines=found.lines,
            pictures=self._ring[first : first + len(found.lines)],
            extents=tuple(found.extents),
            damaged=found.damaged,
        )

    def drop(self) -> None:
        """Forget what was ordered; what decoders are at is waited for, for they write to the
        ring."""
        with self._changed:
            for number in self._waiting:
                del self._tasks[number]
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._tasks or self._failure or self._closing)
            self._slots.clear()

    def close(self) -> None:
        """End the decoders. Nothing happens the second time."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake.send_bytes(b".")
        self._thread.join()
        if self._fetcher is not None:
            self._fetcher.close()
        for each in self._decoders:
            each.connection.close()  # which ends it
        for each in self._decoders:
            try:
                each.process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        self._wakes.close()
        self._wake.close()
        os.close(self._descriptor)

    @property
    def decoder_pids(self) -> list[int]:
        """Of the decoders that are there now."""
        with self._changed:
            return [each.process.pid for each in self._decoders]

    # --- the thread -------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the reader would wait forever for a thread that has ended
            with self._changed:
                self._failure = ReadingError(f"decoders of pictures cannot be served: {error}")
                self._failure.__cause__ = error
                self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            heard = [] if self._failure else self._decoders
            ready = wait([self._wakes, *(each.connection for each in heard)])
            with self._changed:
                if self._closing:
                    return
                if self._wakes in ready:
                    self._wakes.recv_bytes()
                for place, each in enumerate(heard):
                    if each.connection in ready and not self._failure:
                        self._hear(place)
                for each in self._decoders:
                    self._feed(each)
                self._changed.notify_all()

    def _hear(self, place: int) -> None:
        decoder = self._decoders[place]
        try:
            answer: Done | Unreachable = decoder.connection.recv()
        except (EOFError, OSError):
            self._replace(place)
            return
        task = decoder.tasks.popleft()
        if isinstance(answer, Unreachable):
            kind = InputError if answer.is_damaged else ReadingError
            self._failure = kind(answer.message)
            return
        assert answer.number == task.number
        self._num_deaths = 0
        self._finish(task, answer)

    def _finish(self, task: Task, done: Done) -> None:
        del self._tasks[task.number]
        self._deaths.pop(task.number, None)
        slot, place = divmod(task.first, self._batch)
        if (filled := self._slots.get(slot)) is None:
            return  # dropped
        filled.extents[place : place + len(task.lines)] = done.extents
        filled.damaged.update({place + each: why for each, why in done.damaged.items()})
        filled.missing -= len(task.lines)

    def _feed(self, decoder: _Decoder) -> None:
        while self._waiting and len(decoder.tasks) < _TASKS_AT_ONCE:
            task = self._tasks[self._waiting.popleft()]
            decoder.tasks.append(task)
            # One that has died is noticed, and replaced, when its answer is waited for.
            with contextlib.suppress(OSError):
                decoder.connection.send(task)

    def _replace(self, place: int) -> None:
        dead = self._decoders[place]
        dead.connection.close()
        code = dead.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._num_deaths += 1
        if self._num_deaths > max(_MOST_DEATHS, _MOST_DEATHS_EACH * len(self._decoders)):
            self._failure = ReadingError(
                f"{self._num_deaths} decoders of pictures have died one after the other, the last "
                f"of {how}. If the kernel has killed them, use fewer decoders, a smaller batch or "
                "a larger host; if they failed to start, the log shows why"
            )
            return
        at_work, *others = dead.tasks or [None]
        self._waiting.extendleft(reversed([each.number for each in others if each]))
        if at_work is not None:
            self._retry(at_work, how)
        self._decoders[place] = self._start()

    def _retry(self, task: Task, how: str) -> None:
        """Give a task whose decoder died to another: in the end picture by picture, because one of
        them may be what kills decoders."""
        deaths = self._deaths.pop(task.number, 0) + 1
        if deaths < _LIVES - 1 or (len(task.lines) == 1 and deaths < _LIVES):
            self._deaths[task.number] = deaths
            self._waiting.appendleft(task.number)
        elif len(task.lines) > 1:
            del self._tasks[task.number]
            for place, line in enumerate(task.lines):
                self._deaths[self._add(task.first + place, [line])] = deaths - 1
        else:
            why = f"{deaths} decoders have died of it ({how})"
            done = Done(number=task.number, extents=((0, 0),), damaged={0: why})
            self._finish(task, done)

    def _add(self, first: int, lines: Sequence[str]) -> int:
        self._numbers += 1
        task = Task(number=self._numbers, first=first, lines=tuple(lines))
        self._tasks[task.number] = task
        self._waiting.append(task.number)
        return task.number

    def _start(self) -> _Decoder:
        ours, theirs = Pipe()
        with theirs:
            inherited = (theirs.fileno(), self._descriptor)
            process = subprocess.Popen(
                [sys.executable, "-m", "training.data.pictures.decoder", *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                env=shard_cache.child_environment(),
            )
        with contextlib.suppress(OSError):  # as in _feed
            ours.send(self._orders)
        return _Decoder(process=process, connection=ours)


def _shared_memory(size: int) -> int:
    """A descriptor of memory without a name: it is freed with the last process that has it."""
    if sys.platform == "linux":
        # Not bound by the size of /dev/shm, which is small in a container.
        descriptor = os.memfd_create("pictures")
        os.truncate(descriptor, size)
        return descriptor
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())
