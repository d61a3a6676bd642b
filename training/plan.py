"""Memory, speed and cost of training a model, computed before money is spent.

    python -m training.plan fsdp --model new:6.9b --instance g5.12xlarge --workers 8

Standard library only: a laptop without torch runs it. ``training.models.estimates`` has the
formulas, for a few families of sharded language models; for any other model the answer is "not
known", and how to measure it.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contract import exits, nodes
from contract.errors import InputError
from contract.instance_types import INSTANCE_TYPES, InstanceType, instance_type
from contract.nodes import Range
from contract.text import duration
from training import command, recipes
from training.models.estimates import (
    GIB,
    RECOMPUTE,
    Plan,
    Setup,
    differences,
    make,
    smaller,
)
from training.models.model_shapes import SHAPES, ModelShape, UnknownShapeError, read_config
from training.settings import RunConfig


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


@exits.on_closed_pipe()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.plan",
        usage="%(prog)s RECIPE [options] [settings of the recipe, --preset, --workers]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--instance", default="g5.12xlarge", help="(default: g5.12xlarge)")
    parser.add_argument("--tokens", type=float, default=1e6, help="to train on (default: 1e6)")
    parser.add_argument("--efa", action="store_true", help="hosts reach each other by EFA")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, words = parser.parse_known_args(arguments)
    try:
        if not 0 < options.tokens < math.inf:
            raise InputError(f"--tokens is {options.tokens:g}: it must be a positive number")
        machine = instance_type(options.instance)
        config = _config(words, machine)
        if options.efa and not machine.efa_interfaces:
            raise InputError(
                f"--efa: {machine.name} has no EFA; leave it out, or choose another type"
            )
        values: dict[str, Any] = config.to_json()
        shape = shape_of(values["model"])
        setup = Setup.of(values, machine, num_workers=config.num_workers, efa=options.efa)
        plan = make(shape, setup)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.BAD_INPUT
    best = cheapest(shape, plan.setup, tokens=options.tokens)
    if options.json:
        result = {
            **summary(plan, options.tokens),
            "parameters": shape.parameters,
            "cheapest": summary(best, options.tokens) if best else None,
        }
        print(json.dumps(result, indent=1))
        return exits.OK
    print(f"{values['model']}: {shape.parameters:,} parameters")
    print(text(plan, options.tokens))
    if not plan.fits:
        remedies = smaller(shape, plan.setup)
        print(
            "fits here with: " + (differences(plan.setup, remedies[0]) if remedies else "nothing")
        )
    if best and best.setup != plan.setup:
        print(f"\ncheapest that fits: {differences(plan.setup, best.setup)}")
        print(text(best, options.tokens))
    return exits.OK


def _config(words: Sequence[str], machine: InstanceType) -> RunConfig:
    """The settings of a run, by default with all GPUs of a host.

    Raises:
        InputError: the run would refuse them, or its recipe is not planned.
    """
    given = command.parse(words)
    if not given.recipe.is_planned:
        planned = [recipe.name for recipe in recipes.ALL if recipe.is_planned]
        raise InputError(f"recipe {given.recipe.name} is not planned: choose {', '.join(planned)}")
    workers = given.workers or Range(max(1, machine.num_gpus), max(1, machine.num_gpus))
    return command.configure(given, run="plan", storage="/", workers=workers, gpus=nodes.ONE_EACH)


def cost(plan: Plan, tokens: float) -> tuple[float, float | None]:
    """Hours and US dollars to train on so many tokens; None without a list price."""
    hours = tokens / plan.tokens_per_s / 3600
    price = plan.setup.usd_per_hour
    return hours, None if price is None else hours * price


def summary(plan: Plan, tokens: float) -> dict[str, object]:
    """A plan as plain values: bytes, tokens per second, hours, US dollars. What does not fit has no
    speed and no cost: null."""
    hours, usd = cost(plan, tokens)
    speed = {
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "bound_by": plan.bound_by,
        "hours": hours,
        "usd": usd,
    }
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
        "usd_per_hour": plan.setup.usd_per_hour,
        **(speed if plan.fits else dict.fromkeys(speed)),
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
    found = (
        f"{setup.num_workers} x {gpu.name} on {setup.num_hosts} x {setup.machine.name}, "
        f"recompute {setup.recompute}, microbatch {setup.microbatch}, {setup.optimizer}\n"
        f"  memory per GPU: {plan.memory.total / GIB:.1f} of {plan.available / GIB:.1f} GiB: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'} ({parts})"
    )
    if not plan.fits:
        return found
    return (
        f"{found}\n"
        f"  expected: {plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.0%}, bound by "
        f"{plan.bound_by}; {tokens:,.0f} tokens in {duration(hours * 3600)}, {price} (computed)"
    )


if __name__ == "__main__":
    sys.exit(main())
