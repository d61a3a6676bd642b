"""Settings of a run: frozen dataclasses whose fields know their help texts and limits.

Standard library only. Each field carries what the command line, the checks and the documentation
need to know about it, so that all of that is written once. A recipe derives a class from
``RunConfig`` and puts it into its record (``training.recipe``).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from contract.errors import InputError
from contract.runs import check_run_name
from contract.text import counted

Value = int | float | str | bool
"""What a setting can be."""

PRECISIONS: Final = ("auto", "fp32", "bf16")


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
        """Steps of the whole run."""
        steps = self.epochs * steps_per_epoch
        return min(self.max_steps, steps) if self.max_steps else steps

    @property
    def images_per_step(self) -> int:
        """Images per optimizer update over all workers."""
        return self.global_batch or self.batch_per_worker * self.num_workers


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
    low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
    number = cast("float", value)  # only numbers have limits
    if low is not None and number < low:
        raise InputError(f"{option} is {value}: it must be at least {low}")
    if high is not None and number > high:
        raise InputError(f"{option} is {value}: it must be at most {high}")
    if above is not None and number <= above:
        raise InputError(f"{option} is {value}: it must be greater than {above}")


def differences(recorded: Mapping[str, object], wanted: RunConfig) -> list[str]:
    """What keeps ``wanted`` from resuming a run with the ``recorded`` settings, a line each."""
    found = []
    for name, field in fields_of(type(wanted)).items():
        value = getattr(wanted, name)
        if not field.metadata["same_on_resume"] or name not in recorded:
            continue
        if recorded[name] != value:
            found.append(f"{option_name(name)}: the run has {recorded[name]!r}, now {value!r}")
    return found
