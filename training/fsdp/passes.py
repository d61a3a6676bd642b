"""Inputs of each step's passes, made by a thread while the step before trains."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from training.data.feed import Batch, Feed
from training.loop.worker import Worker
from training.system.copies import to_device


class StepInputs(NamedTuple):
    """A worker's part of a step."""

    passes: list[list[Tensor | None]]
    """Arguments of ``WithLoss``, on the device."""
    num_tokens: int
    """Inputs of this worker that are not padding."""
    num_labels: int
    """Labels that all workers learn."""


def ahead(
    feed: Feed, steps: Iterable[int], worker: Worker, *, num_passes: int
) -> Iterator[StepInputs]:
    """The inputs of some steps, each made while the one before is in use."""
    device = worker.device

    def make(step: int) -> StepInputs:
        batch = feed.step(step, rank=worker.rank, world_size=worker.world_size)
        return StepInputs(
            [on_device(each, device) for each in batch.parts(num_passes)],
            batch.num_tokens,
            feed.num_labels(step),
        )

    # A new thread begins with the first GPU.
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1, initializer=begin) as pool:
        made = (pool.submit(make, step) for step in steps)
        for coming, _ in pairwise(chain(made, [None])):
            assert coming is not None
            yield coming.result()


def on_device(batch: Batch, device: torch.device) -> list[Tensor | None]:
    """Arguments of ``WithLoss``."""
    arrays = (batch.tokens, batch.positions, batch.labels)
    return [None if each is None else to_device(torch.from_numpy(each), device) for each in arrays]
