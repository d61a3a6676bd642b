"""The plots of a run's report, in the order of its page, as SVG.

Importing it is cheap: Matplotlib is loaded when something is drawn.
"""

from __future__ import annotations

import html
import io
import itertools
import logging
import math
import re
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from training.record.events import Evaluation, Measure, Metrics, RankTimes, Resume, Step
from training.record.fields import number
from training.record.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A drawing with its words."""

    name: str
    """Identifies it in the page."""
    title: str
    text: str
    """Description of the drawing."""
    svg: str
    """An ``<svg>`` element whose colors follow the page's theme."""


def finished(name: str, title: str, text: str, figure: Figure) -> Plot:
    """A figure drawn, with its words."""
    return Plot(name=name, title=title, text=text, svg=svg(name, f"{title}. {text}", figure))


@contextmanager
def drawing() -> Iterator[None]:
    """Everything inside is drawn in this project's style.

    Matplotlib's settings are changed meanwhile: not for use while another thread draws.
    """
    # It keeps its list of fonts in the home folder, and complains where it cannot.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    with matplotlib.rc_context(_style()):
        yield


def light(color: str) -> str:
    return COLORS[color][0]


def _style() -> Any:  # Matplotlib types its settings by a literal of all their names
    return {
        "font.size": 11,
        "text.color": light("ink"),
        "text.parse_math": False,  # a class may be called "$x"
        "axes.edgecolor": light("line"),
        "axes.labelcolor": light("muted"),
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": light("line"),
        "xtick.color": light("line"),
        "xtick.labelcolor": light("muted"),
        "ytick.color": light("line"),
        "ytick.labelcolor": light("muted"),
        "ytick.major.size": 0,
        "legend.frameon": False,
        "svg.fonttype": "none",
    }


def new_axes(width: int, height: int) -> tuple[Figure, Axes]:
    """A figure with one set of axes; sizes in CSS pixels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A point of Matplotlib is a unit of the SVG, and that is a pixel of the page.
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(5, width // 100), integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(x=0.02)
    return figure, axes


def legend(axes: Axes, *, in_a_row: int = 6) -> None:
    """Rows above the axes, if anything has a label. They take room from axes that are narrower."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.01),
            ncols=in_a_row,
            borderpad=0,
            borderaxespad=0.2,
            handlelength=1.4,
            handletextpad=0.5,
            columnspacing=1.6,
        )


def svg(name: str, label: str, figure: Figure) -> str:
    """The figure as an ``<svg>`` element whose colors follow the page's theme.

    Args:
        label: for those who hear the page.
    """
    import matplotlib

    # Names of shapes are hashes of this and the shape: the same in every run of the program,
    # and not the same in two figures of one page.
    matplotlib.rcParams["svg.hashsalt"] = name
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box
    body = text[text.index(">", box.end()) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"<!--.*?-->|\n\s*", "", body, flags=re.DOTALL)
    variables = {light: f"var(--{name})" for name, (light, _) in COLORS.items()}
    body = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda match: variables[match[0]], body)
    return f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">{body}'


Floats = npt.NDArray[np.float64]

MAX_POINTS: Final = 500  # of a curve: means of several steps, which also smooths it
MAX_RANKS: Final = 16  # bars of the step time

MAX_MEASURES: Final = 8  # plots of what a run is judged by
OTHER: Final = "other"  # what is left of a step beside its parts
#: Colors of the parts of a step, in their order. Any two of them, and OTHER_COLOR, are at least 17
#: apart in CIE L*a*b* (2.3 is just noticeable), with each kind of color vision (Machado 2009).
PART_COLORS: Final = ("orange", "sky", "navy", "umber", "signal")
OTHER_COLOR: Final = "grey"


