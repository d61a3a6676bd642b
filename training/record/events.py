"""Events: what the workers of a run report to the process that keeps its record.

Rank 0 sends them (``Worker.emit``). Those that have a line in ``metrics.jsonl`` are marked below;
the others move the display, or end up in ``result.json`` and ``evaluation.json``. A recipe declares
its own measures (``training.recipe``), and the record of a run repeats them, so that a
report can be drawn where the recipe is not known.

A line of ``metrics.jsonl`` that cannot be read loses only itself. Lines of steps that a resumed run
did again are dropped (``without_redone``). Standard library only: the process that keeps the
record loads neither torch nor Ray for them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar, get_args

from contract import exits
from contract.runs import METRICS_FILE
from contract.text import percent, significant
from contract.typed_json import loads
from training.record import fields
from training.record.fields import Named, Rate, Rated, named
from training.record.result import Evaluated


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A figure by which a run is judged, beside its loss. A line of ``metrics.jsonl``."""

    name: str
    """Key of its values in evaluations and in ``result.json``: ``accuracy``."""
    label: str = ""
    """Label shown to people; empty: the name in words."""
    form: str = "number"
    """How values are written: ``number``, or ``percent`` for a share from 0 to 1."""
    unit: str = ""
    """Written after a value: ``GB/s``."""
    higher_is_better: bool = True
    """True if the largest value is the best."""

    @property
    def title(self) -> str:
        """The label, or the name in words, with a capital letter."""
        text = self.label or self.name.replace("_", " ")
        return text[:1].upper() + text[1:]

    def words(self, value: float) -> str:
        """A value for people: ``93.61%``, ``54.6``, ``92.4 GB/s``."""
        if self.form == "percent":
            return percent(value)
        return f"{significant(value)} {self.unit}".rstrip()

    @property
    def phrase_label(self) -> str:
        """The label within a line; an abbreviation keeps its capitals."""
        title = self.title
        return title if title[1:2].isupper() else title[:1].lower() + title[1:]

    def phrase(self, value: float) -> str:
        """A value with its label, within a line: ``accuracy 93.61%``."""
        return f"{self.phrase_label} {self.words(value)}"


#: Share of the test images that were classified right.
ACCURACY: Final = Measure(name="accuracy", form="percent")
#: ``exp(loss)`` of a language model.
PERPLEXITY: Final = Measure(name="perplexity", higher_is_better=False)


