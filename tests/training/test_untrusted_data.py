"""Proves that data, models and records that others have written are read or refused, whatever they
say (``tests/fuzzing.py``); ``test_untrusted`` has what training itself writes.
"""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from contract.errors import InputError
from store.storage import runs_root
from tests.fuzzing import damaged_bytes, fuzz, fuzz_text, fuzz_values
from tests.training.test_plan import TINY_LLAMA
from tests.training.test_report import RESULT
from training.data import idx, vocabulary
from training.data.documents import Rows, documents
from training.data.pictures.index import Entry, Index, StoredFile
from training.models import model_weights
from training.models.conversion import convert
from training.models.model_shapes import ModelShape, read_config
from training.models.pretrained import config_of
from training.models.serving import stops_of
from training.models.weight_files import PICKLED, PICKLED_INDEX
from training.record.progress import Progress
from training.record.result import Result


def test_storage_addresses() -> None:
    for text in ("~/runs", "s3://bucket/prefix", "/tmp/runs"):
        fuzz_text(text, runs_root, InputError)


def test_idx() -> None:
    content = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (2, 3, 4)) + bytes(24)
    fuzz(content, lambda given: idx.parse(given, "x"), InputError)


def test_compressed_idx(tmp_path: Path) -> None:
    file = tmp_path / "x.gz"
    fuzz(gzip.compress(b"\0\0\x08\x01\0\0\0\x04abcd"), at(file, idx.decompress), InputError)


def at(file: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of files as one of bytes."""

    def reader(content: bytes) -> object:
        file.write_bytes(content)
        return read(file)

    return reader


CONVERSATION = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "weight": 1,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
    ],
    "tools": [{"name": "f"}],
    "system": "s",
}


@pytest.mark.parametrize(
    "name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "b.jsonl", "a.json"]
)
def test_texts(tmp_path: Path, name: str) -> None:
    text = "one\ntwo\n\nthree é\n"
    rows: list[dict[str, Any]] = [{"text": "one"}, {"text": "two"}, {"text": ""}]
    if ".jsonl" in name:
        rows = [CONVERSATION] * 2 if name.startswith("b") else rows
        text = "".join(json.dumps(row) + "\n" for row in rows)
    content = text.encode()
    content = gzip.compress(content) if name.endswith(".gz") else content
    content = json.dumps(rows).encode() if name.endswith(".json") else content
    fuzz(content, at(tmp_path / name, lambda file: [*documents([file], Rows(), None)]), InputError)


def test_tables(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two", None]}), file)
    for content, name in ((file.getvalue(), "a.parquet"), (b'a,text\n1,"x, ""y"""\n', "a.csv")):
        read = at(tmp_path / name, lambda path: [*documents([path], Rows(), None)])
        fuzz(content, read, InputError)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_tokenizers(tmp_path: Path, name: str) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<end>"])
    contents = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>", "chat_template": "{{ 1 }}"}),
        "config.json": json.dumps({"eos_token_id": [2]}),
    }
    for other, text in contents.items():
        (tmp_path / other).write_text(text)
    fuzz(
        contents[name].encode(),
        at(tmp_path / name, lambda _: vocabulary.read(tmp_path)),
        InputError,
    )


def test_tokens_that_end_answers() -> None:
    fuzz_text('{"eos_token_id": [2, 3]}', lambda text: stops_of(text.encode()), InputError)


def test_configurations_of_models(tmp_path: Path) -> None:
    def shape(file: Path) -> object:
        return ModelShape.from_config(read_config(file))

    def config(file: Path) -> object:
        return config_of(read_config(file))

    content = json.dumps(TINY_LLAMA).encode()
    fuzz(content, at(tmp_path / "config.json", shape), InputError)
    fuzz(content, at(tmp_path / "config.json", config), InputError, cases=100)


def test_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config  # it has no types

    small = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    model = make(config_of(TINY_LLAMA | small))
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    content = save(weights)

    def read(_file: Path) -> None:
        model_weights.load(model, tmp_path)

    fuzz(content, at(tmp_path / "model.safetensors", read), InputError, cases=100)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "part.safetensors").write_bytes(content)
    places = dict.fromkeys(weights, "part.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": places}).encode()
    fuzz(index, at(tmp_path / "model.safetensors.index.json", read), InputError, cases=100)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["archive", "pickle"])
def test_weights_in_pickles(tmp_path: Path, form: str) -> None:
    """In an archive, and in one that is whole around a damaged pickle."""
    saved, into = io.BytesIO(), tmp_path / "converted"
    into.mkdir()
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    torch.save(weights, saved)

    def damage(content: bytes, draw: random.Random) -> bytes:
        found = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(found, "w") as new:
            for name in old.namelist():
                part = old.read(name)
                part = damaged_bytes(part, draw) if name.endswith("/data.pkl") else part
                new.writestr(name, part)
        return found.getvalue()

    read = at(tmp_path / PICKLED, lambda _: convert(tmp_path, into))
    how = damage if form == "pickle" else damaged_bytes
    fuzz(saved.getvalue(), read, InputError, damage=how, cases=50)


def test_indexes_of_weights_in_pickles(tmp_path: Path) -> None:
    into = tmp_path / "converted"
    into.mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "part.bin")
    index = json.dumps({"metadata": {}, "weight_map": {"a": "part.bin"}}).encode()
    fuzz(index, at(tmp_path / PICKLED_INDEX, lambda _: convert(tmp_path, into)), InputError)


def test_indexes_of_pictures() -> None:
    entry = Entry(label=0, name="a/1.jpg", file="train-0.bin", size=3, height=1, width=1)
    fuzz_text(entry.to_line(), Entry.from_line, InputError)
    files = {"train.tsv": StoredFile(size=3, sha256="0" * 64)}
    found = Index(
        form="tree",
        classes=("a",),
        counts={"train": 1},
        fingerprint="0",
        files=files,
        damaged=("x",),
    )
    fuzz_text(found.to_json(), lambda text: Index.from_json(text, where="s3://x"), InputError)


def test_records_of_runs() -> None:
    fuzz_values(RESULT.to_json(), lambda value: Result.from_json(as_object(value)), ValueError)
    progress = {"time": 1.0, "step": 1, "total_steps": 3, "loss": 0.1, "left_s": 3.0}
    fuzz_values(progress, lambda value: line_of(as_object(value)), ValueError)


def as_object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def line_of(values: dict[str, object]) -> tuple[str, str]:
    found = Progress.from_json(values)
    return found.line(), found.share
