"""Arithmetic on the phases of a start: when each was over, and what it took in time and CPU."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from training.record.events import Event, Phase, Step

PHASES: Final = {
    "ray_ready": "the command joins Ray and looks at the data",
    "workers_ready": "the worker processes, and what they import",
    "model_ready": "data, model and checkpoint in the workers",
    "first_step": "the model made parallel, what the recipe evaluates first, and the first step",
}
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What one command took; each mapping by phase, in seconds since the command."""

    wall_s: Mapping[str, float]
    cpu_s: Mapping[str, float]
    """CPU seconds of all of the command's processes."""
    foreign_cpu_s: float | None
    """CPU seconds that the rest of the machine used meanwhile; None where that is not known."""


def rotated(items: Sequence[_T], number: int) -> list[_T]:
    """The items in the order of a round, so that each comes first in some round."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def phase_times(events: Sequence[Event]) -> dict[str, float]:
    """Unix time of each phase in a run's record; ``first_step`` once the first step is in it."""
    times = {
        event.name: event.time
        for event in events
        if isinstance(event, Phase) and event.name in PHASES
    }
    first = next((event.time for event in events if isinstance(event, Step)), None)
    return times if first is None else {**times, "first_step": first}


def interpolated(samples: Sequence[tuple[float, float]], at: float) -> float:
    """Value at a time, between the samples (time, value) around it; never beyond the last."""
    earlier = samples[0]
    for later in samples[1:]:
        if later[0] >= at:
            part = (at - earlier[0]) / (later[0] - earlier[0]) if later[0] > earlier[0] else 1.0
            return earlier[1] + max(part, 0.0) * (later[1] - earlier[1])
        earlier = later
    return earlier[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """What one way took up to a phase, in seconds."""

    wall_s: float
    """Median."""
    cpu_s: float
    """Median."""
    all_wall_s: tuple[float, ...]
    all_cpu_s: tuple[float, ...]
    foreign_cpu_s: tuple[float, ...]
    """Of the starts in which it is known."""


def column(spent: Sequence[Spent], *, last: str) -> Column:
    """Medians of one way, up to the phase ``last``, and all single values."""
    foreign = [each.foreign_cpu_s for each in spent if each.foreign_cpu_s is not None]
    return Column(
        wall_s=statistics.median(each.wall_s[last] for each in spent),
        cpu_s=statistics.median(each.cpu_s[last] for each in spent),
        all_wall_s=tuple(round(each.wall_s[last], 3) for each in spent),
        all_cpu_s=tuple(round(each.cpu_s[last], 3) for each in spent),
        foreign_cpu_s=tuple(round(each, 3) for each in foreign),
    )


def ratios(slow: Column, quick: Column) -> tuple[float, float]:
    """How many times less the quick column takes: time, and CPU time."""
    return slow.wall_s / quick.wall_s, slow.cpu_s / quick.cpu_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one phase took since the one before it, median over starts."""

    wall_s: float
    cpu_s: float
    what: str
    """What happens in it."""


def split(starts: Sequence[Spent]) -> dict[str, Part]:
    """Every phase of some starts, by its name."""
    parts = {}
    before = ""
    for name, what in PHASES.items():
        if not all(name in each.wall_s for each in starts):
            continue
        wall = [each.wall_s[name] - each.wall_s.get(before, 0.0) for each in starts]
        cpu = [each.cpu_s[name] - each.cpu_s.get(before, 0.0) for each in starts]
        parts[name] = Part(wall_s=statistics.median(wall), cpu_s=statistics.median(cpu), what=what)
        before = name
    return parts
