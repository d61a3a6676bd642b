"""Models and tokenizers are found wherever they are said to be; where they are not, the error says
what to do."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import InputError
from store import storage
from tests.conftest import ROOT
from tests.training import loopback_hub
from training.models import pretrained


def parquet(text: str) -> bytes:
    """A table with one document."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": [text]}), content)
    return bytes(content.getvalue())


def pickled() -> bytes:
    """Weights as they were published before there were safetensors."""
    content = io.BytesIO()
    torch.save({"a": torch.ones(2)}, content)
    return content.getvalue()


FILES = {
    "config.json": json.dumps({"model_type": "gpt_neox", "hidden_size": 64}).encode(),
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"not wanted",
}


SCRIPT = {"README.md": b"no card", "script.py": b"raise SystemExit"}
#: What the Hub makes of some data sets, in a revision of its own.
CONVERTED = {
    "/api/datasets/owner/script": {
        "default/train/0000.parquet": parquet("from"),
        "default/train/0001.parquet": parquet("a script"),
        "default/test/0000.parquet": parquet("held out"),
        "large/partial-train/0000.parquet": parquet("the beginning"),
    }
}
TEXTS = {
    "README.md": b"no text",
    "part.jsonl": b'{"text": "one"}',
    "more/part.jsonl": b'{"text": "two"}',
}
PICKLED = {"config.json": FILES["config.json"], "pytorch_model.bin": pickled()}
DAMAGED = {"config.json": FILES["config.json"], "pytorch_model.bin": b"damaged"}
REPOSITORIES = {
    "/api/models/owner/pickled": ("/owner/pickled", PICKLED),
    "/api/models/owner/damaged": ("/owner/damaged", DAMAGED),
    "/api/models/owner/empty": ("/owner/empty", {"config.json": b"{}"}),
    "/api/models/owner/open": ("/owner/open", FILES),
    "/api/datasets/owner/texts": ("/datasets/owner/texts", TEXTS),
    "/api/datasets/owner/script": ("/datasets/owner/script", SCRIPT),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """owner/open and owner/texts are there, owner/gated wants a permission, nothing else is
    known."""
    with loopback_hub.serve(REPOSITORIES, CONVERTED) as address:
        yield address


def asked(models: list[str], hub: str, tmp_path: Path, runs: str = "runs") -> list[str]:
    """What a process that may reach the Hub makes of each model: its files, or the error."""
    script = """
import json, os, sys
from contract.errors import InputError
from training.data import documents
from training.models import pretrained
found = []
for model in sys.argv[1:]:
    try:
        if model.startswith("hf://"):
            files = documents.text_files(model)
            found.append(" ".join(documents.documents(files, documents.Rows(), None)))
            continue
        pretrained.check_weights(model, runs=os.environ["TEST_RUNS"])
        folder = pretrained.model_folder(model, runs=os.environ["TEST_RUNS"])
        found.append(" ".join(sorted(path.name for path in folder.glob('[!.]*'))))
    except InputError as error:
        found.append(str(error))
print(json.dumps(found))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"TEST_RUNS": runs, "TRAINING_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *models],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
def test_the_hub_gives_what_it_has_and_its_refusals_say_what_to_do(
    hub: str, tmp_path: Path
) -> None:
    models = ["owner/open", "owner/gated", "owner/none", "not a name", "hf://owner/texts"]
    models += ["owner/pickled", "owner/empty"]
    there, gated, unknown, bad, texts, pickled, empty = asked(models, hub, tmp_path)
    assert there == "config.json model.safetensors"
    assert pickled == "config.json pytorch_model.bin"
    assert "model owner/empty has no weights that can be used" in empty
    assert "HF_TOKEN" in gated
    assert "HF_TOKEN" in unknown
    assert texts == "two one"
    assert "not a name" in bad


@pytest.mark.slow
def test_a_configuration_and_a_split_of_a_data_set_are_chosen(hub: str, tmp_path: Path) -> None:
    places = {
        "script/default/test": "held out",
        "script/default": "from a script",
        "script/default/train": "from a script",
        "script/default/dev": "has no split 'dev': it has test, train",
        "script/default/train/more": "give hf://owner/name[@revision] or hf://owner/name/CONF",
        "script/other/train": "data set owner/script has no configuration 'other': it has default",
        "script/large": "has only its beginning: give hf://owner/script, all of its files",
        "none/small": "owner/none is not known to the Hugging Face Hub",
    }
    found = asked([f"hf://owner/{place}" for place in places], hub, tmp_path)
    for said, expected in zip(found, places.values(), strict=True):
        assert expected in said


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", r"model folder \./nowhere does not exist"),
        ("owner/name", "no folder here, and huggingface.co does not provide it: .*HF_HUB_OFFLINE"),
        ("ftp://host/model", r"give a folder, s3://BUCKET/PREFIX or a Hugging Face id"),
    ],
)
def test_a_model_that_is_not_there_is_refused(model: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        pretrained.model_folder(model, runs="runs")


def test_a_folder_must_have_a_configuration_that_transformers_knows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        pretrained.model_config(str(tmp_path), runs="runs")
    (tmp_path / "config.json").write_text('{"model_type": "zebra"}')
    with pytest.raises(InputError, match=r"transformers cannot use its config\.json"):
        pretrained.model_config(str(tmp_path), runs="runs")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(InputError, match="reads more than text"):
        pretrained.model_config(str(tmp_path), runs="runs")


def test_a_new_model_takes_the_tokenizers_vocabulary_rounded_up() -> None:
    config = pretrained.model_config("new:tiny", runs="runs", vocab_size=257)
    assert (config.vocab_size, config.hidden_size) == (384, 128)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3["original_max_position_embeddings"] = 512


@pytest.mark.parametrize(
    ("values", "older"),
    [
        # As transformers 5 writes it, and as it is published.
        (
            {"model_type": "llama", "rope_parameters": {**_LLAMA3, "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
        ),
        (
            {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": _LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
        ),
        (
            {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 2e4},
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": None},
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}),
        ({"model_type": "gpt_neox", "rotary_pct": 0.5}, {"rotary_pct": 0.5, "rope_theta": 1e4}),
    ],
)
def test_a_configuration_has_the_names_that_older_readers_know(
    values: dict[str, Any], older: dict[str, Any]
) -> None:
    """``tests/published/test_older_readers.py`` has transformers 4 compute with them."""
    config = pretrained.config_of(values)
    written = json.loads(config.to_json_string(use_diff=False))
    assert {key: written[key] for key in older} == older
    assert pretrained.config_of(written).rope_parameters == config.rope_parameters


def test_the_byte_tokenizer_gives_back_every_text() -> None:
    from tokenizers import Tokenizer

    file = pretrained.tokenizer_file("", "new:tiny", runs="runs")
    tokenizer = Tokenizer.from_file(str(file))
    text = "naïve 日本\n\tx"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 257
    assert tokenizer.token_to_id(pretrained.END_OF_TEXT) == 256


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        pretrained.tokenizer_file(str(tmp_path), "new:tiny", runs="runs")


@pytest.mark.slow
@pytest.mark.usefixtures("s3_endpoint", "cache")
def test_a_model_in_s3_is_fetched_once_and_again_when_it_changed() -> None:
    storage.filesystem("s3://").mkdir("s3://models")
    with pytest.raises(InputError, match=r"holds none of|does not exist"):
        pretrained.model_folder("s3://models/a", runs="runs")
    storage.write_bytes("s3://models/a/config.json", b'{"model_type": "gpt_neox"}')
    storage.write_bytes("s3://models/a/model.safetensors", b"one")
    storage.write_bytes("s3://models/a/model.safetensors.index.json", b"{}")
    folder = pretrained.model_folder("s3://models/a", runs="runs")
    assert (folder / "model.safetensors").read_bytes() == b"one"
    before = (folder / "config.json").stat().st_mtime_ns
    assert pretrained.model_folder("s3://models/a/", runs="runs") == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    # One file in place of parts: what is left of those would be loaded.
    storage.write_bytes("s3://models/a/model.safetensors", b"other")
    storage.remove_file("s3://models/a/model.safetensors.index.json")
    assert pretrained.model_folder("s3://models/a", runs="runs") == folder
    assert (folder / "model.safetensors").read_bytes() == b"other"
    assert not (folder / "model.safetensors.index.json").exists()


@pytest.mark.slow
def test_the_nodes_of_a_cluster_share_converted_weights_and_no_incomplete_copy(
    hub: str, s3_endpoint: str, tmp_path: Path
) -> None:
    del s3_endpoint  # the environment points at it
    storage.filesystem("s3://").mkdir("s3://shared-models")
    runs = "s3://shared-models/runs"
    damaged, good = asked(["owner/damaged", "owner/pickled"], hub, tmp_path / "a", runs)
    assert "pytorch_model.bin cannot be read" in damaged
    assert good == "config.json model-00001.safetensors model.safetensors.index.json"
    stored = [each.rpartition("/")[2] for each in storage.filesystem(runs).find(runs)]
    assert sorted(stored) == [".complete", *good.split()]  # nothing of the damaged one
    # Another node finds it there, and asks the Hub for no file.
    (again,) = asked(["owner/pickled"], "http://127.0.0.1:9", tmp_path / "b", runs)
    assert again == good
