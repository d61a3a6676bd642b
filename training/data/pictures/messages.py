"""What a reader and its decoders say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a decoder is told once."""

    root: str
    """Of the set."""
    encoding: str
    size: int
    """Most pixels of the shorter side of a picture; see ``picture.canvas_side``."""
    capacity: int
    """Canvases in the ring."""
    cached: Mapping[str, Path]
    """See ``Files``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Pictures to decode into neighbouring canvases."""

    number: int
    first: int
    """Place of the first one's canvas in the ring."""
    lines: tuple[str, ...]
    """Of the set's table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What became of a task."""

    number: int
    extents: tuple[tuple[int, int], ...]
    """Height and width of each picture, 0 of a damaged one."""
    damaged: Mapping[int, str]
    """Place in the task -> what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreachable:
    """The set cannot be read at all: its store does not answer, or its index is damaged."""

    message: str
    is_damaged: bool = False
    """It is the index: to try again does not help."""
