"""Memory, speed and cost of training a model, computed before money is spent.

    python -m training.plan fsdp --model new:6.9b --instance g5.12xlarge --workers 8

Standard library only for a few families of language models: a laptop without torch runs it. Others
are built by transformers, where it is installed, without memory for their weights. For mixtures of
experts, and the like, the answer is "not known", and how to measure it.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from contract import exits, faults, nodes
from contract.errors import InputError
from contract.instance_types import INSTANCE_TYPES, InstanceType, instance_type
from contract.nodes import Range
from contract.text import dollars, duration
from training import command, recipes
from training.data import catalog
from training.fsdp.settings import FsdpConfig
from training.models.estimates import (
    GIB,
    RECOMPUTE,
    Plan,
    Setup,
    differences,
    make,
    smaller,
)
from training.models.model_shapes import (
    SHAPES,
    Builder,
    ModelShape,
    UnknownShapeError,
    of_config,
    read_config,
)
from training.settings import RunConfig


def cheapest(shape: ModelShape, wanted: Setup, *, per_token: bool) -> Plan | None:
    """The set-up that fits and costs least, over all machines with a price.

    Args:
        per_token: for each token. Otherwise for each hour, on one host if any has room: several
            small ones are cheaper only because they wait for the network between them.
    """

    def usd(plan: Plan) -> tuple[float, ...]:
        hourly, speed = plan.setup.usd_per_hour or math.inf, plan.tokens_per_s
        return (hourly / speed,) if per_token else (plan.setup.num_hosts > 1, hourly, -speed)

    fitting = (each for each in _candidates(shape, wanted) if each.fits)
    return min(fitting, key=usd, default=None)


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
        config = read_config(path / "config.json" if path.is_dir() else path)
        return of_config(config, model=name, build=_builder())
    if known := _KNOWN.get(name.partition("@")[0]):
        return ModelShape.from_config(SHAPES[known])
    if asks_hub:
        try:
            from training.data import hub

            folder = hub.fetch(name, ("config.json",))
        except ImportError:
            pass
        else:
            return of_config(read_config(folder / "config.json"), model=name, build=_builder())
    raise UnknownShapeError(
        f"model {model!r}, which is no folder with a config.json and none of "
        f"{', '.join([*SHAPES, *_KNOWN])}"
    )


def _builder() -> Builder | None:
    """Reads the shapes of other families, where torch is installed."""
    if not (find_spec("torch") and find_spec("transformers")):
        return None
    from training.models import built_shapes

    return built_shapes.built


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
    passes: int
    """Forward passes beside the steps: evaluations and samples."""
    passes_hours: float
    """Hours of them."""


#: UTF-8 bytes of English text to a token of a vocabulary of some ten thousand; a byte is a token
#: where a model has no tokenizer of its own.
_BYTES_PER_TOKEN: Final = 4


def trained_tokens(values: Mapping[str, Any], *, num_bytes: int | None = None) -> int:
    """Tokens of the steps of a run; 0: not known.

    An epoch of text has whole steps only (``training.data.feed``).

    Args:
        values: settings of the run.
        num_bytes: size of its text; None: that of published data.
    """
    step = int(values["global_batch"] * values["seq_len"])
    if steps := int(values["max_steps"]):
        return step * steps
    text = catalog.find(values["data"])
    # Nothing is held out where another text is evaluated on.
    every = math.inf if values["validation"] else values["held_out_every"]
    tokens = (num_bytes or (text.num_bytes if text else 0)) * (1 - 1 / every)
    if not values["model"].startswith("new:") or values["tokenizer"]:
        # Counted with documents of their true sizes held out, which is no exact twentieth.
        tokens /= _BYTES_PER_TOKEN
        if text and text.num_train_tokens and every == 20:
            tokens = text.num_train_tokens
    return int(values["epochs"] * max(0, (tokens - 1) // step) * step)


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
    if not (tokens := trained_tokens(values, num_bytes=num_bytes)):
        return None
    hours, _ = cost(plan, tokens)
    assert isinstance(config, FsdpConfig)  # no other recipe is planned
    steps = tokens // (config.global_batch * config.seq_len)
    per_epoch = steps if config.max_steps else steps // config.epochs
    evaluated, sampled = config.extra_passes(steps, max(1, per_epoch))
    return Expected(
        hours=hours,
        tokens=tokens,
        fits=plan.fits,
        passes=evaluated + sampled,
        passes_hours=(evaluated * plan.evaluated_s + sampled * plan.sampled_s) / 3600,
    )


@faults.command()
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
    parser.add_argument(
        "--tokens",
        type=float,
        help="to train on (default: those of --max-steps or of published --data, else 1e6)",
    )
    parser.add_argument("--efa", action="store_true", help="hosts reach each other by EFA")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options, words = parser.parse_known_args(arguments)
    tokens = options.tokens
    if tokens is not None and not 0 < tokens < math.inf:
        raise InputError(f"--tokens is {tokens:g}: it must be a positive number")
    machine = instance_type(options.instance)
    preset, config = _config(words, machine)
    if options.efa and not machine.efa_interfaces:
        raise InputError(f"--efa: {machine.name} has no EFA; leave it out, or choose another type")
    values: dict[str, Any] = config.to_json()
    shape = shape_of(values["model"])
    setup = Setup.of(values, machine, num_workers=config.num_workers, efa=options.efa)
    plan = make(shape, setup)
    tokens = tokens or trained_tokens(values) or 1e6
    best = {
        f"cheapest_per_{unit}": cheapest(shape, setup, per_token=unit == "token")
        for unit in ("hour", "token")
    }
    if options.json:
        result = {
            **summary(plan, tokens),
            "preset": preset,
            "parameters": shape.parameters,
            **{name: each and summary(each, tokens) for name, each in best.items()},
        }
        print(json.dumps(result, indent=1))
        return exits.OK
    trained = f"adapters of rank {setup.lora_rank}" if setup.lora_rank else "all"
    print(
        f"{values['model']}: {shape.parameters:,} parameters, {trained} trained; preset {preset}: "
        f"{setup.global_batch} sequences of {setup.seq_len:,} tokens a step"
    )
    print(text(plan, tokens))
    if not plan.fits:
        remedies = smaller(shape, setup)
        print("fits here with: " + (differences(setup, remedies[0]) if remedies else "nothing"))
    hour, token = best.values()
    if hour and token and hour.setup == token.setup:
        best = {"cheapest per hour and per token": hour}
    for name, each in best.items():
        if each and each.setup != setup:
            print(f"\n{name.replace('_', ' ')}: {differences(setup, each.setup)}")
            print(text(each, tokens))
    return exits.OK


def _config(words: Sequence[str], machine: InstanceType) -> tuple[str, RunConfig]:
    """The preset and the settings of a run, by default with all GPUs of a host.

    Raises:
        InputError: the run would refuse them, or its recipe is not planned.
    """
    parsed = command.parse(words)
    has_preset = any(each.startswith("--preset") for each in words)
    if parsed.recipe.is_planned and "model" in parsed.settings and not has_preset:
        # As with --data: the built-in data is for the built-in model.
        parsed = command.parse([*words, "--preset", next(iter(parsed.recipe.presets))])
    if not parsed.recipe.is_planned:
        planned = [recipe.name for recipe in recipes.ALL if recipe.is_planned]
        raise InputError(f"recipe {parsed.recipe.name} is not planned: choose {', '.join(planned)}")
    workers = parsed.workers or Range(max(1, machine.num_gpus), max(1, machine.num_gpus))
    return parsed.preset, command.configure(
        parsed, run="plan", storage="/", workers=workers, gpus=nodes.ONE_EACH
    )


def cost(plan: Plan, tokens: float) -> tuple[float, float | None]:
    """Hours and US dollars to train on so many tokens; None without a list price."""
    hours = tokens / plan.tokens_per_s / 3600
    price = plan.setup.usd_per_hour
    return hours, None if price is None else hours * price


def summary(plan: Plan, tokens: float) -> dict[str, object]:
    """A plan as plain values: bytes, tokens per second, hours, US dollars. What does not fit has no
    speed and no cost: null."""
    hours, usd = cost(plan, tokens)
    setup = plan.setup
    speed = {
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "bound_by": plan.bound_by,
        "hours": hours,
        "usd": usd,
    }
    return {
        **dataclasses.asdict(setup),
        "machine": setup.machine.name,
        "hosts": setup.num_hosts,
        "fits": plan.fits,
        "memory_bytes": {**plan.memory.parts, "total": plan.memory.total},
        "memory_at": plan.memory.moment,
        "available_bytes": plan.setup.available,
        "usd_per_hour": setup.usd_per_hour,
        **(speed if plan.fits else dict.fromkeys(speed)),
    }


def text(plan: Plan, tokens: float) -> str:
    """A plan for people; computed, not measured."""
    setup, memory = plan.setup, plan.memory
    machine, passes = setup.machine, setup.num_microbatches
    hours, usd = cost(plan, tokens)
    assert machine.gpu is not None
    # Next to nothing is left out.
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in memory.parts.items() if size > GIB / 20
    )
    rows = -(-setup.global_batch // (setup.num_workers * passes))
    found = (
        f"{setup.num_workers} x {machine.gpu.name} on {setup.num_hosts} x {machine.name}: "
        f"{dollars(setup.usd_per_hour)} an hour, quota of {setup.num_hosts * machine.vcpus} vCPUs "
        f"of {machine.name[0].upper()} instances\n"
        f"  passes per step: {passes}, of at most {rows} sequences per GPU; recompute "
        f"{setup.recompute}, {setup.optimizer}\n"
        f"  memory per GPU: {memory.total / GIB:.1f} of {plan.setup.available / GIB:.1f} GiB: "
        f"{'fits' if plan.fits else 'DOES NOT FIT'} (most at {memory.moment}: {parts})"
    )
    if not plan.fits:
        return found
    return (
        f"{found}\n"
        f"  expected: {plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.0%}, bound by "
        f"{plan.bound_by}; {tokens:,.0f} tokens in {duration(hours * 3600)}, {dollars(usd)}: "
        "computed, without start-up"
    )


if __name__ == "__main__":
    sys.exit(main())