def draw(metrics: Metrics) -> list[Plot]:
    """The plots of what there is, in the order of the page."""
    drawn = [
        loss_plot(metrics),
        *(measure_plot(metrics, measure) for measure in metrics.measures[:MAX_MEASURES]),
        step_time_plot(metrics.of(RankTimes)),
    ]
    return [plot for plot in drawn if plot is not None]


def loss_plot(metrics: Metrics) -> Plot | None:
    steps, losses = curve(metrics.of(Step), "loss")
    eval_steps, eval_losses = curve(metrics.evaluations, "loss")
    if not len(steps):
        return None
    every, last_step = math.ceil(len(steps) / MAX_POINTS), steps[-1]
    steps, losses = bucket_means(steps), bucket_means(losses)

    figure, axes = new_axes(980, 320)
    label = "each step" if every == 1 else f"{every}-step mean"
    axes.plot(steps, losses, color=light("blue"), linewidth=1.4, label=label)
    if len(eval_steps):
        line(axes, eval_steps, eval_losses, color="orange", label="evaluation")
    # A few wild steps must not press the rest of the curve flat.
    shown = np.concatenate([losses[-1:], eval_losses, [np.percentile(losses, 99.5)]])
    low, high = float(min(shown.min(), losses.min())), float(shown.max())
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    _finish(axes, metrics)
    text = f"Training loss {losses[0]:.3g} at first, {losses[-1]:.3g} at step {last_step:,.0f}."
    if len(eval_losses):
        text += f" Evaluation loss {eval_losses[-1]:.4f} at the end"
        is_best = eval_losses[-1] == eval_losses.min()
        text += ", its best." if is_best else f", {eval_losses.min():.4f} at best."
    return finished("loss", "Loss", text, figure)


def measure_plot(metrics: Metrics, measure: Measure) -> Plot | None:
    """One of the figures by which the run is judged: accuracy, perplexity."""
    evaluations = metrics.evaluations
    if not measure.higher_is_better:
        # That of a model that knows nothing would press the rest flat.
        evaluations = [each for each in evaluations if each.step != 0]
    steps, values = curve(evaluations, measure.name)
    if not len(values):
        return None
    figure, axes = new_axes(468, 280)
    line(axes, steps, values, color="blue")
    axes.set_ylabel(measure.unit)
    if measure.form == "percent":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    axes.margins(y=0.12)
    if measure.form == "percent":
        axes.set_ylim(top=min(1, axes.get_ylim()[1]))
    _finish(axes, metrics)
    # Of equal ones the last: if that is the end of the run, the text says so.
    backwards = values[::-1] if measure.higher_is_better else -values[::-1]
    best = len(values) - 1 - int(backwards.argmax())
    text = f"{measure.words(values[-1])} at the end"
    if values[best] == values[-1]:
        text += ", the best."
    else:
        text += f"; best {measure.words(values[best])} at step {steps[best]:,.0f}."
    return finished(measure.name, measure.title, text, figure)


class _Means(NamedTuple):
    """Mean times of a rank's steps, in milliseconds."""

    rank: int
    step: float
    parts: list[float]
    gpu: float
    """GPU utilization, 0 to 1."""


def _means(times: list[RankTimes], parts: Iterable[str]) -> list[_Means]:
    by_rank: dict[int, list[RankTimes]] = {}
    for each in times:
        by_rank.setdefault(each.rank, []).append(each)
    return [
        _Means(
            rank,
            1e3 * mean(each.step_time_s for each in own),
            [1e3 * mean(each.phases.get(part) for each in own) for part in parts],
            mean(each.gpu_utilization for each in own),
        )
        for rank, own in by_rank.items()
    ]


