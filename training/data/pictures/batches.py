"""Batches of a set's pictures for one rank, decoded by torch's DataLoader ahead of the step that
needs them.

Which samples a batch holds is the caller's plan, so the order is exact for any number of ranks and
decoders, and in the middle of an epoch:

    order = BatchOrder(num_images=len(found.train), global_batch=256, seed=0)
    with PictureReader(found, found.train, size=size, device=device, decoders=4) as reader:
        plan = rank_plan(order, steps=range(first, last), rank=rank, world_size=world_size)
        for batch in reader.batches(plan):
            ...

A damaged picture is left out of its batch, which is one smaller then; the caller weights the others
by how many there are over all ranks.

The DataLoader's workers are forked. They write pixels into a ring of shared memory and return
extents and labels only: tensors sent through its queues would be mapped anew for each batch, which
costs more than decoding raw pixels.
"""

import itertools
import math
import mmap
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch
from torch.utils.data import DataLoader

from contract.errors import InputError
from training.data.pictures import workers
from training.data.pictures.decode import Decoder, DecodingTask, Done
from training.data.pictures.index import JPEG
from training.data.pictures.library import PictureSet, Split
from training.data.pictures.picture import canvas_side
from training.data.small_images import BatchOrder, shard_bounds
from training.system.copies import to_device

#: Batches that are decoded ahead of the one in use.
AHEAD: Final = 3
#: Few enough that all workers decode parts of each batch, if it is large.
_MOST_IN_TASK: Final = 16
#: More damaged pictures than this, and than this share of their split, are no accident.
_MOST_DAMAGED: Final = 100
_MOST_DAMAGED_SHARE: Final = 0.05


class ReadingError(RuntimeError):
    """A process that decodes pictures was killed. Another attempt may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureBatch:
    """One rank's part of a global batch; n is the number of its pictures that are not damaged.

    On a CPU its pictures lie in memory that the next batch may overwrite: use them, or clone them,
    before you ask for it.
    """

    pictures: torch.Tensor
    """uint8 ``[n, side, side, 3]``, on the device. Each fills the top left corner of its canvas;
    the rest is 0."""
    extents: torch.Tensor
    """int64 ``[n, 2]``, on the device: height and width of each picture in its canvas, at least 1.
    The aspect ratio is that of the original, unless only its middle fits (``canvas_side``)."""
    labels: torch.Tensor
    """int64 ``[n]``, on the device."""
    samples: torch.Tensor
    """int64 ``[n]``, on the host: the samples' numbers in their split."""


def rank_plan(
    order: BatchOrder, *, steps: Iterable[int], rank: int, world_size: int
) -> Iterator[torch.Tensor]:
    """The samples of each step's global batch that are ``rank``'s, int64 ``[n]``."""
    for step in steps:
        batch = order.indices(step)
        first, end = shard_bounds(len(batch), rank=rank, world_size=world_size)
        yield batch[first:end]


