"""Adapters stand only where they can be trained, and those that are exported by themselves name the
base model that they were trained beside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save

from contract.errors import InputError
from tests.published.models import ROWS, config_of
from tests.training.test_nf4 import STATE_SPACE, filled
from tests.training.test_plan import TINY_LLAMA, built
from training import export
from training.checkpoint.sharded_checkpoints import STATE_FILE, ShardedCheckpoint, state_of
from training.models import lora
from training.models.language_models import WithLoss

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MATRIX = "model.layers.0.mlp.up_proj"


def written(folder: Path, state: dict[str, Any], config: dict[str, Any]) -> ShardedCheckpoint:
    """A checkpoint of a run with such settings."""
    save(state, storage_writer=FsspecWriter(str(folder)), no_dist=True)
    (folder / STATE_FILE).write_text(json.dumps({"position": {"step": 1}, "config": config}))
    return ShardedCheckpoint(str(folder))


def checkpoint(folder: Path, model: str) -> ShardedCheckpoint:
    """What a run with one adapter beside ``model`` has saved."""
    weights = {f"{MATRIX}.lora_{each}.default.weight": torch.ones(2, 2) for each in "AB"}
    return written(folder, {"model": weights}, {"run": "lora", "model": model, "lora_rank": 2})


@pytest.mark.parametrize(
    ("model", "base", "revision"),
    [
        ("owner/name@refs/pr/1", "owner/name", "refs/pr/1"),
        ("there/base@v2", "there/base@v2", None),
    ],
)
def test_the_revision_of_a_hub_id_is_kept_and_no_path_is_cut(
    model: str, base: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there/base@v2").mkdir(parents=True)
    found = checkpoint(tmp_path / "checkpoint", model)
    place = export.export_adapters(found, str(tmp_path / "adapters"))
    settings = LoraConfig.from_pretrained(place)
    assert settings.base_model_name_or_path == base
    assert settings.revision == revision


def test_adapters_that_peft_would_put_elsewhere_are_exported_merged_only(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "checkpoint", "owner/name")
    (tmp_path / "checkpoint" / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(InputError, match=r"'deepseek_v3'.*leave --adapters out"):
        export.export_adapters(found, str(tmp_path / "adapters"))
    (tmp_path / "checkpoint" / "config.json").write_text('{"model_type": "llama"}')
    export.export_adapters(found, str(tmp_path / "adapters"))


def test_adapters_that_the_model_does_not_have_are_refused_and_not_left_out(
    tmp_path: Path,
) -> None:
    """An earlier version put adapters beside other matrices, under the same --lora-targets."""
    model = built(TINY_LLAMA)
    lora.add(model, rank=2, targets="up_proj,q_proj")
    filled(model)
    optimizer = torch.optim.SGD(each for each in model.parameters() if each.requires_grad)
    found = written(tmp_path, state_of(model, optimizer), {})
    found.load(model, optimizer)
    found.load_weights(model)

    other = built(TINY_LLAMA)
    lora.add(other, rank=2, targets="up_proj")
    filled(other)
    optimizer = torch.optim.SGD(each for each in other.parameters() if each.requires_grad)
    words = r"also holds model\.layers\.0\.self_attn\.q_proj\.lora_A.* more; give the model and the"
    with pytest.raises(InputError, match=words):
        found.load(other, optimizer)
    with pytest.raises(InputError, match=words):
        found.load_weights(other)


def tiny(kind: str, **changes: Any) -> Any:
    return built({**TINY_LLAMA, "model_type": kind, **changes})


def trained(model: torch.nn.Module) -> dict[str, bool]:
    """Matrix with adapters -> whether a step changes them."""
    WithLoss(filled(model))(torch.arange(32).view(2, 16)).backward()
    parts = {
        name.split(".lora_")[0]: each for name, each in model.named_parameters() if "lora_B" in name
    }
    return {
        name.partition("layers.")[2]: each.grad is not None and bool(each.grad.any())
        for name, each in parts.items()
    }


def test_all_leaves_out_what_would_not_be_trained_and_names_it() -> None:
    model = built(STATE_SPACE)
    note = lora.add(model, rank=4)
    assert note.startswith("no adapters are put beside dt_proj, out_proj (is read by its state-")
    found = trained(model)
    assert {name.partition(".")[2] for name in found} == {"mixer.in_proj", "mixer.x_proj"}
    assert all(found.values())
    with pytest.raises(InputError, match=r"'dt_proj', which is read.*choose of in_proj, x_proj$"):
        lora.add(built(STATE_SPACE), rank=4, targets="in_proj,dt_proj")


def test_linear_attention_calls_its_matrices() -> None:
    """It has the convolution of a state-space layer, whose kernels read a matrix instead."""
    model = built(config_of("Qwen3.5-18B-REAP-A3B-Coding"))
    lora.add(model, rank=4)
    assert trained(model)["0.linear_attn.out_proj"]


def test_routers_get_adapters_only_by_name() -> None:
    mixture = {"num_experts": 4, "moe_topk": 2, "head_dim": 8}
    model = tiny("hunyuan_v1_moe", **mixture)
    assert lora.add(model, rank=4) == (
        "no adapters are put beside wg (chooses experts); down_proj, gate_up_proj (fused experts, "
        "69% of the weights)"
    )
    assert not any("wg" in name for name in trained(model))
    model = tiny("hunyuan_v1_moe", **mixture)
    assert lora.add(model, rank=4, targets="wg") == ""
    found = trained(model)
    assert {name.partition(".")[2] for name in found} == {"mlp.gate.wg"}
    assert all(found.values())
    # Some are a layer of a class of their own, which returns more than a product.
    model = tiny("llama4_text", **ROWS["meta-llama/Llama-4-Scout-17B-16E"]["tiny"])
    assert "router (does more than a product" in lora.add(model, rank=4)
    assert all(trained(model).values())
    with pytest.raises(InputError, match="'router', which does more than a product"):
        lora.add(tiny("phimoe"), rank=4, targets="router")
