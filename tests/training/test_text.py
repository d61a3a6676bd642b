"""Text becomes tokens once, completely and in order; each step's sequences depend on the step and
the seed alone; what is no text is refused in one sentence."""

import errno
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from contract.errors import InputError
from tests.training.bucket import CrashError, install
from training.data import documents, rows
from training.data.feed import Feed, Windows, feed_of, positions_in_documents
from training.data.rows import TokenStore, store_for

pytestmark = pytest.mark.usefixtures("cache")

WORDS = ["<|endoftext|>", "[unknown]", *(f"w{i}" for i in range(98))]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A vocabulary of a hundred words."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[unknown]"))
    made.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def document(number: int) -> str:
    return " ".join(f"w{(number + i) % 98}" for i in range(5))


DOCUMENTS = [document(i) for i in range(40)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty documents of five words in one file."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(DOCUMENTS) + "\n")
    return path


def decoded(tokens: npt.NDArray[Any]) -> list[str]:
    names = [WORDS[int(token)] for token in tokens]
    return [part.strip() for part in " ".join(names).split("<|endoftext|>") if part.strip()]


def store_of(source: Path, tokenizer: Path, every: int = 10, **options: Any) -> TokenStore:
    """A store of a text of which every tenth document, or another part, is held out."""
    return store_for(str(source), tokenizer, held_out_every=every, **options)


# --- building -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz"])
def test_every_document_is_there_once_in_order_and_ends_with_end_of_text(
    kind: str, tmp_path: Path, tokenizer: Path
) -> None:
    """In any kind of file, and in the order of the names of a folder."""
    folder = tmp_path / "files"
    (folder / "b").mkdir(parents=True)
    for name, part in (("b/x", DOCUMENTS[20:]), ("a", DOCUMENTS[:20])):
        content = "\n\n".join(part)
        if kind.startswith("jsonl"):
            content = "\n".join(json.dumps({"text": each}) for each in part)
        data = content.encode()
        file = folder / f"{name}.{kind}"
        file.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    store = store_of(folder, tokenizer)
    assert decoded(store.held_out) == DOCUMENTS[9::10]
    assert decoded(store.train) == [each for i, each in enumerate(DOCUMENTS) if i % 10 != 9]
    assert store.train[-1] == store.held_out[-1] == store.info.end_of_text == 0
    assert store.info.num_train_tokens + store.info.num_held_out_tokens == 40 * 6
    assert store.train.dtype == np.uint16


def test_a_store_is_built_once_and_anew_for_another_text_tokenizer_or_split(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store_of(corpus, tokenizer)
    keys = {first.info.key}
    with monkeypatch.context() as patch:
        patch.setattr(rows, "build", lambda *_a, **_k: pytest.fail("built a second time"))
        assert store_of(corpus, tokenizer).info == first.info
    keys.add(store_of(corpus, tokenizer, every=20).info.key)
    corpus.write_text(corpus.read_text() + "\n\nw1 w2\n")
    keys.add(store_of(corpus, tokenizer).info.key)
    other = tmp_path / "other.json"
    other.write_text(tokenizer.read_text().replace('"w97"', '"z97"'))
    keys.add(store_of(corpus, other).info.key)
    assert len(keys) == 4


def test_a_node_takes_the_store_of_another_node_whole_or_builds_it(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = install(monkeypatch)

    download = bucket.get_file

    def get_file(uri: str, local: str) -> None:
        if uri.endswith(rows.TRAIN_FILE):  # the last one of a store
            raise OSError(errno.EBUSY, "Please reduce your request rate.")
        download(uri, local)

    def store_on(node: str) -> TokenStore:
        monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / node))
        shared = "s3://bucket/runs/.cache"
        return store_of(corpus, tokenizer, shared=shared)

    bucket.crash_at = 3  # half of the store is in the bucket
    with pytest.raises(CrashError):
        store_on("first")
    bucket.crash_at = None
    built = store_on("second")

    monkeypatch.setattr(rows, "build", lambda *_a, **_k: pytest.fail("built a second time"))
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "get_file", get_file)
        with pytest.raises(OSError, match="reduce your request rate"):
            store_on("third")
    fetched = store_on("third")
    assert fetched.info == built.info
    assert np.array_equal(fetched.train, built.train)
    assert not [*fetched.folder.parent.glob(".*")], "nothing of the first attempt is left"
    # A worker has the key, and may not have the text.
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(tmp_path / "fourth"))
    by_key = rows.open_store(built.info.key, shared="s3://bucket/runs/.cache")
    assert by_key is not None
    assert rows.open_store("other", shared="s3://bucket/runs/.cache") is None


