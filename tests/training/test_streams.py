"""Proves that text which is streamed has the tokens that it would have on a disk, in an order that
any number of workers and a resumed run share, and that neither text nor tokens fill the disk."""

import gzip
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InputError
from tests.conftest import ROOT
from training import storage
from training.data import documents, sources, vocabulary
from training.data.documents import RemoteFile
from training.data.feed import TextFeed
from training.data.sequences import BlockShuffle
from training.data.streams import build, store
from training.data.streams.build import Build
from training.data.streams.store import StreamedStore, open_stream
from training.data.text import TokenStore, store_for, texts
from training.models.pretrained import tokenizer_file
from training.recipes.fsdp import inputs
from training.recipes.fsdp.settings import PRESETS, FsdpConfig
from training.storage import UnreachableError

NUM = 90
KEY = "stream-0"


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(documents, "_BATCH_DOCUMENTS", 8)
    monkeypatch.setattr(build, "SHARD_TOKENS", 700)
    monkeypatch.setattr(store, "BLOCK_TOKENS", 100)
    monkeypatch.setattr(store, "GROUP_BLOCKS", 4)


def corpus(folder: Path) -> Path:
    """Documents in files of all kinds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(NUM)]
    words = [digest[: 20 + number % 40] for number, digest in enumerate(digests)]
    lines = "".join(json.dumps({"text": each}) + "\n" for each in words[:30])
    (folder / "a.jsonl").write_text(lines)
    pq.write_table(pa.table({"text": words[30:60]}), folder / "b.parquet", row_group_size=7)
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(words[60:]).encode()))
    return folder


def as_remote(folder: Path) -> list[RemoteFile]:
    """The files as if they were in S3: a disk has the same few operations."""
    return [
        RemoteFile(address=str(path), size=path.stat().st_size, etag="")
        for path in sorted(folder.iterdir())
    ]


def builder(bucket: Path) -> Build:
    words = vocabulary.read(tokenizer_file("", "new:tiny", runs=""))
    (sources.cache_dir() / "tokens").mkdir(parents=True, exist_ok=True)
    return Build(words, str(bucket / "tokens" / KEY), held_out_every=5)


def built(folder: Path, bucket: Path) -> None:
    made = builder(bucket)
    made.run(as_remote(folder), "text", None)
    made.finish(KEY, "", "source")


def opened(bucket: Path) -> StreamedStore:
    found = open_stream(KEY, shared=str(bucket))
    assert found is not None
    return found


def ordinary(folder: Path) -> TokenStore:
    return store_for(str(folder), tokenizer_file("", "new:tiny", runs=""), held_out_every=5)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    built(corpus(tmp_path / "text"), tmp_path / "bucket")
    return tmp_path / "bucket"


def content(bucket: Path) -> dict[str, bytes]:
    folder = bucket / "tokens" / KEY
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_streamed_text_has_the_tokens_of_the_same_text_on_a_disk(
    tmp_path: Path, bucket: Path
) -> None:
    streamed, whole = opened(bucket), ordinary(tmp_path / "text")
    assert len(streamed.info.train_shards) > 3
    assert len(streamed.info.held_out_shards) > 3
    assert streamed.info.num_documents == whole.info.num_documents == NUM
    assert np.array_equal(streamed.held_out, whole.held_out)
    labels = whole.held_out[1:]
    assert streamed.unigram_loss(labels) == whole.unigram_loss(labels)
    for seq_len in (16, 100, 33, 700):
        num = (len(whole.train) - 1) // seq_len
        sequences = np.random.default_rng(0).permutation(num)
        expected = whole.windows(sequences, seq_len)
        assert np.array_equal(streamed.windows(sequences, seq_len), expected)
    # Nothing of the build is left but the store.
    left = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.name[0] == "."]
    assert left == []
    assert build.PROGRESS_FILE not in content(bucket)


@pytest.mark.parametrize("num_stored", [0, 1, 3])
def test_a_build_that_is_interrupted_resumes_after_its_last_shard(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch, num_stored: int
) -> None:
    real, stored = Build._store, 0

    def interrupted(self: Build, *arguments: Any) -> None:
        nonlocal stored
        stored += 1
        if stored > num_stored:
            raise KeyboardInterrupt
        real(self, *arguments)

    monkeypatch.setattr(Build, "_store", interrupted)
    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "text", again)
    assert open_stream("stream-1", shared=str(again)) is None
    monkeypatch.setattr(Build, "_store", real)
    encoded: list[int] = []

    def counted(words: Any) -> Callable[..., Any]:
        encode = texts(words)

        def count(batch: Any) -> Any:
            encoded.append(len(batch))
            return encode(batch)

        return count

    monkeypatch.setattr(build, "texts", counted)
    built(tmp_path / "text", again)
    assert content(again) == content(bucket)
    assert (sum(encoded) < NUM) == (num_stored > 0)


@given(
    num=st.integers(1, 400),
    block=st.integers(1, 50),
    group=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_an_order_by_blocks_has_each_sequence_once_an_epoch(
    num: int, block: int, group: int, seed: int
) -> None:
    begun: list[list[int]] = []
    order = BlockShuffle(
        seed=seed, num=num, block=block, group=group, begins=lambda each: begun.append([*each])
    )
    first = order.pick(0, np.arange(num))
    assert sorted(first.tolist()) == list(range(num))
    assert order.pick(1, np.arange(num)).tolist() != first.tolist() or num < 8
    other = BlockShuffle(seed=seed, num=num, block=block, group=group)
    for place in (num - 1, 0, num // 2):
        assert other.pick(0, np.array([place])).tolist() == [first[place]]
    # What is needed is announced a group before: its blocks are those that were told of then.
    assert {each // block for each in first.tolist()} == {b for told in begun for b in told}
    for now, after in pairwise(begun[: -(-num // (block * group))]):
        assert now[group:] == after[: len(now) - group]


def feed(found: TokenStore, *, batch: int = 4) -> TextFeed:
    return TextFeed(found, seq_len=16, global_batch=batch, seed=3, isolates=False)


def test_every_sequence_comes_once_an_epoch_whatever_the_workers_and_wherever_it_resumes(
    tmp_path: Path, bucket: Path
) -> None:
    whole = ordinary(tmp_path / "text").train
    # Two nodes with a cache each would fetch the same: here they share one.
    feeds = [feed(opened(bucket)) for _ in range(4)]
    steps = feeds[0].steps_per_epoch
    seen: list[tuple[int, ...]] = []
    rows = {tuple(whole[first : first + 17].tolist()) for first in range(0, len(whole) - 16, 16)}
    for step in range(2 * steps):
        world_size = (1, 2, 4)[step % 3]  # as if it were resumed at each step
        parts = [feeds[r].step(step, rank=r, world_size=world_size) for r in range(world_size)]
        tokens = np.concatenate([each.tokens for each in parts])
        expected = feeds[3].step(step, rank=0, world_size=1).tokens
        assert sorted(map(tuple, tokens)) == sorted(map(tuple, expected))
        seen += map(tuple, tokens.tolist())
    for epoch in (0, 1):
        own = seen[epoch * steps * 4 :][: steps * 4]
        assert len({*own}) == len(own)
        assert {*own} <= rows
        assert len(rows) - len(own) < 4  # what fills no step is left out
    assert seen[: steps * 4] != seen[steps * 4 :]


def test_blocks_have_bounded_room_on_the_disk_and_come_before_they_are_needed(
    bucket: Path,
) -> None:
    found = opened(bucket)
    fed = feed(found)
    blocks = found._blocks_of(16)
    kept = 3 * store.GROUP_BLOCKS
    assert -(-fed.num_sequences // 6) > kept  # more blocks than have room
    most = 0
    for step in range(3 * fed.steps_per_epoch):
        fed.step(step, rank=0, world_size=1)
        files = [*blocks._folder.glob("*.bin")]
        most = max(most, len(files))
        # What other runs remove is fetched again.
        if step % 5 == 0:
            for each in files:
                each.unlink(missing_ok=True)
    assert most <= kept + 4  # and those that four threads have just written
    blocks._coming.clear()
    for thread in threading.enumerate():
        if thread.name == "blocks":
            thread.join(60)
    # Nor does this process hold the room of files that are removed, but of those it needs.
    assert len(blocks._maps) <= 2 * store.GROUP_BLOCKS
    part = blocks._folder / ".block-killed"
    part.touch()
    os.utime(part, (0, 0))
    next(iter(blocks._folder.glob("*.bin"))).unlink()
    for number in range(3):
        blocks._fetch(number)
    assert not part.exists()


def test_a_damaged_shard_is_named(bucket: Path) -> None:
    found = opened(bucket)
    shard = bucket / "tokens" / KEY / store.TRAIN_SHARD.format(1)
    shard.write_bytes(shard.read_bytes()[:-600])
    with pytest.raises(InputError, match=r"train-00001.bin is damaged or missing: start the run"):
        found.windows(np.arange(found.info.num_train_tokens // 16), 16)


@pytest.mark.parametrize("missing", ["train-00001.bin", "held-out-00000.bin", "counts.bin", "*"])
def test_a_store_whose_files_have_expired_is_built_again(
    tmp_path: Path, bucket: Path, missing: str
) -> None:
    before = content(bucket)
    sequences = np.arange(40)
    expected = opened(bucket).windows(sequences, 16)
    for path in (bucket / "tokens" / KEY).glob(missing):
        path.unlink()
    assert open_stream(KEY, shared=str(bucket)) is None
    assert not (sources.cache_dir() / "tokens" / KEY).exists()
    built(tmp_path / "text", bucket)
    assert content(bucket) == before
    assert np.array_equal(opened(bucket).windows(sequences, 16), expected)


def test_a_build_of_which_shards_have_expired_starts_over(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(Build, "finish", lambda *_: None)
        built(tmp_path / "text", again)
    (again / "tokens" / KEY / "train-00000.bin").unlink()
    killed = sources.cache_dir() / "tokens" / f".shard-{KEY}-0"
    killed.mkdir()
    built(tmp_path / "text", again)
    assert content(again) == content(bucket)
    assert not killed.exists()


def test_a_run_ends_while_s3_does_not_answer(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = opened(bucket)._blocks_of(16)
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    answer = threading.Event()

    def fetch(number: int) -> None:
        asked.put(number)
        answer.wait(60)
        raise UnreachableError("no answer")

    monkeypatch.setattr(blocks, "_fetch", fetch)
    blocks.fetch_ahead(range(20))
    first = {asked.get(timeout=60) for _ in range(4)}
    threads = [each for each in threading.enumerate() if each.name == "blocks"]
    assert all(each.daemon for each in threads), "else the interpreter waits for them"
    answer.set()
    for each in threads:
        each.join(60)
    # A failure ends the queue: the other blocks would fail as well, minutes each.
    assert first == {0, 1, 2, 3}
    assert asked.qsize() < 4
    with pytest.raises(UnreachableError, match="no answer"):
        blocks.read(9)


def test_a_store_that_says_nonsense_is_named_in_the_bucket(bucket: Path) -> None:
    written = bucket / "tokens" / KEY / "store.json"
    values = json.loads(written.read_text())
    for content in ("{", json.dumps({**values, "dtype": "O"})):
        written.write_text(content)
        with pytest.raises(InputError, match=r"bucket/tokens/stream-0/store.json is that of no"):
            opened(bucket)


def test_only_the_first_of_much_held_out_text_is_kept_on_a_node(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "HELD_OUT_TOKENS", 250)
    whole = ordinary(tmp_path / "text")
    assert np.array_equal(opened(bucket).held_out, whole.held_out[:250])


def test_conversations_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 40)
    with pytest.raises(InputError, match=r"a.jsonl holds conversations: .* Leave out --stream"):
        built(folder, tmp_path / "bucket")


def config(data: str, **changes: Any) -> FsdpConfig:
    values: dict[str, Any] = {
        **PRESETS["tiny"],
        "recipe": "fsdp",
        "run": "r",
        "storage": "s3://streams/runs",
        "data": data,
        "held_out_every": 5,
        "stream": True,
    }
    return FsdpConfig(**{**values, **changes})


def test_where_nothing_can_be_streamed_that_is_said() -> None:
    with pytest.raises(InputError, match=r"--stream is for text in S3, and --data is /text"):
        config("/text")
    with pytest.raises(InputError, match=r"--storage /runs is no bucket"):
        inputs.look_at(config("s3://streams/text", storage="/runs"))


@pytest.mark.slow
def test_text_in_s3_is_streamed_by_every_node_and_what_does_not_fit_is_told_how(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3_endpoint  # the environment points at it
    storage.filesystem("s3://").mkdir("s3://streams")
    folder = corpus(tmp_path / "text")
    for path in folder.iterdir():
        storage.write_bytes(f"s3://streams/text/{path.name}", path.read_bytes())
    told: list[tuple[int, int]] = []
    settings = config(f"7 s3://streams/text, 3 {ROOT / 'LICENSE'}")
    prepared = inputs.prepare(settings, lambda *each: told.append(each))
    first, _, second = prepared.text_key.partition(", ")
    assert first.startswith("7/10 stream-")
    assert second.startswith("3/10 ")
    assert "stream" not in second
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert (size, size) in told
    assert inputs.prepare(settings) == prepared

    whole = ordinary(folder)
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "worker"))
    streamed, _ = inputs.stores_of(prepared)
    sequences = np.arange((len(whole.train) - 1) // 16)
    assert np.array_equal(streamed.windows(sequences, 16), whole.windows(sequences, 16))
    assert not [*(tmp_path / "worker").rglob("a.jsonl")]
    batch = feed(streamed).step(0, rank=0, world_size=1)
    assert batch.tokens.shape == (4, 17)

    monkeypatch.setattr(sources, "bytes_free", lambda: size)
    with pytest.raises(InputError, match=r"s3://streams/text has .* of text .*: give --stream"):
        inputs.prepare(config("s3://streams/text", stream=False))
    # Another content of a file is another store.
    before = documents.remote_files("s3://streams/text/")[0]
    storage.write_bytes("s3://streams/text/a.jsonl", b'{"text": "now another"}\n' * 30)
    with pytest.raises(InputError, match=r"a.jsonl has been replaced since the run began"):
        before.open()
    with pytest.raises(InputError, match=r"was trained on another text"):
        inputs.prepare(prepared)
