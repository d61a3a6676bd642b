"""How much memory a sharded language model needs and how fast it trains: arithmetic only.

Standard library only: a laptop asks before money is spent (``training.plan``), and a recipe asks
where a model may not fit its GPU. ``docs/fsdp.md`` has the formulas, where each number comes from,
and how far they were from what was measured.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from contract.errors import InputError
from contract.instance_types import InstanceType
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
_PACKED: Final = 9 / 16
_UNPACKING: Final = 8.0
#: Of a GPU's memory, what CUDA, NCCL and the allocator's gaps take (GiB, and a part of the whole).
_RESERVED_GIB: Final = 1.2
_FRAGMENTED: Final = 0.06
#: Bytes per token and unit of width that are kept outside of the blocks: embedding, last norm, and
#: the gradient of its output.
_OUTSIDE: Final = 8.0
#: Tokens whose logits exist at once, and the fp32 copies of them (``training.losses``).
_LOGIT_TOKENS: Final = 512
#: Of the peak that large matrix products reach in practice on a data-centre GPU.
_ATTAINABLE: Final = 0.55
#: Bytes per second that a GPU copies to or from pinned memory of its host, over 16 lanes of PCIe 4
#: at half of their peak, because GPUs share the way.
_TO_HOST: Final = 16e9
#: Of a host's bandwidth that NCCL's collectives reach.
_NETWORK: Final = 0.75


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be expected of a set-up. Computed, not measured."""

    setup: Setup
    memory: Memory
    available: float
    """Bytes of a GPU that training may use."""
    host_memory: float
    """Bytes of moments that a host keeps for all of its GPUs; 0 without ``--offload-moments``."""
    tokens_per_s: float
    mfu: float
    bound_by: str

    @property
    def host_available(self) -> float:
        """Bytes of a host that moments may take."""
        # A checkpoint copies weights and moments to the host's memory, and loading data takes some.
        return self.setup.machine.memory_mib * 2**20 / 3

    @property
    def fits_gpus(self) -> bool:
        return self.memory.total <= self.available

    @property
    def fits_hosts(self) -> bool:
        return self.host_memory <= self.host_available

    @property
    def fits(self) -> bool:
        return self.fits_gpus and self.fits_hosts


def memory(shape: ModelShape, setup: Setup) -> Memory:
    """Bytes per GPU at the worst moment of a step: what is trained, its gradients and moments in
    fp32 and sharded, the rest in bf16.

    Raises:
        InputError: frozen weights are to be in four bits, or adapters beside matrices, that this
            model has not or that cannot be.
    """
    shards = setup.num_workers // setup.replicas
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
        held -= (2 - _PACKED) * shape.packed_parameters / shape.parameters
        gathered -= (2 - _PACKED) * shape.packed_parameters / shape.blocks_parameters
        unpacked = _UNPACKING * max(each.parameters for each in shape.packed_matrices)
    has_passes = setup.num_microbatches > 1
    sharded = 4 * trained / shards
    # Gradients that wait for the last pass are whole until then.
    sent = REDUCE_DTYPES[setup.reduce_dtype]
    waiting = sent * trained if has_passes and setup.reduce_gradients == "step" else 0.0
    block, embedding = shape.block_parameters, shape.embedding_parameters
    learned_block, learned = (0, 0) if setup.lora_rank else (block, embedding)
    kept = shape.kept[setup.recompute] * shape.layers
    again = shape.cast_again if setup.num_workers == 1 else 0.0
    if setup.recompute == "none":
        kept += again * shape.layers
    else:
        kept += shape.kept["none"] + again  # the block that is being computed again
    activations = (kept + _OUTSIDE * shape.hidden) * setup.microbatch * setup.seq_len
    arriving = gathered * block if shards > 1 else 0.0
    keeps_blocks = setup.keep_blocks and shards > 1
    if keeps_blocks:
        arriving = gathered * (shape.blocks_parameters - block)
    # Tied embeddings are whole from the first block's forward to its backward pass, and reduced
    # last. Else the output embedding is whole from the loss until it is reduced, which is before
    # the blocks' backward passes, and the input embedding while it is reduced.
    staying, early = (2.0 * embedding, 0) if shape.is_tied else (0.0, learned)
    left = staying
    if setup.num_workers == 1:
        # Autocast, not FSDP: each trained weight is there in bf16 too, until its backward pass.
        staying, arriving = 2.0 * trained, 0.0
    last_gathered = 2.0 * embedding if shards > 1 else staying
    last_gathered += gathered * shape.blocks_parameters if keeps_blocks else 0.0
    always = {
        "weights": (held * frozen + 4 * trained) / shards,
        "moments": setup.moments * trained / shards,
    }
    earlier = (waiting or sharded) if has_passes else 0.0
    # The output embedding's gradient is added up in fp32 while there are logits. What was gathered
    # last is there twice until something else is: FSDP2 keeps the buffer it came in.
    at_loss = Memory(
        **always,
        gradients=earlier,
        gathered=2.0 * embedding + (arriving if shape.is_tied else last_gathered),
        activations=activations,
        logits=_LOGIT_TOKENS * shape.vocab * 4.0 * 2 + 4.0 * learned,
    )
    # A gradient is whole until it is reduced, and in the type of that beside its own.
    at_head = Memory(
        **always,
        gradients=earlier,
        gathered=2.0 * embedding + (2.0 + sent) * early + (arriving if keeps_blocks else 0.0),
        activations=activations,
        logits=0.0,
    )
    # One block computes while the next arrives; what came before it is on its way.
    tied_gradient = 2.0 * learned if shape.is_tied else 0.0
    at_last_block = Memory(
        **always,
        gradients=earlier,
        gathered=staying
        + tied_gradient
        + gathered * block
        + unpacked
        + arriving
        + max(sent * early, (2.0 + sent) * learned_block),
        activations=activations,
        logits=0.0,
    )
    at_end = Memory(
        **always,
        gradients=sharded,  # the others were reduced on the way
        gathered=left + (2.0 + sent) * learned + gathered * block + sent * learned_block,
        activations=0.0,
        logits=0.0,
    )
    return max(at_loss, at_head, at_last_block, at_end, key=lambda each: each.total)


