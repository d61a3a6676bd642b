"""Sequences of each step of a language model, from a store of text or of conversations.

Text is cut into windows of one length; conversations are packed into sequences, none is torn apart,
and none sees another. The batch of a step is a function of only the step and the seed.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from contract.text import counted
from training.data.rows import ChatPart, Tokens, TokenStore
from training.loop.losses import IGNORE

#: Stands for a sequence that holds nothing.
NOTHING: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences, and the labels that are learned."""

    tokens: Tokens
    """``[num_sequences, seq_len + 1]``: inputs and labels overlap in all but one."""
    labels: Tokens
    """``[num_sequences, seq_len]``, ``IGNORE`` where nothing is learned."""
    positions: Tokens | None
    """Positions of the inputs in their documents, ``[num_sequences, seq_len]``; None: attention
    reaches over the whole sequence."""
    num_tokens: int
    """Inputs that are not padding."""

    @property
    def num_labels(self) -> int:
        """Labels that are learned."""
        return int((self.labels != IGNORE).sum())

    def parts(self, num: int) -> "list[Batch]":
        """Split into ``num`` batches whose sizes differ by at most one sequence.

        All ranks of a step take as many passes, so where there are fewer sequences than ``num``,
        the last parts repeat the first sequence and have no labels to learn.
        """
        found = []
        total = len(self.tokens)
        for own in np.array_split(np.arange(total), num):
            rows = own if len(own) else np.zeros(1, np.int64)
            found.append(
                Batch(
                    tokens=self.tokens[rows],
                    labels=self.labels[rows] if len(own) else np.full_like(self.labels[:1], IGNORE),
                    positions=None if self.positions is None else self.positions[rows],
                    num_tokens=self.num_tokens * len(own) // total,
                )
            )
        return found


class Feed:
    """The sequences of a store, shuffled anew for each epoch."""

    def __init__(
        self,
        train: "Windows | Packs",
        held_out: "Windows | Packs",
        *,
        global_batch: int,
        seed: int,
        drops_rest: bool,
        notes: Sequence[str] = (),
    ) -> None:
        """
        Args:
            train: as many sequences as a step, at least.
            drops_rest: what fills no step is left out, another part in each epoch. Without it, the
                last step of an epoch is filled up with ``NOTHING``.
            notes: about the data, for the user, a sentence each.
        """
        self.train, self.held_out, self.notes = train, held_out, notes
        self.isolates = train.isolates
        self.num_sequences = num = train.num_sequences
        self.steps_per_epoch = num // global_batch if drops_rest else -(-num // global_batch)
        num_places = max(self.steps_per_epoch * global_batch, num)
        self.tokens_per_step = global_batch * train.num_tokens / num_places
        """Mean number of inputs that are not padding."""
        self._order, self._global_batch = Shuffle(seed=seed, num=num), global_batch

    def sequences(self, step: int) -> Tokens:
        """Sequences of a step, ``[global_batch]``, ``NOTHING`` where an epoch has no more."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self._global_batch
        last = min(first + self._global_batch, self.num_sequences)
        found = self._order.pick(epoch, np.arange(first, last))
        return np.pad(found, (0, self._global_batch - len(found)), constant_values=NOTHING)

    def step(self, step: int, *, rank: int, world_size: int) -> Batch:
        """A worker's part of a step."""
        return self.train.batch(self.sequences(step)[rank::world_size])

    def num_labels(self, step: int) -> int:
        """Number of labels that all workers learn in a step."""
        return self.train.num_labels(self.sequences(step))


def feed_of(
    store: TokenStore,
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    isolates: bool = False,
    packs: bool = True,
) -> Feed:
    """Feed for the content of a store, text or conversations.

    Args:
        isolates: attention stays within a document of text.
        packs: several conversations may share a sequence.

    Raises:
        InputError: it does not fill a step.
    """
    info, notes = store.info, [*store.info.notes]
    train: Windows | Packs
    held_out: Windows | Packs
    if info.is_chat:
        train, held_out = (
            Packs(
                store.conversations(held_out=each),
                seq_len=seq_len,
                padding=info.end_of_text,
                isolates=packs,
            )
            for each in (False, True)
        )
        content = counted(info.num_train_conversations, "conversation")
        if info.num_left_out:
            left_out = counted(info.num_left_out, "conversation")
            notes.append(f"left out, without an answer: {left_out}")
        cut, dropped = (
            train.num_cut + held_out.num_cut,
            train.num_dropped + held_out.num_dropped,
        )
        if cut:
            notes.append(
                f"cut off at --seq-len {seq_len}: {cut:,} of "
                + counted(info.num_documents, "conversation")
                + (f"; left out, because no answer is left: {dropped:,}" if dropped else "")
            )
    else:
        end_of_text = info.end_of_text if isolates else None
        train, held_out = (
            Windows(tokens, seq_len=seq_len, end_of_text=end_of_text)
            for tokens in (store.train, store.held_out)
        )
        content = f"{len(store.train):,} tokens"
    if train.num_sequences < global_batch:
        raise InputError(
            f"the text has {content} in {counted(train.num_sequences, 'sequence')} of {seq_len}, "
            f"fewer than the {global_batch} of one step: give more data, or a smaller batch or "
            "sequence"
        )
    return Feed(
        train,
        held_out,
        global_batch=global_batch,
        seed=seed,
        # Each conversation comes once an epoch; of text, the next epoch has what this one lacks.
        drops_rest=not info.is_chat,
        notes=notes,
    )


