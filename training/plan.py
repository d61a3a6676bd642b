"""Whether a model fits, how fast it will be and what it will cost, before money is spent.

    python -m training.plan fsdp --model new:6.9b --instance g5.12xlarge --workers 8

Arithmetic alone, from the sizes of the model and the data sheets of the machines; standard library
only. ``docs/fsdp.md`` has the formulas, where each number comes from, and how far they were from
what was measured.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from contract.exits import BAD_INPUT as EXIT_BAD_INPUT
from contract.exits import OK as EXIT_OK
from contract.instance_types import INSTANCE_TYPES, InstanceType, instance_type
from training.models.model_shapes import SHAPES, ModelShape, read_config
from training.recipes.fsdp.settings import PRESETS, RECOMPUTE, FsdpConfig

GIB: Final = 2**30
#: Bytes per parameter of the moments.
_MOMENTS: Final = {"adamw": 8.0, "adamw-8bit": 2.1}
#: Of a GPU's memory, what CUDA, NCCL and the allocator's gaps take (GiB, and a part of the whole).
_RESERVED_GIB: Final = 1.2
_FRAGMENTED: Final = 0.06
#: Bytes per token and unit of width that a block keeps for backward, bf16 (after arXiv 2205.05198,
#: equation 2, without the attention matrix, which flash attention does not store).
_KEPT: Final = {"none": 34.0, "selective": 22.0, "full": 2.0}
#: Tokens whose logits exist at once, and the fp32 copies of them (``training.losses``).
_LOGIT_TOKENS: Final = 512
#: Of the peak that large matrix products reach in practice on a data-centre GPU.
_ATTAINABLE: Final = 0.55
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

    def __post_init__(self) -> None:
        if self.machine.gpu is None:
            raise InputError(f"{self.machine.name} has no GPU: choose another --instance")
        if self.num_workers < 1:
            raise InputError(f"--workers is {self.num_workers}: it must be at least 1")
        if self.num_workers % self.replicas:
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
    def usd_per_hour(self) -> float | None:
        price = self.machine.usd_per_hour
        return None if price is None else price * self.num_hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a GPU holds at the worst moment of a step, in bytes."""

    weights: float
    gradients: float
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
    tokens_per_s: float
    mfu: float
    bound_by: str

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.available


def memory(shape: ModelShape, setup: Setup) -> Memory:
    """Bytes per GPU: weights, gradients and moments in fp32 and sharded, the rest in bf16."""
    shards = setup.num_workers // setup.replicas
    parameters = float(shape.parameters)
    trained = parameters
    if setup.lora_rank:
        # Two thin matrices beside each of a block's.
        widths = 2 * shape.hidden + 2 * shape.heads * shape.head_dim
        widths += (3 if shape.is_gated else 2) * (shape.hidden + shape.intermediate)
        trained = float(setup.lora_rank * shape.layers * (widths + shape.hidden))
    tokens = setup.microbatch * setup.seq_len
    # The embeddings belong to the root, which stays whole from the first to the last block.
    root = shape.embedding_parameters * (1 if shape.is_tied else 2)
    # One block computes while the next arrives; its gradient is whole until it is reduced, in fp32.
    gathered = 2.0 * (2 * shape.block_parameters + root)
    if not setup.lora_rank:
        gathered += 2.0 * root + 4.0 * max(shape.block_parameters, root)
    kept = _KEPT[setup.recompute] * shape.layers
    if setup.recompute != "none":
        kept += _KEPT["none"]  # the block that is being computed again
    logits = _LOGIT_TOKENS * shape.vocab * 4.0 * 2
    if not setup.lora_rank:
        logits += 4.0 * shape.embedding_parameters  # the sum of the output embedding's gradient
    return Memory(
        weights=4 * parameters / shards,
        gradients=4 * trained / shards,
        moments=_MOMENTS[setup.optimizer] * trained / shards,
        gathered=gathered if shards > 1 else gathered - 2.0 * shape.block_parameters,
        activations=kept * tokens * shape.hidden,
        logits=logits,
    )


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
        bandwidth = setup.machine.network_gbps / 8 * 1e9 * _NETWORK
        # Through each link of NCCL's ring, per pass: the weights twice in bf16; per step: gradients
        # in fp32. One link of the ring is the way into a host.
        across = (shards - 1) / shards if hosts > 1 else 0.0
        gathers = 2 * 2.0 * shape.parameters * across * setup.num_microbatches
        reduced = 0.0 if setup.lora_rank else 4.0 * shape.parameters * across
        if setup.replicas > 1:
            reduced += 2 * 4.0 * shape.parameters / shards * min(setup.machine.num_gpus, shards)
        network = (gathers + reduced) / bandwidth
    moments = _MOMENTS[setup.optimizer]
    touched = (2 * (4 + moments) + 4) * shape.parameters / shards
    optimizer = 0.0 if setup.lora_rank else touched / (_GBPS.get(gpu.name, 600.0) * 1e9)

    step = max(compute, network) + optimizer
    reserved = _RESERVED_GIB * GIB + _FRAGMENTED * gpu.memory_gib * GIB
    return Plan(
        setup=setup,
        memory=memory(shape, setup),
        available=gpu.memory_gib * GIB - reserved,
        tokens_per_s=tokens / step,
        mfu=flops / (step * setup.num_workers * peak),
        bound_by="network" if network > compute else "compute",
    )


