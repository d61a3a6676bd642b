"""Memory, speed and cost of training a model, computed before money is spent.

    python -m training.plan fsdp --model new:6.9b --instance g5.12xlarge --workers 8

Standard library only: a laptop without torch runs it. ``training.models.estimates`` has the
formulas, for a few families of sharded language models; for any other model the answer is "not
known", and how to measure it.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from contract.exits import BAD_INPUT as EXIT_BAD_INPUT
from contract.exits import OK as EXIT_OK
from contract.instance_types import INSTANCE_TYPES, InstanceType, instance_type
from training import recipes
from training.models.estimates import (
    GIB,
    MOMENTS,
    RECOMPUTE,
    REDUCE,
    REDUCE_DTYPES,
    Plan,
    Setup,
    differences,
    make,
    smaller,
)
from training.models.model_shapes import SHAPES, ModelShape, UnknownShapeError, read_config
from training.recipes.settings import RunConfig, fields_of


def cheapest(shape: ModelShape, wanted: Setup, *, tokens: float) -> Plan | None:
    """The set-up that fits and costs least for ``tokens``, over all machines with a price."""
    best: Plan | None = None
    best_usd = 0.0
    for candidate in _candidates(shape, wanted):
        _, usd = cost(candidate, tokens)
        if not candidate.fits or usd is None:
            continue
        if best is None or usd < best_usd:
            best, best_usd = candidate, usd
    return best


def _candidates(shape: ModelShape, wanted: Setup) -> Iterator[Plan]:
    for machine in INSTANCE_TYPES.values():
        if machine.gpu is None or machine.usd_per_hour is None:
            continue
        for num_hosts in (1, 2, 4, 8):
            num_workers = num_hosts * machine.num_gpus
            if wanted.global_batch < num_workers:
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


def shape_of(model: str, *, asks_hub: bool = True) -> ModelShape:
    """The shape of a model: ``new:NAME``, a folder with a ``config.json``, that file, or a Hub id.

    Args:
        asks_hub: fetch the ``config.json`` of a Hub id, where huggingface_hub is installed.

    Raises:
        UnknownShapeError: there are no formulas for the model.
        InputError: its configuration cannot be read.
    """
    name = model.removeprefix("new:")
    if name in SHAPES:
        return ModelShape.from_config(SHAPES[name])
    path = Path(name).expanduser()
    if path.exists():
        return ModelShape.from_config(read_config(path / "config.json" if path.is_dir() else path))
    if known := _KNOWN.get(name.partition("@")[0]):
        return ModelShape.from_config(SHAPES[known])
    if asks_hub:
        try:
            from training.data import hub

            folder = hub.fetch(name, ("config.json",))
        except ImportError:
            pass
        else:
            return ModelShape.from_config(read_config(folder / "config.json"))
    raise UnknownShapeError(
        f"model {model!r}, which is no folder with a config.json and none of "
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Time and memory that a run is expected to take. Computed, not measured."""

    hours: float
    """Hours of training, with all workers from the first step."""
    tokens: float
    """Tokens to train on, over all epochs."""
    fits: bool
    """The model fits the GPUs."""


#: UTF-8 bytes of English text to a token of a vocabulary of some ten thousand; a byte is a token
#: where a model has no tokenizer of its own.
_BYTES_PER_TOKEN: Final = 4


