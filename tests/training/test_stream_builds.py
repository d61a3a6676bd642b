"""Proves that of several processes that need the same streamed text one makes its tokens, that the
others wait for it, and that one of them continues where it has died or stalled."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.times import LEASE_S
from tests.forks import FORKS, ranks
from tests.training.test_lease import elsewhere
from tests.training.test_streams import NUM, as_remote, built, corpus, ordinary
from training import storage
from training.checkpoint.lease import newest_number
from training.data import documents
from training.data.feed import TextFeed
from training.data.streams import build, store
from training.data.streams.build import stream_for
from training.data.text import texts
from training.models.pretrained import tokenizer_file
from training.recipes.fsdp import inputs
from training.recipes.fsdp.model import build as build_model
from training.recipes.fsdp.model import rebuild
from training.recipes.fsdp.settings import FsdpConfig

Stop = Callable[[int], None]
"""Is called before documents are tokenized, with the number of those that were before."""


def tokenized(folder: Path, bucket: Path | str, log: Path, stop: Stop | None = None) -> None:
    """What one process does that needs the store. It notes what it tokenizes, and what it reports.

    Args:
        folder: the text, as if it were in S3.
        bucket: where the runs are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINING_CACHE_DIR", str(log.with_suffix(".cache")))
        patch.setattr(documents, "_BATCH_DOCUMENTS", 8)
        patch.setattr(build, "SHARD_TOKENS", 700)
        patch.setattr(store, "BLOCK_TOKENS", 100)
        patch.setattr(build, "_LOOK_EVERY_S", 0.02)
        patch.setattr(build, "remote_files", lambda _: as_remote(folder))

        def slowed(words: Any) -> Any:
            encode, num = texts(words), 0

            def each(batch: Sequence[str]) -> Any:
                nonlocal num
                if stop is not None:
                    stop(num)
                num += len(batch)
                note(log, "tokenized", *batch)
                return encode(batch)

            return each

        patch.setattr(build, "texts", slowed)
        found = stream_for(
            "source",
            tokenizer_file("", "new:tiny", runs=""),
            held_out_every=5,
            text_field="text",
            shared=str(bucket),
            report=lambda done, total: note(log, "reported", done, total),
        )
        note(log, "opened", found.info.num_train_tokens, found.info.num_held_out_tokens)


def note(log: Path, *what: object) -> None:
    with log.open("a") as file:
        file.write(json.dumps(what) + "\n")


def noted(log: Path, kind: str) -> list[list[Any]]:
    content = log.read_text() if log.exists() else ""
    lines = content.rpartition("\n")[0].splitlines()  # the last one may be half written
    return [rest for name, *rest in map(json.loads, lines) if name == kind]


def words_of(*logs: Path) -> list[str]:
    """The documents that were tokenized."""
    return [each for log in logs for batch in noted(log, "tokenized") for each in batch]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slow_one(
    variables: dict[str, str], folder: Path, bucket: str, log: Path, other: Path, dies: bool
) -> None:
    """A process that waits in the middle until the other one is told how far it is; then it goes
    on, or dies."""
    os.environ.update(variables)

    def stop(num: int) -> None:
        if num >= NUM // 2:
            wait_for(lambda: any(done > 0 for done, _ in noted(other, "reported")))
            if dies:
                os._exit(9)

    tokenized(folder, bucket, log, stop)


def uri_of(bucket: str) -> str:
    """The only store of a bucket."""
    (key,) = storage.list_folders(f"{bucket}/tokens")
    return f"{bucket}/tokens/{key}"


