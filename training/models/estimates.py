"""Whether a sharded language model fits, and how fast it trains: arithmetic only.

Standard library only: a laptop asks before money is spent (``training.plan``), and a recipe asks
where a model may not fit its GPU. ``docs/fsdp.md`` has the formulas, where each number comes from,
and how far they were from what was measured.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from training.models.memory import (
    GIB,
    MOMENTS,
    PACKED,
    RECOMPUTE,
    REDUCE_DTYPES,
    Memory,
    Setup,
    needed,
)
from training.models.model_shapes import ModelShape

#: Of a GPU's memory, what CUDA, NCCL and the allocator's gaps take (GiB, and a part of the whole).
_RESERVED_GIB: Final = 1.2
_FRAGMENTED: Final = 0.06
#: Of the peak that large matrix products reach in practice on a data-centre GPU.
_ATTAINABLE: Final = 0.55
#: Bytes per second that a GPU copies to or from pinned memory of its host, over 16 lanes of PCIe 4
#: at half of their peak, because GPUs share the way.
_TO_HOST: Final = 16e9
#: Of a host's bandwidth that NCCL's collectives reach.
_NETWORK: Final = 0.75


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
            saved = (2 - PACKED) * shape.packed_parameters
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
        memory=needed(shape, setup),
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
