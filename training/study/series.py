"""What a series of runs tells about scaling: times, efficiency, cost, and what holds it back.

Everything comes from the records of the runs. What they do not hold is None, and the table shows
"not measured". Standard library only: a laptop that submits the jobs computes the same.

Efficiency is that of the first, smallest run: with ``w`` workers an epoch that takes ``T`` seconds
costs ``w * T`` seconds of workers, which ideally stays what it is. What it grows by is lost, and
the part of a step in which most of that is lost is the bottleneck.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Self

from contract.errors import InputError
from contract.text import significant
from training.recipes import by_name
from training.recipes.recipe import Model
from training.record.events import Metrics, RankTimes, Step

#: An efficiency that leaves little to gain.
GOOD: Final = 0.95
MEASURED: Final = "measured"
COMPARED: Final = "by comparison with one worker"
NOT_MEASURED: Final = "not measured"
#: Parts of a step that compute; collectives run in them and beside them.
_COMPUTE: Final = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a series: seconds are means of a step without the first, slower ones."""

    run: str
    workers: int
    nodes: int | None = None
    """Worker nodes of its job; None for a run on one machine."""
    steps_per_epoch: float
    step_s: float
    """Of the slowest worker, which all others wait for."""
    phases: Mapping[str, float]
    """Seconds of each part of a step, mean over the workers."""
    communication_s: float | None
    """Seconds in which collectives were at work in one profiled step, beside computing or not; None
    where the recipe does not measure it."""
    items_per_s: float | None
    """Of all workers together."""
    items: str
    """What ``items_per_s`` counts."""
    usd_per_hour: float | None = None
    """Of all hosts at list prices; None: not known."""
    has_warm_up: bool = False
    """Whether the first, slower steps could not be left out."""

    @property
    def epoch_s(self) -> float:
        """Seconds of training in an epoch, without evaluation."""
        return self.step_s * self.steps_per_epoch

    @property
    def usd_per_epoch(self) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * self.epoch_s / 3600

    @property
    def worker_s(self) -> float:
        """Seconds of all workers together that an epoch takes."""
        return self.workers * self.epoch_s

    @classmethod
    def of(
        cls,
        metrics: Metrics,
        *,
        run: str,
        nodes: int | None = None,
        usd_per_hour: float | None = None,
    ) -> Self:
        """From the ``metrics.jsonl`` of a run that has ended.

        Raises:
            InputError: it has not reached its first evaluation, or trains on nothing.
        """
        found = [each for each in metrics.of(RankTimes) if each.epoch > 0 and each.step > 0]
        if not found:
            raise InputError(
                f"run {run} has no times of steps: it failed before its first evaluation, or its "
                "recipe trains nothing; look into its log, and choose another name for a new study"
            )
        steps_per_epoch = found[-1].step / found[-1].epoch
        first = min(each.step for each in found)
        later = [each for each in found if each.step != first]
        ranks = later or found
        by_rank: dict[int, list[RankTimes]] = {}
        for each in ranks:
            by_rank.setdefault(each.rank, []).append(each)
        step_s = max(_mean(each.step_time_s for each in own) for own in by_rank.values())
        # Several stretches leave the first one out; of a single one, its first report can be.
        settled = None if later else _after_first_report(metrics.of(Step))
        shrink = 1.0 if settled is None else min(1.0, settled / step_s)
        names = dict.fromkeys(name for each in ranks for name in each.phases)
        talking = [each.communication_s for each in ranks if each.communication_s is not None]
        rates = [_mean(each.items_per_s or 0.0 for each in own) for own in by_rank.values()]
        items = next((each.rate.items for each in ranks if each.rate is not None), "items")
        return cls(
            run=run,
            workers=len(by_rank),
            nodes=nodes,
            steps_per_epoch=steps_per_epoch,
            step_s=step_s * shrink,
            phases={
                name: shrink * _mean(each.phases.get(name, 0.0) for each in ranks) for name in names
            },
            # A worker by itself has no one to talk to.
            communication_s=0.0 if len(by_rank) == 1 else _mean(talking) if talking else None,
            items_per_s=sum(rates) / shrink if sum(rates) else None,
            items=items,
            usd_per_hour=usd_per_hour,
            has_warm_up=not later and settled is None,
        )


