"""Adapters that are exported by themselves name the base model that they were trained beside."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save

from training import export
from training.checkpoint.sharded_checkpoints import STATE_FILE, Found

MATRIX = "model.layers.0.mlp.up_proj"


def checkpoint(folder: Path, model: str) -> Found:
    """What a run with one adapter beside ``model`` has saved."""
    weights = {f"{MATRIX}.lora_{each}.default.weight": torch.ones(2, 2) for each in "AB"}
    save({"model": weights}, storage_writer=FsspecWriter(str(folder)), no_dist=True)
    config = {"run": "lora", "model": model, "lora_rank": 2}
    (folder / STATE_FILE).write_text(json.dumps({"position": {"step": 1}, "config": config}))
    return Found(str(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("model", "base", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("owner/name@v1.0", "owner/name", "v1.0"),
        ("owner/name@refs/pr/1", "owner/name", "refs/pr/1"),
        ("{folder}/base@v2", "{folder}/base@v2", None),
        ("./models/base@v2", "./models/base@v2", None),
        ("there/base@v2", "there/base@v2", None),
        ("s3://bucket/base@v2", "s3://bucket/base@v2", None),
    ],
)
def test_the_revision_of_a_hub_id_is_kept_and_no_path_is_cut(
    model: str, base: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there/base@v2").mkdir(parents=True)
    found = checkpoint(tmp_path / "checkpoint", model.format(folder=tmp_path))
    place = export.export_adapters(found, str(tmp_path / "adapters"))
    settings = LoraConfig.from_pretrained(place)
    assert settings.base_model_name_or_path == base.format(folder=tmp_path)
    assert settings.revision == revision
