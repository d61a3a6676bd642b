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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from training.record.events import Evaluation, Measure, RankTimes, Step
from training.record.fields import number
from training.record.reader import RecordedRun, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each color in the light and in the dark theme. Figures are drawn in the light one; in the
# page every color becomes the CSS variable of its name, so that one drawing serves both.
# Hence no two light colors may be equal. Blue and orange stay apart for every kind of color vision.
COLORS: Final[Mapping[str, tuple[str, str]]] = {
    "page": ("#f6f7f9", "#0f1319"),
    "surface": ("#ffffff", "#171d26"),
    "line": ("#dde2e9", "#2b3442"),
    "ink": ("#1b2330", "#e7ebf1"),
    "muted": ("#586474", "#9ca8b8"),
    "blue": ("#1d5fa9", "#6fb1f6"),
    "orange": ("#bd540a", "#f4a261"),
    "navy": ("#173a66", "#4c8fdc"),
    "sky": ("#3a7fbf", "#a5d0fa"),
    "umber": ("#5a2a14", "#f3ead3"),
    "signal": ("#7a2fd0", "#d2694b"),
    "grey": ("#6b7785", "#8a96a6"),
}


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


def legend(axes: Axes) -> None:
    """One row above the axes, if anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.01),
            ncols=6,
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
Record = Step | RankTimes | Evaluation

MAX_POINTS: Final = 1500  # of a curve; more cannot be told apart on a screen
MAX_RANKS: Final = 16  # bars of the step time

MAX_MEASURES: Final = 8  # plots of what a run is judged by
OTHER: Final = "other"  # what is left of a step beside its parts
#: Colors of the parts of a step, in their order. Any two of them, and OTHER_COLOR, are at least 17
#: apart in CIE L*a*b* (2.3 is just noticeable), with each kind of color vision (Machado 2009).
PART_COLORS: Final = ("orange", "sky", "navy", "umber", "signal")
OTHER_COLOR: Final = "grey"


def draw(run: RecordedRun) -> list[Plot]:
    """The plots of what there is, in the order of the page."""
    drawn = [
        loss_plot(run),
        *(measure_plot(run, measure) for measure in run.measures[:MAX_MEASURES]),
        step_time_plot(run),
    ]
    return [plot for plot in drawn if plot is not None]


def loss_plot(run: RecordedRun) -> Plot | None:
    steps, losses = curve(run.steps, "step", "loss")
    eval_steps, eval_losses = curve(run.evaluations, "step", "loss")
    if not len(steps):
        return None
    every, last_step = math.ceil(len(steps) / MAX_POINTS), steps[-1]
    steps, losses = bucket_means(steps), bucket_means(losses)
    smoothed = smooth(losses)

    figure, axes = new_axes(980, 320)
    label = "each step" if every == 1 else f"{every}-step mean"
    axes.plot(steps, losses, color=light("blue"), alpha=0.35, linewidth=0.9, label=label)
    axes.plot(steps, smoothed, color=light("blue"), linewidth=2, label="smoothed")
    if len(eval_steps):
        axes.plot(
            eval_steps,
            eval_losses,
            color=light("orange"),
            marker="D" if len(eval_steps) <= 40 else "",
            markersize=4.5,
            linewidth=1.2,
            linestyle=(0, (3, 2)),
            label="evaluation",
        )
    # A few wild steps must not press the rest of the curve flat.
    shown = np.concatenate([smoothed, eval_losses, [np.percentile(losses, 99.5)]])
    low, high = float(min(shown.min(), losses.min())), float(shown.max())
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    _finish(axes, run, "step")
    text = f"Training loss {losses[0]:.3g} at first, {smoothed[-1]:.3g} (smoothed) at step "
    text += f"{last_step:,.0f}."
    if len(eval_losses):
        text += f" Evaluation loss {eval_losses[-1]:.4g} at the end"
        is_best = eval_losses[-1] == eval_losses.min()
        text += ", its best." if is_best else f", {eval_losses.min():.4g} at best."
    return finished("loss", "Loss", text, figure)


def measure_plot(run: RecordedRun, measure: Measure) -> Plot | None:
    """One of the figures by which the run is judged: accuracy, perplexity."""
    evaluations = run.evaluations
    if not measure.higher_is_better:
        # That of a model that knows nothing would press the rest flat.
        evaluations = [each for each in evaluations if each.step != 0]
    places, values = curve(evaluations, run.clock, measure.name)
    if not len(values):
        return None
    figure, axes = new_axes(468, 280)
    line(axes, places, values)
    # Of equal ones the last: if that is the end of the run, the text says so.
    backwards = values[::-1] if measure.higher_is_better else -values[::-1]
    best = len(values) - 1 - int(backwards.argmax())
    axes.plot(
        places[best],
        values[best],
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgecolor=light("orange"),
        markeredgewidth=1.6,
        linestyle="none",
        label="best",
    )
    axes.set_ylabel(measure.unit)
    if measure.form == "percent":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    axes.margins(y=0.12)
    _finish(axes, run, run.clock)
    text = f"{measure.words(values[-1])} after the last {run.clock}"
    if values[best] == values[-1]:
        text += ", the best."
    else:
        text += f"; best {measure.words(values[best])} after {run.clock} {places[best]:,.0f}."
    return finished(measure.name, measure.title, text, figure)


def step_time_plot(run: RecordedRun) -> Plot | None:
    """Bars per rank, one part of a step behind the other; the slowest rank sets the pace."""
    ranks = run.ranks
    epochs = {number(each.epoch) for each in ranks}
    if not ranks:
        return None
    stretch = "epoch" if run.clock == "epoch" else "stretch between evaluations"
    text = f"Mean per rank over the only {stretch}."
    if len(epochs) > 1:  # the first one pays for warming up
        first = min(epoch or 0 for epoch in epochs)
        ranks = [each for each in ranks if number(each.epoch) != first]
        text = f"Mean per rank without the first {stretch}."

    own: dict[int, list[RankTimes]] = {}
    for each in ranks:
        own.setdefault(each.rank, []).append(each)
    totals = {rank: 1e3 * mean(each.step_time_s for each in one) for rank, one in own.items()}
    text += f" Slowest {max(totals.values()):,.0f} ms."
    talking = 1e3 * mean(each.communication_s for each in ranks)
    if talking:
        text += f" Collectives were at work for {talking:,.0f} ms of it, much of that beside "
        text += "forward and backward (one profiled step of each stretch)."
    shown = sorted(sorted(own, key=lambda rank: -totals[rank])[:MAX_RANKS])
    if len(shown) < len(own):
        text += f" The {MAX_RANKS} slowest of {len(own)} ranks."

    figure, axes = new_axes(468, max(280, 70 + 26 * len(shown)))
    rows, left = np.arange(len(shown)), np.zeros(len(shown))
    parts = dict.fromkeys(part for each in ranks for part in each.phases if part != OTHER)
    for part, color in zip(parts, itertools.cycle(PART_COLORS), strict=False):
        means = [1e3 * mean(each.phases.get(part) for each in own[rank]) for rank in shown]
        axes.barh(rows, means, left=left, height=0.62, color=light(color), label=part)
        left = left + means
    others = np.maximum([totals[rank] - known for rank, known in zip(shown, left, strict=True)], 0)
    bars = axes.barh(rows, others, left=left, height=0.62, color=light(OTHER_COLOR), label=OTHER)
    axes.bar_label(bars, [f"{each:,.1f} ms" for each in left + others], padding=5)
    legend(axes)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.17)
    axes.set_yticks(rows, [f"rank {rank}" for rank in shown])
    axes.set_ylim(max(len(shown), 3) - 0.4, -0.6)  # keeps one bar from filling the figure
    axes.set_xlabel("ms per step")
    return finished("step_time", "Time per step", text, figure)


def line(axes: Axes, places: Floats, values: Floats) -> None:
    """Values that are joined, and marked where they are few."""
    marker = "o" if len(places) <= 40 else ""
    axes.plot(places, values, color=light("blue"), linewidth=2, marker=marker, markersize=4.5)
    if len(places) == 1:
        # Room around it; limits that are set would cut off the marks where it resumed.
        axes.update_datalim([(places[0] + side, values[0]) for side in (-1, 1)])


def _finish(axes: Axes, run: RecordedRun, clock: str) -> None:
    """Add what all curves have: marks where the run resumed, a legend, the name of their axis.

    Args:
        clock: ``step`` or ``epoch``, by which the curve counts.
    """
    marks: Any = [resume.step for resume in run.resumes]
    if clock != "step":
        steps, at = curve(run.evaluations, "step", clock)
        marks = np.interp(marks, np.r_[0, steps], np.r_[0, at])
    for i, mark in enumerate(marks):
        label = None if i else "resumed"
        style: Any = (0, (1, 2))
        axes.axvline(mark, color=light("muted"), linewidth=1.2, linestyle=style, label=label)
    legend(axes)
    axes.set_xlabel(clock)


def column(records: Iterable[Record], key: str) -> Floats:
    """One field, or one measure, of all records; NaN where it is missing or not finite."""
    return np.array([figure(record, key) for record in records], dtype=np.float64)


def curve(records: Sequence[Record], x: str, y: str) -> tuple[Floats, Floats]:
    """Two fields of the records that have both."""
    xs, ys = column(records, x), column(records, y)
    both = np.isfinite(xs) & np.isfinite(ys)
    return xs[both], ys[both]


def bucket_means(values: Floats) -> Floats:
    """Means of consecutive values, so that at most ``MAX_POINTS`` are left."""
    if len(values) <= MAX_POINTS:
        return values
    edges = np.linspace(0, len(values), MAX_POINTS + 1).astype(np.intp)
    sums = np.add.reduceat(values, edges[:-1])
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def smooth(values: Floats) -> Floats:
    """Centred weighted mean over about a twentieth of the curve."""
    if len(values) < 8:
        return values
    kernel = np.hanning(2 * max(1, len(values) // 40) + 3)
    # The divisor is what is left of the kernel at the two ends.
    weights = np.convolve(np.ones_like(values), kernel, "same")
    return np.asarray(np.convolve(values, kernel, "same") / weights, dtype=np.float64)


def mean(values: Iterable[float | None]) -> float:
    """Mean of the finite ones; 0 when there are none."""
    there = [value for value in map(number, values) if value is not None]
    return statistics.fmean(there) if there else 0.0
