"""Sequences of each step of a run on a mixture (``training.data.mixture``).

An epoch has as many sequences as all sources together, each source its share of them, shuffled by
the seed and the epoch. Each source has its own seeded order and its own epochs, so the batch of a
step is the same on any number of workers, and a resumed run finds it at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from contract.errors import InputError
from training.data.feed import Batch, Feed, Shuffle, feed_of
from training.data.mixture import Source
from training.data.rows import Tokens, TokenStore

#: A source that is seen more often teaches little more (Muennighoff et al., arXiv:2305.16264).
_MANY_EPOCHS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A source of a run's data: what of it is learned, and how much it counts."""

    label: str
    share: float
    """Of the run's sequences."""
    store: TokenStore
    feed: Feed


class MixedFeed:
    """Sequences of several sources, in the shares that they were given.

    A source whose share is larger than its part of all sequences is seen more than once in an
    epoch, another less. What fills no step is left out, another part in each epoch.
    """

    def __init__(self, parts: Sequence[Part], *, global_batch: int, seed: int) -> None:
        """
        Raises:
            InputError: they do not fill a step.
        """
        self.parts, self._global_batch = parts, global_batch
        num = sum(each.feed.num_sequences for each in parts)
        self._counts = np.array([max(1, round(each.share * num)) for each in parts])
        total = int(self._counts.sum())
        self.steps_per_epoch = total // global_batch
        if not self.steps_per_epoch:
            raise InputError(
                f"all sources together are {num} sequences, fewer than the {global_batch} of one "
                "step: give more text, or a smaller batch or sequence"
            )
        # Source of each sequence of an epoch, and its number among those of this source.
        self._source = np.repeat(np.arange(len(parts)), self._counts)
        self._number = np.concatenate([np.arange(each) for each in self._counts])
        self._order = Shuffle(seed=seed, num=total)
        per_sequence = sum(each.share * each.feed.tokens_per_step for each in parts)
        self.tokens_per_step = global_batch * per_sequence
        self.isolates = any(each.feed.isolates for each in parts)
        self.notes = [f"{each.label}: {note}" for each in parts for note in each.feed.notes]

    def sequences(self, step: int) -> list[Tokens]:
        """Sequences of a step, source by source, in the order of their places."""
        source, places = self._places(step)
        return [
            each.feed.endless(places[source == number]) for number, each in enumerate(self.parts)
        ]

    def step(self, step: int, *, rank: int, world_size: int) -> Batch:
        """A worker's part of a step."""
        source, places = (each[rank::world_size] for each in self._places(step))
        rows = [np.flatnonzero(source == number) for number in range(len(self.parts))]
        batches = [
            each.feed.train.batch(each.feed.endless(places[own]))
            for each, own in zip(self.parts, rows, strict=True)
        ]
        return _merged(batches, rows)

    def num_labels(self, step: int) -> int:
        """Number of labels that all workers learn in a step."""
        return sum(
            each.feed.train.num_labels(found)
            for each, found in zip(self.parts, self.sequences(step), strict=True)
        )

    def times_seen(self, total_steps: int) -> list[float]:
        """Number of times that a run sees each source."""
        num = total_steps * self._global_batch
        return [num * each.share / each.feed.num_sequences for each in self.parts]

    def _places(self, step: int) -> tuple[Tokens, Tokens]:
        """Source of each sequence of a step, and its place among all of this source in the run."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self._global_batch
        found = self._order.pick(epoch, np.arange(first, first + self._global_batch))
        source = self._source[found]
        return source, epoch * self._counts[source] + self._number[found]


def feed_for(
    sources: Sequence[Source],
    stores: Sequence[TokenStore],
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    isolates: bool = False,
    packs: bool = True,
) -> tuple[Feed | MixedFeed, Sequence[Part]]:
    """Feed of a run, and its parts: one for each source.

    Args:
        stores: one for each source.
        isolates: attention stays within a document of text.
        packs: several conversations may share a sequence.

    Raises:
        InputError: it does not fill a step.
    """
    is_mixed = len(sources) > 1
    parts = []
    for number, (source, store) in enumerate(zip(sources, stores, strict=True)):
        try:
            feed = feed_of(
                store,
                seq_len=seq_len,
                # In a mixture, no source needs to fill a step by itself.
                global_batch=1 if is_mixed else global_batch,
                # Sources of one length would else come in the same order.
                seed=seed + number * 2**32,
                isolates=isolates,
                packs=packs,
            )
        except InputError as error:
            raise InputError(f"{source.place}: {error}") from None
        parts.append(Part(label=source.label, share=source.share, store=store, feed=feed))
    if not is_mixed:
        return parts[0].feed, parts
    return MixedFeed(parts, global_batch=global_batch, seed=seed), parts


def described(feed: MixedFeed, total_steps: int) -> tuple[list[str], list[str]]:
    """Facts about a run on a mixture for its user, and warnings, a sentence each."""
    facts, warnings = [], []
    for part, times in zip(feed.parts, feed.times_seen(total_steps), strict=True):
        facts.append(
            f"{part.label}: {part.feed.num_sequences:,} sequences, {part.share:.2%} of the run's, "
            f"each seen {times:.2f} times"
        )
        if times > _MANY_EPOCHS:
            warnings.append(
                f"{part.label} is repeated {times:.1f} times in this run, which teaches little "
                f"after {_MANY_EPOCHS}: give it a smaller weight, more text, or take fewer steps"
            )
    return facts, warnings


def _merged(batches: Sequence[Batch], rows: Sequence[Tokens]) -> Batch:
    """Batches of several sources as one.

    Args:
        rows: where the sequences of each one belong.
    """
    num, seq_len = sum(map(len, rows)), batches[0].labels.shape[1]
    tokens, labels = np.empty((num, seq_len + 1), np.int64), np.empty((num, seq_len), np.int64)
    # A running count: attention over the whole sequence.
    positions = np.tile(np.arange(seq_len), (num, 1))
    for batch, own in zip(batches, rows, strict=True):
        tokens[own] = batch.tokens
        labels[own] = batch.labels
        if batch.positions is not None:
            positions[own] = batch.positions
    isolates = any(each.positions is not None for each in batches)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=positions if isolates else None,
        num_tokens=sum(each.num_tokens for each in batches),
    )