# GPU -> bandwidth of its memory in GB/s, from NVIDIA's data sheets.
_GBPS: Final = {
    "Tesla T4": 320.0,
    "NVIDIA A10G": 600.0,
    "NVIDIA L4": 300.0,
    "NVIDIA L40S": 864.0,
    "Tesla V100-SXM2-16GB": 900.0,
    "Tesla V100-SXM2-32GB": 900.0,
    "NVIDIA A100-SXM4-40GB": 1555.0,
    "NVIDIA A100-SXM4-80GB": 2039.0,
    "NVIDIA H100 80GB HBM3": 3350.0,
    "NVIDIA H200": 4800.0,
    "NVIDIA B200": 8000.0,
}


def cheapest(shape: ModelShape, wanted: Setup, *, tokens: float) -> Plan | None:
    """The set-up that fits and costs least for ``tokens``, over all machines with a price."""
    best: Plan | None = None
    best_usd = 0.0
    for candidate in _candidates(shape, wanted):
        if not candidate.fits or (price := candidate.setup.usd_per_hour) is None:
            continue
        usd = tokens / candidate.tokens_per_s / 3600 * price
        if best is None or usd < best_usd:
            best, best_usd = candidate, usd
    return best


def _candidates(shape: ModelShape, wanted: Setup) -> Iterator[Plan]:
    for machine in INSTANCE_TYPES.values():
        if machine.gpu is None or machine.usd_per_hour is None:
            continue
        for num_hosts in (1, 2, 4, 8):
            num_workers = num_hosts * machine.num_gpus
            if wanted.global_batch % num_workers:
                continue
            for recompute in RECOMPUTE:
                yield make(
                    shape,
                    dataclasses.replace(
                        wanted,
                        machine=machine,
                        num_workers=num_workers,
                        recompute=recompute,
                        replicas=1,
                    ),
                )


