"""A mistake with the sharded recipe is explained in a sentence, before it costs much."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contract import runs
from contract.errors import InputError
from tests.conftest import ROOT
from tests.training.test_config import imagenet as imagenet_config
from tests.training.test_plan import config as fsdp
from training.checkpoint import checkpoints
from training.checkpoint.manifest import DamagedError
from training.data import documents
from training.data.feed import Batch, feed_of
from training.fsdp import inputs
from training.fsdp import train as loop_of_fsdp
from training.fsdp.held_out import HeldOut
from training.fsdp.model import build
from training.fsdp.passes import ahead
from training.fsdp.settings import FsdpConfig
from training.imagenet import train as imagenet
from training.loop import optimizers
from training.models import agreement
from training.models.language_models import WithLoss
from training.system import devices

pytestmark = pytest.mark.usefixtures("cache")

TEXT = str(ROOT / "LICENSE")


def config(tmp_path: Path, **changes: Any) -> FsdpConfig:
    values = {"data": TEXT, "held_out_every": 5, "seq_len": 64, "global_batch": 4}
    return fsdp(storage=str(tmp_path), **{**values, **changes})


def test_a_sequence_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    prepared = inputs.prepare(config(tmp_path, seq_len=2048))
    with pytest.raises(InputError, match=r"--seq-len is 2048.* 1024 "):
        build(prepared, inputs.store_of(prepared))


def test_beyond_the_original_length_of_long_rope_documents_are_not_packed(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    shape: dict[str, Any] = {"model_type": "phi3", "rope_scaling": {"type": "longrope", **factors}}
    shape |= {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
    shape |= {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    prepared = inputs.prepare(config(tmp_path, seq_len=64, model=f"new:{tmp_path}"))
    store = inputs.store_of(prepared)
    build(prepared, store)  # windows of text are all as long
    with pytest.raises(InputError, match=r"longrope rope.* use at most 32,"):
        build(replace(prepared, isolate_documents=True), store)


def test_only_a_new_run_compares_documents_of_its_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = inputs.store_of(inputs.prepare(config(tmp_path)))
    feed = feed_of(store, seq_len=64, global_batch=4, seed=0)
    seen: list[Any] = []
    monkeypatch.setattr(agreement, "check_documents", lambda *all, **_: seen.append(all))
    trained = WithLoss(torch.nn.Linear(1, 1))
    for step in (1, 0):
        loop_of_fsdp._check_first(trained, feed, torch.device("cpu"), step=step, is_exact=True)
    ((_, (tokens, _, _)),) = seen
    assert tokens.tolist() == feed.step(0, rank=0, world_size=1).tokens[:2].tolist()


def test_a_held_out_part_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    prepared = inputs.prepare(config(tmp_path, seq_len=1024, held_out_every=30))
    store = inputs.store_of(prepared)
    feed = feed_of(store, seq_len=1024, global_batch=4, seed=0)
    with pytest.raises(InputError, match=" 1024"):
        HeldOut(feed, store, prepared)


def test_a_run_that_was_trained_on_something_else_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="LICENSE"):
        inputs.prepare(config(tmp_path, text_key="257f5d3a"))


def test_columns_bad_rows_and_the_text_to_evaluate_on_are_as_the_options_say(
    tmp_path: Path,
) -> None:
    rows = '{"a": "Why?", "b": "So."}\n' * 9
    (tmp_path / "train.jsonl").write_text(rows + '{"a": 1, "b": "So."}\n')
    (tmp_path / "val.jsonl").write_text(rows)
    given: dict[str, Any] = {
        "data": str(tmp_path / "train.jsonl"),
        "validation": str(tmp_path / "val.jsonl"),
        "columns": "prompt=a,answer=b",
    }
    whole = config(tmp_path, skip_bad_rows=True, **given)
    inputs.look_at(whole)
    info = inputs.store_of(inputs.prepare(whole)).info
    assert (info.num_train_conversations, info.num_held_out_conversations) == (9, 9)


def test_what_compiles_wants_a_compiler_and_eight_bits_want_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(InputError, match="--compile"):
        devices.check_compiler("--compile")
    with pytest.raises(InputError, match="adamw-8bit"):
        optimizers.build(
            torch.nn.Linear(2, 2),
            "adamw-8bit",
            lr=1e-3,
            weight_decay=0.0,
            device=torch.device("cpu"),
        )


def test_inputs_are_made_one_step_ahead_and_what_fails_there_fails_the_step() -> None:
    made: list[int] = []
    batch = Batch(
        tokens=np.arange(10).reshape(2, 5),
        labels=np.arange(8).reshape(2, 4),
        positions=None,
        num_tokens=8,
    )

    class Fake:
        def step(self, step: int, *, rank: int, world_size: int) -> Batch:
            made.append(step)
            if step == 9:
                raise InputError(f"rank {rank} of {world_size}")
            return batch

        def num_labels(self, step: int) -> int:
            return 100 + step

    feed: Any = Fake()
    worker: Any = SimpleNamespace(rank=1, world_size=2, device=torch.device("cpu"))
    coming = ahead(feed, range(7, 11), worker, num_passes=2)
    first = next(coming)
    deadline = time.monotonic() + 60
    while len(made) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert made == [7, 8], "the next one, and no more"
    assert (first.num_labels, first.num_tokens, len(first.passes)) == (107, 8, 2)
    tokens, positions, _ = first.passes[1]
    assert positions is None
    assert tokens is not None
    assert tokens.tolist() == [[5, 6, 7, 8, 9]]
    next(coming)
    with pytest.raises(InputError, match="rank 1 of 2"):
        next(coming)


@pytest.mark.parametrize(
    ("loop", "settings", "advice"),
    [
        (loop_of_fsdp, fsdp(data=TEXT), "--microbatch 2"),
        (
            imagenet,
            imagenet_config(data=TEXT, global_batch=512, image_size=224),
            "--batch-per-worker 128",
        ),
    ],
    ids=["fsdp", "imagenet"],
)
def test_out_of_memory_says_what_is_kept_and_what_to_try(
    loop: Any, settings: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(loop, "_train", full)
    worker = SimpleNamespace(rank=1, world_size=2, run_uri=str(tmp_path / "r"), fence=0)
    (tmp_path / "r" / "checkpoints" / "step-00000007").mkdir(parents=True)
    with pytest.raises(InputError, match=f"step-00000007.*{advice}.*Tried to allocate"):
        loop.train(worker, settings)


@pytest.mark.slow
def test_text_in_a_folder_of_s3_is_read_from_all_its_files(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3_endpoint  # the environment points at it
    from store import storage

    storage.filesystem("s3://").mkdir("s3://texts")
    with pytest.raises(InputError, match=r"s3://texts/a holds no text"):
        documents.text_files("s3://texts/a")
    storage.write_bytes("s3://texts/a/two.jsonl", b'{"text": "two"}')
    storage.write_bytes("s3://texts/a/deep/one.jsonl", b'{"text": "one"}')
    storage.write_bytes("s3://texts/a/picture.png", b"no text")
    storage.write_bytes("s3://texts/a/README.txt", b"about them")
    # Text and tokens are 60 bytes together.
    monkeypatch.setattr(storage, "bytes_free", lambda _: 59)
    with pytest.raises(InputError, match=r"use hosts with a larger disk"):
        documents.text_files("s3://texts/a")
    monkeypatch.setattr(storage, "bytes_free", lambda _: 60)
    found = documents.text_files("s3://texts/a/")
    assert [path.read_bytes() for path in found] == [b'{"text": "one"}', b'{"text": "two"}']


def test_a_column_of_a_table_is_text(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = [f"document {number}" for number in range(30)] + [None, " "]
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"body": words, "id": range(32)}), table)
    prepared = inputs.prepare(config(tmp_path, data=str(table), text_field="body"))
    assert inputs.store_of(prepared).info.num_documents == 30
    with pytest.raises(InputError, match="--text-field"):
        inputs.prepare(config(tmp_path, data=str(table)))


def test_the_built_in_text_is_the_same_documents_each_time(tmp_path: Path) -> None:
    prepared = inputs.prepare(config(tmp_path, data="python-help", held_out_every=20))
    store = inputs.store_of(prepared)
    assert store.info.num_documents > 70
    assert store.info.num_train_tokens > 300_000
    assert inputs.prepare(config(tmp_path, data="python-help", held_out_every=20)) == prepared
    assert [*map(len, store.prompts(num=3, length=16))] == [16] * 3


LISTED = '{"files": {"%s": {"bytes": %d, "sha256": "wrong"}}}'


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (None, r"manifest\.json is missing"),
        (LISTED % ("__1_0.distcp", 5), r"__1_0\.distcp is missing"),
        (LISTED % ("__0_0.distcp", 6), "has 5 bytes instead of 6"),
        (LISTED % ("__0_0.distcp", 5), "does not match its checksum"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_known_by_its_manifest(
    manifest: str | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"shard")
    if manifest:
        (tmp_path / runs.MANIFEST_FILE).write_text(manifest)
    with pytest.raises(DamagedError, match=words):
        checkpoints.verify(str(tmp_path))
