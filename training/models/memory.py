"""How much memory a GPU needs to train a sharded language model: arithmetic only.

Standard library only. ``docs/fsdp.md`` has the formulas; a test compares them with torch's memory
tracker.
"""

import dataclasses
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError
from contract.instance_types import InstanceType
from training.models.activations import Activations
from training.models.model_shapes import ALL, ModelShape

GIB: Final = 2**30
#: What is computed again instead of kept for the backward pass: nothing, attention, whole blocks.
RECOMPUTE: Final = ("none", "selective", "full")
#: When gradients are exchanged.
REDUCE: Final = ("pass", "step")
#: Types in which gradients are exchanged, and their bytes.
REDUCE_DTYPES: Final = {"fp32": 4.0, "bf16": 2.0}
#: Bytes per parameter of the moments.
MOMENTS: Final = {"adamw": 8.0, "adamw-8bit": 2.1}
#: Bytes of a weight in four bits with its part of a scale (``training.models.nf4``), and of each
#: weight of a matrix that is unpacked for a product.
PACKED: Final = 9 / 16
_UNPACKING: Final = 8.0
#: Tokens whose logits exist at once, and the fp32 copies of them (``training.loop.losses``).
_LOGIT_TOKENS: Final = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Where and how a model is to be trained."""

    machine: InstanceType
    num_workers: int
    seq_len: int
    global_batch: int
    microbatch: int
    recompute: str
    optimizer: str
    replicas: int = 1
    lora_rank: int = 0
    lora_targets: str = ALL
    lora_bits: int = 16
    offload_moments: bool = False
    reduce_gradients: str = "pass"
    reduce_dtype: str = "fp32"
    keep_blocks: bool = False
    efa: bool = False
    """Whether hosts reach each other by EFA, with all network cards, and not only by TCP."""

    def __post_init__(self) -> None:
        if self.machine.gpu is None:
            raise InputError(f"{self.machine.name} has no GPU: choose another --instance")
        if self.num_workers < 1:
            raise InputError(f"--workers is {self.num_workers}: it must be at least 1")
        if self.replicas < 1 or self.num_workers % self.replicas:
            raise InputError(
                f"--replicas is {self.replicas}, which does not divide {self.num_workers} workers"
            )

    @property
    def num_hosts(self) -> int:
        return -(-self.num_workers // self.machine.num_gpus)

    @property
    def num_microbatches(self) -> int:
        """Passes per step."""
        return max(1, -(-self.global_batch // (self.num_workers * self.microbatch)))

    @property
    def moments(self) -> float:
        """Bytes per trained parameter that a GPU holds of moments."""
        return 0.0 if self.offload_moments else MOMENTS[self.optimizer]

    @property
    def usd_per_hour(self) -> float | None:
        price = self.machine.usd_per_hour
        return None if price is None else price * self.num_hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a GPU holds at a moment of a step, in bytes."""

    weights: float
    gradients: float
    """Those of earlier passes, and at the end of a step all."""
    moments: float
    gathered: float
    """Blocks that are whole for a moment, and their gradients before they are shared out."""
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in dataclasses.fields(self)))


def needed(shape: ModelShape, setup: Setup) -> Memory:
    """Bytes per GPU at the worst moment of a step: what is trained, its gradients and moments in
    fp32 and sharded, the rest in bf16.

    Raises:
        InputError: frozen weights are to be in four bits, or adapters beside matrices, that this
            model has not or that cannot be.
    """
    parameters = float(shape.parameters)
    trained, frozen = parameters, 0.0
    if setup.lora_rank:
        trained = float(shape.adapter_parameters(setup.lora_rank, setup.lora_targets))
        frozen = parameters
    # Bytes of a frozen weight, on average, and of one of a block that is gathered.
    held = gathered = 2.0
    unpacked = 0.0
    if setup.lora_bits == 4:
        if shape.why_not_packed:
            raise InputError(shape.why_not_packed)
        held -= (2 - PACKED) * shape.packed_parameters / shape.parameters
        gathered -= (2 - PACKED) * shape.packed_parameters / shape.blocks_parameters
        unpacked = _UNPACKING * max(each.parameters for each in shape.packed_matrices)
    weights = held * frozen + 4 * trained
    if setup.num_workers == 1:
        moments = _alone(shape, setup, trained=trained, weights=weights, unpacked=unpacked)
    else:
        moments = _shared(
            shape, setup, trained=trained, weights=weights, unpacked=unpacked, gathered=gathered
        )
    return max(moments, key=lambda each: each.total)


