"""Draws a study, and writes what it has found: a picture, and the figures as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from contract.errors import InputError
from training.record.plots import Plot, drawing, legend, light, new_axes, png
from training.study.series import Series

FIGURES_FILE: Final = "study.json"
PICTURE_FILE: Final = "study.png"
_COLORS: Final = ("blue", "orange", "signal", "umber")


def plot(series: Sequence[Series]) -> Plot:
    """Time per epoch over the number of workers, of each series beside its ideal; call it while
    ``drawing``."""
    figure, axes = new_axes(620, 380, left=66)
    for color, each in zip(_COLORS, series, strict=False):
        workers = [point.workers for point in each.points]
        name = each.network or "measured"
        axes.plot(
            workers,
            [point.epoch_s for point in each.points],
            color=light(color),
            linewidth=2,
            marker="o",
            label=name,
        )
        axes.plot(
            workers,
            [each.ideal_epoch_s(point) for point in each.points],
            color=light(color),
            linewidth=1.2,
            linestyle="--",
            label=f"{name}: ideal" if each.network else "ideal",
        )
    legend(axes)
    axes.set_xlabel("workers")
    axes.set_ylabel("seconds per epoch")
    axes.set_xticks(sorted({point.workers for each in series for point in each.points}))
    axes.set_ylim(bottom=0)
    title = f"{series[0].recipe}: time per epoch"
    return Plot(name="study", title=title, text=series[0].bottleneck(), figure=figure)


def write(series: Sequence[Series], folder: Path) -> list[Path]:
    """Write figures and picture into a folder.

    Returns:
        The files; without the picture where Matplotlib is not installed, as on a laptop that only
        submits jobs.

    Raises:
        InputError: the folder cannot be written.
    """
    figures, picture = folder / FIGURES_FILE, folder / PICTURE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures.write_text(json.dumps([each.to_json() for each in series], indent=1) + "\n")
        try:
            with drawing():
                picture.write_bytes(png(plot(series)))
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            return [figures]
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror or error}; give another --output"
        ) from None
    return [figures, picture]