def shards(bucket: str) -> dict[str, bytes]:
    """All of a complete store but its mark, which has the name of the key."""
    uri = uri_of(bucket)
    found = {name: storage.read_bytes(f"{uri}/{name}") for name in storage.list_files(uri)}
    assert found.pop("store.json")
    return {name: each for name, each in found.items() if each is not None}


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The shards of the store, from one process that nothing happens to."""
    monkeypatch.setattr(documents, "_BATCH_DOCUMENTS", 8)
    monkeypatch.setattr(build, "SHARD_TOKENS", 700)
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "cache"))
    built(corpus(tmp_path / "text"), tmp_path / "expected")
    return shards(str(tmp_path / "expected"))


def two_processes(tmp_path: Path, bucket: str, *, dies: bool) -> tuple[Path, Path]:
    """Notes of a process that builds a store, and of one that comes while it does."""
    first, second = tmp_path / "first", tmp_path / "second"
    text, variables = tmp_path / "text", {**os.environ}
    slow = FORKS.Process(target=slow_one, args=(variables, text, bucket, first, second, dies))
    slow.start()
    try:
        wait_for(lambda: noted(first, "tokenized") or slow.exitcode is not None)
        tokenized(text, bucket, second)
        slow.join(120)
        assert slow.exitcode == (9 if dies else 0)
    finally:
        slow.kill()
        slow.join()
    return first, second


def test_of_two_processes_at_a_time_one_makes_the_tokens(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    bucket = str(tmp_path / "bucket")
    first, second = two_processes(tmp_path, bucket, dies=False)
    assert noted(first, "opened") == noted(second, "opened") != []
    assert len({*words_of(first)}) == len(words_of(first)) == NUM
    assert words_of(second) == []
    told = [done for done, _ in noted(second, "reported")]
    size = sum(each.size for each in as_remote(tmp_path / "text"))
    assert told == sorted(told)
    assert 0 < told[-1] <= size
    assert {total for _, total in noted(second, "reported")} == {size}
    assert shards(bucket) == expected
    assert newest_number(uri_of(bucket)) == 1, "no other process took one"


def test_one_that_dies_is_continued_after_its_last_whole_shard(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    bucket = str(tmp_path / "bucket")
    first, second = two_processes(tmp_path, bucket, dies=True)
    assert noted(first, "opened") == []
    assert noted(second, "opened")
    assert len({*words_of(first, second)}) == NUM
    # Twice: only what the first had of a shard that it did not complete.
    num_twice = len(words_of(first, second)) - NUM
    assert 0 < num_twice < len(words_of(first))
    assert shards(bucket) == expected


def test_one_that_died_on_another_host_is_followed_once_its_lease_is_over(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    def dies(num: int) -> None:
        if num >= NUM // 2:
            raise KeyboardInterrupt

    text, bucket = tmp_path / "text", str(tmp_path / "bucket")
    first, second = tmp_path / "first", tmp_path / "second"
    with pytest.raises(KeyboardInterrupt):
        tokenized(text, bucket, first, dies)
    assert newest_number(uri_of(bucket)) == 1
    elsewhere(uri_of(bucket), 2, age_s=LEASE_S - 1)
    tokenized(text, bucket, second)
    assert noted(second, "reported")[0][0] > 0, "how far the first one came"
    assert newest_number(uri_of(bucket)) == 3
    assert len(words_of(second)) < NUM
    assert len({*words_of(first, second)}) == NUM
    assert shards(bucket) == expected


def test_one_that_stalls_until_it_has_lost_the_lease_leaves_the_store_to_the_other(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    text, bucket = tmp_path / "text", str(tmp_path / "bucket")
    first, second = tmp_path / "first", tmp_path / "second"

    def stalls(num: int) -> None:
        if num >= NUM // 2 and not second.exists():
            elsewhere(uri_of(bucket), 2, age_s=LEASE_S)
            tokenized(text, bucket, second)

    tokenized(text, bucket, first, stalls)
    assert noted(first, "opened") == noted(second, "opened") != []
    assert len(words_of(first)) < NUM, "it ends with the shard that it was at"
    assert len(words_of(second)) < NUM
    assert len({*words_of(first, second)}) == NUM
    assert shards(bucket) == expected


def test_one_that_asks_just_before_the_store_is_complete_makes_none(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, bucket = tmp_path / "text", str(tmp_path / "bucket")
    first, second = tmp_path / "first", tmp_path / "second"

    def open_stream(key: str, *, shared: str) -> Any:
        found = store.open_stream(key, shared=shared)
        monkeypatch.setattr(build, "open_stream", store.open_stream)
        if not first.exists():
            tokenized(text, bucket, first)
        return found

    monkeypatch.setattr(build, "open_stream", open_stream)
    tokenized(text, bucket, second)
    assert noted(first, "opened") == noted(second, "opened") != []
    assert words_of(second) == []
    assert shards(bucket) == expected


#: What a rank runs that has a node, and so a cache, to itself. Blocks are so small that a run needs
#: more of them than are fetched ahead.
NODE = """
import os, runpy, torch
from training.data import documents
from training.data.streams import build, store
torch.set_num_threads(1)  # as torchrun has it: two ranks would wait for each other's threads
os.environ["TRAINING_CACHE_DIR"] += os.environ["RANK"]
documents._BATCH_DOCUMENTS, build.SHARD_TOKENS, build._LOOK_EVERY_S = 8, 700, 0.05
store.BLOCK_TOKENS, store.GROUP_BLOCKS = 100, 4
texts = build.texts