class Shuffle:
    """All of them shuffled: a function of only the seed and the epoch."""

    def __init__(self, *, seed: int, num: int) -> None:
        self._num, self._seed = num, seed
        self._epoch = -1
        self._order: npt.NDArray[np.signedinteger] = np.zeros(0, np.int64)

    def pick(self, epoch: int, places: Tokens) -> Tokens:
        # Kept, because every step of the epoch asks for it.
        if epoch != self._epoch:
            self._epoch = epoch
            # Half the memory of int64, and the same order.
            numbers = np.arange(self._num, dtype=np.int32 if self._num < 2**31 else np.int64)
            self._order = np.random.default_rng([self._seed, epoch]).permutation(numbers)
        return self._order[places].astype(np.int64)


# --- windows of text ----------------------------------------------------------------------------
class Windows:
    """Text cut into sequences of one length, each of whose tokens is learned.

    Sequence ``i`` is tokens ``[i * seq_len, (i + 1) * seq_len]``, both ends included: the last
    token of one is the first of the next, as label there and as input here.
    """

    def __init__(
        self, tokens: npt.NDArray[Any], *, seq_len: int, end_of_text: int | None = None
    ) -> None:
        """
        Args:
            end_of_text: id of the token that ends a document, where attention stays within one.
        """
        self._tokens, self._seq_len, self._end_of_text = tokens, seq_len, end_of_text
        self.isolates = end_of_text is not None
        self.num_sequences = max(0, (len(tokens) - 1) // seq_len)
        self.num_tokens = self.num_sequences * seq_len

    def num_labels(self, sequences: Tokens) -> int:
        """Labels of some sequences."""
        return int((sequences != NOTHING).sum()) * self._seq_len

    def batch(self, sequences: Tokens) -> Batch:
        """Read sequences; ``NOTHING`` stands for one without labels."""
        starts = np.maximum(sequences, 0)[:, None] * self._seq_len
        tokens = self._tokens[starts + np.arange(self._seq_len + 1)].astype(np.int64)
        positions = None
        if self._end_of_text is not None:
            positions = positions_in_documents(tokens[:, :-1], self._end_of_text)
        return Batch(
            tokens=tokens,
            labels=np.where(sequences[:, None] == NOTHING, IGNORE, tokens[:, 1:]),
            positions=positions,
            num_tokens=self.num_labels(sequences),
        )


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

    def __init__(self, part: ChatPart, *, seq_len: int, padding: int, isolates: bool) -> None:
        """
        Args:
            padding: id of the token that fills a sequence up.
            isolates: several may lie in a sequence, and attention stays within one. One that has a
                sequence to itself needs no care: padding comes after it, and no token sees what
                follows.
        """
        self._part, self._seq_len, self._padding = part, seq_len, padding
        self.isolates = isolates
        lengths = np.diff(part.starts)
        self.num_cut = int((lengths > seq_len + 1).sum())
        """Conversations that are longer than a sequence."""
        self._lengths = np.minimum(lengths, seq_len + 1)
        counts = self._num_labels()
        kept = np.flatnonzero(counts)
        self.num_dropped = len(lengths) - len(kept)
        """Conversations without a label in what is left of them."""
        own = np.arange(len(kept))
        pack_of = best_fit(self._lengths[kept], seq_len + 1) if isolates else own
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
        self.num_tokens = int(self._tokens_of.sum())
        """Inputs of all sequences that are not padding."""

    def members(self, sequence: int) -> Tokens:
        """Numbers of the conversations of a sequence."""
        if sequence == NOTHING:
            return self._members[:0]
        return self._members[self._first[sequence] : self._first[sequence + 1]]

    def num_labels(self, sequences: Tokens) -> int:
        """Labels of some sequences that are learned."""
        return int(self._labels_of[sequences].sum())

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
            positions=positions[:, :-1] if self.isolates else None,
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
