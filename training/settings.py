"""Settings of a run: frozen dataclasses whose fields know their help texts and limits.

Standard library only. Each field carries what the command line, the checks and the documentation
need to know about it, so that all of that is written once. A recipe derives a class from
``RunConfig`` and puts it into its record (``training.recipe``).
"""

import dataclasses
import math
from collections.abc import Container, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Final, Self, cast

from contract.errors import InputError
from contract.runs import check_run_name
from contract.text import counted

Value = int | float | str | bool
"""Value of a setting."""

PRECISIONS: Final = ("auto", "fp32", "bf16")
SCHEDULES: Final = ("cosine", "constant", "wsd")
#: Value of ``--keep-best`` that keeps none.
NO_BEST: Final = "none"
#: Settings that decide how long a run is.
LENGTH: Final = ("epochs", "max_steps")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    same_on_resume: bool = True,
    cli: bool = True,
) -> Any:
    """A field of a configuration.

    Args:
        default: value without a preset and without the option.
        help: one phrase, for help texts and lists of settings.
        low: smallest allowed value.
        high: largest allowed value.
        above: the value must be greater than this.
        choices: the allowed values.
        same_on_resume: a resumed run must keep the value.
        cli: it is an option of the command line, ``--with-hyphens``.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "above": above,
        "choices": choices,
        "same_on_resume": same_on_resume,
        "cli": cli,
    }
    return dataclasses.field(default=default, metadata=metadata)


def best_option(*measures: str, use: str = "and publish its model") -> Any:
    """The field ``keep_best`` of a recipe that has these measures."""
    return option(
        NO_BEST,
        choices=(NO_BEST, *measures),
        help=f"also keep the checkpoint with the best of this measure, {use}",
        same_on_resume=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings that every recipe has."""

    recipe: str = option(help="the recipe", cli=False)
    run: str = option(help="name of the run; giving it again resumes it", cli=False)
    storage: str = option(
        help="folder or s3://bucket/prefix that holds the runs", same_on_resume=False, cli=False
    )
    data: str = option(
        help="where the data comes from", same_on_resume=False, cli=False
    )  # the content's checksum is what must match, and the checkpoint carries it
    num_workers: int = option(
        1, low=1, help="training processes, one GPU each", same_on_resume=False, cli=False
    )
    preset: str = option("", help="preset that these settings are based on", cli=False)

    def __post_init__(self) -> None:
        check_run_name(self.run)
        check_values(type(self), {name: getattr(self, name) for name in fields_of(type(self))})

    def begun(self, recorded: Mapping[str, object]) -> Self:
        """Decide what is decided when a run first starts, or take it from the ``recorded`` settings
        of the run that this one resumes; without those that the command gives."""
        del recorded
        return self

    def to_json(self) -> dict[str, Value]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """Build from ``to_json``'s result; fields of a newer version are ignored."""
        known: dict[str, Any] = {name: values[name] for name in fields_of(cls) if name in values}
        return cls(**known)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(RunConfig):
    """Settings that every recipe has that trains a model."""

    epochs: int = option(10, low=1, high=100_000, help="passes over the training data")
    max_steps: int = option(0, low=0, help="end after so many steps (0: after the epochs)")
    schedule: str = option(
        "cosine",
        choices=SCHEDULES,
        help="course of the learning rate: half a cosine after a rise; constant; or wsd, constant "
        "and then a linear fall. The last two let a larger --epochs or --max-steps continue a run",
    )
    warmup_fraction: float = option(
        0.05, low=0, high=0.9, help="part of the run in which the learning rate rises (cosine)"
    )
    warmup_steps: int = option(
        0, low=0, help="steps in which the learning rate rises (0: warmup-fraction)"
    )
    decay_fraction: float = option(
        0.2, above=0, high=1, help="part of the run in which the learning rate falls (wsd)"
    )
    keep_best: str = best_option("loss")
    patience: int = option(
        0,
        low=0,
        help="end after so many evaluations without a better one (0: never)",
        same_on_resume=False,
    )
    seed: int = option(0, low=0, high=2**31 - 1, help="seed of weights, order and augmentation")
    report_every: int = option(
        10, low=1, help="steps between two reports of the loss", same_on_resume=False
    )
    checkpoint_minutes: float = option(
        15.0,
        low=0,
        help="a checkpoint is saved at the first report after so many minutes, beside those that "
        "other settings ask for (0: only those)",
        same_on_resume=False,
    )
    checkpoints_to_keep: int = option(
        2, low=1, help="number of newest checkpoints that are kept", same_on_resume=False
    )
    from_scratch: bool = option(
        False,
        help="start at step 0 where the run has checkpoints and none of them can be used, instead "
        "of refusing to start",
        same_on_resume=False,
    )

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run."""
        return self.max_steps or self.epochs * steps_per_epoch

    def why_not_longer(self, name: str, *, is_complete: bool) -> str:
        """Reason why a run cannot be resumed with a larger value of a setting; empty if it can.

        Args:
            name: ``epochs`` or ``max_steps``.
            is_complete: the run has come to its end.
        """
        del name
        if self.schedule == "cosine":
            return (
                "the learning rate of --schedule cosine has its course over the whole run: begin "
                "another --run, with --schedule constant or wsd if it is to be made longer later"
            )
        return TOO_LATE if self.schedule == "wsd" and is_complete else ""

    def decay_begins(self, total_steps: int) -> float:
        """Step at which the learning rate of ``wsd`` begins to fall."""
        return total_steps * (1 - self.decay_fraction)

    def rate(self, step: int, total_steps: int, *, peak: float, floor: float = 0.0) -> float:
        """Learning rate of ``step`` (counted from 0), a function of nothing else.

        ``cosine`` with a floor of 0 is the one-cycle policy of Smith and Topin (arXiv 1708.07120)
        without its momentum cycle; ``wsd`` is of arXiv 2404.06395, with the fall of 2405.18392.

        Args:
            peak: the largest.
            floor: the last of a cosine.
        """
        done = step + 0.5
        if self.schedule != "cosine":
            rise = done / self.warmup_steps if self.warmup_steps else 1.0
            fall = 1.0
            if self.schedule == "wsd":
                fall = (total_steps - done) / (total_steps - self.decay_begins(total_steps))
            return peak * min(1.0, rise, fall)
        warmup = self.warmup_steps or self.warmup_fraction * total_steps
        if done < warmup:
            return peak * done / warmup
        left = 0.5 * (1 + math.cos(math.pi * (done - warmup) / (total_steps - warmup)))
        return floor + (peak - floor) * left


#: What is said where a run of schedule wsd cannot be made longer.
TOO_LATE: Final = (
    "the learning rate of --schedule wsd has begun to fall at the end of the run, which only a run "
    "that was stopped before can leave out: begin another --run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig(TrainingConfig):
    """Settings of recipes that keep the whole model on every worker, and train it on images."""

    checkpoint_every_epochs: int = option(
        1, low=1, help="epochs between two checkpoints", same_on_resume=False
    )
    batch_per_worker: int = option(
        128,
        low=8,
        high=65_536,
        help="images per worker and step when a run first starts; the run then keeps its "
        "global batch on any number of workers",
    )
    global_batch: int = option(
        0,
        low=0,
        help="images per step over all workers (0: batch-per-worker times workers)",
    )
    lr: float = option(1e-3, above=0, help="peak learning rate", same_on_resume=False)
    weight_decay: float = option(
        0.0, low=0, high=1, help="weight decay; it spares biases and normalization"
    )
    label_smoothing: float = option(0.0, low=0, high=0.5, help="label smoothing of the loss")
    max_grad_norm: float = option(5.0, low=0, help="gradients are clipped to this norm (0: never)")
    precision: str = option(
        "auto",
        choices=PRECISIONS,
        help="arithmetic of the model (auto: bf16 autocast on a GPU that has it, else fp32)",
    )
    compile: bool = option(
        False, help="compile the model with torch.compile (GPU)", same_on_resume=False
    )

    max_steps: int = option(
        0, low=0, help="end after so many steps, if that is earlier (0: after the epochs)"
    )

    def __post_init__(self) -> None:
        # Not super().__post_init__(): slots=True makes a new class, which zero-argument super
        # does not see (CPython issue 90562).
        TrainingConfig.__post_init__(self)
        if self.global_batch and self.global_batch < 8 * self.num_workers:
            raise InputError(
                f"global batch {self.global_batch} is too small for "
                f"{counted(self.num_workers, 'worker')}: "
                "batch normalisation needs at least 8 images per worker; use fewer workers or "
                f"--global-batch {8 * self.num_workers} or more"
            )

    def begun(self, recorded: Mapping[str, object]) -> Self:
        # A run keeps its global batch when it continues on another number of workers.
        batch: Any = recorded.get("global_batch") or self.images_per_step
        lr: Any = recorded.get("lr") or self.lr
        return dataclasses.replace(self, global_batch=batch, lr=lr)

    def num_steps(self, steps_per_epoch: int) -> int:
        steps = self.epochs * steps_per_epoch
        return min(self.max_steps, steps) if self.max_steps else steps

    @property
    def images_per_step(self) -> int:
        """Images per optimizer update over all workers."""
        return self.global_batch or self.batch_per_worker * self.num_workers


def most_kept(newest: int, settings: Mapping[str, Any]) -> int:
    """Number of checkpoints that a run keeps, the best one included."""
    return newest + int(settings.get("keep_best", NO_BEST) != NO_BEST)


def fields_of(config: type[RunConfig]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a configuration by name."""
    return {field.name: field for field in dataclasses.fields(config)}


