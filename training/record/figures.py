"""How figures look, and how they become parts of a page (SVG) and files (PNG).

Importing it is cheap: Matplotlib and Pillow are loaded when something is drawn.
"""

from __future__ import annotations

import html
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each color in the light and in the dark theme. Figures are drawn in the light one; in the
# page every color becomes the CSS variable of its name, so that one drawing serves both.
# Hence no two light colors may be equal. Blue and orange, and the colors of the parts of a step,
# stay apart for every kind of color vision: tests/training/test_report.py computes it.
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
    """A figure with its words."""

    name: str
    """File name of the image, without its ending."""
    title: str
    text: str
    """What the figure shows; or, without a figure, why there is none."""
    figure: Figure | None = None


@contextmanager
def drawing() -> Iterator[None]:
    """Everything inside is drawn in this project's style.

    Matplotlib's settings are changed meanwhile: not for use while another thread draws.
    """
    with _place_for_matplotlib():
        import matplotlib

        with matplotlib.rc_context(_style()):
            yield


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


def light(color: str) -> str:
    return COLORS[color][0]


def _style() -> Any:  # Matplotlib types its settings by a literal of all their names
    return {
        "font.size": 11,
        "text.color": light("ink"),
        "text.parse_math": False,  # a class may be called "$x"
        "axes.edgecolor": light("line"),
        "axes.labelcolor": light("muted"),
        "axes.labelsize": 11,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": light("line"),
        "grid.linewidth": 0.8,
        "xtick.color": light("line"),
        "xtick.labelcolor": light("muted"),
        "ytick.color": light("line"),
        "ytick.labelcolor": light("muted"),
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 11,
        "svg.fonttype": "none",
    }


def new_axes(
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


def svg(plot: Plot) -> str:
    """The figure as an ``<svg>`` element whose colors follow the page's theme."""
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
    variables = {light: f"var(--{name})" for name, (light, _) in COLORS.items()}
    body = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda match: variables[match[0]], body)
    label = html.escape(f"{plot.title}. {plot.text}")
    return f'<svg {box[0]} role="img" aria-label="{label}">{body}'


def png(plot: Plot) -> bytes:
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
    plot.figure.savefig(file, format="png", dpi=150, facecolor=light("surface"))
    return file.getvalue()


def gray_png(pixels: bytes, height: int, width: int) -> bytes:
    """A PNG of ``height * width`` grey values, one byte each.

    Raises:
        ValueError: The number of bytes is another.
    """
    from PIL import Image

    if min(height, width) < 1 or len(pixels) != height * width:
        raise ValueError(f"{len(pixels)} bytes are no image of {height} x {width} grey values")
    file = io.BytesIO()
    Image.frombytes("L", (width, height), pixels).save(file, format="png", optimize=True)
    return file.getvalue()
