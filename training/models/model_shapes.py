"""Shapes of transformer language models: what their size follows from, without torch.

Standard library only, so that a laptop can plan a run. A shape comes from a name below, which is a
model to be made with random weights, from the Hugging Face ``config.json`` of a few kinds of
decoders, or, for all others, from the model itself (``training.models.built_shapes``).
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
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


#: Functions that transformers computes operation by operation, and bytes that they keep in bf16 of
#: each number beside that; others keep what they are given.
WRITTEN_OUT: Final = {
    "gelu_accurate": 6.0,
    "gelu_fast": 12.0,
    "gelu_new": 6.0,
    "gelu_python_tanh": 6.0,
    "quick_gelu": 2.0,
}


class Without(StrEnum):
    """Why a matrix gets no adapters unless it is named, or not at all."""

    NOTHING = ""
    ROUTER = "router"
    """It chooses the experts of a token, which fine-tuning leaves as they are; it may be named."""
    READ = "read"
    """The model computes with its weight and never calls it: no adapter would be trained."""
    REFUSED = "refused"
    """peft has no adapters for it."""
    MORE = "more"
    """Its layer does more than a product, as some routers do: no adapter's can be added to that."""


# What each means, after the names of matrices.
_REASONS: Final = {
    Without.ROUTER: "chooses experts",
    Without.READ: "is never called, since the model computes with its weight itself: adapters "
    "would not be trained",
    Without.REFUSED: "gets none from peft in models of this kind",
    Without.MORE: "does more than a product, to which those of adapters could be added",
}


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
    is_read: bool = False
    """Whether the model asks for its weight, and does not only call it."""
    without: Without = Without.NOTHING

    @property
    def parameters(self) -> int:
        """Of one of them."""
        return self.inputs * self.outputs

    @property
    def is_packed(self) -> bool:
        """Whether ``--lora-bits 4`` keeps its weight in four bits."""
        return self.is_plain and self.inputs % NF4_BLOCK == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Those of a mixture, whose weights a block holds in one tensor for all of them: what a model
    computes with in one product, after it has sorted the tokens by expert."""

    number: int
    """In a block."""
    chosen: float
    """For a token, in the average of all blocks, of which some may have none."""
    width: int
    """In the middle of one."""
    is_gated: bool
    parameters: int
    """Of all of them, in all blocks."""

    def padding(self, shards: int) -> float:
        """Parameters that are added where ``shards`` do not divide the experts of a block evenly:
        FSDP2 gives each rank whole experts, and the last ranks fewer or none."""
        held = -(-self.number // shards)
        return self.parameters * (held * shards / self.number - 1)


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
    experts: Experts | None = None
    """None where no token chooses any."""
    normed: int = 0
    """Width of the queries and keys of a block together, where norms of their own follow them."""
    written_out: float = 0.0
    """Bytes that the function between the last matrices of a block keeps of each number beside
    that: of one that consists of several operations."""
    doubtful: str = ""
    """Its type, unless one of that type was seen to keep what is planned for it, within 10 %."""
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
        return [each for each in self.matrices if each.is_packed]

    @property
    def takes_adapters(self) -> bool:
        """Whether any matrix gets adapters without being named."""
        return any(not each.without for each in self.matrices)

    @property
    def why_not_packed(self) -> str:
        """Why a run with ``--lora-bits 4`` is refused; empty where it is not."""
        read = [each.name for each in self.packed_matrices if each.is_read]
        if read:
            return reads_weight(read[0])
        return "" if self.packed_matrices else NOTHING_TO_PACK

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
            InputError: as for ``with_adapters``.
        """
        chosen = with_adapters(self.matrices, targets)
        return rank * sum(each.number * (each.inputs + each.outputs) for each in chosen)

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        matrices = tuple(
            Matrix(**{**each, "without": Without(each["without"])}) for each in values["matrices"]
        )
        experts = Experts(**values["experts"]) if values["experts"] else None
        return cls(**{**values, "matrices": matrices, "experts": experts})

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
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
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
            normed=query + key_value if kind == "qwen3" else 0,
            written_out=WRITTEN_OUT.get(str(config.get("hidden_act")), 0.0),
            is_tied=is_tied,
            matrices=tuple(
                Matrix(name=name, inputs=inputs, outputs=outputs, number=layers)
                for name, (inputs, outputs) in widths.items()
            ),
        )


class UnknownKindError(InputError):
    """The shape of a model does not follow from its configuration by what is known here."""


def with_adapters(matrices: Iterable[Matrix], targets: str) -> Sequence[Matrix]:
    """Those matrices of a model that adapters stand beside: of runs and of plans.

    Args:
        targets: names of matrices, separated by commas; or ``all``, which is all but those with a
            reason against it (``Matrix.without``).

    Raises:
        InputError: there are none of such a name, or adapters beside them are impossible.
    """
    matrices = [*matrices]
    known = {each.name for each in matrices}
    names = known if targets == ALL else {each.strip() for each in targets.split(",")}
    if unknown := sorted(names - known):
        raise InputError(
            f"--lora-targets names {', '.join(map(repr, unknown))}, which this model's blocks do "
            f"not have: choose of {', '.join(sorted(known))}, separated by commas, or {ALL}"
        )
    allowed = {Without.NOTHING} if targets == ALL else {Without.NOTHING, Without.ROUTER}
    chosen = [each for each in matrices if each.name in names and each.without in allowed]
    if targets != ALL and (none := sorted(names - {each.name for each in chosen})):
        why = next(each.without for each in matrices if each.name == none[0])
        rest = sorted({each.name for each in matrices if each.without in allowed})
        raise InputError(
            f"--lora-targets names {none[0]!r}, which {_REASONS[why]}: choose of {', '.join(rest)}"
        )
    if not chosen:
        raise InputError("this model's blocks have no matrices for adapters: leave --lora-rank out")
    return chosen


def left_out(matrices: Iterable[Matrix], targets: str) -> str:
    """Names what ``with_adapters`` leaves out though its name was meant, and why; or nothing."""
    if targets != ALL:
        return ""
    names: dict[Without, set[str]] = {}
    for each in matrices:
        if each.without:
            names.setdefault(each.without, set()).add(each.name)
    parts = [f"{', '.join(sorted(names[why]))} ({_REASONS[why]})" for why in sorted(names)]
    return f"no adapters are put beside {'; '.join(parts)}" if parts else ""


def reads_weight(layer: str) -> str:
    """Why a model that reads the weight of a layer is refused with ``--lora-bits 4``."""
    return (
        f"--lora-bits is 4, and this kind of model reads the weight of its layer {layer} itself, "
        "where four bits cannot stand for it: leave --lora-bits out"
    )


# What the arithmetic of ``from_config`` is for; a test compares it with the models.
_KINDS: Final = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
#: Types of models whose planned memory was within 10 % of what torch's memory tracker has.
AGREEING: Final = (
    *_KINDS,
    "cohere",
    "gpt2",
    "granite",
    "granitemoe",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmoe",
    "opt",
    "phi",
    "qwen2_moe",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
)


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
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no JSON object")
    return values