def kind_of(field: dataclasses.Field[Any]) -> type:
    """Type of a field: int, float, str or bool."""
    assert isinstance(field.type, type), "annotations of settings are plain types, not text"
    return field.type


def option_name(field: str) -> str:
    """Option of the command line for a field's name."""
    return "--" + field.replace("_", "-")


def check_values(config: type[RunConfig], values: Mapping[str, Value]) -> None:
    """Check values one by one, without regard to each other.

    Raises:
        InputError: one has the wrong type or is out of its limits.
    """
    fields = fields_of(config)
    for name, value in values.items():
        check_value(fields[name], value)


def check_value(field: dataclasses.Field[Any], value: Value) -> None:
    """Raise InputError when ``value`` has the wrong type or is out of the field's limits."""
    option = option_name(field.name)
    kind = kind_of(field)
    right_type = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not right_type or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{option} is {value!r}: it must be of type {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{option} is {value}: it must be a finite number")
    limits = field.metadata
    choices = limits.get("choices")
    if choices and value not in choices:
        raise InputError(f"{option} is {value!r}: choose one of {', '.join(choices)}")
    # A larger whole number is exact neither in JSON nor as a float.
    most = 2**53 if kind is int else None
    low, high, above = limits.get("low"), limits.get("high") or most, limits.get("above")
    number = cast("float", value)  # only numbers have limits
    if low is not None and number < low:
        raise InputError(f"{option} is {value}: it must be at least {low}")
    if high is not None and number > high:
        raise InputError(f"{option} is {value}: it must be at most {high}")
    if above is not None and number <= above:
        raise InputError(f"{option} is {value}: it must be greater than {above}")


def differences(
    recorded: Mapping[str, object],
    wanted: RunConfig,
    *,
    command_settings: Container[str] = (),
    is_complete: bool = False,
) -> list[str]:
    """Differences that keep ``wanted`` from resuming a run with the ``recorded`` settings, one line
    per setting.

    Args:
        command_settings: names of the settings on the command line; some make a run longer.
        is_complete: the run has come to its end.
    """
    found = []
    for name, field in fields_of(type(wanted)).items():
        value = getattr(wanted, name)
        # A run that was begun before there was this setting has its default; a record that names no
        # preset is of a few settings only.
        default = value if field.default is MISSING or "preset" not in recorded else field.default
        before = recorded.get(name, default)
        if not field.metadata["same_on_resume"] or before == value:
            continue
        line = f"{option_name(name)}: the run has {before!r}, now {value!r}"
        if is_longer(name, recorded, wanted) and name in command_settings:
            assert isinstance(wanted, TrainingConfig)
            if not (reason := wanted.why_not_longer(name, is_complete=is_complete)):
                continue
            line += f"; {reason}"
        found.append(line)
    return found


def is_longer(name: str, recorded: Mapping[str, object], wanted: RunConfig) -> bool:
    """True if a setting makes a run longer than its recorded value did."""
    before: Any = recorded.get(name)
    return name in LENGTH and type(before) is int and 0 < before < getattr(wanted, name)
