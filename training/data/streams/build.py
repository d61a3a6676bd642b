"""Makes shards of tokens of a text in S3; neither text nor tokens are ever whole on a disk.

Files are read through the network one after the other. Tokens go to the bucket a shard at a time,
with a note of how far that is: a build that was interrupted resumes after the last shard. Of the
processes of all hosts and jobs that need the same store, the one that holds its lease builds it,
and the others wait. One that stalls until it has lost the lease can do no harm: its shards have the
same bytes, and a note that is behind costs the next build some shards that are there already.
"""

import io
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from contract.errors import InputError
from training import storage
from training.checkpoint import lease
from training.data import sources, vocabulary
from training.data.conversations import Conversation
from training.data.documents import RemoteFile, Report, batches, documents, remote_files
from training.data.store_info import FORMAT, STORE_FILE, StoreInfo
from training.data.streams.store import (
    HELD_OUT_SHARD,
    PREFIX,
    TRAIN_SHARD,
    StreamedStore,
    are_there,
    open_stream,
)
from training.data.text import COUNTS_FILE, Output, key_of, place_of, sha256, texts
from training.data.vocabulary import Vocabulary

#: Tokens of a shard, to the end of the thousand documents in which they are reached.
SHARD_TOKENS: Final = 1 << 26
#: How far a build has come; removed at its end.
PROGRESS_FILE: Final = "progress.npz"
#: Between two questions how far another process has come.
_LOOK_EVERY_S: Final = 5.0
_NO_CHATS: Final = (
    "--stream is for text, and {} holds conversations: how they are packed follows from the "
    "lengths of all of them. Leave out --stream, on hosts whose disk holds them twice"
)


def stream_for(
    source: str,
    tokenizer_file: Path,
    *,
    held_out_every: int,
    text_field: str,
    shared: str,
    report: Report | None = None,
) -> StreamedStore:
    """The store of a text in S3, built now unless it is in the bucket already. One process builds
    it; one that dies is followed by another once its lease is over.

    Args:
        source: ``s3://``, a file or a folder.
        tokenizer_file: a ``tokenizer.json``, or its folder.
        held_out_every: one document in so many is held out.
        text_field: of a line or a row, the one that holds the document.
        shared: address of the folder in which the nodes of a cluster share stores.
        report: called with the bytes read, by this process or the one it waits for, and the bytes
            there are.

    Raises:
        InputError: there is no text, it is no text, or the tokenizer cannot be used.
    """
    files = remote_files(source)
    words = vocabulary.read(tokenizer_file)
    # What a listing tells of the contents: nothing needs to be read to know the key.
    marks = [f"{each.name}:{each.size}:{each.etag}" for each in files]
    found = key_of(marks, tokenizer_file, held_out_every, text_field, words, is_chat=False)
    key = f"{PREFIX}{found}"
    uri = storage.join(shared, "tokens", key)
    # Of a node, one process asks the bucket.
    with sources.locked(place_of(key).with_name(f"{key}.build.lock")):
        while (store := open_stream(key, shared=shared)) is None:
            try:
                with _held(uri) as fence:
                    # Another one may have completed it just before.
                    if not storage.exists(storage.join(uri, STORE_FILE)):
                        build = Build(words, uri, held_out_every=held_out_every, fence=fence)
                        build.run(files, text_field, report)
                        build.finish(key, sha256(tokenizer_file), source)
            except lease.HeldError:
                # There is none before the first shard, nor after the last one.
                if report is not None and (done := _stored(uri)):
                    report(done.num_bytes, sum(each.size for each in files))
                time.sleep(_LOOK_EVERY_S)
            except lease.LostError:  # this process stalled: now the other one is waited for
                continue
    return store


@contextmanager
def _held(uri: str) -> Iterator[int]:
    """Hold the lease of a store; its number.

    Raises:
        HeldError: another process holds it.
    """
    # Under torchrun, any node of a job may need the store first.
    held = lease.Lease.take(uri, one_per_job=False)
    held.keep()
    try:
        yield held.number
    finally:
        held.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Progress:
    """What of a text has become shards."""

    file: int = 0
    """Number of the file that is being read."""
    read: int = 0
    """Documents that were read of it."""
    num_documents: int = 0
    """Documents that were read of all files."""
    num_bytes: int = 0
    """Bytes that were read of all files, for those who wait."""
    train_shards: tuple[int, ...] = ()
    held_out_shards: tuple[int, ...] = ()
    counts: Any = field(compare=False)
    """How often each token is in the training part, int64."""

    def to_bytes(self) -> bytes:
        values = {**asdict(self), "counts": None}
        content = io.BytesIO()
        np.savez_compressed(content, values=np.array(json.dumps(values)), counts=self.counts)
        return content.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> "_Progress":
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            values = json.loads(str(found["values"]))
            shards = {name: tuple(values[name]) for name in ("train_shards", "held_out_shards")}
            return cls(**{**values, **shards, "counts": found["counts"]})


def _stored(uri: str) -> _Progress | None:
    """How far a build has come, of whichever process; None where there is none."""
    content = storage.read_bytes(storage.join(uri, PROGRESS_FILE))
    return None if content is None else _Progress.from_bytes(content)


