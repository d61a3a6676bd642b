"""Memory and speed of training a sharded language model: arithmetic only.

Standard library only: a laptop asks before money is spent (``training.plan``), and a recipe asks
whether a model fits its GPU. A test compares memory with torch's memory tracker.

Bytes per GPU, ``P`` parameters over ``S`` shards, a pass of ``T`` tokens, width ``h``, ``L``
blocks, vocabulary ``V``:

* weights, gradients, moments: (4 + 4 + 8) P / S; moments 2.1 with 8 bits; 2 for frozen weights,
  9/16 in four bits (and 8 for the largest matrix, while it is unpacked);
* between passes, where that fits too: whole weights, 2 P, and gradients, 4 P (``keeps_whole``);
* gathered: at the loss 4 x an embedding; when its gradient is reduced 8 x; in a block 2 x two
  blocks + 4 x a block on its way; at the end 6 x (input embedding + a block). One worker: 2 x all
  blocks until their backward passes, or one block where they are recomputed;
* activations: T (L a + 8 h) at the loss (14 h with RMSNorm): a block keeps a = 36 h (none), 22 h
  (selective) or 2 h (full) of a GPT, after arXiv 2205.05198 without the attention matrix; 45.5 h
  and 25 h of a Llama, whose block is gated, 6 bytes more per query and key that have norms of their
  own, and 8 h for each norm beyond two. One worker: 6 h more in a gated block. Compiled, a gated
  block keeps 32.1 h, 2 bytes more per query and key, h for each norm, and one worker 2 h (a test
  counts what torch's partitioner keeps);
* loss: 8 bytes for each logit of a chunk (``logit_tokens``) + 4 V h, at the loss only.

The worst moment counts: the loss, the backward pass of the last block or the one before, or the end
of the backward pass. Others never need more than 2 % above these (models from 1 to 70 billion
parameters, 1 to 64 GPUs). Tied embeddings stay whole from the first block's forward to its backward
pass.

A step takes the slower of computing and of communicating between hosts, and then the optimizer's
pass over memory. Computing is products at a part of the peak; attention, and all between products,
at the speed of memory; and what sharding costs within a host: five constants, fitted to published
speeds (a test compares). Between hosts go, per pass, two gathers of the blocks' bf16 weights, one
of the embeddings', and one reduction of fp32 gradients (per step one of each, where they stay
whole), each link of NCCL's ring carrying (S-1)/S of it; TCP carries at most 100 Gbit/s, EFA all.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from contract.errors import InputError
from contract.instance_types import InstanceType
from training.models.model_shapes import ALL, NOTHING_TO_PACK, ModelShape

GIB: Final = 2**30
#: What is recomputed instead of kept for the backward pass: nothing, attention, whole blocks.
RECOMPUTE: Final = ("none", "selective", "full")
#: Types in which gradients are exchanged, and their bytes.
REDUCE_DTYPES: Final = {"fp32": 4.0, "bf16": 2.0}
#: Bytes per parameter of the moments.
MOMENTS: Final = {"adamw": 8.0, "adamw-8bit": 2.1}
#: Bytes of a weight in four bits with its part of a scale (``training.models.nf4``), and of each
#: weight of a matrix that is unpacked for a product.
PACKED: Final = 9 / 16
_UNPACKING: Final = 8.0
#: Logits that exist at once, in fp32 256 MB (``training.loop.losses``).
_LOGITS: Final = 2**26
#: Of a GPU's memory, what CUDA, NCCL and the allocator's gaps take (GiB, and a part of the whole).
_RESERVED_GIB: Final = 1.2
_FRAGMENTED: Final = 0.06
# Constants of speed: the part of the peak that products reach; what recomputing all blocks takes
# again, of a step; and per byte of the memory's bandwidth: operations of attention, bytes moved for
# each that a block keeps, bytes moved for each parameter in a pass because it is sharded.
_ATTAINABLE: Final = 0.777
_RECOMPUTED: Final = 0.252
_ATTENTION: Final = 80.2
_BETWEEN: Final = 12.3
_SHARDING: Final = 37.8
#: Of a host's bandwidth that NCCL's collectives reach.
_NETWORK: Final = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Hosts, and the settings of a run that decide its memory and speed."""

    machine: InstanceType
    num_workers: int
    seq_len: int
    global_batch: int
    microbatch: int
    recompute: str
    optimizer: str
    lora_rank: int = 0
    lora_targets: str = ALL
    lora_bits: int = 16
    reduce_dtype: str = "fp32"
    efa: bool = False
    """True if hosts communicate over EFA with all network cards; False: over TCP."""
    compile: bool = False
    """True if blocks are compiled."""

    def __post_init__(self) -> None:
        if self.machine.gpu is None:
            raise InputError(f"{self.machine.name} has no GPU: choose another --instance")

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        machine: InstanceType,
        *,
        num_workers: int,
        efa: bool = False,
    ) -> Self:
        """The set-up of a run's settings, of which it takes its part, on a machine."""
        names = {field.name for field in dataclasses.fields(cls)} - {"machine", "num_workers"}
        values = {name: value for name, value in settings.items() if name in names}
        return cls(**{**values, "machine": machine, "num_workers": num_workers, "efa": efa})

    @property
    def num_hosts(self) -> int:
        return -(-self.num_workers // self.machine.num_gpus)

    @property
    def num_microbatches(self) -> int:
        """Passes per step."""
        return max(1, -(-self.global_batch // (self.num_workers * self.microbatch)))

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a value in a GPU's computations: 2 for bf16, 4 for fp32."""
        return 2.0 if self.machine.gpu and self.machine.gpu.has_bf16 else 4.0

    @property
    def available(self) -> float:
        """Bytes of a GPU that training may use."""
        assert self.machine.gpu is not None
        return GIB * ((1 - _FRAGMENTED) * self.machine.gpu.memory_gib - _RESERVED_GIB)

    @property
    def usd_per_hour(self) -> float | None:
        price = self.machine.usd_per_hour
        return None if price is None else price * self.num_hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a GPU holds at a moment of a step."""

    moment: str
    """Name of the moment."""
    weights: float
    gradients: float
    """Gradients of earlier passes; at the end of a step, all."""
    moments: float
    gathered: float = 0.0
    """Blocks that are whole for a moment, and their gradients before they are sharded."""
    activations: float = 0.0
    logits: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by what they are for."""
        found = dataclasses.asdict(self)
        del found["moment"]
        return found

    @property
    def total(self) -> float:
        return float(sum(self.parts.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes per token that a pass keeps for its backward pass, counted operation by operation,
    without the attention matrix, which flash attention does not store.

    Recomputation covers one block at a time: ``within`` is freed before that of the next block, and
    begins when the logits are freed.
    """

    outside: float
    """Kept after the blocks, until their backward passes: what the last norm keeps, its output
    twice, for the loss, and the gradient of that."""
    kept: float
    """Kept by each block."""
    within: float
    """Besides in one block during its backward pass: what is recomputed, and gradients."""

    @classmethod
    def of(
        cls, shape: ModelShape, recompute: str, *, autocast: bool, compiled: bool = False
    ) -> Self:
        """Activations of a model.

        Args:
            recompute: what is recomputed: ``none``, ``selective`` or ``full``.
            compiled: torch's compiler decides what is kept, and computes the rest again; otherwise
                each operation keeps its inputs.
            autocast: weights are fp32, and inputs of products are cast, as a single worker does it;
                otherwise weights are bf16.
        """
        h, i, attention, keys = shape.hidden, shape.intermediate, shape.attention, shape.keys
        if shape.is_gated:
            # Inputs and outputs of products, the gate before and after its function, and RMSNorms,
            # which compute in fp32; compiled, norms and the gate's function are computed again.
            per_width, per_gate, per_head, per_norm = (
                (8.0, 6, 2, 1) if compiled else (16.0, 8, 6, 8)
            )
            whole = per_width * h + 4 * (attention + keys) + per_gate * i
            products = 6.0 * h + 4 * (attention + keys + i)
            if shape.norms_heads:
                whole += per_head * (attention + keys)
            whole += per_norm * h * (shape.norms - 2)
            if autocast:
                # The output of a norm is cast to bf16 for each of five matrices by itself.
                whole += (2 if compiled else 6) * h
        else:
            whole = 12.0 * h + 8 * attention + 4 * i
            products = 6.0 * h + 8 * attention + 2 * i
        kept = {"none": whole, "selective": products, "full": 2.0 * h}[recompute]

        # Where gradients in a block are widest, there are two of its output, and those that go
        # through its last matrices.
        gradients = 4.0 * h + (4 if shape.is_gated else 2) * i
        return cls(
            outside=(14.0 if shape.is_gated else 8.0) * h,
            kept=kept,
            within=whole - kept + gradients,
        )


def needed(shape: ModelShape, setup: Setup) -> Memory:
    """Bytes per GPU at the worst moment of a step. Trained weights, gradients and moments are fp32
    and sharded, everything else is bf16, or fp32 on a GPU without bf16.

    Raises:
        InputError: the model has no matrices for four bits, or none of the names for adapters.
    """
    parameters = float(shape.parameters)
    trained, frozen = parameters, 0.0
    if setup.lora_rank:
        trained = float(shape.adapter_parameters(setup.lora_rank, setup.lora_targets))
        frozen = parameters
    # Bytes of a frozen weight, on average, and of one of a block that is gathered.
    held = gathered = width = setup.bytes_per_value
    unpacked = 0.0
    if setup.lora_bits == 4:
        if not shape.packed_sizes:
            raise InputError(NOTHING_TO_PACK)
        held -= (width - PACKED) * shape.packed_parameters / shape.parameters
        gathered -= (width - PACKED) * shape.packed_parameters / shape.blocks_parameters
        unpacked = _UNPACKING * max(shape.packed_sizes)
    weights = held * frozen + 4 * trained
    if setup.num_workers == 1:
        moments = _alone(shape, setup, trained=trained, weights=weights, unpacked=unpacked)
    else:
        moments = _shared(
            shape, setup, trained=trained, weights=weights, unpacked=unpacked, gathered=gathered
        )
    # Of what is gathered, gradients are fp32 in any case: a bound from above.
    wider = [
        dataclasses.replace(
            each, gathered=each.gathered * width / 2, activations=each.activations * width / 2
        )
        for each in moments
    ]
    return max(wider, key=lambda each: each.total)


def logit_tokens(vocab: int) -> int:
    """Tokens whose logits exist at once."""
    return max(128, _LOGITS // vocab // 128 * 128)


def _logits(shape: ModelShape, setup: Setup) -> float:
    """Bytes of a chunk of logits and of its gradient, in fp32."""
    tokens = min(logit_tokens(shape.vocab), setup.microbatch * setup.seq_len)
    return tokens * shape.vocab * 4.0 * 2


def keeps_whole(shape: ModelShape, setup: Setup) -> bool:
    """True if weights and gradients stay unsharded between the passes of a step."""
    if 1 in (setup.num_workers, setup.num_microbatches):
        return False
    whole = setup.bytes_per_value * shape.parameters
    if setup.reduce_dtype == "fp32" and not setup.lora_rank:
        whole += 4.0 * shape.parameters
    return needed(shape, setup).total + whole <= setup.available


def _alone(
    shape: ModelShape, setup: Setup, *, trained: float, weights: float, unpacked: float
) -> list[Memory]:
    """The moments of a step of a single worker, which shards nothing and computes under autocast:
    each trained weight that is multiplied has a copy in bf16, from the first product to its
    backward pass; where blocks are recomputed, only those of one block at a time."""
    per_token = Activations.of(shape, setup.recompute, autocast=True, compiled=setup.compile)
    tokens = setup.microbatch * setup.seq_len
    kept = per_token.kept * shape.layers
    is_frozen = bool(setup.lora_rank)
    learned = 0 if is_frozen else shape.embedding_parameters
    copies = 2.0 * (trained if is_frozen else shape.blocks_parameters)
    copies_of_block = copies / shape.layers
    if setup.recompute != "none":
        copies = 0.0
    # A gradient is added to those of earlier passes.
    earlier = 4 * trained if setup.num_microbatches > 1 else 0.0
    always = {"weights": weights, "moments": MOMENTS[setup.optimizer] * trained}
    at_loss = Memory(
        moment="the loss",
        **always,
        gradients=earlier,
        gathered=2.0 * learned + copies,
        activations=(kept + per_token.outside) * tokens,
        logits=_logits(shape, setup) + 4.0 * learned,
    )
    at_last_block = Memory(
        moment="the backward pass of the last block",
        **always,
        # The two gradients of a tied embedding are added at the end.
        gradients=earlier + (4.0 * learned if shape.is_tied or not earlier else 0.0),
        gathered=max(copies, copies_of_block) + unpacked,
        activations=(kept + per_token.within) * tokens,
    )
    return [at_loss, at_last_block]


def _shared(
    shape: ModelShape,
    setup: Setup,
    *,
    trained: float,
    weights: float,
    unpacked: float,
    gathered: float,
) -> list[Memory]:
    """The moments of a step of several workers, which shard weights, gradients and moments.

    Args:
        gathered: bytes of a weight of a block that is gathered.
    """
    shards = setup.num_workers
    per_token = Activations.of(shape, setup.recompute, autocast=False, compiled=setup.compile)
    tokens = setup.microbatch * setup.seq_len
    kept = per_token.kept * shape.layers
    has_passes = setup.num_microbatches > 1
    is_frozen = bool(setup.lora_rank)
    block, embedding = shape.block_parameters, shape.embedding_parameters
    learned_block, learned = (0, 0) if is_frozen else (block, embedding)
    sharded = 4 * trained / shards
    sent = REDUCE_DTYPES[setup.reduce_dtype]
    whole = gathered * block
    # Tied embeddings are whole from the first block's forward to its backward pass, and reduced
    # last. Otherwise the output embedding is whole from the loss until it is reduced, before the
    # blocks' backward passes, and the input embedding while it is reduced.
    staying, early = (2.0 * embedding, 0) if shape.is_tied else (0.0, learned)
    always = {"weights": weights / shards, "moments": MOMENTS[setup.optimizer] * trained / shards}
    earlier = sharded if has_passes else 0.0
    # The output embedding's gradient is accumulated in fp32 while there are logits. What was
    # gathered last exists twice until the next gather: FSDP2 keeps the buffer it came in.
    at_loss = Memory(
        moment="the loss",
        **always,
        gradients=earlier,
        gathered=2.0 * embedding + (whole if shape.is_tied else 2.0 * embedding),
        activations=(kept + per_token.outside) * tokens,
        logits=_logits(shape, setup) + 4.0 * learned,
    )
    # One block computes while the next is gathered and the gradients of the one before are sent.
    computing = staying + (2.0 * learned if shape.is_tied else 0.0) + whole + unpacked
    # Until a gradient is reduced it is whole, in its own type and in that of the reduction.
    at_last_block = Memory(
        moment="the backward pass of the last block",
        **always,
        gradients=earlier,
        gathered=computing + whole + sent * early,
        activations=(kept + per_token.within) * tokens,
    )
    before_last_block = Memory(
        moment="the backward pass of the last block but one",
        **always,
        gradients=earlier,
        gathered=computing + sent * learned_block + (whole if shape.layers > 2 else 0.0),
        activations=(kept - per_token.kept + per_token.within) * tokens,
    )
    at_end = Memory(
        moment="the end of the backward pass",
        **always,
        gradients=sharded,  # all but the last were reduced before
        gathered=staying + (2.0 + sent) * learned + whole + sent * learned_block,
    )
    return [at_loss, at_last_block, before_last_block, at_end]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Memory and speed of a set-up. Computed, not measured."""

    setup: Setup
    memory: Memory
    tokens_per_s: float
    mfu: float
    bound_by: str
    evaluated_s: float
    """Seconds of a pass of the same size without gradients."""
    sampled_s: float
    """Seconds of a pass of a few tokens: it reads, or gathers, all weights."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.setup.available


def make(shape: ModelShape, setup: Setup) -> Plan:
    """Memory and speed of a set-up.

    A step takes as long as the slower of computing and communicating, since they overlap, and then
    the optimizer's pass over memory, which hides behind nothing.
    """
    gpu = setup.machine.gpu
    assert gpu is not None
    peak, touched_s = 1e12 * gpu.tflops, 1 / (gpu.memory_gb_per_s * 1e9)
    tokens, width = setup.global_batch * setup.seq_len, setup.bytes_per_value
    attention = 12 * shape.layers * shape.attention * setup.seq_len * tokens
    flops = shape.flops_per_token(setup.seq_len) * tokens
    kept = Activations.of(shape, "none", autocast=False).kept * shape.layers * tokens * width / 2
    products = (flops - attention) / (peak * _ATTAINABLE)
    others = (attention / _ATTENTION + kept * _BETWEEN) * touched_s
    again = 1 + {"none": 0.0, "selective": 0.03, "full": _RECOMPUTED}[setup.recompute]
    trained = 2 / 3 if setup.lora_rank else 1.0  # frozen weights have no gradients
    # All wait for the workers that have one sequence more than others.
    largest_share = -(-setup.global_batch // setup.num_workers) / setup.global_batch
    forward = (products + others) / 3 * largest_share
    compute = (products * trained + others) * again * largest_share
    is_whole, passes = keeps_whole(shape, setup), setup.num_microbatches
    if setup.num_workers > 1:
        sharding = _SHARDING * trained * shape.parameters * touched_s
        compute += sharding * (1 if is_whole else passes)

    network = 0.0
    read = width * shape.parameters * touched_s
    if setup.num_hosts > 1:
        gbps = setup.machine.network_gbps if setup.efa else setup.machine.tcp_gbps
        bandwidth = gbps / 8 * 1e9 * _NETWORK
        # Through each link of NCCL's ring, per pass: the blocks' weights in bf16 twice, the
        # embeddings' once, and gradients. One link of the ring is the way into a host.
        across = (setup.num_workers - 1) / setup.num_workers
        gathers = width * shape.parameters
        backward = width * shape.blocks_parameters
        if setup.lora_bits == 4:
            packed = (width - PACKED) * shape.packed_parameters
            gathers, backward = gathers - packed, backward - packed
        gathers = across * (gathers if is_whole else (gathers + backward) * passes)
        sent = REDUCE_DTYPES[setup.reduce_dtype]
        reduced = 0.0 if setup.lora_rank else sent * shape.parameters * across
        # Sums in bf16 would lose what each pass adds.
        reduced *= 1 if is_whole and sent == 4 else passes
        network = (gathers + reduced) / bandwidth
        read = width * shape.parameters * across / bandwidth
    moments = MOMENTS[setup.optimizer]
    touched = (2 * (4 + moments) + 4) * shape.parameters / setup.num_workers
    optimizer = 0.0 if setup.lora_rank else touched * touched_s
    step = max(compute, network) + optimizer
    return Plan(
        setup=setup,
        memory=needed(shape, setup),
        tokens_per_s=tokens / step,
        mfu=flops * trained / (step * setup.num_workers * peak),
        bound_by="network" if network > compute else "compute",
        evaluated_s=max(forward / passes, read),
        sampled_s=read,
    )


def smaller(shape: ModelShape, setup: Setup) -> list[Setup]:
    """Set-ups that fit on the same machines: the fastest first, and last those that train otherwise
    (moments in 8 bits, adapters)."""
    changes: list[dict[str, Any]] = []
    for recompute in RECOMPUTE[RECOMPUTE.index(setup.recompute) :]:
        microbatch = setup.microbatch
        while microbatch >= 1:
            changes.append({"recompute": recompute, "microbatch": microbatch})
            microbatch //= 2
    least: dict[str, Any] = {"recompute": "full", "microbatch": 1}
    changes.append({**least, "optimizer": "adamw-8bit"})
    least["lora_rank"] = setup.lora_rank or 16
    changes.append(least)
    if shape.packed_sizes:
        changes.append({**least, "lora_bits": 4})
    candidates = [make(shape, dataclasses.replace(setup, **change)) for change in changes]
    fitting = [each for each in candidates if each.fits]
    fitting.sort(
        key=lambda each: (
            each.setup.lora_bits != setup.lora_bits,
            each.setup.lora_rank != setup.lora_rank,
            each.setup.optimizer != setup.optimizer,
            -each.tokens_per_s,
        )
    )
    return [each.setup for each in fitting]


def differences(setup: Setup, other: Setup) -> str:
    """The options that turn one set-up into the other."""
    found = []
    for field in dataclasses.fields(setup):
        value = getattr(other, field.name)
        if value == getattr(setup, field.name):
            continue
        if field.name == "machine":
            found.append(f"--instance {value.name}")
            continue
        option = {"num_workers": "workers"}.get(field.name, field.name).replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"no --{option}")
        else:
            found.append(f"--{option} {value}")
    return " ".join(found)