def make(shape: ModelShape, setup: Setup) -> Plan:
    """Memory and speed of a set-up.

    A step takes as long as the slower of computing and communicating, since they overlap, and then
    the optimizer's pass over memory, which hides behind nothing.
    """
    gpu = setup.machine.gpu
    assert gpu is not None
    peak = 1e12 * (gpu.bf16_tflops or gpu.fp16_tflops)
    tokens = setup.global_batch * setup.seq_len
    flops = shape.flops_per_token(setup.seq_len) * tokens
    again = {"none": 0.0, "selective": 0.03, "full": 1 / 3}[setup.recompute]
    done = flops * (1 + again) * (2 / 3 if setup.lora_rank else 1)  # no gradients of frozen weights
    compute = done / (setup.num_workers * peak * _ATTAINABLE)

    shards = setup.num_workers // setup.replicas
    hosts = -(-shards // setup.machine.num_gpus)
    network = 0.0
    if setup.num_hosts > 1:
        gbps = setup.machine.network_gbps if setup.efa else setup.machine.tcp_gbps
        bandwidth = gbps / 8 * 1e9 * _NETWORK
        # Through each link of NCCL's ring, per pass: the blocks' weights in bf16, twice where they
        # do not stay, the embeddings' once, and gradients, unless those wait for the last one. One
        # link of the ring is the way into a host.
        across = (shards - 1) / shards if hosts > 1 else 0.0
        gathered = shape.parameters + (0 if setup.keep_blocks else shape.blocks_parameters)
        gathers = 2.0 * gathered
        if setup.lora_bits == 4:
            saved = (2 - _PACKED) * shape.packed_parameters
            gathers -= saved * (1 if setup.keep_blocks else 2)
        gathers *= across * setup.num_microbatches
        sent = REDUCE_DTYPES[setup.reduce_dtype]
        reduced = 0.0 if setup.lora_rank else sent * shape.parameters * across
        if setup.reduce_gradients == "pass":
            reduced *= setup.num_microbatches
        if setup.replicas > 1:
            reduced += 2 * sent * shape.parameters / shards * min(setup.machine.num_gpus, shards)
        network = (gathers + reduced) / bandwidth
    moments = MOMENTS[setup.optimizer]
    touched = (2 * (4 + moments) + 4) * shape.parameters / shards
    optimizer = 0.0 if setup.lora_rank else touched / (gpu.memory_gb_per_s * 1e9)
    on_host = 0.0
    if setup.offload_moments:
        trained = shape.parameters
        if setup.lora_rank:
            trained = shape.adapter_parameters(setup.lora_rank, setup.lora_targets)
        on_host = moments * trained / shards
        optimizer += 2 * on_host / _TO_HOST

    step = max(compute, network) + optimizer
    useful = done / (1 + again)
    reserved = _RESERVED_GIB * GIB + _FRAGMENTED * gpu.memory_gib * GIB
    return Plan(
        setup=setup,
        memory=memory(shape, setup),
        available=gpu.memory_gib * GIB - reserved,
        host_memory=on_host * min(setup.machine.num_gpus, setup.num_workers),
        tokens_per_s=tokens / step,
        mfu=useful / (step * setup.num_workers * peak),
        bound_by="network" if network > compute else "compute",
    )


def smaller(shape: ModelShape, setup: Setup) -> list[Setup]:
    """What makes a set-up that does not fit fit on the same machines: the fastest first, and last
    what trains otherwise (moments in 8 bits, adapters)."""
    setup = dataclasses.replace(setup, reduce_gradients="pass", keep_blocks=False)
    changes: list[dict[str, Any]] = [{"replicas": setup.replicas}, {"replicas": 1}]
    for recompute in RECOMPUTE[RECOMPUTE.index(setup.recompute) :]:
        microbatch = setup.microbatch
        while microbatch >= 1:
            changes.append({"replicas": 1, "recompute": recompute, "microbatch": microbatch})
            microbatch //= 2
    least: dict[str, Any] = {"replicas": 1, "recompute": "full", "microbatch": 1}
    # Only moments of 32 bits can be in the host's memory.
    changes.append({**least, "optimizer": "adamw-8bit", "offload_moments": False})
    changes.append({**least, "optimizer": "adamw", "offload_moments": True})
    least["lora_rank"] = setup.lora_rank or 16
    if shape.takes_adapters:
        changes.append(least)
        if not shape.why_not_packed:
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
