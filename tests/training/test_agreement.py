"""A run does not begin with a model that computes here something else than in transformers.

Which kinds of models pass is in ``tests/published/test_models.py``; here are those that must not.
"""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from contract.errors import InputError
from tests.training.test_nf4 import filled
from tests.training.test_plan import TINY_LLAMA, built
from training.models import agreement, model_weights
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
