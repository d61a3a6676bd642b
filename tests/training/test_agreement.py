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
from training.models import agreement, language_models, model_weights
from training.models.language_models import WithLoss

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "num_attention_heads": 4}


def made(kind: str, **values: Any) -> WithLoss:
    """A small model with random weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **{**SIZES, **values})
    return WithLoss(filled(language_models.build_on_meta(config)))


def llama() -> WithLoss:
    return made("llama", num_hidden_layers=2, intermediate_size=64, max_position_embeddings=64)


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


def test_a_model_that_sees_what_follows_ends_the_run() -> None:
    trained = made("bert", num_hidden_layers=2, intermediate_size=64)
    with pytest.raises(InputError, match=r"type 'bert' .* depends on the tokens that follow"):
        check(trained)


def test_documents_that_are_not_kept_apart_end_the_run() -> None:
    sizes = {"num_hidden_layers": 2, "ffn_dim": 64, "word_embed_proj_dim": 32}
    trained = made("opt", **sizes)
    check(trained)
    with pytest.raises(InputError, match="not keep documents apart in models of type 'opt'"):
        check(trained, isolates=True)


def test_convolutions_let_documents_see_each_other_though_random_weights_hardly_show_it() -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    trained = made("lfm2", **layers, num_key_value_heads=2, intermediate_size=64)
    check(trained)
    with pytest.raises(InputError, match=r"type 'lfm2' \(their convolutions reach back"):
        check(trained, isolates=True)


def test_a_buffer_that_no_rule_computes_ends_the_run() -> None:
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    model = language_models.build_on_meta(AutoConfig.for_model("llama", **SIZES, **sizes))
    part = nn.Module()
    part.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    model.add_module("extra", part)
    with pytest.raises(InputError, match=r"no rule that computes extra\.angles"):
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
