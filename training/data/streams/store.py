"""Tokens in shards in S3, read in blocks that lie on this node's disk for a while.

The order of the sequences is such that a step needs only some blocks (``BlockShuffle``): they are
fetched before their turn, in the background, by one process of the node for all, and the oldest are
removed.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from training import storage
from training.data import sources
from training.data.sequences import BlockShuffle, Order, Tokens, windows
from training.data.store_info import STORE_FILE, StoreInfo, info_of
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
#: Age of a part of a block at which it is taken for that of a process that was killed.
_PART_MAX_AGE_S: Final = 3600.0
_PART: Final = ".block-"


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
        self._lock = threading.Lock()
        self._coming: deque[int] = deque()
        self._num_threads = 0

    def fetch_ahead(self, blocks: Sequence[int]) -> None:
        """Fetch blocks in the background, in this order; others are no longer wanted."""
        # A map keeps the room of its file, also after another process has removed that.
        self._maps = {each: found for each, found in self._maps.items() if each in blocks}
        with self._lock:
            self._coming = deque(each for each in blocks if each not in self._maps)
            for _ in range(min(_THREADS - self._num_threads, len(self._coming))):
                self._num_threads += 1
                # Daemons: the end of a run does not wait for an S3 that does not answer.
                threading.Thread(target=self._fetch_coming, name="blocks", daemon=True).start()

    def _fetch_coming(self) -> None:
        while True:
            with self._lock:
                if not self._coming:
                    self._num_threads -= 1
                    return
                number = self._coming.popleft()
            try:
                self._fetch(number)
            except Exception:  # ``read`` tries this one again, and reports what is wrong
                with self._lock:
                    self._coming.clear()

    def read(self, number: int) -> npt.NDArray[Any]:
        """The tokens of a block, memory-mapped.

        Raises:
            InputError: its shard is damaged.
            UnreachableError: S3 does not answer.
        """
        if number not in self._maps:
            with self._lock, contextlib.suppress(ValueError):
                self._coming.remove(number)
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
            handle, name = tempfile.mkstemp(prefix=_PART, dir=self._folder)
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
        for path in self._folder.glob(f"{_PART}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _PART_MAX_AGE_S:
                    path.unlink()


def open_stream(key: str, *, shared: str) -> StreamedStore | None:
    """The store of a key, if its shards are complete; its small files are brought to this node.

    The bucket is asked even where this node has them: its rules may have removed shards, or a user
    the store. What is left then counts no longer, so that the next build makes it again.
    """
    folder, uri = place_of(key), storage.join(shared, "tokens", key)
    with sources.locked(folder.with_name(f"{key}.lock")):
        content = storage.read_bytes(storage.join(uri, STORE_FILE))
        info = None if content is None else _info_of(content, uri)
        if info is not None and not _is_whole(info, uri):
            storage.remove_file(storage.join(uri, STORE_FILE))
            info = None
        here = folder / STORE_FILE
        if here.exists() and (info is None or here.read_bytes() != content):
            shutil.rmtree(folder, ignore_errors=True)
        if info is None or content is None:
            return None
        if not here.exists():
            for each in folder.parent.glob(f".{key}.*"):  # of processes that were killed
                shutil.rmtree(each, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder.parent))
            try:
                (part / STORE_FILE).write_bytes(content)
                counts = storage.join(uri, COUNTS_FILE)
                storage.filesystem(uri).get_file(counts, str(part / COUNTS_FILE))
                _fetch_held_out(info, uri, part / HELD_OUT_FILE)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return StreamedStore(folder, info, uri=uri)


def _info_of(content: bytes, uri: str) -> StoreInfo:
    try:
        return info_of(content, uri)
    except InputError:
        raise InputError(
            f"{uri}/{STORE_FILE} is that of no token store: remove {uri}, the next run builds it "
            "again"
        ) from None


def _is_whole(info: StoreInfo, uri: str) -> bool:
    counts = {COUNTS_FILE: info.vocab_size * np.dtype(np.int64).itemsize}
    return are_there(info.train_shards, info.held_out_shards, np.dtype(info.dtype), uri, counts)


def are_there(
    train: Sequence[int],
    held_out: Sequence[int],
    dtype: np.dtype[Any],
    uri: str,
    others: Mapping[str, int] | None = None,
) -> bool:
    """Whether a folder has all shards, of so many tokens, and other files, of so many bytes."""
    wanted = {
        TRAIN_SHARD.format(number): each * dtype.itemsize for number, each in enumerate(train)
    }
    for number, each in enumerate(held_out):
        wanted[HELD_OUT_SHARD.format(number)] = each * dtype.itemsize
    try:
        found = storage.filesystem(uri).ls(uri, detail=True)
    except FileNotFoundError:
        found = []
    sizes = {each["name"].rpartition("/")[2]: each["size"] for each in found}
    return (wanted | dict(others or {})).items() <= sizes.items()


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
