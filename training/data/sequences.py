"""Which sequences of a token store each step trains on, and what belongs to which document."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.errors import InputError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOrder:
    """Which sequences each step trains on: a function of only the step and the seed.

    Sequence ``i`` is tokens ``[i * seq_len, (i + 1) * seq_len]``, both ends included: the last
    token of one is the first of the next, as label there and as input here. What does not fill a
    sequence or a step is left out, another part in each epoch.
    """

    num_tokens: int
    seq_len: int
    global_batch: int
    """Sequences per optimizer update, over all workers."""
    seed: int

    def __post_init__(self) -> None:
        if self.num_sequences < self.global_batch:
            raise InputError(
                f"{self.num_tokens:,} tokens are {self.num_sequences} sequences of {self.seq_len}, "
                f"fewer than the {self.global_batch} of one step: give more text, or a smaller "
                "batch or sequence"
            )

    @property
    def num_sequences(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_len)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_sequences // self.global_batch

    def sequences(self, step: int) -> Tokens:
        """Indices of the sequences of ``step`` (0 is the first), ``[global_batch]``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = permutation(self.seed, epoch, self.num_sequences)
        return order[within * self.global_batch :][: self.global_batch]

    def batch(self, tokens: npt.NDArray[Any], step: int, *, rank: int, world_size: int) -> Tokens:
        """A worker's part of a step, ``[global_batch / world_size, seq_len + 1]``.

        Inputs are ``[:, :-1]``, labels ``[:, 1:]``.
        """
        mine = share(self.sequences(step), rank=rank, world_size=world_size)
        window = np.arange(self.seq_len + 1)
        picked: Tokens = tokens[mine[:, None] * self.seq_len + window].astype(np.int64)
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


@functools.lru_cache(maxsize=1)
def permutation(seed: int, epoch: int, num: int) -> Tokens:
    """Order of an epoch's sequences. Kept, because every step of the epoch asks for it."""
    order = np.random.default_rng([seed, epoch]).permutation(num)
    order.flags.writeable = False
    return order


def positions_in_documents(inputs: Tokens, end_of_text: int) -> Tokens:
    """Position of each token within its document, ``inputs``'s shape; a sequence's first is 0.

    Models that are given these instead of a running count attend only within a document.
    """
    place = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == end_of_text, place[:, 1:], 0)
    inside: Tokens = place - np.maximum.accumulate(begins, axis=1)
    return inside