def _alone(
    shape: ModelShape, setup: Setup, *, trained: float, weights: float, unpacked: float
) -> list[Memory]:
    """The moments of a step of a single worker, which shares nothing and computes under autocast:
    of each trained weight that is multiplied there is a copy in bf16, from the first product to its
    backward pass; where blocks are computed again, only those of one block at a time."""
    per_token = Activations.of(shape, setup.recompute, autocast=True)
    tokens = setup.microbatch * setup.seq_len
    kept = per_token.kept * shape.layers
    is_frozen = bool(setup.lora_rank)
    learned = 0 if is_frozen else shape.embedding_parameters
    # Experts' products take no copies.
    experts = shape.experts.parameters if shape.experts else 0
    copies = 2.0 * (trained if is_frozen else shape.blocks_parameters - experts)
    copies_of_block = copies / shape.layers
    if setup.recompute != "none":
        copies = 0.0
    # A gradient is added to what earlier passes gave.
    earlier = 4 * trained if setup.num_microbatches > 1 else 0.0
    always = {"weights": weights, "moments": setup.moments * trained}
    at_loss = Memory(
        **always,
        gradients=earlier,
        gathered=2.0 * learned + copies,
        activations=(kept + per_token.outside) * tokens,
        logits=_LOGIT_TOKENS * shape.vocab * 4.0 * 2 + 4.0 * learned,
    )
    at_last_block = Memory(
        **always,
        # A tied embedding has its second gradient last, and is added up then.
        gradients=earlier + (4.0 * learned if shape.is_tied or not earlier else 0.0),
        gathered=max(copies, copies_of_block) + unpacked,
        activations=(kept + per_token.within) * tokens,
        logits=0.0,
    )
    at_first_block = Memory(
        **always,
        gradients=earlier or 4.0 * (trained - learned),
        gathered=copies_of_block + unpacked,
        activations=(per_token.kept + per_token.within) * tokens,
        logits=0.0,
    )
    at_end = Memory(
        **always,
        gradients=4 * trained + (4.0 * learned if earlier else 0.0),
        gathered=0.0,
        activations=0.0,
        logits=0.0,
    )
    return [at_loss, at_last_block, at_first_block, at_end]


def _shared(
    shape: ModelShape,
    setup: Setup,
    *,
    trained: float,
    weights: float,
    unpacked: float,
    gathered: float,
) -> list[Memory]:
    """The moments of a step of several workers, who share weights and what belongs to them.

    Args:
        gathered: bytes of a weight of a block that is gathered.
    """
    shards = setup.num_workers // setup.replicas
    per_token = Activations.of(shape, setup.recompute, autocast=False)
    tokens = setup.microbatch * setup.seq_len
    kept = per_token.kept * shape.layers
    has_passes = setup.num_microbatches > 1
    is_frozen = bool(setup.lora_rank)
    padding = shape.experts.padding(shards) if shape.experts else 0.0
    weights += (2.0 if is_frozen else 4.0) * padding
    trained += 0.0 if is_frozen else padding
    blocks = shape.blocks_parameters + padding
    block, embedding = shape.block_parameters + padding / shape.layers, shape.embedding_parameters
    learned_block, learned = (0.0, 0) if is_frozen else (block, embedding)
    sharded = 4 * trained / shards
    # Gradients that wait for the last pass are whole until then.
    sent = REDUCE_DTYPES[setup.reduce_dtype]
    waiting = sent * trained if has_passes and setup.reduce_gradients == "step" else 0.0
    whole = gathered * block
    arriving = whole if shards > 1 else 0.0
    keeps_blocks = setup.keep_blocks and shards > 1
    if keeps_blocks:
        arriving = gathered * (blocks - block)
    # Tied embeddings are whole from the first block's forward to its backward pass, and reduced
    # last. Else the output embedding is whole from the loss until it is reduced, which is before
    # the blocks' backward passes, and the input embedding while it is reduced.
    staying, early = (2.0 * embedding, 0) if shape.is_tied else (0.0, learned)
    last_gathered = 2.0 * embedding if shards > 1 else staying
    last_gathered += gathered * blocks if keeps_blocks else 0.0
    always = {"weights": weights / shards, "moments": setup.moments * trained / shards}
    earlier = (waiting or sharded) if has_passes else 0.0
    # The output embedding's gradient is added up in fp32 while there are logits. What was gathered
    # last is there twice until something else is: FSDP2 keeps the buffer it came in.
    at_loss = Memory(
        **always,
        gradients=earlier,
        gathered=2.0 * embedding + (arriving if shape.is_tied else last_gathered),
        activations=(kept + per_token.outside) * tokens,
        logits=_LOGIT_TOKENS * shape.vocab * 4.0 * 2 + 4.0 * learned,
    )
    # A gradient is whole until it is reduced, and in the type of that beside its own.
    at_head = Memory(
        **always,
        gradients=earlier,
        gathered=2.0 * embedding + (2.0 + sent) * early + (arriving if keeps_blocks else 0.0),
        activations=(kept + per_token.outside) * tokens,
        logits=0.0,
    )
    # One block computes while the next arrives; what came before it is on its way.
    computing = staying + (2.0 * learned if shape.is_tied else 0.0) + whole + unpacked
    at_last_block = Memory(
        **always,
        gradients=earlier,
        gathered=computing + arriving + sent * early,
        activations=(kept + per_token.within) * tokens,
        logits=0.0,
    )
    after_last_block = Memory(
        **always,
        gradients=earlier,
        gathered=computing - whole + arriving + (2.0 + sent) * learned_block,
        activations=kept * tokens,
        logits=0.0,
    )
    before_last_block = Memory(
        **always,
        gradients=earlier,
        gathered=computing + sent * learned_block + (arriving if shape.layers > 2 else 0.0),
        activations=(kept - per_token.kept + per_token.within) * tokens,
        logits=0.0,
    )
    at_first_block = Memory(
        **always,
        gradients=waiting or sharded,
        gathered=computing + sent * learned_block,
        activations=(per_token.kept + per_token.within) * tokens,
        logits=0.0,
    )
    at_end = Memory(
        **always,
        gradients=sharded,  # the others were reduced on the way
        gathered=staying + (2.0 + sent) * learned + whole + sent * learned_block,
        activations=0.0,
        logits=0.0,
    )
    moments = [at_loss, at_head, at_last_block, after_last_block, before_last_block]
    return [*moments, at_first_block, at_end]