def described(name: str, declared: Sequence[Measure]) -> Measure:
    """The declared measure of that name, or one made from the name: less is better for
    ``loss_web``."""
    known = (each for each in declared if each.name == name)
    return next(known, Measure(name=name, higher_is_better=not name.startswith("loss")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stage of a run's start. A line of ``metrics.jsonl``."""

    name: str
    """``ray_ready``, ``workers_ready`` or ``model_ready``."""
    time: float
    """Unix time in seconds."""
    hosts: tuple[str, ...] | None = None
    """Address of each rank's node, in the order of the ranks; with ``workers_ready`` only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The workers are about to train. They may start several times in one attempt.

    What has a default is left out by a recipe that trains nothing.
    """

    step: int
    """Optimizer steps done before."""
    resumed: bool
    """True if a checkpoint was loaded."""
    world_size: int
    """Number of workers."""
    global_batch: int = 0
    """Images or sequences in the batch of all workers."""
    items: str = ""
    """Unit that rates count, such as ``images`` or ``tokens``."""
    items_per_step: int = 0
    """Images or tokens per step, over all workers."""
    steps_per_epoch: int = 0
    """Steps in which all of the data is seen once; 0 where there are no epochs."""
    total_steps: int
    """The whole run's, those done before included."""
    parameters: int = 0
    """Number of parameters of the saved model."""
    trained_parameters: int = 0
    """Number of parameters that are trained."""
    device: str
    """Name of the GPU, or ``CPU``."""
    precision: str = ""
    """``bf16`` or ``fp32``: what the forward pass computes in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step over all workers. A line of ``metrics.jsonl``."""

    step: int
    """Counted from 1."""
    epoch: float
    """The epoch it belongs to, counted from 1."""
    loss: float
    """Mean over what the global batch holds: images, tokens."""
    lr: float
    """Learning rate."""
    grad_norm: float
    """Norm of all gradients, before clipping."""
    time: float
    """Unix time of the report that it came with, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A step whose loss or gradient was not a number: the model stayed as it was. A line of
    ``metrics.jsonl``, in place of a ``step``."""

    step: int
    """Counted from 1."""
    loss: float | None = None
    """As in ``step``; None where it was not a number."""
    grad_norm: float | None = None
    """As in ``step``; None where it was not a number."""
    time: float
    """Unix time of the report that it came with, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes(Rated):
    """Where one worker's time went, mean per step since the evaluation before. A line of
    ``metrics.jsonl``."""

    step: int
    """The last one of those measured."""
    epoch: float
    """Epochs done by then."""
    rank: int
    """Number of the worker, from 0."""
    steps: int | None = None
    """Number of steps since the evaluation before."""
    items_per_step: float | None = None
    """This worker's images or tokens in a step, a mean."""
    step_time_s: float
    """Seconds that the whole step took."""
    compiling_s: float = 0.0
    """Seconds of the steps in which torch compiled; the means are those of the others."""
    phases: Named = field(default_factory=dict, metadata=named(suffix="_s"))
    """Seconds of each part of the step, in their order. Recipes that train have ``data`` (the
    batch is chosen and moved), ``forward``, ``backward`` (with the wait for other workers),
    ``optimizer`` (with clipping), and ``checkpoint`` (training waits for a save)."""
    communication_s: float | None = None
    """Seconds in which collectives were at work in one profiled step, waited for or not."""
    memory_bytes: float | None = None
    """Most bytes held so far: allocated on its GPU, or resident on a CPU."""
    gpu_utilization: float | None = None
    """Share of time in which any kernel ran on its GPU, 0 to 1; None on a CPU."""
    rate: Rate | None = None
    """This worker's items per second of its steps, without waits for saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation(Rated):
    """Scores of a run: of the model on data that it is not trained on, or measured by a recipe
    without a model. A line of ``metrics.jsonl``."""

    step: int
    """Steps done before; 0 before training."""
    epoch: float
    """Epochs done by then; 0 before training, and where there are none."""
    loss: float | None = None
    """Mean over what it was evaluated on: per test image, or per held-out token in nats."""
    measures: Named = field(default_factory=dict, metadata=named())
    """Values of the recipe's measures, such as ``accuracy``."""
    train_loss: float | None = None
    """Mean of the training loss since the evaluation before; None before training, and where all
    steps since then were skipped."""
    rate: Rate | None = None
    """Items per second of all workers together; None before training."""
    place: str | None = None
    """Label of the evaluated item, such as ``64 MB``, if it is not the model after ``step``."""
    seconds: float | None = None
    """Spent training, over all attempts, evaluation included."""
    flops_per_s: float | None = None
    """Floating-point operations per second that the model needs, of all workers together."""
    mfu: float | None = None
    """``flops_per_s`` over the peak of all GPUs, 0 to 1; None where the peak is not known."""
    memory_bytes: float | None = None
    """Most bytes that any worker held so far; None where the recipe does not measure it."""
    gpu_utilization: float | None = None
    """Mean of the workers' GPUs; None on CPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Continuation of a text by a language model. A line of ``metrics.jsonl``."""

    step: int
    """Optimizer steps done before."""
    prompt: str
    """How a held-out document begins."""
    text: str
    """Continuation that the model generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A resumed model, evaluated before it is trained again. A line of ``metrics.jsonl``."""

    step: int
    """Step of the checkpoint."""
    loss: float
    """Mean per held-out token, in nats: that of the evaluation after this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempted:
    """Nodes of the run are about to be taken away. A line of ``metrics.jsonl``."""

    nodes: tuple[str, ...]
    """Ray's names of them."""
    time: float
    """Unix time in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Silent:
    """Nothing was heard of the workers for too long: they were ended, and start again. A line of
    ``metrics.jsonl``, which the record adds."""

    after: int
    """The last step that was heard of."""
    seconds: float
    """How long nothing had been heard."""
    states: tuple[str, ...] = ()
    """State of each worker's process in Linux's terms: ``rank 1: T (stopped)``."""
    stacks: str = ""
    """File in the run's folder with the stacks that could be read; empty where none was kept."""
    time: float
    """Unix time in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Training continues from a checkpoint. A line of ``metrics.jsonl``, which the record adds."""

    step: int
    """Step of the checkpoint. Lines above this one that have a later step belong to steps that were
    trained again."""
    world_size: int
    """Number of workers from here on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A checkpoint is being saved."""

    step: int
    """Optimizer steps done, and to be found in it."""
    written: int = 0
    """Bytes that rank 0 has written so far, to this checkpoint and those before. Training waits for
    the save where it is reported again, and the save hangs where this does not grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint is whole. A line of ``metrics.jsonl``: a run that has one does not start at step
    0 by itself."""

    step: int
    """Optimizer steps done, and to be found in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A worker, as it is found again from outside."""

    rank: int
    node: str
    """Ray's name of its node."""
    pid: int
    born: str
    """When it began, in the machine's own count: a number may be given to another process."""
    stacks: int
    """Number of the open file to which it writes its stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The workers are there, and can be looked at from outside (``training.runtime.processes``)."""

    processes: tuple[Process, ...]
    """In the order of the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluating:
    """An evaluation has begun or goes on, in which no step is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Amount of data that has been read before the workers start."""

    done: int
    """Bytes."""
    total: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """Something that a person should know, and that does not end the run."""

    message: str
    """Warning, as a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """Something that a person may want to know about a run as it starts."""

    message: str
    """Note, as a phrase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The workers have saved and left, as they were asked to."""

    step: int
    """Optimizer steps done, all of them saved."""
    seconds: float | None = None
    """Spent training, over all attempts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The run cannot continue."""

    message: str
    """Error, and how to fix it."""
    code: int = exits.BAD_INPUT
    """Exit code of the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The last step is done and all is saved."""

    step: int
    """Steps done."""
    loss: float | None = None
    """That of the last evaluation."""
    measures: Named = field(default_factory=dict, metadata=named())
    """Those of the last evaluation."""
    seconds: float
    """Spent training, over all attempts."""
    evaluation: Evaluated | None = None
    """Content of ``evaluation.json``; None for a recipe that has no such details."""
    shortfall: str | None = None
    """Goal that the run missed, as a sentence; the run then counts as failed."""


Event = (
    Phase
    | Start
    | Measure
    | Step
    | Skipped
    | RankTimes
    | Evaluation
    | Sample
    | Loaded
    | Preempted
    | Silent
    | Resume
    | Saving
    | Saved
    | Joined
    | Evaluating
    | Reading
    | Warned
    | Noted
    | Stopped
    | Failed
    | Finished
)

# The "type" of an event in JSON.
_NAMES: Final = {kind: kind.__name__.lower() for kind in get_args(Event)} | {RankTimes: "rank"}
TYPES: Final[Mapping[str, type[Event]]] = {name: kind for kind, name in _NAMES.items()}


def to_json(event: Event) -> dict[str, object]:
    """An event as a line of ``metrics.jsonl`` has it: its type, and the fields that are known."""
    return {"type": _NAMES[type(event)], **fields.to_json(event)}


def from_json(values: Mapping[str, object]) -> Event:
    """Read an event.

    Raises:
        ValueError: its type is not known, or a field is missing or of another kind.
    """
    kind = TYPES.get(str(values.get("type")))
    if kind is None:
        raise ValueError(f"no event is of type {values.get('type')!r}")
    return fields.from_json(kind, values)


def phase(name: str, *, hosts: Sequence[str] | None = None) -> Phase:
    """The event that a phase of the start is over now."""
    return Phase(name=name, time=time.time(), hosts=None if hosts is None else tuple(hosts))


_E = TypeVar("_E")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of ``metrics.jsonl``."""

    text: str
    """As it is in the file."""
    event: Event
    step: int | None
    """The step that it belongs to; None for those that belong to none."""
    lease: int
    """Number of the lease under which it was written; 0 for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The content of ``metrics.jsonl``, each step once."""

    lines: Sequence[Line] = ()
    num_damaged: int = 0
    """Lines that could not be read; a last one that is still being written does not count."""

    @property
    def events(self) -> list[Event]:
        return [line.event for line in self.lines]

    @property
    def evaluations(self) -> list[Evaluation]:
        return self.of(Evaluation)

    @property
    def measures(self) -> list[Measure]:
        """Measures that the run is judged by: those that its recipe has declared, and others that
        it has a value of."""
        declared = self.of(Measure)
        names = [each.name for each in declared]
        for each in self.evaluations:
            names += each.measures
        return [described(name, declared) for name in dict.fromkeys(names)]

    def of(self, kind: type[_E]) -> list[_E]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


def parse_metrics(content: bytes) -> Metrics:
    """Read the content of a ``metrics.jsonl``."""
    kept, num_damaged, lease = list[Line](), 0, 0
    *whole, last = content.split(b"\n")
    for text in [*whole, last]:
        if not text.strip():
            continue
        try:
            line = _parse(text.decode())
        except (ValueError, RecursionError):
            # A line without its end may still be being written, or a kill tore it in two.
            num_damaged += text is not last
            continue
        if line.lease < lease:
            continue  # by a process that had lost the run and did not know it yet
        if isinstance(line.event, Resume):
            kept = without_redone(kept, line.event.step)
        elif line.lease > lease and line.step is not None:
            kept = without_redone(kept, line.step - 1)
        lease = line.lease
        kept.append(line)
    return Metrics(lines=kept, num_damaged=num_damaged)


def without_redone(lines: Iterable[Line], step: int) -> list[Line]:
    """The lines that stay when training continues after ``step``: what came later is done again."""
    return [line for line in lines if line.step is None or line.step <= step]


def _parse(text: str) -> Line:
    """
    Raises:
        ValueError: it is no JSON object of an event.
    """
    values = loads(text, what=f"a line of {METRICS_FILE}")
    step, lease = values.get("step"), values.get("lease")
    return Line(
        text=text.rstrip(),
        event=from_json(values),
        step=step if isinstance(step, int) else None,
        lease=lease if isinstance(lease, int) else 0,
    )
