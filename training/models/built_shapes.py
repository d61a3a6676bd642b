"""The shape of any language model of transformers, by building it without memory for its weights.

    python -m training.models.built_shapes MODEL

prints it as JSON: ``training.plan``, which has no torch of its own, asks in this way. MODEL is a
folder with a ``config.json``, that file, or a Hugging Face id, of which nothing else is fetched.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from contract import exits
from contract.errors import InputError
from training.data import hub
from training.models import language_models, pretrained, uses
from training.models.model_shapes import (
    AGREEING,
    WRITTEN_OUT,
    Experts,
    ModelShape,
    read_config,
)
from training.models.nf4 import num_weights


def shape_of(model: nn.Module) -> ModelShape:
    """The shape of a model; of one with adapters, that of what they stand beside."""
    of: Any = model  # transformers' own methods
    text = of.config.get_text_config()
    stack = language_models.blocks(model)
    blocks = [_num_parameters(block) for block in stack]
    embedding = of.get_input_embeddings().weight
    found = Counter(uses.matrices_of(model).values())
    width = language_models.attention_width(text)
    keys = {each.outputs for each in found if each.name == "k_proj"}
    has_norms = any(name.endswith(".q_norm") for name, _ in stack.named_modules())
    return ModelShape(
        hidden=embedding.shape[1],
        layers=len(stack),
        attention=width,
        vocab=embedding.shape[0],
        parameters=_num_parameters(model),
        block_parameters=max(blocks),
        blocks_parameters=sum(blocks),
        idle_parameters=language_models.num_idle_parameters(model),
        experts=_experts(model, width=embedding.shape[1], layers=len(stack)),
        normed=width + max(keys, default=width) if has_norms else 0,
        written_out=WRITTEN_OUT.get(_function(text), 0.0),
        doubtful="" if of.config.model_type in AGREEING else str(of.config.model_type),
        is_tied=of.get_output_embeddings().weight is embedding,
        matrices=tuple(dataclasses.replace(each, number=number) for each, number in found.items()),
    )


def _function(config: Any) -> str:
    """Name of the function between the last matrices of a block."""
    names = ("hidden_act", "hidden_activation", "activation_function")
    return next((str(name) for each in names if (name := getattr(config, each, None))), "")


def _experts(model: nn.Module, *, width: int, layers: int) -> Experts | None:
    """The experts of a mixture, where each of their weights is one tensor for all of a block."""
    weights = {
        name: weight for name, weight in language_models.experts(model).items() if weight.dim() == 3
    }
    if not weights:
        return None
    of: Any = model
    last = {name: name.rpartition(".")[2] for name in weights}
    is_gated = any("gate" in each for each in last.values())
    blocks = Counter(last.values()).most_common(1)[0][1]
    num = next(iter(weights.values())).shape[0]
    parameters = sum(each.numel() for each in weights.values())
    return Experts(
        number=num,
        chosen=num * (1 - language_models.idle_part(of.config)) * blocks / layers,
        width=round(parameters / blocks / num / width / (3 if is_gated else 2)),
        is_gated=is_gated,
        parameters=parameters,
    )


def _num_parameters(module: nn.Module) -> int:
    """Parameters of a model or a block, without those of adapters."""
    return sum(num_weights(each) for name, each in module.named_parameters() if "lora_" not in name)


def read(model: str) -> ModelShape:
    """The shape of a model by its folder, its ``config.json`` or its Hugging Face id.

    Raises:
        InputError: there is none, or transformers cannot build it.
    """
    path = Path(model).expanduser()
    if not path.exists():
        path = hub.fetch(model, (pretrained.CONFIG_FILE,))
    if path.is_dir():
        path /= pretrained.CONFIG_FILE
    config = pretrained.config_of(read_config(path), model=model)
    return shape_of(language_models.build_on_meta(config))


def main(arguments: Sequence[str]) -> int:
    (model,) = arguments
    try:
        print(json.dumps(read(model).to_json()))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.BAD_INPUT
    return exits.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