def _after_first_report(steps: Sequence[Step]) -> float | None:
    """Seconds of a step after those of the first report; None where there are too few reports."""
    reports: dict[float, int] = {}
    for each in steps:
        reports[each.time] = max(each.step, reports.get(each.time, 0))
    times = sorted(reports)
    if len(times) < 3:  # two are one stretch, which a moment's delay would decide
        return None
    return (times[-1] - times[0]) / (reports[times[-1]] - reports[times[0]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Where the time of a step goes, in seconds; what is None is part of ``compute``."""

    data: float
    compute: float
    communication: float | None
    """Where ``source`` is ``measured``: at work, part of it beside ``compute`` and counted there
    too. Where it is by comparison: what a step waits for it."""
    other: float
    """Waiting for a save, for slower workers, and between the parts."""
    source: str
    """How ``communication`` is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Runs of the same training that differ in the number of workers only."""

    recipe: str
    points: tuple[Point, ...]
    """By number of workers."""
    network: str = ""
    """What the hosts were told to use, ``efa`` or ``tcp``; empty: nothing."""

    def __post_init__(self) -> None:
        if not self.points:
            raise InputError("a study needs at least one run")
        object.__setattr__(self, "points", tuple(sorted(self.points, key=lambda p: p.workers)))

    @property
    def base(self) -> Point:
        return self.points[0]

    def ideal_epoch_s(self, point: Point) -> float:
        """What an epoch would take if nothing were lost."""
        return self.base.worker_s / point.workers

    def efficiency(self, point: Point) -> float:
        """Ideal over real time, 1 for the base."""
        return self.base.worker_s / point.worker_s

    def split(self, point: Point) -> Split:
        """Where the time of a step of ``point`` goes."""
        data = point.phases.get("data", 0.0)
        computing = sum(point.phases.get(name, 0.0) for name in _COMPUTE)
        other = max(0.0, point.step_s - data - computing)
        if point.communication_s is not None:
            talking: float | None = point.communication_s
            return Split(
                data=data, compute=computing, communication=talking, other=other, source=MEASURED
            )
        waited = self._waited(point)
        return Split(
            data=data,
            compute=computing - (waited or 0.0),
            communication=waited,
            other=other,
            source=NOT_MEASURED if waited is None else COMPARED,
        )

    def _waited(self, point: Point) -> float | None:
        """Seconds that backward takes longer than for one worker and the same work.

        Forward has no collectives where the whole model is on every worker, and shows how much
        slower a worker computes here than by itself.
        """
        base = self.base
        if base.workers != 1 or not base.phases.get("forward") or "backward" not in point.phases:
            return None
        slower = point.phases.get("forward", 0.0) / base.phases["forward"]
        return max(0.0, point.phases["backward"] - slower * base.phases.get("backward", 0.0))

    def lost(self, point: Point) -> dict[str, float]:
        """By which part of a step an epoch of ``point`` loses how many seconds of workers against
        the base; a part that has gained has a negative number."""
        here, there = self.split(point), self.split(self.base)
        per_step = point.workers * point.steps_per_epoch
        base_steps = self.base.workers * self.base.steps_per_epoch
        found = {
            name: getattr(here, name) * per_step - getattr(there, name) * base_steps
            for name in ("data", "compute", "other")
        }
        talking = here.communication
        if here.source == COMPARED and talking is not None:
            found["communication"] = talking * per_step
        elif here.source == MEASURED and talking:
            # What computing seems to lose is waiting for what was at work meanwhile, up to that. Of
            # a whole model, backward alone waits: what slows forward as well is none of it.
            waits = [found["compute"], talking * per_step]
            if by_name(self.recipe).model is not Model.SHARDED:
                waited = self._waited(point)
                waits += [] if waited is None else [waited * per_step]
            waiting = max(0.0, min(waits))
            found["compute"] -= waiting
            found["communication"] = waiting
        return found

    def bottleneck(self) -> str:
        """One sentence: what holds the largest run back."""
        point = self.points[-1]
        share, part = max((s, name) for name, s in self._shares(point).items())
        longest = f"the largest part of a step is {_WORDS[part]} ({share:.0%})"
        if len(self.points) == 1:
            return f"One number of workers tells nothing about scaling; {longest}."
        efficiency = self.efficiency(point)
        sizes = f"from {self.base.workers} to {point.workers} workers"
        if efficiency > 1 / GOOD:
            return (
                f"The smallest run was slower than it should be: {sizes} the efficiency is "
                f"{significant(efficiency)}, more than ideal; look for what else its hosts did."
            )
        if efficiency >= GOOD:
            return (
                f"Nothing holds it back {sizes}: efficiency {significant(efficiency)}; {longest}."
            )
        lost = {name: seconds for name, seconds in self.lost(point).items() if seconds > 0}
        worst = max(lost, key=lambda name: lost[name])
        words = _WORDS[worst]
        if worst == "compute" and self.split(point).source == NOT_MEASURED:
            words = "computing and communication, which the record does not tell apart"
        return (
            f"The bottleneck {sizes} is {words}: efficiency is {significant(efficiency)}, and "
            f"{lost[worst] / sum(lost.values()):.0%} of the lost time is there."
        )

    def _shares(self, point: Point) -> dict[str, float]:
        split = self.split(point)
        parts = {"data": split.data, "compute": split.compute, "other": split.other}
        if split.source == COMPARED:
            parts["communication"] = split.communication or 0.0
        return {name: seconds / point.step_s for name, seconds in parts.items()}

    def to_json(self) -> dict[str, object]:
        """All figures: seconds, US dollars."""
        return {
            "recipe": self.recipe,
            "network": self.network,
            "bottleneck": self.bottleneck(),
            "points": [
                {
                    **asdict(each),
                    "epoch_s": each.epoch_s,
                    "ideal_epoch_s": self.ideal_epoch_s(each),
                    "efficiency": self.efficiency(each),
                    "usd_per_epoch": each.usd_per_epoch,
                    "split_s": asdict(self.split(each)),
                    "lost_worker_s_per_epoch": self.lost(each),
                }
                for each in self.points
            ],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows for people."""
        has_nodes = any(each.nodes is not None for each in self.points)
        heads = [*(["nodes"] if has_nodes else []), "workers", "step", "epoch", "efficiency"]
        heads += [f"{self.base.items}/s", "$/epoch", "data", "compute", "communication", "other"]
        rows = []
        for each in self.points:
            split = self.split(each)
            rate, usd = each.items_per_s, each.usd_per_epoch
            row = [str(each.nodes)] if has_nodes else []
            row += [
                str(each.workers),
                _ms(each.step_s),
                _seconds(each.epoch_s),
                significant(self.efficiency(each)),
                "not known" if rate is None else f"{rate:,.0f}",
                "not known" if usd is None else f"{usd:,.4f}",
                _ms(split.data),
                _ms(split.compute),
                _communication(split),
                _ms(split.other),
            ]
            rows.append(row)
        return heads, rows

    def notes(self) -> list[str]:
        """What has to be known to read the table, a sentence each."""
        found = []
        sources = {self.split(each).source for each in self.points[1:]}
        if MEASURED in sources:
            found.append(
                "communication: how long collectives were at work in one profiled step; what runs "
                "beside computing costs nothing, and is counted in both columns."
            )
        if COMPARED in sources:
            found.append(
                "communication (~): not measured, but what backward takes longer than for one "
                "worker, whose computing is taken to be as much slower as forward is."
            )
        if any(each.usd_per_hour is None for each in self.points):
            found.append("$/epoch: the price of these hosts is not known here.")
        if any(each.has_warm_up for each in self.points):
            found.append(
                "Runs of so few steps that the first, slower ones count: take more for a figure "
                "to rely on."
            )
        return found


_WORDS: Final = {
    "data": "reading data",
    "compute": "computing",
    "communication": "communication",
    "other": "waiting for saves and for slower workers",
}


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _ms(seconds: float) -> str:
    return f"{significant(seconds * 1e3)} ms"


def _seconds(seconds: float) -> str:
    return f"{significant(seconds)} s"


def _communication(split: Split) -> str:
    if split.communication is None:
        return NOT_MEASURED
    return f"{'~' if split.source == COMPARED else ''}{_ms(split.communication)}"


def command_of(recipe: str, settings: Sequence[str], *, steps: int | None) -> list[str]:
    """The words of one run's command: recipe and settings.

    Raises:
        InputError: the recipe trains nothing, or ``steps`` is no number of steps.
    """
    if by_name(recipe).model is Model.NONE:
        raise InputError(
            f"{recipe} trains nothing, so that there are no epochs to compare: choose another "
            f"recipe, or run {recipe} itself"
        )
    if steps is None:
        return [recipe, *settings]
    if steps < 1:
        raise InputError(f"--steps is {steps}: it must be at least 1")
    return [recipe, *settings, "--max-steps", str(steps)]


def text(series: Series) -> str:
    """Table, notes and bottleneck for people."""
    heads, rows = series.table()
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (heads, *rows)
    ]
    title = [f"network: {series.network}"] if series.network else []
    return "\n".join([*title, *lines, "", *series.notes(), series.bottleneck()])


def comparisons(series: Sequence[Series]) -> list[str]:
    """A sentence for each series after the first: how long an epoch takes in it, with the most
    workers that both have."""
    found = []
    first = series[0]
    for other in series[1:]:
        both = {each.workers for each in first.points} & {each.workers for each in other.points}
        if not both:
            continue
        here, there = (
            next(each for each in one.points if each.workers == max(both)) for one in (first, other)
        )
        found.append(
            f"With {max(both)} workers an epoch over {first.network} takes "
            f"{here.epoch_s / there.epoch_s:.0%} of the time that it takes over {other.network}."
        )
    return found
