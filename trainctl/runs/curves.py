"""Curves of a run from its record in the bucket, while it trains: ``trainctl top`` and ``ui``."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple

from contract.runs import METRICS_FILE, run_prefix
from contract.text import byte_size, percent, significant
from trainctl.aws.deployment_bucket import DeploymentBucket
from training.record.events import Metrics, RankTimes, Step, parse_metrics
from training.record.fields import number

Points = Sequence[tuple[int, float]]
"""Steps done, and a figure."""

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
#: Points of a line in a terminal, and on a page.
_WIDTH: Final = 24
_POINTS: Final = 300


class Curve(NamedTuple):
    """A figure over the steps of a run."""

    title: str
    form: Callable[[float], str]
    """A value in words."""
    lines: Mapping[str, Points]
    """By whose it is: a rank's, or the evaluation's. None is empty."""

    def now(self) -> dict[str, str]:
        """The last value of each line in words."""
        return {whose: self.form(points[-1][1]) for whose, points in self.lines.items()}

    def spark(self, whose: str) -> str:
        """A line in a line of text: ``▇▅▃▂▁``."""
        values = [value for _, value in _thinned(self.lines[whose], _WIDTH)]
        low, high = min(values), max(values)
        scale = (len(_BLOCKS) - 1) / ((high - low) or 1)
        return "".join(_BLOCKS[round((value - low) * scale)] for value in values)

    def shapes(self) -> list[str]:
        """Points of an SVG's lines, in a box of 300 times 90."""
        steps, values = zip(*(point for each in self.lines.values() for point in each), strict=True)
        left, top = min(steps), max(values)
        across, up = 300 / ((max(steps) - left) or 1), 90 / ((top - min(values)) or 1)
        return [
            " ".join(
                f"{(step - left) * across:.1f},{(top - value) * up:.1f}"
                for step, value in _thinned(points, _POINTS)
            )
            for points in self.lines.values()
        ]


def _thinned(points: Points, most: int) -> Points:
    """The last of each few points, so that at most so many are left."""
    return points[:: -math.ceil(len(points) / most)][::-1]


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
            self._curves, self._changed = curves_of(parse_metrics(content or b"")), changed
        return self._curves


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
    curves = [Curve("Loss", significant, losses)]
    for measure in metrics.measures:
        values = _known((each.step, each.measures.get(measure.name)) for each in evaluations)
        curves.append(Curve(measure.title, measure.words, {"": values}))
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
