"""Which sequences of a token store each step trains on, and what belongs to which document."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from contract.errors import InputError

Tokens = npt.NDArray[np.int64]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Order(Protocol):
    """The order in which some things come, in each epoch another."""

    num: int
    """How many there are."""

    def pick(self, epoch: int, places: Tokens) -> Tokens:
        """What has these places in an epoch, 0 the first."""
        ...


class Shuffle:
    """All of them shuffled: a function of only the seed and the epoch."""

    def __init__(self, *, seed: int, num: int) -> None:
        self.num, self._seed = num, seed
        self._epoch = -1
        self._order: npt.NDArray[np.signedinteger] = np.zeros(0, np.int64)

    def pick(self, epoch: int, places: Tokens) -> Tokens:
        # Kept, because every step of the epoch asks for it.
        if epoch != self._epoch:
            self._epoch = epoch
            # Half the memory of int64, and the same order.
            numbers = np.arange(self.num, dtype=np.int32 if self.num < 2**31 else np.int64)
            self._order = np.random.default_rng([self._seed, epoch]).permutation(numbers)
        return self._order[places].astype(np.int64)


class BlockShuffle:
    """Shuffled so that those needed at one time lie together: neighbors form blocks, the blocks
    come in a seeded order, and some consecutive ones of it are shuffled with each other.

    A function of only the seed and the epoch, as ``Shuffle``. In memory is the order of the blocks
    and that of the last two groups.
    """

    def __init__(
        self,
        *,
        seed: int,
        num: int,
        block: int,
        group: int,
        begins: Callable[[Sequence[int]], None] = lambda _blocks: None,
    ) -> None:
        """
        Args:
            block: how many lie in a block; in the last one fewer.
            group: blocks that are shuffled with each other.
            begins: called as a group begins, with its blocks and those of the group after it.
        """
        self.num, self._seed, self._block, self._group = num, seed, block, group
        self._num_blocks = -(-num // block)
        self._begins = begins
        self._epochs: dict[int, tuple[Tokens, Tokens]] = {}
        self._groups: dict[tuple[int, int], Tokens] = {}

    def pick(self, epoch: int, places: Tokens) -> Tokens:
        _, ends = self._order(epoch)
        groups = np.searchsorted(ends, places, side="right")
        found = np.empty_like(places)
        for group in np.unique(groups).tolist():
            own = groups == group
            first = int(ends[group - 1]) if group else 0
            found[own] = self._members(epoch, group)[places[own] - first]
        return found

    def _order(self, epoch: int) -> tuple[Tokens, Tokens]:
        """Order of an epoch's blocks, and where each group ends."""
        if epoch not in self._epochs:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._num_blocks)
            sizes = np.minimum(self._block, self.num - order * self._block)
            firsts = np.arange(0, self._num_blocks, self._group)
            _keep(self._epochs, epoch, (order, np.cumsum(np.add.reduceat(sizes, firsts))))
        return self._epochs[epoch]

    def _blocks(self, epoch: int, group: int) -> list[int]:
        order, ends = self._order(epoch)
        if group == len(ends):
            return self._blocks(epoch + 1, 0)
        found: list[int] = order[group * self._group :][: self._group].tolist()
        return found

    def _members(self, epoch: int, group: int) -> Tokens:
        if (epoch, group) not in self._groups:
            blocks = self._blocks(epoch, group)
            self._begins([*blocks, *self._blocks(epoch, group + 1)])
            members = np.concatenate(
                [
                    np.arange(each * self._block, min((each + 1) * self._block, self.num))
                    for each in blocks
                ]
            )
            order = np.random.default_rng([self._seed, epoch, group]).permutation(len(members))
            _keep(self._groups, (epoch, group), members[order])
        return self._groups[epoch, group]


def _keep(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add to what is kept, of which the last two stay: a step may lie in both."""
    kept[key] = value
    while len(kept) > 2:
        del kept[next(iter(kept))]


def endless(order: Order, places: Tokens) -> Tokens:
    """What has these places where epochs follow each other without end."""
    epochs, within = np.divmod(places, order.num)
    found = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        own = epochs == epoch
        found[own] = order.pick(epoch, within[own])
    return found


class SequenceOrder:
    """Which sequences each step trains on: a function of only the step and the seed.

    Sequence ``i`` is tokens ``[i * seq_len, (i + 1) * seq_len]``, both ends included: the last
    token of one is the first of the next, as label there and as input here. What does not fill a
    sequence or a step is left out, another part in each epoch.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        seq_len: int,
        global_batch: int,
        seed: int,
        shuffle: Callable[[int, int], Order] | None = None,
    ) -> None:
        """
        Args:
            global_batch: sequences per optimizer update, over all workers.
            shuffle: makes the order, of the seed and the number of sequences; without it, all of
                them are shuffled with each other.

        Raises:
            InputError: they do not fill a step.
        """
        self.seq_len, self.global_batch = seq_len, global_batch
        self.num_sequences = max(0, (num_tokens - 1) // seq_len)
        if self.num_sequences < global_batch:
            raise InputError(
                f"{num_tokens:,} tokens are {self.num_sequences} sequences of {seq_len}, "
                f"fewer than the {global_batch} of one step: give more text, or a smaller "
                "batch or sequence"
            )
        num = self.num_sequences
        self.order = shuffle(seed, num) if shuffle else Shuffle(seed=seed, num=num)
        self.steps_per_epoch = self.num_sequences // global_batch

    def sequences(self, step: int) -> Tokens:
        """Indices of the sequences of ``step`` (0 is the first), ``[global_batch]``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self.order.pick(epoch, within * self.global_batch + np.arange(self.global_batch))

    def batch(self, tokens: npt.NDArray[Any], step: int, *, rank: int, world_size: int) -> Tokens:
        """A worker's part of a step, ``[global_batch / world_size, seq_len + 1]``.

        Inputs are ``[:, :-1]``, labels ``[:, 1:]``.
        """
        mine = share(self.sequences(step), rank=rank, world_size=world_size)
        return windows(tokens, mine, self.seq_len)


def windows(tokens: npt.NDArray[Any], sequences: Tokens, seq_len: int) -> Tokens:
    """Some sequences of a row of tokens, ``[len(sequences), seq_len + 1]``."""
    picked: Tokens = tokens[sequences[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int64)
    return picked


def share(sequences: Tokens, *, rank: int, world_size: int) -> Tokens:
    """A worker's part of a step's sequences.

    Raises:
        InputError: the workers cannot all have as many.
    """
    if len(sequences) % world_size:
        raise InputError(
            f"a global batch of {len(sequences)} sequences cannot be shared by {world_size} "
            "workers: choose a multiple"
        )
    return sequences[rank::world_size]


def positions_in_documents(inputs: Tokens, end_of_text: int) -> Tokens:
    """Position of each token within its document, ``inputs``'s shape; a sequence's first is 0.

    Models that are given these instead of a running count attend only within a document.
    """
    place = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == end_of_text, place[:, 1:], 0)
    inside: Tokens = place - np.maximum.accumulate(begins, axis=1)
    return inside