def counted(words):
    encode = texts(words)
    def each(batch):
        print(f"tokenized {len(batch)}\\n", end="", flush=True)
        return encode(batch)
    return each

build.texts = counted
runpy.run_module("training.launch", run_name="__main__", alter_sys=True)
"""
RUN = ["--preset", "tiny", "--stream", "--data", "s3://stream-builds/text", "--storage"]
RUN += ["s3://stream-builds/runs", "--run", "streamed", "--held-out-every", "5", "--seq-len", "16"]
# A model that stays as it was: what a step loses depends on its sequences, and on no other step.
RUN += ["--lr", "1e-12", "--report-every", "1", "--max-steps", "6"]
RUN += ["--eval-sequences", "8", "--sample-tokens", "0"]


@pytest.mark.slow
def test_two_nodes_share_a_build_in_s3_and_lose_what_they_would_with_the_text_on_a_disk(
    s3_endpoint: str, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3_endpoint  # the environment points at it
    storage.filesystem("s3://").mkdir("s3://stream-builds")
    for path in (tmp_path / "text").iterdir():
        storage.write_bytes(f"s3://stream-builds/text/{path.name}", path.read_bytes())
    script, log = tmp_path / "node.py", tmp_path / "log"
    script.write_text(NODE)
    nodes = ranks([str(script), "fsdp", *RUN], folder=tmp_path, out=log, err=log)
    try:
        assert nodes.wait(240) == [0, 0], nodes.text()
    finally:
        nodes.kill()
    words = [line.split() for line in nodes.text().splitlines()]
    assert sum(int(each[1]) for each in words if each[:1] == ["tokenized"]) == NUM
    assert shards("s3://stream-builds/runs/.cache") == expected
    for rank in (0, 1):
        assert [*(tmp_path / f"cache{rank}").rglob("blocks-*/*.bin")]
    lines = storage.read_bytes("s3://stream-builds/runs/streamed/metrics.jsonl")
    assert lines is not None
    found = [json.loads(each) for each in lines.splitlines()]
    losses = {each["step"]: each["loss"] for each in found if each["type"] == "step"}

    monkeypatch.setattr(store, "BLOCK_TOKENS", 100)
    monkeypatch.setattr(store, "GROUP_BLOCKS", 4)
    settings = storage.read_bytes("s3://stream-builds/runs/streamed/config.json")
    assert settings is not None
    config = FsdpConfig.from_json(json.loads(settings))
    whole, (streamed,) = ordinary(tmp_path / "text"), inputs.stores_of(config)
    monkeypatch.setattr(whole, "shuffle", streamed.shuffle)  # the order is another one
    feed = TextFeed(whole, seq_len=16, global_batch=16, seed=config.seed, isolates=False)
    _, model_config, _ = build_model(config, streamed)
    model = rebuild(config.to_json(), model_config.to_dict(), torch.device("cpu"))
    assert [*losses] == [*range(1, 7)]
    for step, loss in losses.items():
        tokens = torch.from_numpy(feed.step(step - 1, rank=0, world_size=1).tokens)
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert loss == pytest.approx(own.item(), abs=1e-5)
