"""A run does not begin with a model that computes here something else than in transformers.

Which kinds of models pass is in ``tests/published/test_models.py``; here are those that must not.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from contract.errors import InputError
from tests.training.test_nf4 import filled
from tests.training.test_plan import TINY_LLAMA, built
from training.loop.losses import IGNORE
from training.models import agreement, language_models, model_weights
from training.models.language_models import WithLoss

CPU = torch.device("cpu")
LAYERS = {"num_hidden_layers": 2, "intermediate_size": 64}
SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "num_attention_heads": 4}


def made(kind: str, **values: Any) -> WithLoss:
    """A small model with random weights."""
    return WithLoss(filled(built({"model_type": kind, **SIZES, **values})))


def llama() -> WithLoss:
    return made("llama", **LAYERS)


def check(trained: WithLoss, *, isolates: bool = False) -> None:
    agreement.check(trained, device=CPU, isolates=isolates, is_exact=True)


def test_a_model_that_agrees_passes_and_keeps_its_weights() -> None:
    trained = llama()
    before = {name: each.clone() for name, each in trained.state_dict().items()}
    check(trained, isolates=True)
    assert all(torch.equal(each, before[name]) for name, each in trained.state_dict().items())


def first_only(logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits[:, :1] * 3, logits[:, 1:]], dim=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (first_only, r"type 'llama' cannot be trained.*by the logits of"),
        (torch.square, "LlamaForCausalLM computes its logits in a way"),
    ],
    ids=["another loss", "logits of an unknown making"],
)
def test_a_model_that_disagrees_ends_the_run(
    change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = llama()
    own = trained.model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        found = own(*arguments, **options)
        found.logits = change(found.logits)
        return found

    monkeypatch.setattr(trained.model, "forward", forward)
    with pytest.raises(InputError, match=words):
        check(trained)


CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "isolates", "words"),
    [
        ("bert", {}, False, "'bert'"),
        # They let documents see each other.
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, True, "'opt'"),
        # Random weights hardly show it.
        ("lfm2", CONVOLUTIONS, True, "'lfm2'"),
    ],
)
def test_a_model_whose_tokens_see_too_much_ends_the_run(
    kind: str, sizes: dict[str, Any], isolates: bool, words: str
) -> None:
    trained = made(kind, **LAYERS, **sizes)
    if isolates:
        check(trained)
    with pytest.raises(InputError, match=words):
        check(trained, isolates=isolates)


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
LONG: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0]}


@pytest.mark.parametrize(
    ("rope_type", "more", "short"),
    [
        ("default", {}, 0),
        ("linear", {}, 0),
        ("yarn", {}, 0),
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, 0),
        ("dynamic", {}, 32),
        ("longrope", LONG, 32),
    ],
)
def test_packing_is_refused_where_one_document_changes_the_rope_of_all(
    rope_type: str, more: dict[str, Any], short: int
) -> None:
    rope = {"rope_type": rope_type, **ROPE, **more}
    # Of dynamic NTK, the border is the longest that the model knows.
    longest = 32 if rope_type == "dynamic" else 128
    trained = made("llama", **LAYERS, max_position_embeddings=longest, rope_parameters=rope)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.mul_(8 if weight.ndim > 1 else 1)  # random weights hardly show it
    positions = torch.cat([torch.arange(60), torch.arange(20)])[None]
    tokens = torch.randint(3, 257, (1, 81), generator=torch.Generator().manual_seed(0))
    batch = [tokens, positions, tokens[:, 1:]]
    # Without packing, padding makes all of them long.
    padded = tokens[:, 1:].where(torch.arange(80) < 20, IGNORE)
    check(trained, isolates=True)  # with documents that are short
    for refused in (
        partial(agreement.check_documents, trained, batch, is_exact=True),
        partial(agreement.check_documents, trained, [tokens, None, padded], is_exact=True),
        partial(agreement.check_documents, trained, batch, is_exact=False),
    ):
        with pytest.raises(InputError, match="beside others differs") if short else nullcontext():
            refused()


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_routers_loss_that_the_configuration_asks_for_is_added_and_named(
    recompute: str,
) -> None:
    asked = {
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "num_nextn_predict_layers": 1,
    }
    trained = made("qwen3_moe", **LAYERS, **MIXTURE, num_key_value_heads=2, **asked)
    language_models.recompute(trained.model, recompute)
    tokens = torch.randint(3, 257, (2, 25), generator=torch.Generator().manual_seed(0))
    model: Any = trained.model.eval()
    found = model(input_ids=tokens[:, :-1])  # the last token is only a label here
    plain = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), tokens[:, 1:].flatten())
    (plain + 0.5 * found.aux_loss).backward()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    # One of two passes of a step: it counts by its labels.
    trained(tokens, divisor=2 * tokens[:, 1:].numel()).backward()
    for own, other in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(2 * own.grad, other, atol=1e-5)
    assert trained(tokens, plain=True).item() == pytest.approx(plain.item(), abs=1e-5)
    added, unused = language_models.of_the_loss(model)
    assert "0.5 times the router's load-balancing term" in added
    assert unused.endswith(": num_nextn_predict_layers")
    assert not language_models.of_the_loss(llama().model)


def test_a_buffer_that_no_rule_computes_ends_the_run() -> None:
    model = built(TINY_LLAMA)
    part = nn.Module()
    part.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    model.add_module("extra", part)
    with pytest.raises(InputError, match=r"extra\.angles"):
        model_weights.allocate(model, CPU)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (RuntimeError("mixed"), "models of type 'llama' cannot be trained here: .* fails .mixed"),
        (torch.OutOfMemoryError("no memory"), "^no memory"),
        (torch.AcceleratorError("a bad GPU"), "^a bad GPU"),
    ],
)
def test_a_rule_that_fails_is_the_models_fault_unless_the_device_fails(
    error: RuntimeError, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = llama().model
    monkeypatch.setattr(model, "_init_weights", Mock(side_effect=error))
    with pytest.raises((InputError, type(error)), match=seen):
        model_weights.allocate(model, CPU)