def test_a_build_that_fails_leaves_nothing(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    # Far enough behind the beginning that some of it has been written.
    corpus.write_bytes(corpus.read_bytes() * 20 + b"\n\n\xff\xfe broken")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        store_of(corpus, tokenizer)
    left = [path.name for path in (tmp_path / "cache" / "tokens").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


def test_tokens_go_to_the_disk_while_the_text_is_read_and_progress_is_shown(
    tmp_path: Path, tokenizer: Path
) -> None:
    seen: list[tuple[int, int]] = []
    sizes: list[int] = []

    def report(done: int, total: int) -> None:
        seen.append((done, total))
        parts = (tmp_path / "cache" / "tokens").glob(f".*/{rows.TRAIN_FILE}")
        sizes.append(sum(part.stat().st_size for part in parts))

    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(map(document, range(5000))))
    store = store_of(path, tokenizer, report=report)
    # Before the last document: all but two rounds of the tokenizer, of 1,024 documents of 6 tokens
    # of 2 bytes.
    assert store.train.nbytes - sizes[-2] < 2 * 1024 * 6 * 2
    assert seen == sorted(seen)
    assert len({*seen}) > 2
    assert seen[-1] == (path.stat().st_size,) * 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text, _: text.write_text("\n \n\n"), r"\b0\b"),
        (lambda text, _: text.write_text("w1 w2 w3"), r"\b1\b.* 10\b"),
        (lambda text, _: text.write_bytes(b"w1\0\0\0\n"), "UTF-8"),
        (lambda text, _: text.unlink(), "does not exist: give a file, a folder or an address"),
        (lambda _, words: words.write_text("{}"), "cannot be read"),
        (
            lambda _, words: words.write_text(words.read_text().replace("<|endoftext|>", "<|a|>")),
            "has no end-of-text token",
        ),
        (lambda _, words: words.unlink(), "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    spoil: Callable[[Path, Path], object], message: str, corpus: Path, tokenizer: Path
) -> None:
    spoil(corpus, tokenizer)
    with pytest.raises(InputError, match=message):
        store_of(corpus, tokenizer)


def test_a_damaged_store_is_named_with_what_to_remove(corpus: Path, tokenizer: Path) -> None:
    folder = store_of(corpus, tokenizer).folder
    (folder / rows.TRAIN_FILE).write_bytes(b"123")
    with pytest.raises(InputError, match=r"has 3 bytes instead of 432: .* remove"):
        TokenStore.open(folder)
    (folder / rows.TRAIN_FILE).write_bytes(bytes(432))
    described = json.loads((folder / rows.STORE_FILE).read_bytes())
    names = {name for name in described if type(described[name]) is int}
    names -= {"num_documents", "num_left_out"}
    wrong = [{"stops": [-1]}, {"dtype": "O"}, {"dtype": ">u2"}, *({name: -1} for name in names)]
    for each in wrong:
        (folder / rows.STORE_FILE).write_text(json.dumps(described | each))
        with pytest.raises(InputError, match="is no token store"):
            TokenStore.open(folder)


# --- the order of sequences -----------------------------------------------------------------------
@settings(max_examples=50)
@given(
    num_tokens=st.integers(200, 2000),
    seq_len=st.integers(1, 20),
    seed=st.integers(0, 2**31 - 1),
    world_size=st.sampled_from([1, 2, 3, 4]),
)
def test_an_epoch_predicts_each_token_once_whatever_the_number_of_workers(
    num_tokens: int, seq_len: int, seed: int, world_size: int
) -> None:
    feed = windows_of(num_tokens, seq_len=seq_len, global_batch=4, seed=seed)
    labels: list[int] = []
    for step in range(feed.steps_per_epoch):
        parts = [
            feed.step(step, rank=rank, world_size=world_size).tokens for rank in range(world_size)
        ]
        whole = feed.step(step, rank=0, world_size=1)
        assert sorted(np.concatenate(parts)[:, 0]) == sorted(whole.tokens[:, 0])
        assert (whole.labels == whole.tokens[:, 1:]).all()
        labels += whole.labels.ravel().tolist()
    assert len(labels) == len({*labels}) == feed.steps_per_epoch * 4 * seq_len
    assert num_tokens - len(labels) <= 5 * seq_len


def windows_of(num_tokens: int, *, seq_len: int, global_batch: int, seed: int) -> Feed:
    text = Windows(np.arange(num_tokens, dtype=np.uint32), seq_len=seq_len)
    return Feed(text, text, global_batch=global_batch, seed=seed, drops_rest=True)


def test_a_text_that_does_not_fill_a_step_is_refused(corpus: Path, tokenizer: Path) -> None:
    store = store_of(corpus, tokenizer)
    with pytest.raises(InputError, match="216 tokens in 21 sequences of 10, fewer than the 22 of"):
        feed_of(store, seq_len=10, global_batch=22, seed=0)


def test_positions_begin_anew_after_each_end_of_text() -> None:
    inputs = np.array([[5, 6, 0, 7, 8, 0, 0, 9], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert positions_in_documents(inputs, 0).tolist() == [
        [0, 1, 2, 0, 1, 2, 0, 0],
        [0, 0, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_damaged_packed_text_is_refused(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    packed = bytearray(gzip.compress(b'{"text": "w1 w2"}\n' * 1000))
    packed[12:40] = bytes([255] * 28)
    (tmp_path / f"a.{kind}.gz").write_bytes(packed)
    with pytest.raises(InputError, match=rf"a\.{kind}\.gz cannot be read: .*fetch it again"):
        store_of(tmp_path, tokenizer, every=2)


def test_a_long_table_gives_signs_of_life(tmp_path: Path, tokenizer: Path) -> None:
    pq.write_table(pa.table({"text": [*map(document, range(5000))]}), tmp_path / "one.parquet")
    seen: list[tuple[int, int]] = []
    store_of(tmp_path, tokenizer, report=lambda *each: seen.append(each))
    assert len(seen) == 2 + (5000 - 1) // documents._BATCH_ROWS
    assert seen == sorted(seen)
