"""Weights in four bits are those of bitsandbytes, train adapters as full weights of the same values
would, and take the memory that is planned."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contract.errors import InputError
from tests.training.test_plan import TINY_LLAMA, built, config, setup
from training.fsdp import estimate
from training.fsdp.model import rebuild
from training.models import (
    agreement,
    estimates,
    language_models,
    lora,
    model_weights,
    nf4,
)
from training.models.language_models import WithLoss
from training.models.model_shapes import ModelShape


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_packed_values_are_those_of_bitsandbytes() -> None:
    rows = ((torch.arange(3 * 128) * 37 % 101 - 50).float() / 64).view(3, 128)
    rows[1] = 0
    rows[2, 64:] *= 1e-3
    packed = nf4.pack(rows)
    assert nf4.shape_of(packed) == rows.shape
    # What quantize_4bit and dequantize_4bit of bitsandbytes 0.50.2 make of these rows (blocks of
    # 64, nf4, scales in fp32).
    assert packed[0, :8].tolist() == [4, 193, 110, 41, 243, 176, 93, 23]
    assert digest(packed[:, :64]) == "2973679c63d889ef"
    scales = packed[:, 64:].contiguous().view(torch.float32)
    assert scales.tolist()[:2] == [[0.78125, 0.78125], [0.0, 0.0]]
    assert digest(nf4.unpack(packed, torch.float32)) == "9388510d17bc6f35"
    # Rows do not depend on each other: a shard is packed by itself.
    assert torch.equal(nf4.pack(rows[1:]), packed[1:])
    # A process that shares few rows with many has none of them.
    none = nf4.pack(rows[:0])
    assert none.shape == (0, packed.shape[1])
    assert nf4.unpack(none, torch.float32).shape == (0, 128)


def quantized(kind: str = "llama") -> nn.Module:
    """A tiny model with adapters beside packed matrices."""
    model: nn.Module = built({**TINY_LLAMA, "intermediate_size": 192, "model_type": kind})
    lora.add(model, rank=4)
    nf4.replace(language_models.blocks(model))
    return model


def filled(model: Any) -> Any:
    """The model, with its first weights."""
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=0)
    return model


def test_adapters_get_the_gradients_that_full_weights_of_the_same_values_give() -> None:
    models = []
    for bits in (4, 32):
        model = filled(quantized())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        if bits == 32:
            nf4.restore(model)
        models.append(WithLoss(model))
    packed, full = models
    assert any(isinstance(each, nf4.PackedLinear) for each in packed.modules())
    assert not any(isinstance(each, nf4.PackedLinear) for each in full.modules())
    tokens = torch.randint(500, (2, 33), generator=torch.Generator().manual_seed(0))
    losses = [each(tokens) for each in models]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    for loss in losses:
        loss.backward()
    gradients = [
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        for model in models
    ]
    assert gradients[0].keys() == gradients[1].keys()
    assert all("lora_" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_a_product_keeps_the_packed_matrix_for_its_backward_pass() -> None:
    layer = nf4.PackedLinear(nn.Linear(128, 32))
    layer.packed.data = nf4.pack(torch.randn(32, 128))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs = torch.randn(8, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        layer(inputs).sum().backward()
    assert [each.dtype for each in kept] == [torch.uint8]
    assert inputs.grad is not None


def test_frozen_weights_take_the_memory_that_is_planned() -> None:
    model: Any = quantized("qwen3")
    language_models.keep_in_bf16(model, only_frozen=True)
    frozen = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    shape = ModelShape.from_config(model.config.to_dict())
    planned = estimates.needed(shape, setup(num_workers=1, lora_rank=4, lora_bits=4))
    assert planned.weights == frozen + trained
    assert frozen < 0.45 * 2 * shape.parameters


def test_what_cannot_be_packed_is_refused_or_left_in_full() -> None:
    model = built({**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 4})
    nf4.replace(language_models.blocks(model))
    packed = {name for name, each in model.named_parameters() if each.dtype == torch.uint8}
    assert packed
    assert not any(".experts." in name or "embed" in name for name in packed)
    # A router that is derived from nn.Linear returns more than a product.
    routed = built({**TINY_LLAMA, "model_type": "phimoe", "num_local_experts": 4})
    nf4.replace(language_models.blocks(routed))
    assert {type(each).__name__ for each in routed.modules()} >= {"PhimoeTopKRouter"}
    narrow = built({**TINY_LLAMA, "hidden_size": 32, "intermediate_size": 96})
    with pytest.raises(InputError, match="no linear layer with a multiple of 64 inputs"):
        nf4.replace(language_models.blocks(narrow))


def check(model: nn.Module) -> None:
    """What a run asks of its model before it trains."""
    agreement.check(WithLoss(model), device=torch.device("cpu"), isolates=False, is_exact=True)


class Reading(nn.Module):
    """Does with a layer what some models do, instead of calling it as it is."""

    def __init__(self, layer: nn.Linear, *, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how == "product":
            return inputs @ self.layer.weight.T
        if self.how == "type":
            inputs = inputs.to(self.layer.weight.dtype)
        result: Tensor = self.layer(inputs.byte() if self.how == "bytes" else inputs)
        return result


@pytest.mark.parametrize("how", ["product", "type", "bytes"])
def test_a_model_that_reads_the_weight_of_a_packed_layer_is_refused(how: str) -> None:
    model = quantized()
    attention: Any = language_models.blocks(model)[1].self_attn
    attention.q_proj = Reading(nn.Linear(64, 64, device="meta"), how=how)
    nf4.replace(language_models.blocks(model))
    with pytest.raises(
        InputError, match=r"^--lora-bits is 4.*layer 1\.self_attn\.q_proj\.layer.*out$"
    ):
        check(filled(model))


STATE_SPACE = {
    **TINY_LLAMA,
    "model_type": "mamba",
    "state_size": 8,
    "intermediate_size": 128,
    "time_step_rank": 64,
}


def test_state_space_models_are_refused_because_they_read_their_weights() -> None:
    settings = config(lora_rank=4, model="any")
    with pytest.raises(InputError, match=r"has state-space layers.*leave --lora-bits out"):
        rebuild({**settings.to_json(), "lora_bits": 4}, STATE_SPACE, torch.device("cpu"))
    # Advice proposes only settings that a run takes.
    assert "--lora-bits" not in estimate.advice(settings, built(STATE_SPACE))
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500}
    assert "--lora-bits" not in estimate.advice(settings, built(gpt2))
    plain = built({**TINY_LLAMA, "intermediate_size": 192})
    assert "--lora-bits 4" in estimate.advice(settings, plain)


def test_a_rule_for_first_weights_may_read_a_packed_layer() -> None:
    # GPT-BigCode scales c_proj when it is made; nothing else reads it.
    model = built(
        {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500}
    )
    nf4.replace(language_models.blocks(model))
    check(filled(model))


def test_packed_matrices_begin_with_the_weights_that_others_would() -> None:
    model = filled(quantized())
    plain = filled(built({**TINY_LLAMA, "intermediate_size": 192}))
    packed = model.get_submodule("model.layers.0.mlp.up_proj").base_layer
    full = plain.model.layers[0].mlp.up_proj.weight
    assert torch.equal(packed.packed, nf4.pack(full))
