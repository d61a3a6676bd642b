"""A language model is the same model however it is built, sharded and filled, and its loss is that
of transformers (``test_recipe_steps`` has sharded ones).

Two architectures stand for all: GPT-NeoX, whose output embedding has a name of its own on disk, and
Llama with tied embeddings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from contract.errors import InputError
from tests.training.test_plan import TINY_LLAMA, built
from training.fsdp import train as fsdp
from training.models import language_models, model_weights, weight_files
from training.models.language_models import WithLoss
from training.models.model_shapes import SHAPES

NEOX = {**SHAPES["tiny"], "vocab_size": 257}


def begun(values: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """The first weights of a model."""
    model = built(values)
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=seed)
    return dict(model.named_parameters())


@pytest.mark.parametrize("values", [NEOX, TINY_LLAMA], ids=["neox", "llama"])
def test_random_weights_depend_on_the_seed_and_the_names_alone(values: dict[str, Any]) -> None:
    first, again, other = (begun(values, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    matrices = [key for key in first if first[key].dim() > 1]
    assert not any(torch.equal(first[key], other[key]) for key in matrices)
    for key in matrices:
        assert first[key].std().item() == pytest.approx(0.02, rel=0.1)
    norms = [value for key, value in first.items() if "norm" in key and key.endswith("weight")]
    assert norms
    assert all(bool((value == 1).all()) for value in norms)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model = built(NEOX)
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=0)
    model.save_pretrained(tmp_path, max_shard_size="400KB")

    def load(**changes: int) -> None:
        model = built({**NEOX, **changes})
        model_weights.allocate(model, torch.device("cpu"))
        model_weights.load(model, tmp_path)

    with pytest.raises(InputError, match=r"has shape .* configuration says"):
        load(intermediate_size=96)
    with pytest.raises(InputError, match=r"lacks weights of this model: gpt_neox\.layers\.4\."):
        load(num_hidden_layers=5)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match="download it again"):
        load()
    (tmp_path / weight_files.SAFETENSORS_INDEX).unlink()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        load()
    (tmp_path / weight_files.SAFETENSORS).write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot be read"):
        load()


def test_what_is_no_language_model_is_refused() -> None:
    from transformers import LlamaConfig, ResNetConfig

    with pytest.raises(InputError, match="a causal language model of type 'resnet'"):
        language_models.build_on_meta(ResNetConfig())
    wrong: Any = LlamaConfig()
    wrong.rope_parameters = {"rope_type": "bent"}
    with pytest.raises(InputError, match=r"of type 'llama' \(KeyError"):
        language_models.build_on_meta(wrong)


def alone(bf16: bool) -> tuple[float, set[str], float]:
    model = WithLoss(built(NEOX))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    language_models.shard(model, mesh, bf16=bf16)
    model_weights.allocate(model.model, torch.device("cpu"))
    model_weights.initialise(model.model, seed=3)
    loss = model(torch.arange(200).view(8, 25))
    loss.backward()
    kinds = {f"{type(each).__name__} {each.dtype}" for each in model.parameters()}
    return loss.item(), kinds, fsdp.clip(model, 0.0).item()


@pytest.mark.usefixtures("group")
def test_one_worker_shards_nothing_and_computes_in_bf16_beside_weights_in_fp32() -> None:
    exact, kinds, exact_norm = alone(bf16=False)
    loss, kinds_in_bf16, norm = alone(bf16=True)
    assert kinds == kinds_in_bf16 == {"Parameter torch.float32"}
    assert loss != exact
    assert loss == pytest.approx(exact, rel=1e-3)
    assert norm == pytest.approx(exact_norm, rel=0.02)
