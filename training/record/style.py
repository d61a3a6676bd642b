"""Colors and style sheet of the report and of ``trainctl ui``. Standard library only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

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


def css() -> str:
    """The style sheet, with the colors of both themes as variables."""
    light, dark = (
        ";".join(f"--{name}:{pair[theme]}" for name, pair in COLORS.items()) for theme in (0, 1)
    )
    sheet = (Path(__file__).parent / "page.css").read_text("utf-8")
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"{sheet}"
    )
