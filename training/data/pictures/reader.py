"""Batches of a set's pictures for one rank, decoded ahead of the step that needs them.

Which samples a batch holds is the caller's plan, so the order is exact for any number of ranks and
decoders, and in the middle of an epoch:

    order = BatchOrder(num_images=len(found.train), global_batch=256, seed=0)
    with Reader(found, found.train, size=size, device=device, decoders=4) as reader:
        plan = rank_plan(order, steps=range(first, last), rank=rank, world_size=world_size)
        for batch in reader.batches(plan):
            ...

A damaged picture is left out of its batch, which is one smaller then; ``Batch.places`` tells which
of the planned ones are there, and the caller weights them by how many there are over all ranks.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import torch

from contract.errors import InputError
from training.data.augmentation import pair_bounds
from training.data.images import BatchOrder, shard_bounds
from training.data.pictures.index import Entry
from training.data.pictures.library import PictureSet, Split
from training.data.pictures.pool import Filled, Pool

#: Batches that are decoded ahead of the one in use.
AHEAD: Final = 3
#: More damaged pictures than this, and than this share of their split, are no accident.
_MOST_DAMAGED: Final = 100
_MOST_DAMAGED_SHARE: Final = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
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
    places: torch.Tensor
    """int64 ``[n]``, on the host, ascending: where each of them stands in this rank's plan."""
    num_planned: int
    """n and the damaged ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A picture that cannot be used."""

    sample: int
    name: str
    """``<class>/<file>``."""
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def rank_plan(
    order: BatchOrder, *, steps: Iterable[int], rank: int, world_size: int
) -> Iterator[torch.Tensor]:
    """The samples of each step's global batch that are ``rank``'s, int64 ``[n]``: whole pairs,
    which mixup mixes.

    Their places in the global batch are ``range(*pair_bounds(len(batch), ...))``.
    """
    for step in steps:
        batch = order.indices(step)
        first, end = pair_bounds(len(batch), rank=rank, world_size=world_size)
        yield batch[first:end]


def rank_part(num: int, *, batch: int, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """All of a split, each sample once over all ranks: ``rank``'s part in batches of ``batch`` or
    fewer, int64 ``[n]``."""
    first, end = shard_bounds(num, rank=rank, world_size=world_size)
    for start in range(first, end, batch):
        yield torch.arange(start, min(start + batch, end))


class Reader:
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
        ahead: int = AHEAD,
    ) -> None:
        """
        Args:
            split: ``pictures.train`` or ``pictures.val``. The reader of the former also brings the
                shards of a set in S3 to this node, those of both splits.
            size: most pixels of the shorter side of a picture; the recipe's is
                ``ImagenetConfig.size_of``.
            batch: the most samples that a part of the plan has.
            decoders: processes; a core each.
            ahead: batches that are decoded before they are asked for. Each takes
                ``batch * side * side * 3`` bytes, side being ``canvas_side(size)``.
        """
        self._split = split
        self._device = device
        self._damaged: dict[int, Damaged] = {}
        self._slots = ahead + 1  # one is in use
        self._pool = Pool(
            pictures,
            size=size,
            batch=batch,
            slots=self._slots,
            decoders=decoders,
            fetches=split is pictures.train,
        )
        self._copies = None
        if device.type == "cuda":
            self._copies = _Copies(device, torch.from_numpy(self._pool.memory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the decoders. Tensors that lie in their memory stay valid."""
        if self._copies:
            self._copies.close()
            self._copies = None
        self._pool.close()

    @property
    def decoder_pids(self) -> list[int]:
        """Process ids of the decoders that are there now."""
        return self._pool.decoder_pids

    @property
    def damaged(self) -> tuple[Damaged, ...]:
        """The damaged pictures met so far, each once, by their numbers."""
        return tuple(self._damaged[sample] for sample in sorted(self._damaged))

    def batches(self, plan: Iterable[torch.Tensor]) -> Generator[Batch, None, None]:
        """A batch for each part of the plan, in its order. One plan at a time: close it to stop
        before its end.

        Args:
            plan: numbers of samples, int64 ``[n]`` with n up to ``batch``; it may be endless.

        Raises:
            InputError: so many pictures are damaged that something else is wrong, or the index is.
            ReadingError: decoders die again and again, or the set cannot be reached any more.
        """
        parts = iter(plan)
        planned: deque[torch.Tensor] = deque()
        slot = -1  # in use
        try:
            while True:
                while len(planned) < self._slots - 1 and (part := next(parts, None)) is not None:
                    planned.append(part)
                    self._order((slot + len(planned)) % self._slots, part)
                if not planned:
                    return
                slot = (slot + 1) % self._slots
                part = planned.popleft()
                batch = self._batch(slot, part, self._pool.filled(slot))
                yield batch
        finally:
            self._pool.drop()

    def _order(self, slot: int, part: torch.Tensor) -> None:
        if self._copies:
            self._copies.wait(slot)
        self._pool.order(slot, [self._split.line(each) for each in part.tolist()])

    def _batch(self, slot: int, samples: torch.Tensor, filled: Filled) -> Batch:
        labels = torch.tensor([Entry.from_line(line).label for line in filled.lines])
        pictures, extents = torch.from_numpy(filled.pictures), torch.tensor(filled.extents)
        places = torch.arange(len(samples))
        if filled.damaged:
            self._note(samples, filled)
            places = torch.tensor([i for i in range(len(samples)) if i not in filled.damaged])
            places = places.to(torch.int64)
        if self._copies:
            pictures = self._copies.send(slot, pictures)
        whole = len(places) == len(samples)
        kept = places.to(self._device)
        return Batch(
            pictures=pictures if whole else pictures.index_select(0, kept),
            extents=extents.view(-1, 2)[places].to(self._device, non_blocking=True),
            labels=labels[places].to(self._device, non_blocking=True),
            samples=samples[places],
            places=places,
            num_planned=len(samples),
        )

    def _note(self, samples: torch.Tensor, filled: Filled) -> None:
        for place, why in filled.damaged.items():
            sample = int(samples[place])
            name = Entry.from_line(filled.lines[place]).name
            self._damaged.setdefault(sample, Damaged(sample=sample, name=name, why=why))
        num = len(self._split)
        most = max(min(_MOST_DAMAGED, num // 2), _MOST_DAMAGED_SHARE * num)
        if len(self._damaged) > most:
            raise InputError(
                f"{len(self._damaged)} of {num:,} pictures are damaged, the last is "
                f"{next(reversed(self._damaged.values()))}; check the disk and the set with "
                "trainctl data verify"
            )


class _Copies:
    """Copies from the ring to a GPU, beside what it computes."""

    def __init__(self, device: torch.device, ring: torch.Tensor) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._events: dict[int, torch.cuda.Event] = {}
        self._ring = ring
        # With its pages locked, the GPU reads the ring by itself, at full speed. Where that is
        # refused, the driver copies through pages of its own.
        refused = torch.cuda.cudart().cudaHostRegister(ring.data_ptr(), ring.nbytes, 0)
        self._locked = int(refused) == 0

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())

    def send(self, slot: int, pictures: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            found = pictures.to(self._device, non_blocking=True)
            event = self._events[slot] = torch.cuda.Event()
            event.record(self._stream)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        found.record_stream(current)
        return found

    def wait(self, slot: int) -> None:
        """Until the GPU has what lay in a slot."""
        if (event := self._events.pop(slot, None)) is not None:
            event.synchronize()