def expected(
    config: RunConfig, machine: InstanceType, *, num_bytes: int | None, efa: bool = False
) -> Expected | None:
    """Compute how long a run will train.

    Args:
        config: settings of the run.
        machine: host of its workers.
        num_bytes: size of its text; None if it is not known.
        efa: hosts reach each other by EFA.

    Returns:
        None where it cannot be computed: the recipe is not planned, the hosts have no GPUs, or the
        shape of the model or the number of tokens is not known.

    Raises:
        InputError: the run would refuse to train this model in four bits, or with such adapters.
    """
    if not recipes.by_name(config.recipe).is_planned or machine.gpu is None:
        return None
    values: dict[str, Any] = config.to_json()
    try:
        shape = shape_of(values["model"], asks_hub=False)
    except InputError:
        return None
    plan = make(shape, Setup.of(values, machine, num_workers=config.num_workers, efa=efa))
    tokens = values["max_steps"] * values["global_batch"] * values["seq_len"]
    if not tokens and num_bytes:
        of_bytes = values["model"].startswith("new:") and not values["tokenizer"]
        text = num_bytes * (1 - 1 / values["held_out_every"])
        tokens = values["epochs"] * text / (1 if of_bytes else _BYTES_PER_TOKEN)
    if not tokens:
        return None
    hours, _ = cost(plan, tokens)
    return Expected(hours=hours, tokens=tokens, fits=plan.fits)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    planned = [recipe.name for recipe in recipes.ALL if recipe.is_planned]
    parser.add_argument("recipe", choices=planned)
    parser.add_argument("--model", required=True, help="new:SHAPE, a folder, or a Hub id")
    parser.add_argument("--instance", default="g5.12xlarge", help="(default: g5.12xlarge)")
    parser.add_argument("--workers", type=int, help="GPUs (default: those of one host)")
    parser.add_argument("--tokens", type=float, default=1e6, help="to train on (default: 1e6)")
    parser.add_argument("--preset", help="(default: the recipe's first)")
    for name in ("seq_len", "global_batch", "microbatch", "replicas", "lora_rank", "lora_bits"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--lora-targets", metavar="NAMES", help="matrices with adapters (all)")
    parser.add_argument("--recompute", choices=RECOMPUTE)
    parser.add_argument("--optimizer", choices=[*MOMENTS])
    parser.add_argument("--reduce-gradients", choices=REDUCE)
    parser.add_argument("--reduce-dtype", choices=[*REDUCE_DTYPES])
    parser.add_argument("--efa", action="store_true", help="hosts reach each other by EFA")
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
    recipe = recipes.by_name(options.recipe)
    preset = next(iter(recipe.presets)) if options.preset is None else options.preset
    if preset not in recipe.presets:
        raise InputError(
            f"unknown preset {preset!r}: {recipe.name} has {', '.join(recipe.presets)}"
        )
    defaults = {name: field.default for name, field in fields_of(recipe.config).items()}
    values: dict[str, Any] = {**defaults, **recipe.presets[preset]}
    values |= {name: value for name, value in vars(options).items() if value is not None}
    num_workers = machine.num_gpus if options.workers is None else options.workers
    if options.efa and not machine.efa_interfaces:
        raise InputError(f"--efa: {machine.name} has no EFA; leave it out, or choose another type")
    setup = Setup.of(values, machine, num_workers=num_workers, efa=options.efa)

    # Fail where a run with these settings would.
    named = {name: values[name] for name in defaults if name in values}
    named |= {"run": "plan", "storage": "/", "data": "/", "num_workers": num_workers}
    recipe.config(**named)
    return setup


def cost(plan: Plan, tokens: float) -> tuple[float, float | None]:
    """Hours and US dollars to train on so many tokens; None without a list price."""
    hours = tokens / plan.tokens_per_s / 3600
    price = plan.setup.usd_per_hour
    return hours, None if price is None else hours * price


def summary(plan: Plan, tokens: float) -> dict[str, object]:
    """A plan as plain values: bytes, tokens per second, hours, US dollars."""
    hours, usd = cost(plan, tokens)
    return {
        "instance": plan.setup.machine.name,
        "workers": plan.setup.num_workers,
        "hosts": plan.setup.num_hosts,
        "recompute": plan.setup.recompute,
        "microbatch": plan.setup.microbatch,
        "optimizer": plan.setup.optimizer,
        "lora_rank": plan.setup.lora_rank,
        "lora_targets": plan.setup.lora_targets,
        "lora_bits": plan.setup.lora_bits,
        "fits": plan.fits,
        "memory_bytes": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
        "available_bytes": plan.available,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "bound_by": plan.bound_by,
        "hours": hours,
        "usd_per_hour": plan.setup.usd_per_hour,
        "usd": usd,
    }


def text(plan: Plan, tokens: float) -> str:
    """A plan for people; computed, not measured."""
    setup = plan.setup
    hours, usd = cost(plan, tokens)
    gpu = setup.machine.gpu
    assert gpu is not None
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in dataclasses.asdict(plan.memory).items()
    )
    price = "no list price" if usd is None else f"${usd:,.2f}"
    return (
        f"{setup.num_workers} x {gpu.name} on {setup.num_hosts} x {setup.machine.name}, "
        f"recompute {setup.recompute}, microbatch {setup.microbatch}, {setup.optimizer}\n"
        f"  memory per GPU: {plan.memory.total / GIB:.1f} of {plan.available / GIB:.1f} GiB: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'} ({parts})\n"
        f"  expected: {plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.0%}, bound by "
        f"{plan.bound_by}; {tokens:,.0f} tokens in {hours:.2f} h, {price} (computed)"
    )


if __name__ == "__main__":
    sys.exit(main())
