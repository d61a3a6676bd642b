"""Sequences of each step of a language model, from a store of text or of conversations.

Text is cut into windows of one length; conversations are packed into sequences, none is torn apart,
and none sees another. The batch of a step is a function of only the step and the seed.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from training.data.text import ChatPart, Tokens, TokenStore
from training.loop.losses import IGNORE

#: Stands for a sequence that holds nothing.
NOTHING: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences, and the labels that are learned."""

    tokens: Tokens
    """``[num_sequences, seq_len + 1]``: inputs and labels overlap in all but one."""
    labels: Tokens | None = None
    """``[num_sequences, seq_len]``, ``IGNORE`` where nothing is learned; None: all tokens are."""
    positions: Tokens | None = None
    """Positions of the inputs in their documents, ``[num_sequences, seq_len]``; None: attention
    reaches over the whole sequence."""
    num_labels: int
    """Labels that are learned."""
    num_tokens: int
    """Inputs that are not padding."""

    def parts(self, num: int) -> "list[Batch]":
        """Split into ``num`` batches whose sizes differ by at most one sequence.

        All ranks of a step take as many passes, so where there are fewer sequences than ``num``,
        the last parts repeat the first sequence and have no labels to learn.
        """
        found = []
        total = len(self.tokens)
        for own in np.array_split(np.arange(total), num):
            rows = own if len(own) else np.zeros(1, np.int64)
            labels = None if self.labels is None else self.labels[rows]
            num_labels = self.num_labels * len(own) // total
            if labels is not None:
                num_labels = int((labels[: len(own)] != IGNORE).sum())
            found.append(
                Batch(
                    tokens=self.tokens[rows],
                    labels=labels,
                    positions=None if self.positions is None else self.positions[rows],
                    num_labels=num_labels,
                    num_tokens=self.num_tokens * len(own) // total,
                )
            )
        return found


