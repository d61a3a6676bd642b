"""Goodput of a job: the use of each second that its hosts were paid for.

The head keeps an ``Activity`` in the bucket: the starts of the job's program, and when each made
its steps. ``goodput`` lays it over the run times of the job's nodes, as ECS reports them. The sum
of its table is the time that ``trainctl cost`` counts.

Standard library only. The recorder and ``goodput`` are pure: times are handed in.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from contract.text import percent
from training.record import fields

#: Uses of paid time, as people read them, in the order in which they come.
USES: Final[Mapping[str, str]] = {
    "steps": "steps",
    "uncounted": "running (no steps counted)",
    "waiting": "waiting for other nodes",
    "pulling": "pulling and starting containers",
    "starting": "starting the program",
    "saving": "saving",
    "lost": "steps that were lost",
    "hung": "hung",
    "ending": "ending",
    "held": "held after the failure",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One start of a program, until it ends, fails, or loses a node. Times are Unix time."""

    began: float
    """It runs on all of its nodes."""
    stepped: float | None = None
    """Its first step was done."""
    last: float | None = None
    """Its last step was done, as far as is known."""
    ended: float | None = None
    """None while it runs, or if its head was lost."""
    saved: float | None = None
    """The files that it wrote last were saved."""
    first: int = 0
    """Steps done before."""
    step: int = 0
    """Steps done so far, those before included."""
    saving_s: float = 0.0
    """Seconds in which training waited for checkpoints."""
    hung_s: float = 0.0
    """Seconds without a sign of life before it was ended for that."""
    resumes: float | None = None
    """It continues from the state of this time: later steps of earlier segments are lost."""
    is_last: bool = False
    """Nothing starts after it, unless another head does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Activity of a job's program: an object beside the job's record."""

    segments: tuple[Segment, ...] = ()
    nodes: tuple[str, ...] = ()
    """Address of each node by its number in the log; empty where there is none."""

    def to_json(self) -> dict[str, object]:
        return fields.to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "Activity":
        return fields.from_json(cls, values)


class Recorder:
    """Records the activity of a program as it happens."""

    def __init__(self, earlier: Activity | None = None) -> None:
        """``earlier``: of the job's heads before this one."""
        self.activity = earlier or Activity()
        self._has_begun = False

    @property
    def _runs(self) -> bool:
        segments = self.activity.segments
        return bool(segments) and segments[-1].ended is None

    def begin(self, now: float, *, first: int = 0, resumes: float | None = None) -> None:
        """The program runs on all nodes.

        Args:
            first: steps done before.
            resumes: Unix time of the state that it continues from; None: the time of that step.
        """
        if self._runs and self._has_begun:
            last = self.activity.segments[-1]
            self.end(last.last or last.began)
        self._has_begun = True
        segments = self.activity.segments
        if segments and resumes is None:
            resumes = _reached(segments, first)
        new = Segment(began=now, first=first, step=first, resumes=resumes)
        self.activity = replace(self.activity, segments=(*segments, new))

    def step(self, now: float, step: int) -> None:
        """Steps have been done; ``step`` of them in all."""
        if self._runs and step > self.activity.segments[-1].step:
            stepped = self.activity.segments[-1].stepped or now
            self._change(stepped=stepped, last=now, step=step)

    def save(self, seconds: float) -> None:
        """Training has waited for checkpoints."""
        if self._runs:
            self._change(saving_s=self.activity.segments[-1].saving_s + seconds)

    def end(self, now: float, *, hung_s: float = 0.0) -> None:
        """The program has ended, or is about to be ended."""
        if self._runs:
            self._change(ended=now, hung_s=hung_s)

    def close(self, now: float, *, is_last: bool) -> None:
        """What it has written is saved."""
        if self.activity.segments and not self._runs:
            self._change(saved=self.activity.segments[-1].saved or now, is_last=is_last)

    def _change(self, **changed: float | int | bool | None) -> None:
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


# --- the table ------------------------------------------------------------------------------------
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


class _Period(NamedTuple):
    """A part of a segment that has one use."""

    began: float
    ended: float
    use: str
    joined: float
    """Nodes that have started since are not part of it."""
    saving: float = 0.0
    """Share in which training waited for checkpoints."""


