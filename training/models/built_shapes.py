"""The shape of a language model of any kind that transformers can build: what its ``config.json``
leaves open is read off its modules, on the meta device."""

import re
from collections.abc import Mapping
from typing import Any

from training.models import language_models, pretrained
from training.models.model_shapes import FUNCTIONS, ModelShape, UnknownShapeError


def built(values: Mapping[str, Any], *, model: str) -> ModelShape:
    """The shape of the model that transformers builds from a ``config.json``.

    Args:
        model: its name for the user.

    Raises:
        UnknownShapeError: see ``shape_of``.
        InputError: transformers cannot use the configuration.
    """
    return shape_of(language_models.build_on_meta(pretrained.config_of(values, model=model)))


def shape_of(model: Any) -> ModelShape:
    """The shape of a model of transformers, without adapters.

    Raises:
        UnknownShapeError: it has experts, blocks that differ, layers without attention, an
            attention that stores its matrix, or an activation function that keeps more than its
            input.
    """
    config = model.config
    stores_matrix = getattr(config, "attn_logit_softcapping", None) or not model._supports_sdpa
    others = language_models.num_experts(config) or language_models.state_space_layers(model)
    stack: Any = language_models.blocks(model)
    block, *more = {sum(each.numel() for each in one.parameters()) for one in stack}
    if stores_matrix or others or more:
        raise UnknownShapeError(f"models of type {config.model_type!r}")
    names = ("hidden_act", "hidden_activation", "activation_function")
    function = next(filter(None, (getattr(config, name, None) for name in names)), None)
    if function not in FUNCTIONS:
        raise UnknownShapeError(f"models with activation function {function!r}")

    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    vocab, hidden = last.weight.shape
    sizes = {
        name: (each.in_features, each.out_features)
        for name, each in stack[0].named_modules()
        if hasattr(each, "in_features")
    }
    attention = language_models.attention_width(config)
    heads = int(config.num_attention_heads)
    keys = attention // heads * int(getattr(config, "num_key_value_heads", None) or heads)
    # The widest of what is led back to the model's width.
    intermediate = max(inputs for inputs, outputs in sizes.values() if outputs == hidden)
    fan_out = sum(outputs for inputs, outputs in sizes.values() if inputs == hidden)
    parts = dict(stack[0].named_parameters())
    return ModelShape(
        hidden=hidden,
        layers=len(stack),
        attention=attention,
        keys=keys,
        intermediate=intermediate,
        vocab=vocab,
        block_parameters=block,
        parameters=language_models.num_parameters(model),
        is_gated=fan_out - attention - 2 * keys >= 1.5 * intermediate,
        norms_heads=any("q_norm" in name for name in parts),
        norms=max(2, sum(re.fullmatch(r"\w+norm\.weight", name) is not None for name in parts)),
        is_tied=first.weight is last.weight,
        matrices={name.rpartition(".")[2]: size for name, size in sizes.items()},
    )