def step_time_plot(ranks: list[RankTimes]) -> Plot | None:
    """Bars per rank, one part of a step behind the other; the slowest rank sets the pace."""
    if not ranks:
        return None
    text = "Mean per rank."
    if later := [each for each in ranks if each.step != ranks[0].step]:
        ranks = later
        text = "Mean per rank after the first evaluation, which pays for warming up."

    # The slowest ranks, in the order of their numbers
    parts = dict.fromkeys(part for each in ranks for part in each.phases if part != OTHER)
    means = sorted(_means(ranks, parts), key=lambda each: -each.step)
    shown = sorted(means[:MAX_RANKS])
    text += f" Slowest {means[0].step:,.0f} ms."
    talking = 1e3 * mean(each.communication_s for each in ranks)
    if talking:
        text += f" {talking:,.0f} ms of it is in collectives, most of them behind forward and "
        text += "backward (one profiled step of each stretch)."
    if len(shown) < len(means):
        text += f" The {MAX_RANKS} slowest of {len(means)} ranks."

    # A bar of each, which consists of its parts and of what is left
    figure, axes = new_axes(468, max(280, 70 + 32 * len(shown)))
    rows, left = np.arange(len(shown)), np.zeros(len(shown))
    colors = itertools.cycle(PART_COLORS)
    for part, widths in zip(parts, np.transpose([each.parts for each in shown]), strict=True):
        axes.barh(rows, widths, left=left, height=0.62, color=light(next(colors)), label=part)
        left = left + widths
    others = np.maximum([each.step for each in shown] - left, 0)
    bars = axes.barh(rows, others, left=left, height=0.62, color=light(OTHER_COLOR), label=OTHER)
    axes.bar_label(bars, [f"{each:,.1f} ms" for each in left + others], padding=5)
    legend(axes, in_a_row=3)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.25 * means[0].step or 1)  # room for the numbers
    names = [f"rank {each.rank}" + f"\nGPU {each.gpu:.0%}" * (each.gpu > 0) for each in shown]
    axes.set_yticks(rows, names)
    axes.set_ylim(max(len(shown), 3) - 0.4, -0.6)  # keeps one bar from filling the figure
    axes.set_xlabel("ms per step")
    return finished("step_time", "Time per step", text, figure)


def line(
    axes: Axes, steps: Floats, values: Floats, *, color: str, label: str | None = None
) -> None:
    """Values that are joined, and marked where they are few."""
    marker = "o" if len(steps) <= 40 else ""
    axes.plot(
        steps, values, color=light(color), linewidth=2, marker=marker, markersize=4.5, label=label
    )
    if len(steps) == 1:
        # Room around it; limits that are set would cut off the marks where it resumed.
        axes.update_datalim([(steps[0] + side, values[0]) for side in (-1, 1)])


def _finish(axes: Axes, metrics: Metrics) -> None:
    """Add what all curves have: marks where the run resumed, a legend, the name of their axis."""
    for place, resume in enumerate(metrics.of(Resume)):
        label = None if place else "resumed"
        style: Any = (0, (1, 2))
        axes.axvline(resume.step, color=light("muted"), linewidth=1.2, linestyle=style, label=label)
    legend(axes)
    axes.set_xlabel("step")


def figure(record: Step | Evaluation, name: str) -> float | None:
    """A field of an event, or one of its measures, as a finite number."""
    if isinstance(record, Evaluation) and name in record.measures:
        return number(record.measures[name])
    return number(getattr(record, name, None))


def curve(records: Iterable[Step | Evaluation], name: str) -> tuple[Floats, Floats]:
    """Steps and figures of the records that have one."""
    found = [(each.step, value) for each in records if (value := figure(each, name)) is not None]
    steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def bucket_means(values: Floats) -> Floats:
    """Means of consecutive values, so that at most ``MAX_POINTS`` are left."""
    if len(values) <= MAX_POINTS:
        return values
    edges = np.linspace(0, len(values), MAX_POINTS + 1).astype(np.intp)
    sums = np.add.reduceat(values, edges[:-1])
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def mean(values: Iterable[float | None]) -> float:
    """Mean of the finite ones; 0 when there are none."""
    there = [value for value in map(number, values) if value is not None]
    return statistics.fmean(there) if there else 0.0
