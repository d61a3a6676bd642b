"""Shapes of transformer language models: what their size follows from, without torch.

Standard library only, so that a laptop can plan a run. A shape comes from a name below, which is a
model to be made with random weights, or from a Hugging Face ``config.json``. It describes decoders
with one attention and one MLP per block; anything else is refused and not guessed at.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from contract.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Numbers from which parameters, memory and operations follow."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Fewer than ``heads`` with grouped-query attention."""
    head_dim: int
    intermediate: int
    """Width of the MLP."""
    is_gated: bool
    """Whether the MLP has three matrices, as Llama's, and not two, as GPT's."""
    has_biases: bool
    vocab: int
    positions: int
    """Longest sequence."""
    is_tied: bool
    """Whether the output embedding is the input embedding."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"the model's configuration has {name} = {value!r}")

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        query, key_value = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (query + key_value) + query * self.hidden
        matrices = 3 if self.is_gated else 2
        mlp = matrices * self.hidden * self.intermediate
        if not self.has_biases:
            return attention + mlp + 2 * self.hidden  # RMS norms have no bias
        biases = query + key_value + self.hidden + self.intermediate + self.hidden
        return attention + mlp + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2)
        last_norm = self.hidden * (2 if self.has_biases else 1)
        return self.layers * self.block_parameters + embeddings + last_norm

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of forward and backward per token: six per parameter that multiplies, and 12
        per block, position and width for attention (PaLM, arXiv 2204.02311, appendix B)."""
        looked_up = 0 if self.is_tied else self.embedding_parameters
        attention = 12 * self.layers * self.heads * self.head_dim * seq_len
        return float(6 * (self.parameters - looked_up) + attention)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape that a Hugging Face ``config.json`` describes.

        Raises:
            InputError: it describes no decoder of this kind, or the model's type is not known.
        """
        kind = str(config.get("model_type"))
        if kind not in _KINDS:
            raise InputError(
                f"the size of models of type {kind!r} is not known here (known: "
                f"{', '.join(sorted(_KINDS))}); training may work all the same"
            )
        is_gated, has_biases = _KINDS[kind]
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            return cls(
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate=int(config["intermediate_size"]),
                is_gated=is_gated,
                has_biases=has_biases,
                vocab=int(config["vocab_size"]),
                positions=int(config.get("max_position_embeddings") or 2**20),
                is_tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the model's config.json is not complete: {error!r}") from None


# type -> (three matrices in the MLP, biases)
_KINDS: Final[Mapping[str, tuple[bool, bool]]] = {
    "gpt_neox": (False, True),
    "llama": (True, False),
    "mistral": (True, False),
}


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
