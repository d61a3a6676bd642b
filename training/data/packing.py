"""Conversations packed into sequences: none is torn apart, and none sees another."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from training.data.sequences import Tokens
from training.data.text import Part
from training.losses import IGNORE

#: Stands for a sequence that holds nothing.
NOTHING: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Some sequences, and what is learned of them."""

    tokens: Tokens
    """``[num_sequences, seq_len + 1]``: inputs and labels overlap in all but one."""
    labels: Tokens | None = None
    """``[num_sequences, seq_len]``, ``IGNORE`` where nothing is learned; None: all tokens are."""
    positions: Tokens | None = None
    """Of the inputs within their documents, ``[num_sequences, seq_len]``; None: attention reaches
    over the whole sequence."""
    num_labels: int
    """Labels that are learned."""
    num_tokens: int
    """Inputs that are not padding."""

    def parts(self, num: int) -> "list[Batch]":
        """The same in as many parts of as many sequences each."""
        size = len(self.tokens) // num
        found = []
        for first in range(0, num * size, size):
            rows = slice(first, first + size)
            labels = None if self.labels is None else self.labels[rows]
            found.append(
                Batch(
                    tokens=self.tokens[rows],
                    labels=labels,
                    positions=None if self.positions is None else self.positions[rows],
                    num_labels=self.num_labels // num
                    if labels is None
                    else int((labels != IGNORE).sum()),
                    num_tokens=self.num_tokens // num,
                )
            )
        return found


class Packs:
    """The conversations of a store in sequences of one length, each whole and once.

    Which lie together depends only on their lengths: the longest are placed first, each where it
    leaves the least room (best fit, decreasing). What is longer than a sequence loses its end.
    """

    def __init__(self, part: Part, *, seq_len: int, padding: int, shares: bool = True) -> None:
        """
        Args:
            padding: id of the token that fills a sequence up.
            shares: several may lie in a sequence.
        """
        self._part, self._seq_len, self._padding = part, seq_len, padding
        lengths = np.diff(part.starts)
        self.num_cut = int((lengths > seq_len + 1).sum())
        """Conversations that are longer than a sequence."""
        self._lengths = np.minimum(lengths, seq_len + 1)
        counts = self._num_labels()
        kept = np.flatnonzero(counts)
        self.num_dropped = len(lengths) - len(kept)
        """Of those, the ones of which nothing is left to learn."""
        own = np.arange(len(kept))
        pack_of = best_fit(self._lengths[kept], seq_len + 1) if shares else own
        self.num_sequences = int(pack_of.max(initial=-1)) + 1
        self._members = kept[np.argsort(pack_of, kind="stable")]
        self._first = np.concatenate(
            [[0], np.cumsum(np.bincount(pack_of, minlength=self.num_sequences))]
        ).astype(np.int64)
        # With a last entry for sequences that hold nothing.
        self._labels_of = np.zeros(self.num_sequences + 1, np.int64)
        np.add.at(self._labels_of, pack_of, counts[kept])
        self._tokens_of = np.zeros(self.num_sequences + 1, np.int64)
        np.add.at(self._tokens_of, pack_of, self._lengths[kept])
        self._tokens_of = np.minimum(self._tokens_of, seq_len)

    def members(self, sequence: int) -> Tokens:
        """Numbers of the conversations of a sequence."""
        if sequence == NOTHING:
            return self._members[:0]
        return self._members[self._first[sequence] : self._first[sequence + 1]]

    def num_labels(self, sequences: Tokens) -> int:
        """Labels of some sequences that are learned."""
        return int(self._labels_of[sequences].sum())

    @property
    def num_tokens(self) -> int:
        """Inputs of all sequences that are not padding."""
        return int(self._tokens_of.sum())

    def batch(self, sequences: Tokens) -> Batch:
        """Some sequences; ``NOTHING`` is one of padding."""
        shape = (len(sequences), self._seq_len + 1)
        tokens = np.full(shape, self._padding, np.int64)
        learned = np.zeros(shape, bool)
        positions = np.zeros(shape, np.int64)
        for row, sequence in enumerate(sequences.tolist()):
            at = 0
            for member in self.members(sequence).tolist():
                first, size = self._part.starts[member], self._lengths[member]
                own = slice(at, at + size)
                tokens[row, own] = self._part.tokens[first : first + size]
                # The first token follows another conversation: nothing tells what it will be.
                learned[row, at + 1 : at + size] = self._part.learned[first + 1 : first + size]
                positions[row, own] = np.arange(size)
                at += size
            positions[row, at:] = np.arange(self._seq_len + 1 - at)
        return Batch(
            tokens=tokens,
            labels=np.where(learned[:, 1:], tokens[:, 1:], IGNORE),
            positions=positions[:, :-1],
            num_labels=self.num_labels(sequences),
            num_tokens=int(self._tokens_of[sequences].sum()),
        )

    def _num_labels(self) -> Tokens:
        """Learned labels of each conversation, as much of it as fits a sequence."""
        sums = np.zeros(len(self._lengths), np.int64)
        starts, learned = self._part.starts, self._part.learned
        whole = self._lengths == np.diff(starts)
        if len(learned):
            sums = np.add.reduceat(learned, starts[:-1], dtype=np.int64).astype(np.int64)
            sums -= learned[starts[:-1]]
        for number in np.flatnonzero(~whole).tolist():
            first = starts[number]
            sums[number] = learned[first + 1 : first + self._lengths[number]].sum()
        return sums


def best_fit(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> Tokens:
    """The pack of each of several lengths, none above ``capacity``, numbered from 0.

    Takes about a second per million.
    """
    sizes = np.asarray(lengths, np.int64)
    found = np.empty(len(sizes), np.int64)
    rooms: list[int] = []  # those that some pack has left, sorted
    packs: dict[int, list[int]] = {}
    number = 0
    order = np.argsort(-sizes, kind="stable")
    for place, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            pack, room = number, capacity
            number += 1
        else:
            room = rooms[at]
            pack = packs[room].pop()
            if not packs[room]:
                del packs[room], rooms[at]
        found[place] = pack
        left = room - size
        if left and left not in packs:
            insort(rooms, left)
            packs[left] = []
        if left:
            packs[left].append(pack)
    return found
