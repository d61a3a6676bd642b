"""Curves of a run from its record in the bucket, while it trains: ``trainctl top`` and ``ui``."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

from contract.runs import METRICS_FILE, run_prefix
from contract.text import byte_size, percent, significant
from trainctl.aws.deployment_bucket import DeploymentBucket
from training.record.events import Metrics, RankTimes, Step, parse_metrics
from training.record.fields import number

Points = Sequence[tuple[int, float]]
"""Steps done, and a figure."""

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
#: Points of a line in a terminal.
_WIDTH: Final = 24
#: Columns of a chart.
_COLUMNS: Final = 150
#: A step of a record with its loss and the time of its report, which a lease may follow; parts into
#: which the steps of a long one are cut.
_STEP: Final = re.compile(
    rb'\{"type": "step", [^l]*"loss": (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?), [^}]*"time": ([^},]+)[^}]*\}'
)
_PARTS: Final = 600


class Chart(NamedTuple):
    """A curve as a page draws it."""

    lines: Sequence[tuple[str, str, str, str]]
    """Owner of each line, its last value, the points of an SVG's line in a box of 300 times 90,
    and for the pointer, in JSON, number, step and value in words of each column."""
    ticks: tuple[str, str]
    """The values at the top and at the bottom."""
    ends: tuple[str, str]
    """The first and the last step."""


class Curve(NamedTuple):
    """A figure over the steps of a run."""

    title: str
    form: Callable[[float], str]
    """A value in words."""
    lines: Mapping[str, Points]
    """By whose it is: a rank's, or the evaluation's. None is empty."""
    from_zero: bool = True
    """False where zero is no base, as of a loss."""

    def spark(self, whose: str) -> str:
        """A line in a line of text, on the scale of all lines: ``▇▅▃▂▁``."""
        low, high = self._range()
        scale = (len(_BLOCKS) - 1) / (high - low or 1)
        columns = _columns(self.lines[whose], *self._ends(), _WIDTH).values()
        return "".join(_BLOCKS[round((some[-1][1] - low) * scale)] for some in columns)

    def words(self) -> list[tuple[str, str]]:
        """Names of its lines, and the lines in text: ``Loss training``, ``▇▅▃▂▁ 0.21``."""
        return [
            (f"{self.title} {whose}", f"{self.spark(whose)} {self.form(points[-1][1])}")
            for whose, points in self.lines.items()
        ]

    def chart(self) -> Chart:
        """Its lines, with axes; what stands out is drawn, however many steps there are."""
        (first, last), (low, high) = self._ends(), self._range()
        across, up = 300 / (last - first or 1), 90 / (high - low or 1)
        lines = []
        for whose, points in self.lines.items():
            columns = _columns(points, first, last, _COLUMNS)
            drawn = [
                f"{(step - first) * across:.1f},{(high - value) * up:.1f}"
                for some in columns.values()
                for step, value in some
            ]
            ends = [(each, some[-1]) for each, some in columns.items()]
            words = json.dumps([[each, f"{step:,}", self.form(value)] for each, (step, value) in ends])
            lines.append((whose, self.form(points[-1][1]), " ".join(drawn), words))
        ticks = self.form(high), self.form(low)
        return Chart(lines, ticks, (f"{first:,}", f"{last:,}"))

    def _ends(self) -> tuple[int, int]:
        """The first and the last step."""
        lines = self.lines.values()
        return min(each[0][0] for each in lines), max(each[-1][0] for each in lines)

    def _range(self) -> tuple[float, float]:
        """The least and the largest value of its axis."""
        values = [value for points in self.lines.values() for _, value in points]
        low, high = min(values), max(values)
        return min(low, 0.0) if self.from_zero or low == high else low, high


def _columns(points: Points, first: int, last: int, number: int) -> dict[int, Points]:
    """Lowest, highest and last point of each column, in order; empty columns are left out."""
    found = defaultdict[int, list[tuple[int, float]]](list)
    for point in points:
        found[(point[0] - first) * (number - 1) // (last - first or 1)].append(point)
    value = itemgetter(1)
    return {
        column: sorted({min(some, key=value), max(some, key=value), some[-1]})
        for column, some in found.items()
    }


def compared(curves: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """The curves of several runs, by run, on one chart for each figure; of the ranks only the
    first."""
    together: dict[str, Curve] = {}
    for run, own in curves.items():
        for curve in own:
            lines = {
                f"{run} {whose}".strip(): points
                for whose, points in curve.lines.items()
                if not whose.startswith("rank ") or whose == "rank 0"
            }
            before = together.get(curve.title, curve._replace(lines={}))
            together[curve.title] = before._replace(lines={**before.lines, **lines})
    return [curve for curve in together.values() if curve.lines]


class LiveRecord:
    """The record of a run, of which a file is read again once it has changed."""

    def __init__(self, bucket: DeploymentBucket, run: str) -> None:
        self._bucket, self._run = bucket, run
        self._changed: datetime | None = None
        self._curves: list[Curve] = []

    def curves(self) -> list[Curve]:
        """Its curves so far."""
        prefix = run_prefix(self._run)
        files = {each.key: each.modified for each in self._bucket.listed(prefix)[0]}
        changed = files.get(prefix + METRICS_FILE)
        if changed != self._changed:
            content = self._bucket.read_of_run(self._run, METRICS_FILE)
            self._curves = curves_of(parse_metrics(thinned(content or b"")))
            self._changed = changed
        return self._curves


def thinned(content: bytes) -> bytes:
    """A record without most steps of a long one: of each few the first, the last, and those with
    the lowest and the highest loss stay, and the last of their reports, by which the pace is
    measured. To parse a line takes longer than to draw it."""
    lines = content.split(b"\n")
    steps = {at: step for at, line in enumerate(lines) if (step := _STEP.fullmatch(line))}
    losses = {at: float(step[1]) for at, step in steps.items()}
    last = {step[2]: at for at, step in steps.items()}
    numbers, kept = iter(losses), set[int]()
    while some := [*islice(numbers, len(losses) // _PARTS + 1)]:
        extremes = min(some, key=losses.__getitem__), max(some, key=losses.__getitem__)
        kept |= {some[0], *extremes, some[-1]}
    kept |= {last[steps[at][2]] for at in kept}
    return b"\n".join(line for at, line in enumerate(lines) if at in kept or at not in steps)


def curves_of(metrics: Metrics) -> list[Curve]:
    """The curves of a run that there are."""
    evaluations = metrics.evaluations
    ranks: dict[str, list[RankTimes]] = {}
    for each in metrics.of(RankTimes):
        ranks.setdefault(f"rank {each.rank}", []).append(each)

    def of(events: Iterable[Any], name: str) -> Points:
        return _known((event.step, getattr(event, name)) for event in events)

    def of_ranks(name: str) -> dict[str, Points]:
        return {rank: of(own, name) for rank, own in ranks.items()}

    losses = {"training": of(metrics.of(Step), "loss"), "evaluation": of(evaluations, "loss")}
    curves = [Curve("Loss", significant, losses, from_zero=False)]
    for measure in metrics.measures:
        values = _known((each.step, each.measures.get(measure.name)) for each in evaluations)
        # A share or a rate, and not a score such as perplexity.
        from_zero = measure.form == "percent" or bool(measure.unit)
        curves.append(Curve(measure.title, measure.words, {"": values}, from_zero))
    paces = {"all": _pace(metrics), **of_ranks("step_time_s")}
    curves += [
        Curve("Seconds a step", significant, paces),
        Curve("Items a second", significant, {"": of(evaluations, "items_per_s")}),
        Curve("MFU", percent, {"": of(evaluations, "mfu")}),
        Curve("GPU utilization", percent, of_ranks("gpu_utilization")),
        Curve("Memory", byte_size, of_ranks("memory_bytes")),
    ]
    known = [(curve, {key: own for key, own in curve.lines.items() if own}) for curve in curves]
    return [curve._replace(lines=lines) for curve, lines in known if lines]


def _known(points: Iterable[tuple[int, object]]) -> Points:
    """The finite values."""
    return [(step, value) for step, each in points if (value := number(each)) is not None]


def _pace(metrics: Metrics) -> Points:
    """Seconds a step between two reports, where nothing but steps was done in between."""
    parts: list[dict[float, int]] = [{}]
    for event in metrics.events:
        if isinstance(event, Step):
            parts[-1][event.time] = event.step  # the last one of a report
        elif not isinstance(event, RankTimes):
            parts.append({})
    return [
        (step, (at - before) / (step - first))
        for part in parts
        for (before, first), (at, step) in pairwise(part.items())
        if step > first
    ]