def rank_part(num: int, *, batch: int, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """All of a split, each sample once over all ranks: ``rank``'s part in batches of ``batch`` or
    fewer, int64 ``[n]``."""
    first, end = shard_bounds(num, rank=rank, world_size=world_size)
    for start in range(first, end, batch):
        yield torch.arange(start, min(start + batch, end))


class _Tasks:
    """The DataLoader's sampler: the parts of a plan, each as the same number of tasks."""

    def __init__(self, *, batch: int, slots: int, tasks_per_part: int) -> None:
        self._batch, self._slots, self._tasks_per_part = batch, slots, tasks_per_part
        self.plan: Iterable[torch.Tensor] = ()
        self.planned: deque[torch.Tensor] = deque()
        """Parts whose tasks were given out, and whose batches were not yet taken."""

    def __iter__(self) -> Iterator[DecodingTask]:
        self.planned.clear()
        for slot, part in zip(itertools.cycle(range(self._slots)), self.plan, strict=False):
            assert len(part) <= self._batch, f"{len(part)} pictures for a slot of {self._batch}"
            self.planned.append(part)
            canvas = slot * self._batch
            # Tasks of equal size, because workers take turns; some are empty in a small part.
            for some in part.tensor_split(self._tasks_per_part):
                yield DecodingTask(canvas=canvas, samples=tuple(some.tolist()))
                canvas += len(some)


class PictureReader:
    """Decodes a split's pictures in processes of its own, which end with it."""

    def __init__(
        self,
        pictures: PictureSet,
        split: Split,
        *,
        size: int,
        batch: int,
        device: torch.device,
        decoders: int,
    ) -> None:
        """
        Args:
            pictures: in a folder, see ``mirror.on_disk``.
            split: ``pictures.train`` or ``pictures.val``.
            size: most pixels of the shorter side of a picture; the recipe's is
                ``ImagenetConfig.size_of``.
            batch: the most samples that a part of the plan has. Each of ``AHEAD + 1`` slots of
                the ring takes ``batch * side * side * 3`` bytes, side being ``canvas_side(size)``.
            decoders: processes; a core each.
        """
        self._split = split
        self._device = device
        self.damaged: dict[str, str] = {}
        """``<class>/<file>`` of the damaged pictures met so far -> what is wrong."""
        self._tasks_per_part = max(min(decoders, batch), math.ceil(batch / _MOST_IN_TASK))
        tasks_each = max(1, AHEAD * self._tasks_per_part // decoders)
        # While a batch is in use, the DataLoader has given out this many tasks of later ones. With
        # fewer slots, the last of them would overwrite the batch.
        tasks_ahead = decoders * tasks_each
        self._slots = 2 + (tasks_ahead - 1) // self._tasks_per_part
        self._batch_size = batch
        side = canvas_side(size)
        # Shared with forked workers, without a name: nothing is left of it after a SIGKILL, and it
        # is not bound by the size of /dev/shm, which is small in a container.
        memory = mmap.mmap(-1, self._slots * batch * side * side * 3)
        ring = np.frombuffer(memory, np.uint8).reshape(self._slots * batch, side, side, 3)
        self._ring = torch.from_numpy(ring)
        self._current = np.frombuffer(mmap.mmap(-1, decoders * 8), np.int64)
        self._tasks = _Tasks(batch=batch, slots=self._slots, tasks_per_part=self._tasks_per_part)
        self._loader: DataLoader[Any] = DataLoader(
            Decoder(
                split,
                root=pictures.root,
                encoding=pictures.index.encoding if pictures.index.size else JPEG,
                size=size,
                ring=ring,
                current=self._current,
            ),
            batch_size=None,
            sampler=self._tasks,
            num_workers=decoders,
            prefetch_factor=tasks_each,
            persistent_workers=True,
            multiprocessing_context="fork",
            worker_init_fn=workers.begin,
            generator=torch.Generator(),  # leaves the seeds of the training process alone
        )
        # Started with an empty plan: the earlier they are forked, the less they share.
        self._answers: Any = iter(self._loader)
        self._copies = _Copies(device, self._ring) if device.type == "cuda" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        killed = self._killed() if "DataLoader worker" in str(error) else ""
        self.close()
        if killed:
            raise ReadingError(killed) from None

    def close(self) -> None:
        """End the workers. Tensors that lie in their memory stay valid."""
        if self._copies:
            self._copies.close()
            self._copies = None
        # Not left to the garbage collector: a traceback may hold a reference for long.
        self._answers._shutdown_workers()
        for each in self._answers._workers:
            if each.is_alive():  # its disk does not answer
                each.kill()

    def batches(self, plan: Iterable[torch.Tensor]) -> Generator[PictureBatch, None, None]:
        """A batch for each part of the plan, in its order. One plan at a time: close it to stop
        before its end.

        A worker that is killed raises a RuntimeError anywhere in the main thread. Within ``with``,
        the reader makes a ReadingError of it.

        Args:
            plan: numbers of samples, int64 ``[n]`` with n up to ``batch``; it may be endless.

        Raises:
            InputError: so many pictures are damaged that something else is wrong, or the index is.
        """
        self._tasks.plan = plan
        answers = iter(self._loader)  # the same workers; waits until they have left the last plan
        for slot in itertools.cycle(range(self._slots)):
            found = list(itertools.islice(answers, self._tasks_per_part))
            if not found:
                return
            for each in found:
                if isinstance(each, InputError):
                    raise each
                self.damaged |= each.damaged
            self._check_damaged()
            yield self._batch(slot, self._tasks.planned.popleft(), found)
            if self._copies:
                # The next batch has tasks given out that write to this slot.
                self._copies.wait()

    def _batch(self, slot: int, samples: torch.Tensor, found: Sequence[Done]) -> PictureBatch:
        labels = torch.tensor([each for done in found for each in done.labels], dtype=torch.int64)
        sides = [each for done in found for each in done.extents]
        extents = torch.tensor(sides, dtype=torch.int64).view(-1, 2)
        whole = extents[:, 0].nonzero().flatten()
        first = slot * self._batch_size
        pictures = self._ring[first : first + len(samples)]
        if self._copies:
            pictures = self._copies.send(pictures)
        if len(whole) < len(samples):
            pictures = pictures.index_select(0, whole.to(self._device))
        return PictureBatch(
            pictures=pictures,
            extents=to_device(extents[whole], self._device),
            labels=to_device(labels[whole], self._device),
            samples=samples[whole],
        )

    def _check_damaged(self) -> None:
        """
        Raises:
            InputError: so many pictures are damaged that something else is wrong.
        """
        num = len(self._split)
        most = max(min(_MOST_DAMAGED, num // 2), _MOST_DAMAGED_SHARE * num)
        if len(self.damaged) > most:
            name, why = next(reversed(self.damaged.items()))
            raise InputError(
                f"{len(self.damaged)} of {num:,} pictures are damaged, the last is {name}: {why}; "
                "check the disk, or prepare the set again"
            )

    def _killed(self) -> str:
        """A sentence about the workers that died by themselves; empty where none has."""
        for process, sample in zip(self._answers._workers, self._current, strict=True):
            if not process.exitcode:
                continue
            code = process.exitcode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            at_work = f" while it decoded {self._split.entry(sample).name}" if sample >= 0 else ""
            return (
                f"a process that decodes pictures {how}{at_work}. If the host is short of memory, "
                "use fewer --decoders, a smaller --batch-per-worker or a larger host; if the same "
                "picture is named again, remove it from the set"
            )
        return ""


class _Copies:
    """Copies from the ring to a GPU, beside what it computes."""

    def __init__(self, device: torch.device, ring: torch.Tensor) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._sent = torch.cuda.Event()
        self._ring = ring
        # With its pages locked, the GPU reads the ring by itself, at full speed. Where that is
        # refused, the driver copies through pages of its own.
        refused = torch.cuda.cudart().cudaHostRegister(ring.data_ptr(), ring.nbytes, 0)
        self._locked = int(refused) == 0

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())

    def send(self, pictures: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            found = pictures.to(self._device, non_blocking=True)
            self._sent.record(self._stream)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._sent)
        found.record_stream(current)
        return found

    def wait(self) -> None:
        """Until the GPU has the pictures that were sent last."""
        self._sent.synchronize()
