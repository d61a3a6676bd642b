"""Exporting a run and continuing a prompt need its checkpoint and its base model, not its text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tests.conftest import ROOT
from training import export, generate
from training.checkpoint.sharded_checkpoints import STATE_FILE, Found, state_of
from training.models import model_weights
from training.models.model_weights import SINGLE_FILE
from training.recipes.fsdp import inputs
from training.recipes.fsdp.model import build, describe, fill
from training.recipes.fsdp.settings import FsdpConfig
from training.system import storage


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("place", ["runs", "s3://bucket/runs"])
def test_adapters_are_merged_and_a_prompt_is_continued_without_text_and_tokens(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, text = tmp_path / "cache", tmp_path / "text"
    monkeypatch.setenv("TRAINING_CACHE_DIR", str(cache))
    shutil.copy(ROOT / "LICENSE", text)
    found = checkpoint(tmp_path / "step-00000001", str(text), place)
    before = exported(found, tmp_path / "before")

    text.unlink()
    shutil.rmtree(cache)
    filesystem = storage.filesystem

    def on_disk(uri: str, **options: Any) -> Any:
        assert not storage.is_s3(uri), f"{uri} is read"
        return filesystem(uri, **options)

    monkeypatch.setattr(storage, "filesystem", on_disk)
    assert exported(found, tmp_path / "after") == before
    first, trained = generate.continuations(found, "The License", num=8, seed=0)
    assert first != trained
    assert not (cache / "tokens").exists()


def checkpoint(folder: Path, text: str, place: str) -> Found:
    """A checkpoint of a run with adapters that have learned something, kept at ``place``."""
    config = inputs.prepare(
        FsdpConfig(
            recipe="fsdp", run="r", storage=str(folder.parent), data=text, seq_len=64, lora_rank=2
        )
    )
    stores = inputs.stores_of(config)
    model, model_config, _ = build(config, stores[0])
    model_weights.allocate(model, torch.device("cpu"))
    fill(model, config)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(each)
    optimizer = torch.optim.SGD(each for each in model.parameters() if each.requires_grad)
    save(state_of(model, optimizer), storage_writer=FsspecWriter(str(folder)), no_dist=True)
    state = {"position": {"step": 1}, "config": {**config.to_json(), "storage": place}}
    (folder / STATE_FILE).write_text(json.dumps(state))
    for name, content in describe(config, model_config, stores).items():
        (folder / name).write_bytes(content)
    return Found(str(folder))


def exported(found: Found, to: Path) -> bytes:
    return (Path(export.export(found, str(to))) / SINGLE_FILE).read_bytes()
