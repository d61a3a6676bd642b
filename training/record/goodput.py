"""Goodput of a job: the share of its hosts' paid time that was training.

The head keeps an ``Activity`` in the bucket: the starts of the job's program, and when each made
its steps. ``goodput`` compares it with the run times of the job's nodes, as ECS reports them.

Standard library only. The recorder and ``goodput`` are pure: the caller passes times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from training.record.fields import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One start of a program, until it ends, fails, or loses a node. Times are Unix time."""

    began: float
    """It runs on all of its nodes."""
    stepped: float | None = None
    """Its first step was done."""
    last: float | None = None
    """Its last step was done, as far as is known."""
    first: int = 0
    """Steps done before."""
    step: int = 0
    """Steps done so far, those before included."""
    saving_s: float = 0.0
    """Seconds in which training waited for checkpoints."""
    resumes: float | None = None
    """It continues from the state of this time: later steps of earlier segments are lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity(Record):
    """Activity of a job's program: an object next to the job's record."""

    segments: tuple[Segment, ...] = ()
    nodes: tuple[str, ...] = ()
    """Address of each node by its number in the log; empty where there is none."""


class Recorder:
    """Records the activity of a program as it happens."""

    def __init__(self, earlier: Activity | None = None) -> None:
        """``earlier``: of the job's heads before this one."""
        self.activity = earlier or Activity()

    def begin(self, now: float, *, first: int = 0, resumes: float | None = None) -> None:
        """The program runs on all nodes.

        Args:
            first: steps done before.
            resumes: Unix time of the state that it continues from; None: the time of that step.
        """
        segments = self.activity.segments
        if segments and resumes is None:
            resumes = _reached(segments, first)
        new = Segment(began=now, first=first, step=first, resumes=resumes)
        self.activity = replace(self.activity, segments=(*segments, new))

    def step(self, now: float, step: int) -> None:
        """Steps have been done; ``step`` of them in all."""
        segments = self.activity.segments
        if segments and step > segments[-1].step:
            self._change(stepped=segments[-1].stepped or now, last=now, step=step)

    def save(self, seconds: float) -> None:
        """Training has waited for checkpoints."""
        if segments := self.activity.segments:
            self._change(saving_s=segments[-1].saving_s + seconds)

    def _change(self, **changed: float) -> None:
        *before, last = self.activity.segments
        changed_one = replace(last, **changed)  # type: ignore[arg-type]
        self.activity = replace(self.activity, segments=(*before, changed_one))


def _reached(segments: Sequence[Segment], step: int) -> float:
    """Time at which the newest segment that came to a step had done it."""
    for each in reversed(segments):
        if each.stepped is None or each.last is None or not each.first < step <= each.step:
            continue
        done, all_done = step - each.first - 1, each.step - each.first - 1
        return each.stepped + (each.last - each.stepped) * (done / all_done if all_done else 1)
    return segments[0].began


# --- the figure -----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """A node's time that is paid. Times are Unix time."""

    is_head: bool
    pulled: float
    started: float | None
    """None for a container that never ran."""
    ended: float
    pool: str = ""
    """Pool of a worker's host."""

    @property
    def seconds(self) -> float:
        return self.ended - self.pulled


class _Stretch(NamedTuple):
    """Steps of a segment that count: no later start goes back before them."""

    began: float
    ended: float
    joined: float
    """Nodes that started later do not train in this segment."""
    share: float
    """Share in which training did not wait for checkpoints."""


def goodput(paid: Sequence[Paid], activity: Activity) -> float | None:
    """Share of the paid time of all nodes, 0 to 1, in which they trained, from each start's first
    step to its last; without steps that a later start repeats and without waiting for checkpoints.

    None if nothing is paid yet, or no step was counted.
    """
    billed_s = sum(node.seconds for node in paid)
    stretches = [*_stretches(activity.segments)]
    if not billed_s or not stretches:
        return None

    trained_s = 0.0
    for node in paid:
        if node.started is None:
            continue
        for stretch in stretches:
            if node.is_head or node.started <= stretch.joined:
                began = max(stretch.began, node.pulled, node.started)
                together_s = min(stretch.ended, node.ended) - began
                trained_s += stretch.share * max(0.0, together_s)
    return trained_s / billed_s


def _stretches(segments: Sequence[Segment]) -> Iterator[_Stretch]:
    for number, each in enumerate(segments):
        if each.stepped is None or each.last is None:
            continue
        later = segments[number + 1 :]
        ends = [each.last, *(one.began for one in later)]
        ends += [one.resumes for one in later if one.resumes is not None]
        waited = each.saving_s / max(each.saving_s, each.last - each.stepped, 1e-9)
        yield _Stretch(each.stepped, min(ends), each.began, 1 - waited)
