"""The report of one run: a page that opens anywhere, and its plots as images.

Reads the record that a run leaves in its folder and writes ``report.html``, which needs no
network and no other file, and ``plots/*.png``. An unfinished run gets a report of what is there.
Needs NumPy and Matplotlib, but neither torch nor Ray. To watch a run live, read its
``metrics.jsonl`` instead: this file draws everything again each time.
"""

from __future__ import annotations

import base64
import binascii
import html
import io
import json
import math
import os
import re
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from contract.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    PLOTS_DIR,
    REPORT_FILE,
    RESULT_FILE,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]

CONFUSION: Final = "confusion_matrix"
MAX_POINTS: Final = 1500  # of a curve; more cannot be told apart on a screen
MAX_RANKS: Final = 16  # bars of the step time
MAX_CLASSES: Final = 40  # rows of the confusion matrix

# Each colour in the light and in the dark theme. Figures are drawn in the light one; in the
# page every colour becomes the CSS variable of its name, so that one drawing serves both.
# Hence no two light colours may be equal. Blue and orange stay apart for every kind of colour
# vision, and nothing below is told by colour alone.
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "page": ("#f6f7f9", "#0f1319"),
    "surface": ("#ffffff", "#171d26"),
    "line": ("#dde2e9", "#2b3442"),
    "ink": ("#1b2330", "#e7ebf1"),
    "muted": ("#586474", "#9ca8b8"),
    "blue": ("#1d5fa9", "#6fb1f6"),
    "orange": ("#bd540a", "#f4a261"),
    "navy": ("#173a66", "#4c8fdc"),
    "sky": ("#3a7fbf", "#a5d0fa"),
    "rose": ("#a8446f", "#e89ab8"),
    "green": ("#2f7d5b", "#7fcfa9"),
    "grey": ("#6b7785", "#8a96a6"),
}
# The parts of a step, in the order in which they happen.
PARTS: Final = {
    "data": "orange",
    "forward": "sky",
    "backward": "navy",
    "optimizer": "rose",
    "checkpoint": "green",
}


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` and ``plots/*.png`` into ``run_dir`` and return the page's path.

    The same record gives the same bytes. Files are replaced whole, so a reader never sees half
    of one. Matplotlib's settings are changed while this runs: not for use while another thread
    draws.

    Raises:
        ValueError: ``run_dir`` is not a folder, or holds nothing of a run's record.
        OSError: A file cannot be read or written.
    """
    with _place_for_matplotlib():
        return _write(run_dir)


@contextmanager
def _place_for_matplotlib() -> Iterator[None]:
    """Matplotlib keeps its list of fonts in the home folder, and complains where it cannot."""
    home = Path.home()
    place = next(folder for folder in (home / ".config", home, Path("/")) if folder.is_dir())
    if "MPLCONFIGDIR" in os.environ or "XDG_CONFIG_HOME" in os.environ or os.access(place, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="matplotlib-") as folder:
        os.environ["MPLCONFIGDIR"] = folder
        yield


def _write(run_dir: Path) -> Path:
    import matplotlib

    run = load_run(run_dir)
    with matplotlib.rc_context(_style()):
        plots = draw(run)
        drawings = {plot.name: _svg(plot) for plot in plots if plot.figure}
        # The curve of the loss spans the page; a phone gets it in another shape.
        narrow = loss_plot(run, width=468, height=280, name="loss-narrow")
        if narrow.figure:
            drawings["loss"] = (
                f'<div class="wide">{drawings["loss"]}</div>'
                f'<div class="narrow">{_svg(narrow)}</div>'
            )
        (run_dir / PLOTS_DIR).mkdir(exist_ok=True)
        for plot in plots:
            if plot.figure:
                _replace(run_dir / PLOTS_DIR / f"{plot.name}.png", _png(plot))
    path = run_dir / REPORT_FILE
    _replace(path, page(run, plots, drawings).encode("utf-8", "replace"))
    return path


# ---- load ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run's folder says. Mappings are empty, and lists short, while a run goes on."""

    name: str
    config: Record
    environment: Record
    result: Record
    evaluation: Record
    """Confusion matrix and samples of the last evaluation."""
    steps: Sequence[Record]
    ranks: Sequence[Record]
    evaluations: Sequence[Record]
    resumes: Sequence[Record]
    texts: Sequence[Record]
    """What a language model made of some prompts, before and after training."""
    notes: Sequence[str]
    """What could not be read, a sentence each."""

    @property
    def clock(self) -> str:
        """What evaluations are counted by: epochs, or steps where some lie within an epoch."""
        epochs = column(self.evaluations, "epoch")
        return "epoch" if bool(np.all(epochs == np.floor(epochs))) else "step"

    @property
    def is_language(self) -> bool:
        """Whether this is a language model's run."""
        return self.config.get("recipe") == "fsdp" or any(
            "perplexity" in record for record in self.evaluations
        )

    @property
    def things(self) -> str:
        """What the recipe counts per second."""
        records = [self.result, *self.evaluations, *self.ranks]
        return "tokens" if any("tokens_per_s" in record for record in records) else "images"

    def rates(self, records: Iterable[Record]) -> Floats:
        return column(records, f"{self.things}_per_s")

    def last(self, key: str) -> float | None:
        """The result's value, or the last evaluation's while there is none."""
        for record in (self.result, *reversed(self.evaluations)):
            value = number(record.get(key))
            if value is not None:
                return value
        return None

    @property
    def gpus(self) -> str:
        """Names of the GPUs, empty without one.

        A cluster's head, which describes the environment, may have none where its workers do:
        what the result says of the workers comes first.
        """
        device, gpus = self.result.get("device"), self.environment.get("gpus")
        if device and device != "CPU":
            return str(device)
        return _listed(gpus) if isinstance(gpus, list) and not device else ""


def load_run(run_dir: Path) -> Run:
    """Read the record in ``run_dir``; a missing or damaged file counts as empty.

    Raises:
        ValueError: ``run_dir`` is not a folder, or holds nothing of a run's record.
    """
    files = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, EVALUATION_FILE, RESULT_FILE)
    if not run_dir.is_dir():
        raise InputError(f"{run_dir} is not a folder: give the folder of a run")
    if not any((run_dir / name).is_file() for name in files):
        raise InputError(
            f"{run_dir} is not the folder of a run: it has none of {', '.join(files)}; "
            "give the folder that --storage and the run's name lead to"
        )
    notes: list[str] = []
    config, environment, evaluation, result = (
        _read_json(run_dir / name, notes)
        for name in (CONFIG_FILE, ENVIRONMENT_FILE, EVALUATION_FILE, RESULT_FILE)
    )
    metrics = _read_metrics(run_dir / METRICS_FILE, notes)
    return Run(
        name=str(config.get("run") or run_dir.resolve().name),
        config=config,
        environment=environment,
        result=result,
        evaluation=evaluation,
        steps=metrics["step"],
        ranks=metrics["rank"],
        evaluations=metrics["evaluation"],
        resumes=metrics["resume"],
        texts=metrics["sample"],
        notes=notes,
    )


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        notes.append(f"{path.name} could not be read: {error}.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} was left out: it holds no JSON object.")
        return {}
    return value


def _read_metrics(path: Path, notes: list[str]) -> dict[str, list[Record]]:
    """The records by type, without the steps that a resume did again."""
    kinds = ("step", "rank", "evaluation", "resume", "sample")
    records: dict[str, list[Record]] = {kind: [] for kind in kinds}
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    num_damaged = 0
    for i, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            kind, step = record.get("type"), number(record.get("step"))
        except (ValueError, AttributeError):
            # The last line may still be being written.
            num_damaged += bool(line.strip()) and i < len(lines)
            continue
        if kind not in kinds or step is None:
            continue
        if kind == "resume":
            for known in records:
                records[known] = [r for r in records[known] if r["step"] <= step]
        records[kind].append(record)
    if num_damaged:
        notes.append(f"{path.name}: {num_damaged} damaged lines were left out.")
    return records


def number(value: object) -> float | None:
    """``value`` as a float, or None when it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def column(records: Iterable[Record], key: str) -> Floats:
    """One field of all records, NaN where it is missing or not finite."""
    values = (number(record.get(key)) for record in records)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def curve(records: Sequence[Record], x: str, y: str) -> tuple[Floats, Floats]:
    """Two fields of the records that have both."""
    xs, ys = column(records, x), column(records, y)
    both = np.isfinite(xs) & np.isfinite(ys)
    return xs[both], ys[both]


def bucket_means(values: Floats, num_buckets: int = MAX_POINTS) -> Floats:
    """Means of consecutive values, so that at most ``num_buckets`` are left."""
    if len(values) <= num_buckets:
        return values
    edges = np.linspace(0, len(values), num_buckets + 1).astype(np.intp)
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


# ---- figures ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A figure with its words."""

    name: str
    """File name of the image, without its ending."""
    title: str
    text: str
    """What the figure shows; or, without a figure, why there is none."""
    figure: Figure | None = None


def draw(run: Run) -> list[Plot]:
    """All plots in the order of the page."""
    return [
        loss_plot(run),
        accuracy_plot(run),
        throughput_plot(run),
        learning_rate_plot(run),
        step_time_plot(run),
        *([] if run.is_language else [confusion_plot(run)]),
    ]


def loss_plot(run: Run, *, width: int = 980, height: int = 320, name: str = "loss") -> Plot:
    title = "Loss"
    steps, losses = curve(run.steps, "step", "loss")
    eval_steps, eval_losses = curve(run.evaluations, "step", "loss")
    if not len(steps):
        return Plot(name=name, title=title, text=f"{METRICS_FILE} has no steps yet.")
    every, last_step = math.ceil(len(steps) / MAX_POINTS), steps[-1]
    steps, losses = bucket_means(steps), bucket_means(losses)
    smoothed = smooth(losses)

    figure, axes = _axes(width, height)
    label = "each step" if every == 1 else f"{every}-step mean"
    axes.plot(steps, losses, color=_light("blue"), alpha=0.35, linewidth=0.9, label=label)
    axes.plot(steps, smoothed, color=_light("blue"), linewidth=2, label="smoothed")
    if len(eval_steps):
        axes.plot(
            eval_steps,
            eval_losses,
            color=_light("orange"),
            marker="D" if len(eval_steps) <= 40 else "",
            markersize=4.5,
            linewidth=1.2,
            linestyle=(0, (3, 2)),
            label="evaluation",
        )
    _mark_resumes(axes, [resume["step"] for resume in run.resumes])
    _legend(axes)
    axes.set_xlabel("step")
    # A few wild steps must not press the rest of the curve flat.
    shown = np.concatenate([smoothed, eval_losses, [np.percentile(losses, 99.5)]])
    low, high = float(min(shown.min(), losses.min())), float(shown.max())
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    text = f"Training loss {losses[0]:.3g} at first, {smoothed[-1]:.3g} (smoothed) at step "
    text += f"{last_step:,.0f}."
    if len(eval_losses):
        text += f" Evaluation loss {eval_losses[-1]:.4g} at the end"
        is_best = eval_losses[-1] == eval_losses.min()
        text += ", its best." if is_best else f", {eval_losses.min():.4g} at best."
    return Plot(name=name, title=title, text=text, figure=figure)


def accuracy_plot(run: Run) -> Plot:
    """Accuracy per epoch, or perplexity where a recipe has that instead."""
    epochs, values = curve(run.evaluations, run.clock, "accuracy")
    name, low_is_good = "accuracy", False
    if not len(values):
        # That of a model that knows nothing would press the rest flat.
        later = [record for record in run.evaluations if number(record.get("epoch")) != 0]
        by_perplexity = curve(later, run.clock, "perplexity")
        if not len(by_perplexity[1]):
            name = "perplexity" if run.is_language else "accuracy"
            text = f"{METRICS_FILE} has no {name} yet."
            return Plot(name=name, title=name.capitalize(), text=text)
        (epochs, values), name, low_is_good = by_perplexity, "perplexity", True

    figure, axes = _axes(468, 280)
    _epoch_line(axes, run, epochs, values)
    best = int(values.argmin() if low_is_good else values.argmax())
    axes.plot(
        epochs[best],
        values[best],
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgecolor=_light("orange"),
        markeredgewidth=1.6,
        linestyle="none",
        label="best",
    )
    _legend(axes)
    if name == "accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    axes.margins(y=0.12)
    words = _percent if name == "accuracy" else _significant
    text = f"{words(values[-1])} after the last {run.clock}"
    if values[best] == values[-1]:
        text += ", the best."
    else:
        text += f"; best {words(values[best])} after {run.clock} {epochs[best]:,.0f}."
    return Plot(name=name, title=name.capitalize(), text=text, figure=figure)


def throughput_plot(run: Run) -> Plot:
    name, title = "throughput", "Throughput"
    epochs, rates = curve(run.evaluations, run.clock, f"{run.things}_per_s")
    if not len(rates):
        text = f"{METRICS_FILE} has no {run.things} per second yet."
        return Plot(name=name, title=title, text=text)
    figure, axes = _axes(468, 280)
    _epoch_line(axes, run, epochs, rates)
    axes.fill_between(epochs, rates, color=_light("blue"), alpha=0.1, linewidth=0)
    _legend(axes)
    axes.set_ylim(0, 1.12 * float(rates.max()) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: _compact(value))
    settled = rates[1:] if len(rates) > 1 else rates
    text = f"{_compact(float(settled.mean()))} {run.things}/s over all workers"
    stretch = "epoch" if run.clock == "epoch" else "stretch"
    text += f", mean without the first {stretch}." if len(rates) > 1 else f" in the only {stretch}."
    return Plot(name=name, title=title, text=text, figure=figure)


def learning_rate_plot(run: Run) -> Plot:
    name, title = "learning_rate", "Learning rate"
    steps, rates = curve(run.steps, "step", "lr")
    if not len(rates):
        return Plot(name=name, title=title, text=f"{METRICS_FILE} has no learning rate yet.")
    peak = int(rates.argmax())
    text = f"Highest {rates[peak]:.3g} at step {steps[peak]:,.0f}; {rates[-1]:.3g} at the last."
    steps, rates = bucket_means(steps), bucket_means(rates)
    figure, axes = _axes(468, 280, left=66)
    axes.plot(steps, rates, color=_light("blue"), linewidth=2)
    _mark_resumes(axes, [resume["step"] for resume in run.resumes])
    _legend(axes)
    axes.set_xlabel("step")
    axes.set_ylim(0, 1.12 * float(rates.max()) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    return Plot(name=name, title=title, text=text, figure=figure)


def step_time_plot(run: Run) -> Plot:
    """Bars per rank, one part of a step behind the other; the slowest rank sets the pace."""
    name, title = "step_time", "Time per step"
    ranks = [r for r in run.ranks if number(r.get("rank")) is not None]
    epochs = {number(r.get("epoch")) for r in ranks}
    if not ranks:
        return Plot(name=name, title=title, text=f"{METRICS_FILE} has no times per rank yet.")
    stretch = "epoch" if run.clock == "epoch" else "stretch between evaluations"
    text = f"Mean per rank over the only {stretch}."
    if len(epochs) > 1:  # the first one pays for warming up
        first = min(epoch or 0 for epoch in epochs)
        ranks = [r for r in ranks if number(r.get("epoch")) != first]
        text = f"Mean per rank without the first {stretch}."

    bars: list[tuple[int, dict[str, float], float]] = []  # rank, ms per part, ms altogether
    for rank in sorted({int(r["rank"]) for r in ranks}):
        own = [r for r in ranks if r["rank"] == rank]
        parts = {part: _mean(column(own, f"{part}_s")) * 1e3 for part in PARTS}
        total = max(_mean(column(own, "step_time_s")) * 1e3, sum(parts.values()))
        bars.append((rank, {**parts, "other": total - sum(parts.values())}, total))
    text += f" Slowest {max(bar[2] for bar in bars):,.0f} ms."
    talking = _mean(column(ranks, "communication_s")) * 1e3
    if talking:
        text += f" Collectives were at work for {talking:,.0f} ms of it, much of that beside "
        text += "forward and backward (one profiled step of each stretch)."
    if len(bars) > MAX_RANKS:
        text += f" The {MAX_RANKS} slowest of {len(bars)} ranks."
        bars = sorted(sorted(bars, key=lambda bar: -bar[2])[:MAX_RANKS])

    longest = max(bar[2] for bar in bars) or 1.0
    figure, axes = _axes(468, max(280, 70 + 26 * len(bars)))
    for part, colour in {**PARTS, "other": "grey"}.items():
        for i, (_, parts, total) in enumerate(bars):
            left = sum(list(parts.values())[: list(parts).index(part)])
            named = not i and (part in PARTS or max(bar[1][part] for bar in bars) > 0.01 * longest)
            axes.barh(
                i,
                parts[part],
                left=left,
                height=0.62,
                color=_light(colour),
                edgecolor=_light("surface"),
                linewidth=1,
                label=part if named else None,
            )
            if parts[part] > 0.11 * longest:
                where = (left + parts[part] / 2, i)
                axes.text(*where, _ms(parts[part]), color=_light("surface"), **_CENTRED)
            if part == "other":
                axes.text(total + 0.015 * longest, i, f"{_ms(total)} ms", va="center")
    _legend(axes)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(bars)), [f"rank {bar[0]}" for bar in bars])
    spare = max(0, 3 - len(bars)) / 2  # keeps one bar from filling the figure
    axes.set_ylim(len(bars) - 0.4 + spare, -0.6 - spare)
    axes.set_xlim(0, 1.17 * longest)
    axes.set_xlabel("ms per step")
    return Plot(name=name, title=title, text=text, figure=figure)


def confusion_plot(run: Run) -> Plot:
    name, title = CONFUSION, "Confusion matrix"
    names, counts = confusion(run)
    if not names:
        return Plot(name=name, title=title, text=f"{EVALUATION_FILE} has no confusion matrix yet.")
    if len(names) > MAX_CLASSES:
        return Plot(name=name, title=title, text=f"{len(names)} classes are too many to draw.")
    figure, axes = _axes(468, 468, left=88, right=6, top=6, bottom=88)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    from matplotlib.patches import Rectangle

    for (row, col), count in np.ndenumerate(counts):
        # The square root keeps rare mistakes visible.
        alpha = math.sqrt(shares[row, col])
        colour = _light("blue" if row == col else "orange")
        corner = (float(col) - 0.5, float(row) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, alpha=alpha, linewidth=0))
        if count and len(names) <= 20:
            ink = _light("surface" if alpha > 0.6 else "ink")
            axes.text(col, row, f"{count:.0f}", color=ink, fontsize=10, **_CENTRED)
    short = [label if len(label) <= 13 else label[:12] + "…" for label in names]
    ticks = range(len(names))
    axes.set_xticks(ticks, short, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(ticks, short)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    text = f"{np.trace(counts):,.0f} of {counts.sum():,.0f} right. Each row is a true class, each "
    text += "shade the square root of the share of its row: rare mistakes show."
    return Plot(name=name, title=title, text=text, figure=figure)


def confusion(run: Run) -> tuple[list[str], Floats]:
    """Names of the classes and the counts, shape (true, predicted); empty if not there."""
    names, rows = run.evaluation.get("class_names"), run.evaluation.get("confusion_matrix")
    try:
        counts = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        return [], np.zeros((0, 0))
    if not isinstance(names, list) or not names or counts.shape != (len(names), len(names)):
        return [], np.zeros((0, 0))
    return [str(name) for name in names], np.nan_to_num(counts)


_CENTRED: Final[Any] = {"ha": "center", "va": "center"}


def _light(colour: str) -> str:
    return COLOURS[colour][0]


def _style() -> Any:  # Matplotlib types its settings by a literal of all their names
    return {
        "font.size": 11,
        "text.color": _light("ink"),
        "text.parse_math": False,  # a class may be called "$x"
        "axes.edgecolor": _light("line"),
        "axes.labelcolor": _light("muted"),
        "axes.labelsize": 11,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": _light("line"),
        "grid.linewidth": 0.8,
        "xtick.color": _light("line"),
        "xtick.labelcolor": _light("muted"),
        "ytick.color": _light("line"),
        "ytick.labelcolor": _light("muted"),
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 11,
        "svg.fonttype": "none",
    }


def _axes(
    width: int, height: int, *, left: int = 54, right: int = 12, top: int = 28, bottom: int = 42
) -> tuple[Figure, Axes]:
    """A figure with one set of axes; sizes and margins in CSS pixels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A point of Matplotlib is a unit of the SVG, and that is a pixel of the page.
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    inner = (width - left - right) / width, (height - top - bottom) / height
    axes = figure.add_axes((left / width, bottom / height, *inner))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(5, width // 100), integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(x=0.02)
    return figure, axes


def _epoch_line(axes: Axes, run: Run, epochs: Floats, values: Floats) -> None:
    marker = "o" if len(epochs) <= 40 else ""
    axes.plot(epochs, values, color=_light("blue"), linewidth=2, marker=marker, markersize=4.5)
    axes.set_xlabel(run.clock)
    if len(epochs) == 1:
        axes.set_xlim(epochs[0] - 1, epochs[0] + 1)
    steps, at = curve(run.evaluations, "step", run.clock)
    if len(steps):
        resumed = [resume["step"] for resume in run.resumes]
        marks = np.interp(resumed, np.r_[0, steps], np.r_[0, at])
        _mark_resumes(axes, [mark for mark in marks.tolist() if mark >= epochs[0]])


def _mark_resumes(axes: Axes, places: Sequence[float]) -> None:
    for i, place in enumerate(places):
        label = None if i else "resumed"
        style: Any = (0, (1, 2))
        axes.axvline(place, color=_light("muted"), linewidth=1.2, linestyle=style, label=label)


def _legend(axes: Axes) -> None:
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


def _svg(plot: Plot) -> str:
    """The figure as an ``<svg>`` element whose colours follow the page's theme."""
    import matplotlib

    assert plot.figure
    # Names of shapes are hashes of this and the shape: the same in every run of the program,
    # and not the same in two figures of one page.
    matplotlib.rcParams["svg.hashsalt"] = plot.name
    file = io.StringIO()
    plot.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box
    body = text[text.index(">", box.end()) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"<!--.*?-->|\n\s*", "", body, flags=re.DOTALL)
    variables = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    body = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda match: variables[match[0]], body)
    label = html.escape(f"{plot.title}. {plot.text}")
    return f'<svg {box[0]} role="img" aria-label="{label}">{body}'


def _png(plot: Plot) -> bytes:
    """The figure with its title as an image of 150 dpi. Changes the figure: draw the SVG first."""
    assert plot.figure
    width, height = plot.figure.get_size_inches()
    room = 0.4  # inches above, for the title
    plot.figure.set_size_inches(width, height + room)
    shrink = height / (height + room)
    for axes in plot.figure.axes:
        place = axes.get_position()
        axes.set_position((place.x0, place.y0 * shrink, place.width, place.height * shrink))
    plot.figure.text(
        0.2 / width, 1 - 0.26 / (height + room), plot.title, fontsize=14, weight="bold", va="center"
    )
    file = io.BytesIO()
    plot.figure.savefig(file, format="png", dpi=150, facecolor=_light("surface"))
    return file.getvalue()


# ---- page ---------------------------------------------------------------------------------


def page(run: Run, plots: Sequence[Plot], drawings: Mapping[str, str]) -> str:
    """The whole document. Every string of the record goes through ``html.escape``."""
    loss, *rest = (_card(p, drawings.get(p.name)) for p in plots if p.name != CONFUSION)
    matrix = "".join(_card(p, drawings.get(p.name)) for p in plots if p.name == CONFUSION)
    name = html.escape(run.name)
    # No script and no fetch: the browser refuses both, whatever the record holds.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: training report</title>
<style>{_css()}</style>
</head>
<body>
<main>
{_header(run)}
{_key_figures(run)}
<section aria-labelledby="training">
<h2 id="training">Training</h2>
<div class="grid"><div class="all">{loss}</div>{"".join(rest)}</div>
{_resumes(run)}
{_epochs(run)}
</section>
<section aria-labelledby="evaluation">
<h2 id="evaluation">Evaluation</h2>
{_texts(run) if run.is_language else _images(run, matrix)}
</section>
<section aria-labelledby="record">
<h2 id="record">Record</h2>
<div class="grid">
{_settings("Configuration", run.config, CONFIG_FILE)}
{_settings("Environment", run.environment, ENVIRONMENT_FILE)}
</div>
</section>
{_footer(run)}
</main>
</body>
</html>
"""


def _header(run: Run) -> str:
    status = str(run.result.get("status") or "unfinished")
    mark = {"succeeded": "✓", "failed": "✗", "stopped": "■"}.get(status, "…")
    facts = [
        f"recipe {run.config.get('recipe', 'unknown')}",
        f"preset {run.config['preset']}" if run.config.get("preset") else "",
        f"started {_moment(run.environment['started_at'])}"
        if run.environment.get("started_at")
        else "",
    ]
    error = run.result.get("error")
    trouble = f'<pre class="error">{html.escape(str(error))}</pre>' if error else ""
    return f"""<header>
<p class="over">Training report</p>
<h1>{html.escape(run.name)}</h1>
<p class="facts"><span class="status {_status_class(status)}"><span aria-hidden="true">{mark}</span>
{html.escape(status)}</span> {html.escape(" · ".join(fact for fact in facts if fact))}</p>
{trouble}</header>"""


def _status_class(status: str) -> str:
    return "good" if status == "succeeded" else "bad" if status == "failed" else "open"


def _key_figures(run: Run) -> str:
    world_size = number(run.result.get("world_size")) or number(run.config.get("num_workers"))
    resumed_from = number(run.result.get("resumed_from"))
    if resumed_from is None and run.resumes:
        resumed_from = float(run.resumes[-1]["step"])
    figures = [
        ("Accuracy", run.last("accuracy"), _percent),
        ("Perplexity", run.last("perplexity"), _significant),
        ("Evaluation loss", run.last("loss"), _significant),
        (f"{run.things.capitalize()}/s", run.last(f"{run.things}_per_s"), _compact),
        ("Wall time", number(run.result.get("seconds")), duration),
        ("Workers", world_size, _compact),
        ("Resumed from", resumed_from, lambda step: f"step {step:,.0f}"),
        ("Preempted", number(run.result.get("preempted")) or None, _compact),
        ("Steps", number(run.result.get("steps")), _compact),
        ("Parameters", number(run.result.get("parameters")), _compact),
        ("Model FLOP/s used", number(run.result.get("mfu")), _percent),
        ("Memory per worker", run.last("memory_bytes"), lambda size: f"{size / 2**30:.3g} GiB"),
    ]
    tiles = [
        f"<div><dt>{label}</dt><dd>{html.escape(words(value))}</dd></div>"
        for label, value, words in figures
        if value is not None
    ]
    so_far = "" if run.result else _line(f"There is no {RESULT_FILE} yet: figures so far.")
    return f'<dl class="figures">{"".join(tiles)}</dl>{so_far}'


def _card(plot: Plot, drawing: str | None) -> str:
    if drawing is None:
        return _line(f"{plot.title}: left out. {plot.text}")
    return f"""<figure class="card"><figcaption><h3>{html.escape(plot.title)}</h3>
<p>{html.escape(plot.text)}</p></figcaption>
{drawing}</figure>
"""


def _resumes(run: Run) -> str:
    if not run.resumes:
        return ""
    items = []
    for resume in run.resumes:
        words = f"at step {resume['step']:,}"
        if "world_size" in resume:
            words += f" on {resume['world_size']} workers"
        if "checkpoint" in resume:
            words += f" from {resume['checkpoint']}"
        items.append(html.escape(words))
    return f'<p class="note"><strong>Resumed</strong> {"; ".join(items)}.</p>'


def _epochs(run: Run) -> str:
    """What the curves show, as numbers."""
    columns = [
        ("Epoch", "epoch", _significant),
        ("Step", "step", _compact),
        ("Training loss", "train_loss", _significant),
        ("Evaluation loss", "loss", _significant),
        ("Accuracy", "accuracy", _percent),
        ("Perplexity", "perplexity", _significant),
        (f"{run.things.capitalize()}/s", f"{run.things}_per_s", _compact),
        ("Elapsed", "seconds", duration),
    ]
    columns = [c for c in columns if any(number(e.get(c[1])) is not None for e in run.evaluations)]
    if not columns:
        return ""
    rows = []
    for record in run.evaluations:
        values = [(number(record.get(key)), words) for _, key, words in columns]
        rows.append(["-" if value is None else words(value) for value, words in values])
    table = _table([label for label, _, _ in columns], rows, "numbers")
    return f'<details class="card"><summary>Numbers per evaluation</summary>{table}</details>'


def _images(run: Run, matrix: str) -> str:
    return f'<div class="grid">{matrix}{_classes(run)}</div>\n{_samples(run)}'


def _texts(run: Run) -> str:
    """Held-out loss against that of the plainest model, and what the model makes of prompts."""
    loss, unigram = number(run.evaluation.get("loss")), number(run.evaluation.get("unigram_loss"))
    words = _line(f"Held-out loss: left out. {EVALUATION_FILE} has none yet.")
    if loss is not None and unigram is not None:
        verdict = "better" if loss < unigram else "not better"
        words = _line(
            f"Loss {loss:.4f} nats per token over {run.evaluation.get('num_tokens', 0):,} held-out "
            f"tokens: {verdict} than {unigram:.4f}, which the frequencies of the tokens alone give."
        )
    by_prompt: dict[str, list[Record]] = {}
    for record in run.texts:
        by_prompt.setdefault(str(record.get("prompt")), []).append(record)
    if not by_prompt:
        return words + _line("Samples: left out. No prompt was continued.")
    items = []
    for prompt, records in by_prompt.items():
        rows = "".join(
            f"<dt>{'before training' if not record['step'] else _after(record)}</dt>"
            f"<dd>{html.escape(prompt)}<b>{html.escape(str(record.get('text')))}</b></dd>"
            for record in records
        )
        items.append(f'<dl class="texts">{rows}</dl>')
    return f"""{words}<div class="card"><h3>Samples</h3>
<p>How held-out documents begin, and in bold how the model goes on: drawn, not chosen.</p>
{"".join(items)}</div>"""


def _after(record: Record) -> str:
    return f"after {record['step']:,.0f} steps"


def _classes(run: Run) -> str:
    names, counts = confusion(run)
    if not names:
        return ""
    rows = []
    for i in np.argsort(np.diag(counts) / np.maximum(counts.sum(axis=1), 1), kind="stable"):
        total, right = counts[i].sum(), counts[i, i]
        wrong = counts[i].copy()
        wrong[i] = 0
        worst = int(wrong.argmax())
        share = right / max(total, 1)
        taken_for = f"{names[worst]} ({wrong[worst]:.0f})" if wrong[worst] else "-"
        rows.append(
            f'<tr><th scope="row">{html.escape(names[i])}</th>'
            f'<td class="share"><span style="width:{100 * share:.1f}%"></span></td>'
            f"<td>{100 * share:.1f}%</td><td>{html.escape(taken_for)}</td></tr>"
        )
    return f"""<div class="card"><h3>Accuracy per class</h3>
<p>Hardest first, with the class it is most often taken for.</p>
<table class="classes"><thead><tr><th scope="col">Class</th>
<th scope="col" colspan="2">Accuracy</th><th scope="col">Taken for</th></tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>"""


class Sample(NamedTuple):
    """One evaluated image."""

    image: str  # data URI
    label: str
    prediction: str
    confidence: float | None
    right: bool


def samples(run: Run) -> list[Sample]:
    """The samples of ``evaluation.json`` that can be shown."""
    names, _ = confusion(run)
    found = []
    given = run.evaluation.get("samples")
    for record in given if isinstance(given, list) else []:
        try:
            label, prediction = int(record["label"]), int(record["prediction"])
            image = gray_png(
                base64.b64decode(record["pixels"], validate=True),
                int(record["height"]),
                int(record["width"]),
            )
        except (KeyError, TypeError, ValueError, binascii.Error):
            continue
        uri = "data:image/png;base64," + base64.b64encode(image).decode()
        words = [names[i] if 0 <= i < len(names) else str(i) for i in (label, prediction)]
        confidence = number(record.get("confidence"))
        found.append(Sample(uri, words[0], words[1], confidence, label == prediction))
    return found


def _samples(run: Run) -> str:
    found = samples(run)
    if not found:
        return _line(f"Sample predictions: left out. {EVALUATION_FILE} has no samples yet.")
    groups = []
    for right, title, mark in ((False, "Wrong", "✗"), (True, "Right", "✓")):
        items = []
        for sample in (sample for sample in found if sample.right == right):
            label, prediction = html.escape(sample.label), html.escape(sample.prediction)
            sure = "" if sample.confidence is None else f"{sample.confidence:.0%}"
            alt = f"Image of class {label}, predicted {prediction}"
            truth = "" if right else f'<span class="truth">is {label}</span>'
            items.append(
                f'<li class="{title.lower()}"><img src="{sample.image}" alt="{alt}">'
                f'<span class="mark" aria-hidden="true">{mark}</span>'
                f"<b>{prediction}</b>{truth}<small>{sure}</small></li>"
            )
        if items:
            groups.append(
                f'<h4>{title} <span>{len(items)}</span></h4><ul class="samples">'
                + "".join(items)
                + "</ul>"
            )
    return f"""<div class="card"><h3>Sample predictions</h3>
<p>The predicted class with its probability; where it is wrong, the true class below.</p>
{"".join(groups)}</div>"""


def gray_png(pixels: bytes, height: int, width: int) -> bytes:
    """A PNG of ``height * width`` grey values, one byte each.

    Raises:
        ValueError: The number of bytes is another.
    """
    if min(height, width) < 1 or len(pixels) != height * width:
        raise ValueError(f"{len(pixels)} bytes are no image of {height} x {width} grey values")

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, grey
    rows = b"".join(b"\0" + pixels[i : i + width] for i in range(0, len(pixels), width))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _settings(title: str, values: Record, file: str) -> str:
    if not values:
        return _line(f"{title}: left out. There is no {file} yet.")
    rows = [[key, value] for key, value in _flat(values)]
    table = _table(["Name", "Value"], rows, "settings")
    return f'<div class="card"><h3>{title}</h3>{table}</div>'


def _flat(values: Record, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted names and values as text, nested dictionaries unfolded."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", _listed(value) or "none"
        elif value is None or value == "":
            yield f"{prefix}{key}", "-"
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Sequence[object]) -> str:
    """Values as text, equal ones once; of a dictionary its name."""
    names = [str(v["name"]) if isinstance(v, dict) and "name" in v else str(v) for v in values]
    counts = Counter(names).items()
    return ", ".join(f"{count}x {name}" if count > 1 else name for name, count in counts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table whose first column heads its rows."""
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(text)}</td>" for text in others)
        + "</tr>"
        for first, *others in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _footer(run: Run) -> str:
    if run.gpus:
        words = f"Measured on GPUs: {run.gpus}."
    elif run.environment.get("cpu"):
        words = f"Measured on a CPU: {run.environment['cpu']}. No GPU took part."
    else:
        words = "The record does not say on what this was measured."
    words += f" {run.things.capitalize()}/s are those of all workers together; times per step are "
    words += "each rank's own means, the first stretch left out where there are more."
    return f"<footer>{_line(' '.join([words, *run.notes]))}</footer>"


def _line(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _significant(value: float) -> str:
    return f"{value:.4g}"


def _compact(value: float) -> str:
    """``950``, ``23,450`` or ``11.18 M``."""
    for size, unit in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _moment(value: object) -> str:
    """An ISO time to the minute, or the value itself when it is none."""
    try:
        return f"{datetime.fromisoformat(str(value)):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return str(value)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """``42.1 s``, ``3 min 5 s`` or ``2 h 7 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _mean(values: Floats) -> float:
    """Mean of what is there; 0 when nothing is."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else 0.0


def _css() -> str:
    light, dark = (
        ";".join(f"--{name}:{pair[theme]}" for name, pair in COLOURS.items()) for theme in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{_CSS}"
    )


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


_CSS: Final = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);-webkit-text-size-adjust:100%;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1100px;margin:0 auto;padding:40px 24px 32px}
h1,h2,h3,h4,p,dl,dd,figure,ul,table{margin:0;padding:0}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;font-weight:650;overflow-wrap:anywhere}
h2{font-size:20px;letter-spacing:-.01em;font-weight:620;margin:40px 0 14px}
h3{font-size:15px;font-weight:620}
h4{font-size:13px;font-weight:620;margin:18px 0 8px}
h4 span{color:var(--muted);font-weight:400}
.over{font-size:12px;font-weight:600;letter-spacing:.08em;text-transform:uppercase;
color:var(--muted);margin-bottom:6px}
.facts{color:var(--muted);margin-top:12px;overflow-wrap:anywhere}
.status{display:inline-block;margin-right:8px;padding:1px 11px 2px;border-radius:99px;
border:1px solid;font-size:13px;font-weight:600}
.good{color:var(--blue)}.bad{color:var(--surface);background:var(--orange)}
.open{color:var(--muted);border-style:dashed}
.error{margin:16px 0 0;padding:12px 16px;border-left:4px solid var(--orange);
background:var(--surface);border-radius:4px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.figures{display:flex;flex-wrap:wrap;gap:1px;
margin-top:28px;background:var(--line);border:1px solid var(--line);border-radius:12px;
overflow:hidden}
.figures div{flex:1 1 auto;background:var(--surface);padding:14px 18px;white-space:nowrap}
dt{font-size:12.5px;color:var(--muted)}
dd{font-size:22px;line-height:1.3;font-weight:620;letter-spacing:-.01em;
font-variant-numeric:tabular-nums}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px}
.all,.grid>.note{grid-column:1/-1}
.card{background:var(--surface);border:1px solid var(--line);border-radius:12px;
padding:18px 20px;min-width:0}
.card h3+p,.card>p{color:var(--muted);font-size:13px;margin:2px 0 10px}
svg{display:block;width:100%;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:inherit!important}
.narrow{display:none}
.note{color:var(--muted);font-size:13.5px;margin-top:12px;overflow-wrap:anywhere}
.note strong{color:var(--ink);font-weight:620}
details,section>.card{margin-top:18px}
summary{cursor:pointer;font-weight:620}
summary+div{margin-top:10px}
.scroll{overflow-x:auto}
table{width:100%;border-collapse:collapse;font-size:13.5px}
th,td{padding:6px 10px 6px 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
thead th{color:var(--muted);font-weight:500;font-size:12.5px}
tbody th{font-weight:500}
.numbers th,.numbers td{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.settings{table-layout:fixed;margin-top:6px}
.settings th{width:40%;font-weight:500;overflow-wrap:anywhere}
.settings td{overflow-wrap:anywhere;color:var(--ink);
font:12.5px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.settings tbody th{color:var(--muted)}
.classes td{font-variant-numeric:tabular-nums}
.classes .share{width:26%;vertical-align:middle}
.share span{display:block;height:7px;border-radius:4px;background:var(--blue)}
.samples{list-style:none;display:grid;gap:14px 12px;
grid-template-columns:repeat(auto-fill,minmax(92px,1fr))}
.samples li{position:relative;font-size:12.5px;line-height:1.35;overflow-wrap:anywhere}
.samples img{display:block;width:100%;aspect-ratio:1;object-fit:contain;margin-bottom:5px;
image-rendering:pixelated;background:#000;border-radius:6px;border:2px solid var(--line)}
.wrong img{border:3px dashed var(--orange)}
.mark{position:absolute;top:6px;right:6px;width:20px;height:20px;border-radius:50%;
text-align:center;font-size:12px;line-height:20px;font-weight:700;color:var(--surface);
background:var(--blue)}
.wrong .mark{background:var(--orange)}
.texts{margin-top:14px;padding-top:12px;border-top:1px solid var(--line)}
.texts dt{margin-top:6px}
.texts dd{font:13.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
white-space:pre-wrap;overflow-wrap:anywhere}
.texts dd b{color:var(--blue);font-weight:600}
.samples b{font-weight:600}
.samples small{display:block;color:var(--muted);font-size:12px}
.truth{display:block;color:var(--muted)}
footer{margin-top:36px;padding-top:6px;border-top:1px solid var(--line)}
@media (max-width:720px){
main{padding:24px 12px}
h1{font-size:27px}
.grid{grid-template-columns:minmax(0,1fr)}
.figures{margin-top:20px}
.figures div{flex-basis:40%;padding:11px 14px}
.card{padding:14px}
.wide{display:none}.narrow{display:block}
svg text{font-size:12.8px!important}
.samples{grid-template-columns:repeat(auto-fill,minmax(76px,1fr))}
}
@media print{.card{break-inside:avoid}main{max-width:none}}
"""