class TextFeed:
    """Windows of text. Each token is learned once an epoch; what fills no step is left out."""

    def __init__(
        self, store: TokenStore, *, seq_len: int, global_batch: int, seed: int, isolates: bool
    ) -> None:
        """
        Args:
            isolates: attention stays within a document.
        """
        self._store, self._seq_len, self._isolates = store, seq_len, isolates
        self._order = SequenceOrder(
            num_tokens=store.info.num_train_tokens,
            seq_len=seq_len,
            global_batch=global_batch,
            seed=seed,
        )
        self.isolates = isolates
        self.num_sequences = self._order.num_sequences
        self.steps_per_epoch = self._order.steps_per_epoch
        self.tokens_per_step = float(global_batch * seq_len)
        """Mean number of inputs that are not padding."""
        self.num_held_out = max(0, (len(store.held_out) - 1) // seq_len)
        """Sequences of the held-out part."""
        self.notes: list[str] = []
        """Notes for the user about the data, a sentence each."""

    def step(self, step: int, *, rank: int, world_size: int) -> Batch:
        """A worker's part of a step."""
        return self.batch(self._order.sequences(step)[rank::world_size])

    def num_labels(self, step: int) -> int:
        """Number of labels that all workers learn in a step."""
        return self.num_labels_of(self._order.sequences(step))

    def endless(self, places: Tokens) -> Tokens:
        """The sequences of some places, where epochs follow each other and each has all of them."""
        return endless(self._order.order, places)

    def num_labels_of(self, sequences: Tokens) -> int:
        """Number of labels that are learned in some sequences."""
        return len(sequences) * self._seq_len

    def batch(self, sequences: Tokens) -> Batch:
        """Read sequences of the training part."""
        return self._batch(windows(self._store.train, sequences, self._seq_len))

    def held_out(self, sequences: Tokens) -> Batch:
        """Read held-out sequences; ``NOTHING`` stands for one that does not count."""
        rows = windows(self._store.held_out, np.maximum(sequences, 0), self._seq_len)
        batch = self._batch(rows)
        num = int((sequences != NOTHING).sum()) * self._seq_len
        return Batch(tokens=batch.tokens, positions=batch.positions, num_labels=num, num_tokens=num)

    def num_held_out_labels(self, num: int) -> int:
        """Number of labels that are learned in the first ``num`` held-out sequences."""
        return num * self._seq_len

    def _batch(self, tokens: Tokens) -> Batch:
        positions = None
        if self._isolates:
            positions = positions_in_documents(tokens[:, :-1], self._store.info.end_of_text)
        num = len(tokens) * self._seq_len
        return Batch(tokens=tokens, positions=positions, num_labels=num, num_tokens=num)


class ChatFeed:
    """Conversations, each whole and once an epoch: the last step of one is filled up with nothing.

    Packed into a sequence, they do not see each other.
    """

    def __init__(
        self, store: TokenStore, *, seq_len: int, global_batch: int, seed: int, packs: bool = True
    ) -> None:
        """
        Args:
            packs: several may share a sequence.

        Raises:
            InputError: they do not fill a step.
        """
        info = store.info
        train, held_out = (
            Packs(
                store.conversations(held_out=each),
                seq_len=seq_len,
                padding=info.end_of_text,
                shares=packs,
            )
            for each in (False, True)
        )
        self._train, self._held_out = train, held_out
        self._global_batch = global_batch
        self._order = Shuffle(seed=seed, num=train.num_sequences)
        self.num_sequences = train.num_sequences
        if train.num_sequences < global_batch:
            raise InputError(
                f"{info.num_train_conversations:,} conversations are {train.num_sequences} "
                f"sequences of {seq_len}, fewer than the {global_batch} of one step: give more of "
                "them, or a smaller batch or sequence"
            )
        self.isolates = packs
        """Attention stays within a conversation. One that has a sequence to itself needs no care:
        padding comes after it, and no token sees what follows."""
        self.steps_per_epoch = -(-train.num_sequences // global_batch)
        self.tokens_per_step = train.num_tokens / self.steps_per_epoch
        self.num_held_out = held_out.num_sequences
        self.notes = []
        cut, dropped = (
            train.num_cut + held_out.num_cut,
            train.num_dropped + held_out.num_dropped,
        )
        if info.num_left_out:
            self.notes.append(f"{info.num_left_out:,} conversations without an answer are left out")
        if cut:
            self.notes.append(
                f"{cut:,} of {info.num_documents:,} conversations are longer than --seq-len "
                f"{seq_len} and lose their end"
                + (f"; {dropped:,} of them have no answer left and are left out" if dropped else "")
            )

    def sequences(self, step: int) -> Tokens:
        """Sequences of a step, ``[global_batch]``, ``NOTHING`` where an epoch has no more."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self._global_batch
        last = min(first + self._global_batch, self.num_sequences)
        found = self._order.pick(epoch, np.arange(first, last))
        return np.pad(found, (0, self._global_batch - len(found)), constant_values=NOTHING)

    def step(self, step: int, *, rank: int, world_size: int) -> Batch:
        """A worker's part of a step."""
        return self.batch(self.sequences(step)[rank::world_size])

    def num_labels(self, step: int) -> int:
        """Number of labels that all workers learn in a step."""
        return self.num_labels_of(self.sequences(step))

    def endless(self, places: Tokens) -> Tokens:
        """The sequences of some places, where epochs follow each other and each has all of them."""
        return endless(self._order, places)

    def num_labels_of(self, sequences: Tokens) -> int:
        """Number of labels that are learned in some sequences."""
        return self._train.num_labels(sequences)

    def batch(self, sequences: Tokens) -> Batch:
        """Read sequences of the training part; ``NOTHING`` is one of padding."""
        return self._placed(self._train.batch(sequences))

    def held_out(self, sequences: Tokens) -> Batch:
        """Read held-out sequences; ``NOTHING`` stands for one that does not count."""
        return self._placed(self._held_out.batch(sequences))

    def _placed(self, batch: Batch) -> Batch:
        return batch if self.isolates else replace(batch, positions=None)

    def num_held_out_labels(self, num: int) -> int:
        """Number of labels that are learned in the first ``num`` held-out sequences."""
        return self._held_out.num_labels(np.arange(num))


def feed_of(
    store: TokenStore,
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    isolates: bool = False,
    packs: bool = True,
) -> TextFeed | ChatFeed:
    """Feed for the content of a store, text or conversations.

    Args:
        isolates: attention stays within a document of text.
        packs: several conversations may share a sequence.

    Raises:
        InputError: it does not fill a step.
    """
    if store.info.is_chat:
        return ChatFeed(store, seq_len=seq_len, global_batch=global_batch, seed=seed, packs=packs)
    return TextFeed(store, seq_len=seq_len, global_batch=global_batch, seed=seed, isolates=isolates)


# --- windows of text ----------------------------------------------------------------------------
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


def endless(order: Shuffle, places: Tokens) -> Tokens:
    """Items at these places where epochs follow each other without end."""
    epochs, within = np.divmod(places, order.num)
    found = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        own = epochs == epoch
        found[own] = order.pick(epoch, within[own])
    return found


class SequenceOrder:
    """Numbers of the sequences of each step: a function of only the step and the seed.

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
    ) -> None:
        """
        Args:
            global_batch: sequences per optimizer update, over all workers.

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
        self.order = Shuffle(seed=seed, num=self.num_sequences)
        self.steps_per_epoch = self.num_sequences // global_batch

    def sequences(self, step: int) -> Tokens:
        """Indices of the sequences of ``step`` (0 is the first), ``[global_batch]``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self.order.pick(epoch, within * self.global_batch + np.arange(self.global_batch))


def windows(tokens: npt.NDArray[Any], sequences: Tokens, seq_len: int) -> Tokens:
    """Cut sequences out of a row of tokens, ``[len(sequences), seq_len + 1]``."""
    picked: Tokens = tokens[sequences[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int64)
    return picked


def positions_in_documents(inputs: Tokens, end_of_text: int) -> Tokens:
    """Position of each token within its document, ``inputs``'s shape; a sequence's first is 0.

    Models that are given these instead of a running count attend only within a document.
    """
    place = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == end_of_text, place[:, 1:], 0)
    inside: Tokens = place - np.maximum.accumulate(begins, axis=1)
    return inside


# --- packs of conversations ---------------------------------------------------------------------
class Packs:
    """The conversations of a store in sequences of one length, each whole and once.

    Which lie together depends only on their lengths: the longest are placed first, each where it
    leaves the least room (best fit, decreasing). What is longer than a sequence loses its end.
    """

    def __init__(self, part: ChatPart, *, seq_len: int, padding: int, shares: bool = True) -> None:
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
        """Conversations without a label in what is left of them."""
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
        """Read sequences; ``NOTHING`` is one of padding."""
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
