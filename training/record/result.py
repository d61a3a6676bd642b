"""Result of a run: ``result.json``, and ``evaluation.json`` for its last evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from training.record import fields
from training.record.fields import Named, Rate, Rated, Record, named

Status = Literal["succeeded", "failed", "stopped"]
SUCCEEDED: Final = "succeeded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Record, Rated):
    """The figures of a run, written when an attempt ends. In JSON every field is there."""

    run: str
    """Name of the run."""
    recipe: str
    """Name of the recipe."""
    status: str
    """``succeeded``: trained to its last step; ``stopped``: asked to end before that, resumable;
    ``failed``: see ``error``."""
    loss: float | None
    """Mean loss of the last evaluation: per test image, or per held-out token in nats."""
    measures: Named = field(default_factory=dict, metadata=named())
    """Values of the recipe's measures at the last evaluation, such as ``accuracy``."""
    seconds: float | None
    """Spent training, over all attempts, evaluation included."""
    total_seconds: float | None = None
    """Length of all attempts, each from the start of its command, start-up included; of one that
    was killed at least what it trained."""
    usd: float | None = None
    """About what the job has cost, in US dollars at the list prices of its order, as in
    ``progress.json``; None without a job, or where a price is missing."""
    steps: int
    """Steps done."""
    total_steps: int
    """The whole run's."""
    rate: Rate | None
    """Training throughput of all workers together: median over the evaluations; omitted for a
    recipe that trains on nothing."""
    world_size: int
    """Number of workers at the end."""
    hosts: tuple[str, ...] = ()
    """Address of each rank's node, in the order of the ranks; empty under torchrun."""
    resumed_from: int | None
    """Step of the checkpoint that this attempt began with."""
    preempted: int = 0
    """Nodes that were taken away with notice, over all attempts."""
    skipped_steps: int = 0
    """Steps whose loss or gradient was not a number, over all attempts: they changed nothing."""
    damaged_lines: int = 0
    """Lines of ``metrics.jsonl`` from earlier attempts that could not be read."""
    parameters: int
    """Number of parameters of the complete model; 0 without a model."""
    flops_per_s: float | None
    """Floating-point operations per second that the model needs, of all workers together."""
    mfu: float | None
    """Model FLOP utilization: ``flops_per_s`` over the peak of all GPUs, 0 to 1; None where the
    peak is not known, as on a CPU."""
    memory_bytes: float | None
    """Most bytes that any worker held: on its GPU, or resident where the recipe measures that."""
    gpu_utilization: float | None = None
    """Share of time in which any kernel ran on the GPUs, 0 to 1; None on CPUs."""
    device: str
    """Name of the GPUs, or ``CPU``."""
    precision: str
    """``bf16`` or ``fp32``: what the forward pass computes in."""
    error: str | None
    """Why the run failed."""

    _KEEPS_NONE = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutText:
    """Scores of a language model on the held-out text."""

    loss: float
    """Mean per token, in nats."""
    perplexity: float
    """``exp(loss)``."""
    num_tokens: int
    """Held-out tokens that the loss is a mean over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Figures in rows, of any other recipe: a confusion matrix, the bandwidths of a network."""

    title: str
    """Heading of the table."""
    heads: tuple[str, ...]
    """Headings of the columns, with units."""
    rows: tuple[tuple[float, ...], ...]
    """Figures, as many in each row as there are headings."""
    names: tuple[str, ...] = ()
    """Heading of each row; empty: its first figure."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a row has not a figure for each heading, or has none itself.
        """
        if any(len(row) != len(self.heads) for row in self.rows):
            raise ValueError(f"a row has not {len(self.heads)} figures")
        if len(self.names) not in (0, len(self.rows)):
            raise ValueError(f"there are not {len(self.rows)} names of rows")


Evaluated = HeldOutText | Table
"""Content of ``evaluation.json``."""


def measures_of(values: Mapping[str, object]) -> dict[str, float]:
    """The measures that a ``result.json`` has a value of, also one that lacks all else."""
    return {**fields.from_json(_Measured, values).measures}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    measures: Named = field(default_factory=dict, metadata=named())
