"""What each step of a language model trains on, from a store of text or of conversations."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from training.data.packing import NOTHING, Batch, Packs
from training.data.sequences import (
    SequenceOrder,
    Shuffle,
    Tokens,
    endless,
    positions_in_documents,
    share,
    windows,
)
from training.data.text import TokenStore
from training.losses import IGNORE


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
            shuffle=store.shuffle(seq_len),
        )
        self.isolates = isolates
        self.num_sequences = self._order.num_sequences
        self.steps_per_epoch = self._order.steps_per_epoch
        self.tokens_per_step = float(global_batch * seq_len)
        """Mean number of inputs that are not padding."""
        self.num_held_out = max(0, (len(store.held_out) - 1) // seq_len)
        """Sequences of the held-out part."""
        self.notes: list[str] = []
        """What a person should know about the data, in sentences."""

    def step(self, step: int, *, rank: int, world_size: int) -> Batch:
        """A worker's part of a step."""
        return self.batch(share(self._order.sequences(step), rank=rank, world_size=world_size))

    def num_labels(self, step: int) -> int:
        """What all workers learn in a step."""
        return self.num_labels_of(self._order.sequences(step))

    def endless(self, places: Tokens) -> Tokens:
        """The sequences of some places, where epochs follow each other and each has all of them."""
        return endless(self._order.order, places)

    def num_labels_of(self, sequences: Tokens) -> int:
        """What is learned of some sequences."""
        return len(sequences) * self._seq_len

    def batch(self, sequences: Tokens) -> Batch:
        """Some sequences of the training part."""
        return self._batch(self._store.windows(sequences, self._seq_len))

    def held_out(self, sequences: Tokens) -> Batch:
        """Some of the held-out sequences; ``NOTHING`` stands for one that does not count."""
        rows = windows(self._store.held_out, np.maximum(sequences, 0), self._seq_len)
        batch = self._batch(rows)
        num = int((sequences != NOTHING).sum()) * self._seq_len
        return Batch(tokens=batch.tokens, positions=batch.positions, num_labels=num, num_tokens=num)

    def held_out_labels(self, num: int) -> npt.NDArray[np.integer]:
        """What is learned of the first ``num`` held-out sequences, ids."""
        return self._store.held_out[1 : 1 + num * self._seq_len]

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

    def members(self, step: int, *, rank: int, world_size: int) -> Tokens:
        """Numbers of the conversations of a worker's part of a step, sequence by sequence."""
        mine = share(self.sequences(step), rank=rank, world_size=world_size)
        return np.concatenate([self.members_of(each) for each in mine.tolist()])

    def members_of(self, sequence: int) -> Tokens:
        """Numbers of the conversations of a sequence."""
        return self._train.members(sequence)

    def step(self, step: int, *, rank: int, world_size: int) -> Batch:
        """A worker's part of a step."""
        return self.batch(share(self.sequences(step), rank=rank, world_size=world_size))

    def num_labels(self, step: int) -> int:
        """What all workers learn in a step."""
        return self.num_labels_of(self.sequences(step))

    def endless(self, places: Tokens) -> Tokens:
        """The sequences of some places, where epochs follow each other and each has all of them."""
        return endless(self._order, places)

    def num_labels_of(self, sequences: Tokens) -> int:
        """What is learned of some sequences."""
        return self._train.num_labels(sequences)

    def batch(self, sequences: Tokens) -> Batch:
        """Some sequences of the training part; ``NOTHING`` is one of padding."""
        return self._placed(self._train.batch(sequences))

    def held_out(self, sequences: Tokens) -> Batch:
        """Some of the held-out sequences; ``NOTHING`` stands for one that does not count."""
        return self._placed(self._held_out.batch(sequences))

    def _placed(self, batch: Batch) -> Batch:
        return batch if self.isolates else replace(batch, positions=None)

    def held_out_labels(self, num: int) -> npt.NDArray[np.integer]:
        """What is learned of the first ``num`` held-out sequences, ids."""
        found = [self._held_out.batch(np.array([each])).labels for each in range(num)]
        return np.concatenate([each[each != IGNORE] for each in found if each is not None])


def feed_of(
    store: TokenStore,
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    isolates: bool = False,
    packs: bool = True,
) -> TextFeed | ChatFeed:
    """What belongs to the content of a store.

    Args:
        isolates: attention stays within a document of text.
        packs: several conversations may share a sequence.

    Raises:
        InputError: it does not fill a step.
    """
    if store.info.is_chat:
        return ChatFeed(store, seq_len=seq_len, global_batch=global_batch, seed=seed, packs=packs)
    return TextFeed(store, seq_len=seq_len, global_batch=global_batch, seed=seed, isolates=isolates)
