"""Tokens in shards in S3, read in blocks that lie on this node's disk for a while.

The order of the sequences is such that a step needs only some blocks (``BlockShuffle``): they are
fetched before their turn, in the background, by one process of the node for all, and the oldest are
removed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from training import storage
from training.data import sources
from training.data.sequences import BlockShuffle, Order, Tokens, windows
from training.data.store_info import STORE_FILE, StoreInfo, read_info
from training.data.text import COUNTS_FILE, HELD_OUT_FILE, TokenStore, place_of

#: How the keys of such stores begin.
PREFIX: Final = "stream-"
TRAIN_SHARD: Final = "train-{:05}.bin"
HELD_OUT_SHARD: Final = "held-out-{:05}.bin"
#: Tokens of a block, rounded down to whole sequences.
BLOCK_TOKENS: Final = 1 << 20
#: Blocks that are shuffled with each other: 32 million tokens.
GROUP_BLOCKS: Final = 32
#: Groups whose blocks have room on the disk: the one before, this one and the next. With four
#: bytes a token they take 400 MB.
_GROUPS_KEPT: Final = 3
#: Of the held-out part, the first ones are kept on each node.
HELD_OUT_TOKENS: Final = 1 << 24
_THREADS: Final = 4
_LOCKS: Final = 16


class StreamedStore(TokenStore):
    """A store whose training part stays in S3. It has no ``train``; ``windows`` reads it."""

    def __init__(self, folder: Path, info: StoreInfo, *, uri: str) -> None:
        self.folder, self.info = folder, info
        self._uri = uri
        size = min(info.num_held_out_tokens, HELD_OUT_TOKENS)
        self.held_out = self._map(HELD_OUT_FILE, size)
        self._blocks: dict[int, Blocks] = {}

    def windows(self, sequences: Tokens, seq_len: int) -> Tokens:
        """Some sequences of the training part, ``[len(sequences), seq_len + 1]``."""
        found = np.empty((len(sequences), seq_len + 1), np.int64)
        per_block = sequences_per_block(seq_len)
        blocks = sequences // per_block
        for block in np.unique(blocks).tolist():
            own = blocks == block
            tokens = self._blocks_of(seq_len).read(block)
            found[own] = windows(tokens, sequences[own] - block * per_block, seq_len)
        return found

    def shuffle(self, seq_len: int) -> Callable[[int, int], Order]:
        """What makes the order of its sequences, of a seed and their number."""

        def make(seed: int, num: int) -> Order:
            return BlockShuffle(
                seed=seed,
                num=num,
                block=sequences_per_block(seq_len),
                group=GROUP_BLOCKS,
                begins=self._blocks_of(seq_len).fetch_ahead,
            )

        return make

    def _blocks_of(self, seq_len: int) -> "Blocks":
        size = sequences_per_block(seq_len) * seq_len
        if size not in self._blocks:
            self._blocks[size] = Blocks(self.info, self._uri, self.folder, size=size)
        return self._blocks[size]


def sequences_per_block(seq_len: int) -> int:
    return max(1, BLOCK_TOKENS // seq_len)


class Blocks:
    """The training part of a store in blocks of one size, each with the first token of the next."""

    def __init__(self, info: StoreInfo, uri: str, folder: Path, *, size: int) -> None:
        """
        Args:
            uri: folder of the shards.
            folder: of the store on this node.
            size: tokens of a block.
        """
        self._uri, self._size, self._total = uri, size, info.num_train_tokens
        self._dtype = np.dtype(info.dtype)
        self._ends = [*accumulate(info.train_shards)]
        self._folder = folder / f"blocks-{size}"
        self._kept = _GROUPS_KEPT * GROUP_BLOCKS
        self._maps: dict[int, npt.NDArray[Any]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[None]] = {}

    def fetch_ahead(self, blocks: Sequence[int]) -> None:
        """Fetch blocks in the background, in this order; those asked for before are no longer
        wanted, unless they are among these."""
        if self._threads is None:  # not before it is needed: threads do not survive a fork
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blocks")
        for number in [each for each in self._coming if each not in blocks]:
            self._coming.pop(number).cancel()
        for number in blocks:
            if number not in self._coming and number not in self._maps:
                self._coming[number] = self._threads.submit(self._fetch, number)

    def read(self, number: int) -> npt.NDArray[Any]:
        """The tokens of a block, memory-mapped.

        Raises:
            InputError: its shard is damaged.
            UnreachableError: S3 does not answer.
        """
        if number not in self._maps:
            coming = self._coming.pop(number, None)
            if coming is not None and not coming.cancel():
                with contextlib.suppress(Exception):  # it is tried again
                    coming.result()
            self._maps[number] = self._map(number)
            while len(self._maps) > self._kept:
                del self._maps[next(iter(self._maps))]
        return self._maps[number]

    def _map(self, number: int) -> npt.NDArray[Any]:
        for _ in range(_THREADS):  # another run on this node may need the room at any moment
            self._fetch(number)
            with contextlib.suppress(FileNotFoundError):
                return np.memmap(self._path(number), dtype=self._dtype, mode="r")
        raise InputError(
            f"{self._folder} is emptied by other runs as fast as it is filled: give each of them "
            f"a {sources.CACHE_VARIABLE} of its own"
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:07}.bin"

    def _fetch(self, number: int) -> None:
        path = self._path(number)
        with sources.locked(self._folder / f".{number % _LOCKS}.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)  # the oldest ones are removed
                return
            first = number * self._size
            last = min(first + self._size + 1, self._total)
            handle, name = tempfile.mkstemp(prefix=".block-", dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    for shard, begin, end in self._pieces(first, last):
                        file.write(self._read(shard, begin, end))
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        self._make_room()

    def _pieces(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Where some tokens are: numbers of shards, and the first and last token in each."""
        found = []
        for shard, end in enumerate(self._ends):
            begin = self._ends[shard - 1] if shard else 0
            if begin < last and first < end:
                found.append((shard, max(first, begin) - begin, min(last, end) - begin))
        return found

    def _read(self, shard: int, begin: int, end: int) -> bytes:
        address, size = storage.join(self._uri, TRAIN_SHARD.format(shard)), self._dtype.itemsize
        try:
            with storage.reading(address):
                fs = storage.filesystem(address)
                content = bytes(fs.cat_file(address, start=begin * size, end=end * size))
        except FileNotFoundError:
            content = b""
        if len(content) != (end - begin) * size:
            raise InputError(
                f"{address} is damaged or missing: start the run again, it builds {self._uri} again"
            )
        return content

    def _make_room(self) -> None:
        """Remove the blocks that were needed the longest ago; open ones stay readable."""
        found = []
        for path in self._folder.glob("*.bin"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(found)[: max(0, len(found) - self._kept)]:
            path.unlink(missing_ok=True)


def open_stream(key: str, *, shared: str) -> StreamedStore | None:
    """The store of a key, if its shards are complete; its small files are brought to this node."""
    folder, uri = place_of(key), storage.join(shared, "tokens", key)
    with sources.locked(folder.with_name(f"{key}.lock")):
        if not (folder / STORE_FILE).exists():
            content = storage.read_bytes(storage.join(uri, STORE_FILE))
            if content is None:
                return None
            part = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder.parent))
            try:
                (part / STORE_FILE).write_bytes(content)
                info = _read_info(part, uri)
                counts = storage.join(uri, COUNTS_FILE)
                storage.filesystem(uri).get_file(counts, str(part / COUNTS_FILE))
                _fetch_held_out(info, uri, part / HELD_OUT_FILE)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return StreamedStore(folder, read_info(folder), uri=uri)


def _read_info(folder: Path, uri: str) -> StoreInfo:
    """Of a copy in a folder of what is in the bucket."""
    try:
        return read_info(folder)
    except InputError:
        raise InputError(
            f"{uri}/{STORE_FILE} is that of no token store: remove {uri}, the next run builds it "
            "again"
        ) from None


def _fetch_held_out(info: StoreInfo, uri: str, target: Path) -> None:
    fs, left = storage.filesystem(uri), HELD_OUT_TOKENS
    size = np.dtype(info.dtype).itemsize
    with target.open("wb") as file:
        for number, tokens in enumerate(info.held_out_shards):
            wanted = min(left, tokens)
            if wanted:
                address = storage.join(uri, HELD_OUT_SHARD.format(number))
                file.write(fs.cat_file(address, start=0, end=wanted * size))
            left -= wanted
