"""What a run is made of: frozen settings, their presets and their command-line options.

Standard library only. Each field carries its help text and its limits, so that the command
line, the checks and the documentation are written once, here. A recipe adds a class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from contract.errors import InputError
from contract.runs import check_run_name

PRECISIONS: Final = ("auto", "fp32", "bf16")
SCHEDULES: Final = ("one-cycle", "constant")
COMPRESSIONS: Final = ("none", "bf16", "fp16")
LAYOUTS: Final = ("live", "full")
OPTIMIZERS: Final = ("adamw", "adamw-8bit")
RECOMPUTE: Final = ("none", "selective", "full")


def _option(
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
    """A field with its help, its limits, and whether a resumed run may change it."""
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
    """Settings that every recipe has. A resumed run may change those marked free."""

    recipe: str = _option(help="the recipe", cli=False)
    run: str = _option(help="name of the run; giving it again resumes it", cli=False)
    storage: str = _option(
        help="folder or s3://bucket/prefix that holds the runs", same_on_resume=False, cli=False
    )
    data: str = _option(
        help="where the data comes from", same_on_resume=False, cli=False
    )  # the content's checksum is what must match, and the checkpoint carries it
    num_workers: int = _option(
        1, low=1, help="training processes, one GPU each", same_on_resume=False, cli=False
    )
    preset: str = _option(
        "", help="the preset these settings began from", same_on_resume=False, cli=False
    )
    epochs: int = _option(10, low=1, high=100_000, help="passes over the training data")
    seed: int = _option(0, low=0, high=2**31 - 1, help="seed of weights, order and augmentation")
    report_every: int = _option(
        10, low=1, help="steps between two reports of the loss", same_on_resume=False
    )
    checkpoints_to_keep: int = _option(
        2, low=1, help="newest checkpoints kept", same_on_resume=False
    )

    def __post_init__(self) -> None:
        check_run_name(self.run)
        for field in dataclasses.fields(self):
            check_value(field, getattr(self, field.name))

    def begun(self, recorded: Mapping[str, Any]) -> Self:
        """Fix what is decided when a run first starts, or take it from the ``recorded`` settings
        of the run that this one continues."""
        del recorded
        return self

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from ``to_json``'s result; fields of a newer version are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig(RunConfig):
    """Data-parallel image classification (``training.recipes.ddp.loop``)."""

    checkpoint_every_epochs: int = _option(
        1, low=1, help="epochs between two checkpoints", same_on_resume=False
    )
    batch_per_worker: int = _option(
        128,
        low=8,
        high=65_536,
        help="images per worker and step when a run first starts; the run then keeps its "
        "global batch, whatever the number of workers",
        same_on_resume=False,
    )
    global_batch: int = _option(
        0,
        low=0,
        help="images per step over all workers (0: batch-per-worker times workers)",
    )
    lr: float = _option(1e-3, above=0, help="peak learning rate of Adam")
    weight_decay: float = _option(0.0, low=0, high=1, help="decoupled decay of the weight matrices")
    schedule: str = _option(
        "one-cycle", choices=SCHEDULES, help="course of the learning rate over the run"
    )
    warmup_fraction: float = _option(
        0.2, low=0, high=0.9, help="part of the run in which the learning rate rises"
    )
    label_smoothing: float = _option(0.0, low=0, high=0.5, help="label smoothing of the loss")
    max_grad_norm: float = _option(5.0, low=0, help="gradients are clipped to this norm (0: never)")
    flip: bool = _option(False, help="mirror half of the training images at random")
    shift: int = _option(
        0, low=0, high=8, help="move each training image by up to this many pixels at random"
    )
    shift_fraction: float = _option(
        1.0, low=0, high=1, help="part of the run in which images are moved; then they rest"
    )
    precision: str = _option(
        "auto",
        choices=PRECISIONS,
        help="arithmetic of the model (auto: bf16 autocast on a GPU, fp32 on a CPU)",
    )
    layout: str = _option(
        "live",
        choices=LAYOUTS,
        help="live: leave out convolution taps that only ever see padding; full: keep them. "
        "The loss is the same, checkpoints are full either way",
        same_on_resume=False,
    )
    gradient_compression: str = _option(
        "none",
        choices=COMPRESSIONS,
        help="number format in which gradients cross the network",
    )
    compile: bool = _option(
        False, help="compile the model with torch.compile (GPU)", same_on_resume=False
    )
    bucket_mb: float = _option(
        4.0,
        above=0,
        help="size of DDP's gradient buckets in MB; small enough to overlap with backward",
        same_on_resume=False,
    )

    def __post_init__(self) -> None:
        # Not super().__post_init__(): slots=True makes a new class, which zero-argument super
        # does not see (CPython issue 90562).
        RunConfig.__post_init__(self)
        if self.global_batch and self.global_batch < 8 * self.num_workers:
            raise InputError(
                f"global batch {self.global_batch} is too small for {self.num_workers} workers: "
                "batch normalisation needs at least 8 images per worker; use fewer workers or "
                f"--global-batch {8 * self.num_workers} or more"
            )

    def begun(self, recorded: Mapping[str, Any]) -> Self:
        # A run keeps its global batch when it continues on another number of workers.
        batch = recorded.get("global_batch") or self.images_per_step
        return dataclasses.replace(self, global_batch=batch)

    @property
    def images_per_step(self) -> int:
        """Images per optimizer update over all workers."""
        return self.global_batch or self.batch_per_worker * self.num_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig(RunConfig):
    """Fully sharded training of a causal language model (``training.recipes.fsdp.loop``)."""

    model: str = _option(
        help="Hugging Face id (id@revision), folder or s3:// address of a model in safetensors; or "
        "new:SHAPE, a folder's config.json or one of tiny, 160m, 400m, 2.8b, 6.9b, with random "
        "weights",
        default="new:tiny",
    )
    tokenizer: str = _option(
        "",
        help="tokenizer.json, its folder, s3:// address or Hugging Face id (default: the model's; "
        "bytes for new:SHAPE)",
        same_on_resume=False,
    )  # its content is what must match, and the store's key carries it
    text_key: str = _option(
        "", help="hash of text, tokenizer and split; decided when the text is read", cli=False
    )
    text_field: str = _option(
        "text", help="field of a .jsonl line or column of a .parquet file that holds a document"
    )
    held_out_every: int = _option(20, low=2, help="one document in so many is held out")
    isolate_documents: bool = _option(
        False, help="attention stays within a document (default: the whole sequence)"
    )
    seq_len: int = _option(1024, low=8, high=2**20, help="tokens per sequence")
    global_batch: int = _option(
        64, low=1, help="sequences per step over all workers, kept whatever their number"
    )
    microbatch: int = _option(
        4,
        low=1,
        help="most sequences that a worker computes at once; gradients of several are added up "
        "before they are exchanged",
        same_on_resume=False,
    )
    max_steps: int = _option(0, low=0, help="end after so many steps (0: after the epochs)")
    lr: float = _option(2e-5, above=0, help="peak learning rate")
    min_lr_fraction: float = _option(
        0.1, low=0, high=1, help="part of the peak at which the learning rate ends"
    )
    warmup_fraction: float = _option(
        0.05, low=0, high=0.9, help="part of the run in which the learning rate rises"
    )
    schedule: str = _option(
        "cosine", choices=("cosine", "constant"), help="course of the learning rate over the run"
    )
    weight_decay: float = _option(0.1, low=0, high=1, help="decoupled decay of the weight matrices")
    max_grad_norm: float = _option(1.0, low=0, help="gradients are clipped to this norm (0: never)")
    optimizer: str = _option(
        "adamw",
        choices=OPTIMIZERS,
        help="adamw-8bit keeps its moments in a quarter of the memory (GPU, needs torchao)",
    )
    lora_rank: int = _option(
        0,
        low=0,
        high=1024,
        help="train low-rank adapters of this rank beside the frozen weights (0: all weights)",
    )
    precision: str = _option(
        "auto",
        choices=PRECISIONS,
        help="arithmetic of the model (auto: bf16 on a GPU, fp32 on a CPU); weights are kept and "
        "gradients reduced in fp32 either way",
    )
    recompute: str = _option(
        "none",
        choices=RECOMPUTE,
        help="activations computed again in backward instead of kept: selective recomputes all "
        "but matrix products and attention, full whole blocks",
        same_on_resume=False,
    )
    replicas: int = _option(
        1,
        low=1,
        help="copies of the model; each is sharded over workers / replicas, which sends less "
        "where memory allows",
        same_on_resume=False,
    )
    compile: bool = _option(
        False, help="compile each block with torch.compile (GPU)", same_on_resume=False
    )
    evaluate_every: int = _option(
        0, low=0, help="steps between two evaluations (0: once an epoch)", same_on_resume=False
    )
    eval_sequences: int = _option(
        64, low=0, help="held-out sequences evaluated, the first ones (0: all)"
    )
    checkpoint_every: int = _option(
        0, low=0, help="steps between two checkpoints (0: at each evaluation)", same_on_resume=False
    )
    sample_tokens: int = _option(
        40,
        low=0,
        high=4096,
        help="tokens of the samples written before and after training (0: none)",
        same_on_resume=False,
    )

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.num_workers % self.replicas:
            raise InputError(
                f"--replicas is {self.replicas}, which does not divide {self.num_workers} workers: "
                f"choose one of {_divisors(self.num_workers)}"
            )
        if self.global_batch % self.num_workers:
            below = self.global_batch // self.num_workers * self.num_workers
            raise InputError(
                f"a global batch of {self.global_batch} sequences cannot be shared by "
                f"{self.num_workers} workers: use a number of workers that divides it "
                f"({_divisors(self.global_batch)})"
                + (f", or --global-batch {below + self.num_workers}" if below else "")
            )

    def begun(self, recorded: Mapping[str, Any]) -> Self:
        return dataclasses.replace(self, text_key=recorded.get("text_key") or self.text_key)

    @property
    def num_microbatches(self) -> int:
        """Passes of each worker per step: the fewest that keep each within ``microbatch``."""
        own = self.global_batch // self.num_workers
        return next(
            num for num in range(1, own + 1) if own % num == 0 and own // num <= self.microbatch
        )


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, min(number, 4096) + 1) if number % each == 0]
    return ", ".join(found if len(found) <= 8 else [*found[:7], "…"])


# What each recipe accepts, and its named starting points. The first preset is the default.
CONFIGS: Final[Mapping[str, type[RunConfig]]] = {"ddp": DdpConfig, "fsdp": FsdpConfig}

# What trains without --data: what comes with the packages that are there anyway.
BUILT_IN_DATA: Final[Mapping[str, str]] = {"ddp": "digits", "fsdp": "python-help"}
# The preset that suits it.
BUILT_IN_PRESET: Final[Mapping[str, str]] = {"ddp": "digits", "fsdp": "tiny"}

PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "ddp": {
        # Reference solution 1: 128 images per worker, Adam at 1e-3, 10 epochs. What keeps ten
        # epochs from overfitting is this project's: schedule, mirrored images, weight decay.
        "ddp": {"epochs": 10, "lr": 1e-3, "flip": True, "weight_decay": 0.05},
        # The same ten epochs at a higher peak: 0.004 more on FashionMNIST (docs/benchmarks.md).
        "tuned": {"epochs": 10, "lr": 3e-3, "flip": True, "weight_decay": 0.05},
        # The same accuracy as the reference's ten epochs in one.
        "fast": {"epochs": 1, "lr": 4e-3},
        # scikit-learn's 1,797 digits: what ``make demo`` trains.
        "digits": {"epochs": 8, "batch_per_worker": 32, "lr": 2e-3, "report_every": 5},
    },
    "fsdp": {
        # Full fine-tuning of a model of some billion parameters: 65,536 tokens a step.
        "finetune": {"epochs": 1, "report_every": 1},
        # Reference solution 2, dolly-v2-7b on two g5.12xlarge, with every token trained on once:
        # docs/fsdp.md has the arithmetic for 8 x 24 GB.
        "dolly": {
            "model": "databricks/dolly-v2-7b",
            "epochs": 1,
            "seq_len": 512,
            "global_batch": 64,
            # One pass per step: on machines without NVLink each pass costs two gathers.
            "microbatch": 8,
            "recompute": "full",
            "report_every": 1,
        },
        # One small GPU: the weights stay as they are, adapters of rank 16 are trained.
        "lora": {"epochs": 1, "lora_rank": 16, "lr": 2e-4, "recompute": "full", "report_every": 1},
        # A GPT-NeoX of 0.8 million parameters beside its embeddings, from nothing, on a CPU.
        "tiny": {
            "model": "new:tiny",
            "epochs": 1,
            "seq_len": 128,
            "global_batch": 16,
            "microbatch": 8,
            "lr": 3e-3,
            "evaluate_every": 25,
            "report_every": 5,
        },
    },
}


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise InputError when ``value`` has the wrong type or is out of the field's limits."""
    option = "--" + field.name.replace("_", "-")
    kind = _kind(field)
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
    if low is not None and value < low:
        raise InputError(f"{option} is {value}: it must be at least {low}")
    if high is not None and value > high:
        raise InputError(f"{option} is {value}: it must be at most {high}")
    if above is not None and value <= above:
        raise InputError(f"{option} is {value}: it must be greater than {above}")


def differences(recorded: Mapping[str, Any], wanted: RunConfig) -> list[str]:
    """What keeps ``wanted`` from resuming a run with the ``recorded`` settings, a line each."""
    found = []
    for field in dataclasses.fields(wanted):
        value = getattr(wanted, field.name)
        if not field.metadata["same_on_resume"] or field.name not in recorded:
            continue
        if recorded[field.name] != value:
            found.append(f"{field.name}: the run has {recorded[field.name]!r}, now {value!r}")
    return found


def _kind(field: dataclasses.Field[Any]) -> type:
    """The field's type; the annotations here are plain names."""
    kinds: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
    return kinds[str(field.type)]
