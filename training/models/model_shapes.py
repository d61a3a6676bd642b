"""Sizes of language models, computed from their configuration without torch.

Standard library only, so that a laptop can plan a run. A shape comes from a name below, which is a
model with random weights, or from the Hugging Face ``config.json`` of a family of ``FAMILIES``.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from contract.errors import InputError

#: Every matrix of the blocks, as the target of adapters.
ALL: Final = "all"
#: Weights in four bits share one scale per so many in a row of a matrix; matrices whose rows do not
#: consist of whole blocks stay in 16 bits (``training.models.nf4``).
NF4_BLOCK: Final = 64
NOTHING_TO_PACK: Final = (
    "--lora-bits is 4, and this model's blocks have no linear layer with a multiple of "
    f"{NF4_BLOCK} inputs: leave --lora-bits out"
)
#: Types of models whose sizes, and whose memory within 10 %, follow from their configuration; tests
#: compare both with the models.
FAMILIES: Final = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
#: Keys of a ``config.json`` whose weights are quantized: transformers', compressed-tensors' and
#: MLX's.
_QUANTIZED: Final = ("quantization_config", "compression_config", "quantization")
#: Activation functions that keep nothing but their input for the backward pass. transformers writes
#: others out, operation by operation, and those keep several times as much.
FUNCTIONS: Final = ("gelu", "gelu_pytorch_tanh", "silu")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Numbers that determine memory and operations."""

    hidden: int
    layers: int
    attention: int
    """Width of all attention heads of a block together."""
    keys: int
    """Width of the heads of keys, and of values."""
    intermediate: int
    """Width between the last two matrices of a block."""
    vocab: int
    block_parameters: int
    """Parameters of one block."""
    parameters: int
    """Parameters of the whole model."""
    is_gated: bool
    """A block has a gate and RMSNorms, as in Llama, and not GPT's two matrices and LayerNorms."""
    norms_heads: bool
    """Queries and keys pass through norms of their own."""
    norms: int = 2
    """Others in a block."""
    is_tied: bool
    """The output embedding is the input embedding."""
    matrices: Mapping[str, tuple[int, int]]
    """Name of each matrix of a block -> its inputs and outputs."""

    @property
    def blocks_parameters(self) -> int:
        """Parameters of all blocks together."""
        return self.layers * self.block_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding."""
        return self.vocab * self.hidden

    @property
    def packed_sizes(self) -> list[int]:
        """Parameters of each matrix of a block that ``--lora-bits 4`` keeps in four bits."""
        return [
            inputs * outputs
            for inputs, outputs in self.matrices.values()
            if inputs % NF4_BLOCK == 0
        ]

    @property
    def packed_parameters(self) -> int:
        """Parameters of all those matrices."""
        return self.layers * sum(self.packed_sizes)

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of forward and backward per token: six per parameter that multiplies, and 12
        per block, position and width for attention (PaLM, arXiv 2204.02311, appendix B)."""
        looked_up = 0 if self.is_tied else self.embedding_parameters
        attention = 12 * self.layers * self.attention * seq_len
        return float(6 * (self.parameters - looked_up) + attention)

    def adapter_parameters(self, rank: int, targets: str = ALL) -> int:
        """Parameters of low-rank adapters: a matrix of ``rank`` columns and one of ``rank`` rows
        beside each target.

        Args:
            targets: names of matrices, separated by commas; or ``all``.

        Raises:
            InputError: the blocks have no matrix of such a name.
        """
        sizes = [self.matrices[name] for name in target_names(self.matrices, targets)]
        return rank * self.layers * sum(inputs + outputs for inputs, outputs in sizes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape that a Hugging Face ``config.json`` describes.

        Raises:
            UnknownShapeError: the model is of another family, or of a rare kind of these.
            InputError: the configuration is not complete.
        """
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise UnknownShapeError(f"models of type {family!r}")
        is_gated = family != "gpt_neox"
        function = config.get("hidden_act", "silu" if is_gated else "gelu")
        if function not in FUNCTIONS:
            raise UnknownShapeError(f"models with activation function {function!r}")
        try:
            hidden = int(config["hidden_size"])
            heads = int(config["num_attention_heads"])
            layers = int(config["num_hidden_layers"])
            intermediate = int(config["intermediate_size"])
            key_value_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            vocab = int(config["vocab_size"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise InputError(f"the model's config.json is not complete: {error!r}") from None
        sizes = (hidden, heads, layers, intermediate, key_value_heads, head_dim, vocab)
        if min(sizes) < 1:
            raise InputError(f"the model's config.json has a size below 1: {sizes}")

        attention, keys = heads * head_dim, key_value_heads * head_dim
        if is_gated:
            matrices = {
                "q_proj": (hidden, attention),
                "k_proj": (hidden, keys),
                "v_proj": (hidden, keys),
                "o_proj": (attention, hidden),
                "gate_proj": (hidden, intermediate),
                "up_proj": (hidden, intermediate),
                "down_proj": (intermediate, hidden),
            }
        else:
            matrices = {
                "query_key_value": (hidden, 3 * attention),
                "dense": (attention, hidden),
                "dense_h_to_4h": (hidden, intermediate),
                "dense_4h_to_h": (intermediate, hidden),
            }

        # Norms and biases; the model's last norm has as many parameters as one of a block.
        norm = hidden if is_gated else 2 * hidden
        vectors = 2 * norm
        if family == "gpt_neox":
            vectors += sum(outputs for _, outputs in matrices.values())
        elif family == "qwen2":
            vectors += attention + 2 * keys
        elif family == "qwen3":
            vectors += 2 * head_dim

        block = sum(inputs * outputs for inputs, outputs in matrices.values()) + vectors
        is_tied = bool(config.get("tie_word_embeddings", False))
        return cls(
            hidden=hidden,
            layers=layers,
            attention=attention,
            keys=keys,
            intermediate=intermediate,
            vocab=vocab,
            block_parameters=block,
            parameters=layers * block + vocab * hidden * (1 if is_tied else 2) + norm,
            is_gated=is_gated,
            norms_heads=family == "qwen3",
            is_tied=is_tied,
            matrices=matrices,
        )


class UnknownShapeError(InputError):
    """There are no formulas for a model."""

    def __init__(self, models: str) -> None:
        super().__init__(
            f"not known: memory and speed of {models} (known: {', '.join(FAMILIES)}, and with "
            "transformers installed most others without experts). Measure them: train a few steps "
            "on the same kind of GPUs (trainctl submit fsdp --model MODEL --max-steps 5), then "
            "read memory_bytes and tokens_per_s in the run's result.json"
        )


class Builder(Protocol):
    """``training.models.built_shapes.built``, which needs torch."""

    def __call__(self, values: Mapping[str, Any], *, model: str) -> ModelShape: ...


def of_config(values: Mapping[str, Any], *, model: str, build: Builder | None) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Args:
        model: what a user calls the model.
        build: reads the shape of other families off the model that transformers builds.

    Raises:
        UnknownShapeError: there are no formulas for it, and it is not built.
        InputError: the configuration is not complete, or transformers cannot use it.
    """
    try:
        return ModelShape.from_config(values)
    except UnknownShapeError:
        if build is None:
            raise
    return build(values, model=model)


def target_names(known: Iterable[str], targets: str) -> set[str]:
    """Names of the matrices that adapters are asked for.

    Args:
        known: names of the matrices of a block.
        targets: names of matrices, separated by commas; or ``all``.

    Raises:
        InputError: one of them is not known.
    """
    known = {*known}
    names = known if targets == ALL else {each.strip() for each in targets.split(",")}
    if unknown := sorted(names - known):
        raise InputError(
            f"--lora-targets names {', '.join(map(repr, unknown))}, which this model's blocks do "
            f"not have: choose of {', '.join(sorted(known))}, separated by commas, or {ALL}"
        )
    return names


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
        InputError: it is not there or no JSON object, or is that of quantized weights.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no JSON object")
    for key in _QUANTIZED:
        if found := values.get(key):
            how = found.get("quant_method") or found.get("bits") if isinstance(found, dict) else ""
            raise InputError(
                f"{file} has {key} ({how or 'of an unknown method'}): quantized weights cannot be "
                "trained. Give the model that they were made of, with --lora-rank 16 --lora-bits 4 "
                "where memory is short; where only quantized ones are published, let transformers "
                "write others (from_pretrained with dequantize=True in its quantization_config, "
                "then save_pretrained)"
            )
    return values
