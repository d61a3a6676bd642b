"""Shapes of transformer language models: what their size follows from, without torch.

Standard library only, so that a laptop can plan a run. A shape comes from a name below, which is a
model to be made with random weights, from the Hugging Face ``config.json`` of a few kinds of
decoders, or, for all others, from the model itself (``training.models.built_shapes``).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from contract.errors import InputError

#: Every matrix of the blocks, as the target of adapters.
ALL: Final = "all"
#: Weights in four bits share a scale, so many in a row of a matrix; matrices whose rows do not
#: consist of whole blocks keep theirs in 16 bits (``training.models.nf4``).
NF4_BLOCK: Final = 64
NOTHING_TO_PACK: Final = (
    "--lora-bits is 4, and this model's blocks have no linear layer with a multiple of "
    f"{NF4_BLOCK} inputs: leave --lora-bits out"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Matrices of one name and size in the blocks of a model."""

    name: str
    """The last part of it, such as ``q_proj``."""
    inputs: int
    outputs: int
    number: int
    """How many the model has."""
    is_plain: bool = True
    """Whether it is a linear layer as any other: not GPT-2's transposed matrices, nor a layer that
    does more than a product."""

    @property
    def parameters(self) -> int:
        """Of one of them."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Numbers from which memory and operations follow."""

    hidden: int
    layers: int
    attention: int
    """Width of all attention heads of a block together."""
    vocab: int
    parameters: int
    """Of the whole model."""
    block_parameters: int
    """Of the largest block."""
    blocks_parameters: int
    """Of all blocks together."""
    idle_parameters: int = 0
    """Of experts that a token does not pass through."""
    is_tied: bool
    """Whether the output embedding is the input embedding."""
    matrices: tuple[Matrix, ...]
    """Of all blocks: where adapters can be."""

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding."""
        return self.vocab * self.hidden

    @property
    def packed_matrices(self) -> Sequence[Matrix]:
        """Those whose weights ``--lora-bits 4`` keeps in four bits."""
        return [each for each in self.matrices if each.is_plain and each.inputs % NF4_BLOCK == 0]

    @property
    def packed_parameters(self) -> int:
        """Parameters that four bits each can take."""
        return sum(each.number * each.parameters for each in self.packed_matrices)

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of forward and backward per token: six per parameter that multiplies, and 12
        per block, position and width for attention (PaLM, arXiv 2204.02311, appendix B)."""
        looked_up = 0 if self.is_tied else self.embedding_parameters
        attention = 12 * self.layers * self.attention * seq_len
        return float(6 * (self.parameters - self.idle_parameters - looked_up) + attention)

    def adapter_parameters(self, rank: int, targets: str = ALL) -> int:
        """Parameters of low-rank adapters: a matrix of ``rank`` columns and one of ``rank`` rows
        beside each target.

        Args:
            targets: names of matrices, separated by commas; or ``all``.

        Raises:
            InputError: the blocks have no matrices of such a name.
        """
        names = names_of(targets, {each.name for each in self.matrices})
        widths = (
            each.number * (each.inputs + each.outputs)
            for each in self.matrices
            if each.name in names
        )
        return rank * sum(widths)

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        matrices = tuple(Matrix(**each) for each in values["matrices"])
        return cls(**{**values, "matrices": matrices})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape that a Hugging Face ``config.json`` describes.

        Raises:
            UnknownKindError: only the model itself tells the shape of models of this type.
            InputError: the configuration is not complete.
        """
        kind = str(config.get("model_type"))
        if kind not in _KINDS:
            raise UnknownKindError(
                f"the size of models of type {kind!r} is not known without torch and transformers "
                f"(known: {', '.join(sorted(_KINDS))})"
            )
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            layers, intermediate = (
                int(config["num_hidden_layers"]),
                int(config["intermediate_size"]),
            )
            key_value_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            vocab = int(config["vocab_size"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"the model's config.json is not complete: {error!r}") from None
        sizes = (hidden, heads, layers, intermediate, key_value_heads, head_dim, vocab)
        if min(sizes) < 1:
            raise InputError(f"the model's config.json has a size below 1: {sizes}")
        query, key_value = heads * head_dim, key_value_heads * head_dim
        if kind == "gpt_neox":
            widths = {
                "query_key_value": (hidden, 3 * query),
                "dense": (query, hidden),
                "dense_h_to_4h": (hidden, intermediate),
                "dense_4h_to_h": (intermediate, hidden),
            }
        else:
            widths = {
                "q_proj": (hidden, query),
                "k_proj": (hidden, key_value),
                "v_proj": (hidden, key_value),
                "o_proj": (query, hidden),
                "gate_proj": (hidden, intermediate),
                "up_proj": (hidden, intermediate),
                "down_proj": (intermediate, hidden),
            }
        # Norms and biases; the last norm has as many as one of a block.
        biased, norm = sum(outputs for _, outputs in widths.values()), hidden
        vectors = 2 * hidden
        if kind == "gpt_neox":
            vectors, norm = 4 * hidden + biased, 2 * hidden
        elif kind == "qwen2":
            vectors += query + 2 * key_value
        elif kind == "qwen3":
            vectors += 2 * head_dim
        block = sum(inputs * outputs for inputs, outputs in widths.values()) + vectors
        is_tied = bool(config.get("tie_word_embeddings", False))
        return cls(
            hidden=hidden,
            layers=layers,
            attention=query,
            vocab=vocab,
            parameters=layers * block + vocab * hidden * (1 if is_tied else 2) + norm,
            block_parameters=block,
            blocks_parameters=layers * block,
            is_tied=is_tied,
            matrices=tuple(
                Matrix(name=name, inputs=inputs, outputs=outputs, number=layers)
                for name, (inputs, outputs) in widths.items()
            ),
        )


class UnknownKindError(InputError):
    """The shape of a model does not follow from its configuration by what is known here."""


def names_of(targets: str, known: set[str]) -> Sequence[str]:
    """The names of matrices that ``targets`` lists, or all that are known.

    Raises:
        InputError: there is none of such a name.
    """
    if targets == ALL:
        return sorted(known)
    names = [each.strip() for each in targets.split(",")]
    if unknown := [each for each in names if each not in known]:
        raise InputError(
            f"--lora-targets names {', '.join(map(repr, unknown))}, which this model's blocks do "
            f"not have: choose of {', '.join(sorted(known))}, separated by commas, or {ALL}"
        )
    return names


# What the arithmetic of ``from_config`` is for; a test compares it with the models.
_KINDS: Final = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")


def _neox(hidden: int, layers: int, heads: int, *, positions: int = 2048) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 50432,
        "max_position_embeddings": positions,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    }


#: GPT-NeoX models to be made with random weights. The larger ones have the sizes of Pythia
#: (arXiv 2304.01373, table 1); 6.9b is also dolly-v2-7b. A tokenizer decides the vocabulary.
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": _neox(128, 4, 4, positions=1024),
    "160m": _neox(768, 12, 12),
    "400m": _neox(1024, 24, 16),
    "2.8b": _neox(2560, 32, 32),
    "6.9b": _neox(4096, 32, 32),
}


def read_config(file: Path) -> dict[str, object]:
    """Read a Hugging Face ``config.json``.

    Raises:
        InputError: it is not there or no JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no JSON object")
    return values