def smaller(shape: ModelShape, setup: Setup) -> list[Setup]:
    """What makes a set-up that does not fit fit on the same machines: the fastest first, and last
    what trains otherwise (moments in 8 bits, adapters)."""
    changes: list[dict[str, Any]] = [{"replicas": 1}] if setup.replicas > 1 else []
    for recompute in RECOMPUTE[RECOMPUTE.index(setup.recompute) :]:
        microbatch = setup.microbatch
        while microbatch >= 1:
            changes.append({"replicas": 1, "recompute": recompute, "microbatch": microbatch})
            microbatch //= 2
    changes.append({"replicas": 1, "recompute": "full", "microbatch": 1, "optimizer": "adamw-8bit"})
    changes.append({"replicas": 1, "recompute": "full", "microbatch": 1, "lora_rank": 16})
    candidates = [make(shape, dataclasses.replace(setup, **change)) for change in changes]
    fitting = [each for each in candidates if each.fits]
    fitting.sort(
        key=lambda each: (
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
        else:
            option = {"num_workers": "workers"}.get(field.name, field.name).replace("_", "-")
            found.append(f"--{option} {value}")
    return " ".join(found)


def advice(config: FsdpConfig) -> str:
    """What a run that ran out of memory could do, in a sentence."""
    options = []
    if config.microbatch > 1:
        options.append(f"--microbatch {max(1, config.microbatch // 2)}")
    if config.recompute != "full":
        options.append("--recompute full")
    if config.replicas > 1:
        options.append("--replicas 1")
    if config.optimizer == "adamw":
        options.append("--optimizer adamw-8bit")
    if not config.lora_rank:
        options.append("--lora-rank 16 (another --run)")
    return f"Give more --workers, or one of: {', '.join(options)}; training.plan computes what fits"


def warning(values: Mapping[str, Any], config: FsdpConfig, gpu_name: str) -> str:
    """What to expect of a run on a GPU that is too small for it; empty where it fits, or where
    model or GPU are not known here.

    Args:
        values: the model's Hugging Face configuration.
        gpu_name: as ``torch.cuda.get_device_name`` has it.
    """
    machines = [each for each in INSTANCE_TYPES.values() if each.gpu and each.gpu.name == gpu_name]
    try:
        shape = ModelShape.from_config(values)
    except InputError:
        return ""
    if not machines:
        return ""
    own = config.global_batch // config.num_workers // config.num_microbatches
    setup = Setup(
        machine=machines[0],
        num_workers=config.num_workers,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        microbatch=own,
        recompute=config.recompute,
        optimizer=config.optimizer,
        replicas=config.replicas,
        lora_rank=config.lora_rank,
    )
    found = make(shape, setup)
    if found.fits:
        return ""
    remedies = smaller(shape, setup)
    return (
        f"by the arithmetic of training.plan this needs {found.memory.total / GIB:.1f} GiB of each "
        f"GPU, and {found.available / GIB:.1f} are free: "
        + (f"{differences(setup, remedies[0])} would fit" if remedies else "give more --workers")
    )


def shape_of(model: str) -> ModelShape:
    """The shape of a model: ``new:NAME``, or a folder with a ``config.json``, or that file.

    Raises:
        InputError: there is none.
    """
    name = model.removeprefix("new:")
    if name in SHAPES:
        return ModelShape.from_config(SHAPES[name])
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.exists():
        return ModelShape.from_config(read_config(path))
    if known := _KNOWN.get(name):
        return ModelShape.from_config(SHAPES[known])
    raise InputError(
        f"the shape of {model!r} is not known here: give the folder of its config.json, or one of "
        f"{', '.join([*SHAPES, *_KNOWN])}"
    )


# Models on the Hub that have one of the shapes.
_KNOWN: Final = {
    "databricks/dolly-v2-7b": "6.9b",
    "databricks/dolly-v2-3b": "2.8b",
    "EleutherAI/pythia-6.9b": "6.9b",
    "EleutherAI/pythia-2.8b": "2.8b",
    "EleutherAI/pythia-410m": "400m",
    "EleutherAI/pythia-160m": "160m",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", choices=("fsdp",))
    parser.add_argument("--model", required=True, help="new:SHAPE, a folder, or a known Hub id")
    parser.add_argument("--instance", default="g5.12xlarge", help="(default: g5.12xlarge)")
    parser.add_argument("--workers", type=int, help="GPUs (default: those of one host)")
    parser.add_argument("--tokens", type=float, default=1e6, help="to train on (default: 1e6)")
    parser.add_argument("--preset", default="finetune", choices=[*PRESETS])
    for name in ("seq_len", "global_batch", "microbatch", "replicas", "lora_rank"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--recompute", choices=RECOMPUTE)
    parser.add_argument("--optimizer", choices=[*_MOMENTS])
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)
    try:
        shape = shape_of(options.model)
        plan = make(shape, _setup(options))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    best = cheapest(shape, plan.setup, tokens=options.tokens)
    if options.json:
        result = {
            **summary(plan, options.tokens),
            "parameters": shape.parameters,
            "cheapest": summary(best, options.tokens) if best else None,
        }
        print(json.dumps(result, indent=1))
        return EXIT_OK
    print(f"{options.model}: {shape.parameters:,} parameters")
    print(text(plan, options.tokens))
    if not plan.fits:
        remedies = smaller(shape, plan.setup)
        print(
            "fits here with: " + (differences(plan.setup, remedies[0]) if remedies else "nothing")
        )
    if best and best.setup != plan.setup:
        print(f"\ncheapest that fits: {differences(plan.setup, best.setup)}")
        print(text(best, options.tokens))
    return EXIT_OK


def _setup(options: argparse.Namespace) -> Setup:
    machine = instance_type(options.instance)
    defaults = {field.name: field.default for field in dataclasses.fields(FsdpConfig)}
    values: dict[str, Any] = {**defaults, **PRESETS[options.preset]}
    values |= {name: value for name, value in vars(options).items() if value is not None}
    names = (
        "seq_len",
        "global_batch",
        "microbatch",
        "recompute",
        "optimizer",
        "replicas",
        "lora_rank",
    )
    return Setup(
        machine=machine,
        num_workers=machine.num_gpus if options.workers is None else options.workers,
        **{name: values[name] for name in names},
    )


def summary(plan: Plan, tokens: float) -> dict[str, Any]:
    """A plan as plain values: bytes, tokens per second, hours, US dollars."""
    hours = tokens / plan.tokens_per_s / 3600
    price = plan.setup.usd_per_hour
    return {
        "instance": plan.setup.machine.name,
        "workers": plan.setup.num_workers,
        "hosts": plan.setup.num_hosts,
        "recompute": plan.setup.recompute,
        "microbatch": plan.setup.microbatch,
        "optimizer": plan.setup.optimizer,
        "fits": plan.fits,
        "memory_bytes": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
        "available_bytes": plan.available,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "bound_by": plan.bound_by,
        "hours": hours,
        "usd_per_hour": price,
        "usd": None if price is None else hours * price,
    }


def text(plan: Plan, tokens: float) -> str:
    """A plan for people; computed, not measured."""
    setup, found = plan.setup, summary(plan, tokens)
    gpu = setup.machine.gpu
    assert gpu is not None
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in dataclasses.asdict(plan.memory).items()
    )
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    price = "no list price" if found["usd"] is None else f"${found['usd']:,.2f}"
    return (
        f"{setup.num_workers} x {gpu.name} on {setup.num_hosts} x {setup.machine.name}, "
        f"recompute {setup.recompute}, microbatch {setup.microbatch}, {setup.optimizer}\n"
        f"  memory per GPU: {plan.memory.total / GIB:.1f} of {plan.available / GIB:.1f} GiB: "
        f"{verdict} ({parts})\n"
        f"  expected: {plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.0%}, bound by "
        f"{plan.bound_by}; {tokens:,.0f} tokens in {found['hours']:.2f} h, {price} (computed)"
    )


if __name__ == "__main__":
    sys.exit(main())
