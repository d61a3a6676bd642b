"""The pictures of the stacks have today's prices and sizes, and their text stays in its boxes."""

import functools
import re
import runpy
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from matplotlib import font_manager
from PIL import ImageFont

from tests.conftest import ROOT

PICTURES = ("architecture", "deployment")
#: Width at which GitHub shows a picture of README, in pixels.
PAGE_PX = 830


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_stacks_have_todays_settings(name: str) -> None:
    drawing = runpy.run_path(str(ROOT / ".ci" / "pictures.py"))
    assert drawing["DRAWN"] == PICTURES
    drawn = drawing["of_the_settings"](name)
    assert (ROOT / f"docs/images/{name}.svg").read_text() == drawn, "run `make pictures`"


class Area(NamedTuple):
    """A rectangle of a picture."""

    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: "Area") -> bool:
        return (
            self.left <= other.left <= other.right <= self.right
            and self.top <= other.top <= other.bottom <= self.bottom
        )

    def meets(self, other: "Area") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def size_of(area: Area) -> float:
    return (area.right - area.left) * (area.bottom - area.top)


@functools.cache
def font(*, is_mono: bool, is_bold: bool) -> ImageFont.FreeTypeFont:
    """DejaVu, the default of most Linux desktops: wider than the fonts of macOS and Windows."""
    found = font_manager.FontProperties(
        family="DejaVu Sans Mono" if is_mono else "DejaVu Sans",
        weight="bold" if is_bold else "regular",
    )
    return ImageFont.truetype(font_manager.findfont(found, fallback_to_default=False), 100)


class Picture:
    """Rectangles of an SVG, and its texts with the area that each takes in a wide font."""

    def __init__(self, name: str) -> None:
        svg = ElementTree.parse(ROOT / f"docs/images/{name}.svg").getroot()
        self.width = float(svg.get("viewBox", "").split()[2])
        self.boxes: list[Area] = []
        self.texts: list[tuple[str, Area]] = []
        self.sizes: set[float] = set()
        self._rules = {
            name: rule
            for names, rule in re.findall(r"([^{}]+){([^}]*)}", svg.findtext("{*}style", ""))
            for name in names.split()
        }
        self._read(svg, 0, 0)

    def _read(self, node: ElementTree.Element, x: float, y: float) -> None:
        moved = re.match(r"translate\((\S+) (\S+)\)", node.get("transform", ""))
        if moved:
            x, y = x + float(moved[1]), y + float(moved[2])
        tag = node.tag.rpartition("}")[2]
        left, top = (at + float(node.get(name, 0)) for at, name in ((x, "x"), (y, "y")))
        if tag == "rect":
            right, bottom = left + float(node.get("width", 0)), top + float(node.get("height", 0))
            self.boxes.append(Area(left, top, right, bottom))
        elif tag == "text":
            self.texts.append(self._text(node, left, top))
        for child in node:
            self._read(child, x, y)

    def _text(self, node: ElementTree.Element, x: float, base: float) -> tuple[str, Area]:
        classes = ("text", *(f".{name}" for name in node.get("class", "").split()))
        rule = " ".join(self._rules.get(name, "") for name in classes)
        size = float(re.findall(r"([\d.]+)px", rule)[-1])
        self.sizes.add(size)
        text = "".join(node.itertext())
        drawn = font(is_mono="monospace" in rule, is_bold="600" in rule)
        width = drawn.getlength(text) * size / 100
        anchor = node.get("text-anchor") or "".join(re.findall(r"text-anchor: (\w+)", rule))
        left = x - width * {"end": 1, "middle": 0.5}.get(anchor, 0)
        return text, Area(left, base - 0.75 * size, left + width, base + 0.2 * size)


@pytest.mark.parametrize("name", PICTURES)
def test_text_stays_inside_its_box_and_apart_in_a_wide_font(name: str) -> None:
    picture = Picture(name)
    assert len(picture.texts) > 20
    # Of the boxes that a text touches, the smallest one is its own.
    outside = [
        text
        for text, area in picture.texts
        if not min((box for box in picture.boxes if box.meets(area)), key=size_of).holds(area)
    ]
    assert outside == []
    for number, (text, area) in enumerate(picture.texts):
        assert [other for other, place in picture.texts[:number] if place.meets(area)] == [], text


def test_the_first_picture_can_be_read_at_half_of_the_width_of_a_page() -> None:
    picture = Picture("architecture")
    assert min(picture.sizes) * PAGE_PX / 2 / picture.width > 9.5
