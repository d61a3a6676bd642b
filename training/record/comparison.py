"""The page that compares runs: their figures, the settings that differ, and their curves.

Needs what ``training.record.page`` needs. ``trainctl compare`` makes the tables without it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from training.record import plots
from training.record.page import render
from training.record.plots import PART_COLORS, Plot, Record
from training.record.reader import read_run
from training.system import storage

Rows = Sequence[Sequence[str]]


def write_comparison(
    path: Path, folders: Mapping[str, Path], *, figures: Rows, settings: Rows
) -> None:
    """Write the page.

    Args:
        folders: records of the runs by name; no more than there are ``PART_COLORS``.
        figures: a label and a text for each run.
        settings: the same, of the settings that differ.

    Raises:
        InputError: a folder holds nothing of a run's record.
        OSError: the page cannot be written.
    """
    runs = {name: read_run(folder) for name, folder in folders.items()}
    steps = {name: run.steps for name, run in runs.items()}
    evaluations = {name: run.evaluations for name, run in runs.items()}
    measures = {each.name: each.title for run in runs.values() for each in run.measures}
    with plots.drawing():
        drawn = [
            _overlay("loss", "loss", "Training loss, smoothed", steps),
            _overlay("evaluation", "loss", "Evaluation loss", evaluations),
            *(_overlay(name, name, title, evaluations) for name, title in measures.items()),
            _overlay("throughput", "items_per_s", "Throughput", evaluations),
        ]
    page = render(
        "comparison.html.j2",
        names=[*runs],
        figures=figures,
        settings=settings,
        plots=[plot for plot in drawn if plot],
    )
    storage.write_bytes(str(path), page.encode("utf-8", "replace"))


def _overlay(
    name: str, field: str, title: str, records: Mapping[str, Sequence[Record]]
) -> Plot | None:
    """A field of every run's records in one set of axes, by steps; None where there is none."""
    figure, axes = plots.new_axes(980 if name == "loss" else 468, 280)
    last = []
    for (run, found), color in zip(records.items(), PART_COLORS, strict=False):
        steps, values = plots.curve(found, "step", field)
        if not len(steps):
            continue
        if name == "loss":
            steps, values = plots.bucket_means(steps), plots.smooth(plots.bucket_means(values))
        plots.line(axes, steps, values, color=color, label=run)
        last.append(f"{run} {values[-1]:.4g}")
    plots.legend(axes)
    axes.set_xlabel("step")
    text = f"At the end: {', '.join(last)}."
    return plots.finished(name, title, text, figure) if last else None
