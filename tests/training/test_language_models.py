"""A language model is the same model however it is built, sharded and filled, and its loss is that
of transformers; sharded training takes the same steps as data-parallel training.

Two architectures stand for all: GPT-NeoX, whose output embedding has a name of its own on disk, and
Llama with tied embeddings. Sharded ones run in real processes over gloo.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from benchmarks import processes
from contract.errors import InputError
from tests import forks
from training.fsdp import train as fsdp
from training.models import language_models, lora, model_weights, weight_files
from training.models.language_models import WithLoss

VOCAB, SEQ_LEN = 257, 24


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "neox": {"model_type": "gpt_neox", "rotary_pct": 0.25, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
}


def config_of(name: str) -> Any:
    return AutoConfig.for_model(**SIZES, **MODELS[name])


every_model = pytest.mark.parametrize("name", MODELS)


def tokens(step: int, num: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (num, SEQ_LEN + 1), generator=generator)


def reference(name: str) -> Any:
    """transformers' own model with its own random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    make: Any = AutoModelForCausalLM
    return make.from_config(config_of(name)).eval()


def built(name: str, fill: Callable[[nn.Module], object]) -> WithLoss:
    model = language_models.build_on_meta(config_of(name))
    model_weights.allocate(model, torch.device("cpu"))
    fill(model)
    return WithLoss(model)


@pytest.fixture
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A Hugging Face folder of the model that the test is about, in several files."""
    folder = tmp_path / "model"
    model = reference(request.getfixturevalue("name"))
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / weight_files.SAFETENSORS_INDEX).exists()
    return folder


# --- one process ----------------------------------------------------------------------------------
@every_model
def test_random_weights_depend_on_the_seed_and_the_names_alone(name: str) -> None:
    first, again, other = (
        dict(built(name, partial(model_weights.initialise, seed=seed)).named_parameters())
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    matrices = [key for key in first if first[key].dim() > 1]
    assert not any(torch.equal(first[key], other[key]) for key in matrices)
    for key in matrices:
        assert first[key].std().item() == pytest.approx(0.02, rel=0.1)
    norms = [value for key, value in first.items() if "norm" in key and key.endswith("weight")]
    assert norms
    assert all(bool((value == 1).all()) for value in norms)


def test_parameters_and_operations_are_counted() -> None:
    model = language_models.build_on_meta(config_of("neox"))
    whole = sum(p.numel() for p in reference("neox").parameters())
    assert language_models.num_parameters(model) == whole
    assert len(language_models.blocks(model)) == 3
    multiplied = language_models.num_parameters(model) - VOCAB * 32
    expected = 6 * multiplied + 12 * 3 * 32 * 100
    assert language_models.flops_per_token(model, 100) == expected


@pytest.mark.parametrize("name", ["neox"])
def test_weights_that_do_not_fit_are_refused_by_name(name: str, saved: Path) -> None:
    def load(**changes: int) -> None:
        config = config_of(name)
        config.update(changes)
        model = language_models.build_on_meta(config)
        model_weights.allocate(model, torch.device("cpu"))
        model_weights.load(model, saved)

    with pytest.raises(InputError, match=r"has shape .* configuration says"):
        load(intermediate_size=128)
    with pytest.raises(InputError, match=r"lacks weights of this model: gpt_neox\.layers\.3\."):
        load(num_hidden_layers=4)
    next(saved.glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match="download it again"):
        load()
    (saved / weight_files.SAFETENSORS_INDEX).unlink()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        load()
    (saved / weight_files.SAFETENSORS).write_bytes(b"no weights")
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


# --- several processes ----------------------------------------------------------------------------
def sharded(name: str, *, sends_less: bool = False) -> WithLoss:
    model = WithLoss(language_models.build_on_meta(config_of(name)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    language_models.shard(model, mesh, bf16=False, reduce_bf16=sends_less)
    model_weights.allocate(model.model, torch.device("cpu"))
    return model


def _train(name: str, folder: Path) -> int:
    """Save the gradients, more than a pipe holds; return the number of weights of this process."""
    dist.init_process_group("gloo")
    model, less = sharded(name), sharded(name, sends_less=True)
    for each in (model, less):
        model_weights.load(each.model, folder)
        with torch.no_grad():
            each(tokens(0))
        language_models.reshard(each)
    found = _gradients(model)
    # Sent in bf16, a gradient is rounded, and is the same beside that.
    for one, other in zip(found, _gradients(less), strict=True):
        assert 0 < (one - other).norm() < 0.02 * one.norm()
    torch.save(found, folder / f"gradients-{dist.get_rank()}.pt")
    return sum(p.to_local().numel() for p in less.parameters())  # type: ignore[attr-defined]


def _gradients(model: Any) -> list[Tensor]:
    """The gradients after two passes; each pass leaves all of them to their ranks."""
    for number in range(2):
        model(tokens(number + dist.get_rank(), num=2)).backward()
        assert all(each.grad is not None for each in model.parameters())
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def alone(bf16: bool) -> tuple[float, set[str], float]:
    model = WithLoss(language_models.build_on_meta(config_of("neox")))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    language_models.shard(model, mesh, bf16=bf16)
    model_weights.allocate(model.model, torch.device("cpu"))
    model_weights.initialise(model.model, seed=3)
    loss = model(tokens(0))
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size"), [("llama", 2), ("neox", 3)], ids=["two share", "three share unevenly"]
)
def test_a_sharded_model_is_the_whole_one(name: str, world_size: int, saved: Path) -> None:
    held = processes.run(world_size, _train, name, saved, method=forks.METHOD)
    whole = built(name, lambda model: model_weights.load(model, saved))
    for number in [*range(world_size), *range(1, world_size + 1)]:
        whole(tokens(number, num=2)).backward()
    expected = [each.grad / world_size for each in whole.parameters()]  # type: ignore[operator]
    for rank in range(world_size):
        gradients = torch.load(saved / f"gradients-{rank}.pt")
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert sum(held) == language_models.num_parameters(whole.model), "no rank holds it twice"


def test_adapters_go_beside_matrices_that_the_blocks_have() -> None:
    model = language_models.build_on_meta(config_of("llama"))
    with pytest.raises(InputError, match=r"names 'w_q', .*: choose of down_proj, .*, v_proj"):
        lora.add(model, rank=2, targets="w_q,v_proj")
    lora.add(model, rank=2, targets="v_proj, up_proj")
    trained = {name.split(".")[-4] for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {"v_proj", "up_proj"}
    language_models.keep_in_bf16(model, only_frozen=True)
    kinds = {(each.requires_grad, each.dtype) for each in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