class Build:
    """Writes the shards of a store."""

    def __init__(self, words: Vocabulary, uri: str, *, held_out_every: int, fence: int = 0) -> None:
        """
        Args:
            fence: number of the lease that this process holds; 0 without one.
        """
        self._words, self._uri, self._held_out_every = words, uri, held_out_every
        self._fence = fence
        self._dtype = np.dtype(np.uint16 if words.size <= 2**16 else np.uint32)
        done = _stored(uri)
        # Shards may have been removed since, by the bucket's rules or a user.
        if done is None or not are_there(done.train_shards, done.held_out_shards, self._dtype, uri):
            done = _Progress(counts=np.zeros(words.size, np.int64))
        self._done = done

    def run(self, files: Sequence[RemoteFile], text_field: str, report: Report | None) -> None:
        """Write all shards that are not there yet.

        Raises:
            InputError: the text holds conversations, or a file cannot be read.
            LostError: another process has taken the lease.
            UnreachableError: S3 does not answer.
        """
        encode = texts(self._words)
        place = sources.cache_dir() / "tokens"
        prefix = f".shard-{self._uri.rpartition('/')[2]}-"
        for each in place.glob(f"{prefix}*"):  # of builds that were killed
            shutil.rmtree(each, ignore_errors=True)
        contents = batches(_documents(files, self._done, text_field, report))
        batch = next(contents, None)
        while batch is not None:
            local = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            try:
                with ExitStack() as stack:
                    train, held_out = (
                        Output(local / name, self._dtype, self._words.size, stack, is_chat=False)
                        for name in (TRAIN_SHARD, HELD_OUT_SHARD)
                    )
                    done = self._done
                    while batch is not None and train.num_tokens < SHARD_TOKENS:
                        for row in encode([each.text for each in batch]):
                            last = self._held_out_every - 1
                            is_held_out = done.num_documents % self._held_out_every == last
                            (held_out if is_held_out else train).add(row.ids, row.learned)
                            done = replace(done, num_documents=done.num_documents + 1)
                        last_one = batch[-1]
                        done = replace(
                            done,
                            file=last_one.file,
                            read=last_one.number,
                            num_bytes=last_one.num_bytes,
                        )
                        batch = next(contents, None)
                lease.check(self._uri, self._fence)
                self._store(local, done, train, held_out)
            finally:
                shutil.rmtree(local, ignore_errors=True)

    def _store(self, local: Path, done: _Progress, train: Output, held_out: Output) -> None:
        fs = storage.filesystem(self._uri)
        shards = {}
        for name, output, sizes in (
            (TRAIN_SHARD, train, done.train_shards),
            (HELD_OUT_SHARD, held_out, done.held_out_shards),
        ):
            if output.num_tokens:
                target = storage.join(self._uri, name.format(len(sizes)))
                fs.put_file(str(local / name), target)
                sizes = (*sizes, output.num_tokens)
            shards[name] = sizes
        self._done = replace(
            done,
            train_shards=shards[TRAIN_SHARD],
            held_out_shards=shards[HELD_OUT_SHARD],
            counts=done.counts + train.counts,
        )
        storage.write_bytes(storage.join(self._uri, PROGRESS_FILE), self._done.to_bytes())

    def finish(self, key: str, tokenizer: str, source: str) -> None:
        """Mark the shards as complete.

        Raises:
            InputError: there is too little text.
        """
        done = self._done
        if done.num_documents < self._held_out_every:
            raise InputError(
                f"{source} has {done.num_documents} documents, and one in {self._held_out_every} "
                "is to be held out: give more text. In .txt files an empty line ends a document"
            )
        info = StoreInfo(
            format=FORMAT,
            key=key,
            tokenizer=tokenizer,
            vocab_size=self._words.size,
            end_of_text=self._words.end_of_text,
            dtype=self._dtype.name,
            num_documents=done.num_documents,
            num_train_tokens=sum(done.train_shards),
            num_held_out_tokens=sum(done.held_out_shards),
            train_shards=done.train_shards,
            held_out_shards=done.held_out_shards,
        )
        storage.write_bytes(storage.join(self._uri, COUNTS_FILE), done.counts.tobytes())
        written = json.dumps(asdict(info), indent=1).encode()
        storage.write_bytes(storage.join(self._uri, STORE_FILE), written)
        storage.remove_file(storage.join(self._uri, PROGRESS_FILE))


@dataclass(frozen=True, slots=True)
class _Document:
    text: str | Conversation
    file: int
    number: int
    """Of those in its file, from 1."""
    num_bytes: int
    """Bytes of the text that were read before it."""


def _documents(
    files: Sequence[RemoteFile], done: _Progress, text_field: str, report: Report | None
) -> Iterator[_Document]:
    """What of a text has not become shards.

    Raises:
        InputError: it holds conversations, or a file cannot be read.
        UnreachableError: S3 does not answer.
    """
    total = sum(each.size for each in files)
    num_bytes = 0
    for number, file in enumerate(files):
        if number < done.file:
            continue
        num_bytes = before = sum(each.size for each in files[:number])

        def told(size: int, _all: int, before: int = before) -> None:
            nonlocal num_bytes
            num_bytes = before + size
            if report is not None:
                report(num_bytes, total)

        for place, text in enumerate(documents([file], text_field, told), start=1):
            if not isinstance(text, str):
                raise InputError(_NO_CHATS.format(file))
            if number > done.file or place > done.read:
                yield _Document(text, number, place, num_bytes)