def goodput(
    paid: Sequence[Paid],
    activity: Activity,
    *,
    least: int,
    is_over: bool,
    held: float | None = None,
) -> dict[str, float]:
    """Seconds of each use, over all nodes; their sum is the time that is paid.

    Args:
        paid: of each node that the job has had.
        least: worker nodes that it needs.
        held: Unix time since which its hosts are held after a failure.
    """
    ends = [*_ends(activity.segments, paid)]
    periods = [*_periods(activity.segments, ends)]
    end = _end(activity.segments, ends, is_over=is_over)
    edges = {edge for each in periods for edge in (each.began, each.ended)}
    edges |= {edge for each in paid for edge in (each.started or each.ended, each.ended)}
    edges |= {edge for edge in (end, held) if edge is not None}
    times = sorted(edges)
    found = dict.fromkeys(USES, 0.0)

    # What happens between two of these times is the same for all nodes but those that join late.
    kinds: list[_Period] = []
    for began, until in pairwise(times):
        at = (began + until) / 2
        period = next((each for each in periods if each.began <= at < each.ended), None)
        if held is not None and at >= held:
            period = _Period(began, until, "held", math.inf)
        elif period is None:
            if end is not None and at >= end:
                use = "ending"
            else:
                use = "waiting" if _lacks_nodes(paid, at, least) else "starting"
            period = _Period(began, until, use, math.inf)
        kinds.append(period)

    for node in paid:
        started = node.ended if node.started is None else max(node.pulled, node.started)
        at = min(started, node.ended)
        found["pulling"] += at - node.pulled
        number = bisect_right(times, at) - 1
        while at < node.ended:
            kind, until = kinds[number], min(times[number + 1], node.ended)
            is_part = node.is_head or started <= kind.joined
            saving = kind.saving * (until - at) if is_part else 0.0
            found["saving"] += saving
            found[kind.use if is_part else "waiting"] += until - at - saving
            at, number = until, number + 1
    return found


def _lacks_nodes(paid: Sequence[Paid], at: float, least: int) -> bool:
    """True where a head or a worker that the job needs does not run."""
    running = [each for each in paid if each.started is not None and each.started <= at]
    heads = [each.is_head for each in running if at < each.ended]
    return not any(heads) or heads.count(False) < least


def _ends(segments: Sequence[Segment], paid: Sequence[Paid]) -> Iterator[float]:
    """The end of each segment. Of one whose head was lost, it is the head's end."""
    for number, each in enumerate(segments):
        heads = (node.ended for node in paid if node.is_head and node.ended > each.began)
        ended = each.ended or min(heads, default=each.last or each.began)
        later = segments[number + 1 :]
        yield max(each.began, min(ended, later[0].began) if later else ended)


def _periods(segments: Sequence[Segment], ends: Sequence[float]) -> Iterator[_Period]:
    """The parts of all segments whose use is known."""
    counts = any(each.stepped is not None for each in segments)
    for number, (each, ended) in enumerate(zip(segments, ends, strict=True)):
        later = segments[number + 1 :]
        hung = max(each.began, ended - each.hung_s)
        yield _Period(hung, ended, "hung", each.began)

        if each.stepped is None and not counts:
            yield _Period(each.began, hung, "uncounted", each.began)
        elif each.stepped is not None and each.last is not None:
            # A step that is under way when a program runs, or is ended early, counts as one.
            has_ended = each.ended is not None and not later
            until = min(hung, each.last if has_ended else ended)
            lost = min([until, *(one.resumes for one in later if one.resumes is not None)])
            lost = max(each.stepped, lost)
            share = each.saving_s / max(each.saving_s, each.last - each.stepped, 1e-9)
            yield _Period(each.stepped, lost, "steps", each.began, share)
            yield _Period(lost, until, "lost", each.began)
        if each.ended is not None and each.saved is not None:
            saved = min(each.saved, later[0].began) if later else each.saved
            yield _Period(ended, saved, "saving", each.began)


def _end(segments: Sequence[Segment], ends: Sequence[float], *, is_over: bool) -> float | None:
    """Time after which a job does nothing but end; None where another start may come."""
    if not segments or not (is_over or segments[-1].is_last):
        return None
    last = segments[-1]
    has_finished = last.ended is not None and last.last is not None and not last.hung_s
    return last.last if has_finished else ends[-1]


def words(table: Mapping[str, float]) -> str:
    """``steps 81.2%, waiting for other nodes 10.4%, ... of 3.52 host hours``; empty before any."""
    paid = sum(table.values())
    if not paid:
        return ""
    parts = [f"{USES[use]} {percent(s / paid)}" for use, s in table.items() if s / paid >= 0.0005]
    return f"{', '.join(parts)} of {paid / 3600:,.2f} host hours"
