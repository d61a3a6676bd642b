"""Names and shapes of the models for pictures. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Dimensions of one EfficientNet (arXiv 1905.11946), as in the authors' published models."""

    width: float
    """Factor of the channels."""
    depth: float
    """Factor of the number of blocks."""
    image_size: int
    """Pixels of a side that it was made for."""
    hidden: int
    """Channels before the classifier."""
    dropout: float
    """Before the classifier."""
    odd: tuple[int, ...] = ()
    """Blocks that halve maps of an odd size when pictures have ``image_size``: they pad both sides
    alike, as the published models do, or the map would lose its last row and column."""


RESNET50: Final = "resnet50"
SHAPES: Final[Mapping[str, Shape]] = {
    "efficientnet-b0": Shape(width=1.0, depth=1.0, image_size=224, hidden=1280, dropout=0.2),
    "efficientnet-b7": Shape(
        width=2.0, depth=3.1, image_size=600, hidden=2560, dropout=0.5, odd=(18,)
    ),
}
NAMES: Final = (RESNET50, *SHAPES)


def image_size(name: str) -> int:
    """Pixels of a side that a model was made for."""
    return SHAPES[name].image_size if name in SHAPES else 224
