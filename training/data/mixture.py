"""Mixture of text sources in one ``--data``, each with a weight:

    --data "0.7 s3://bucket/web, 0.3 hf://owner/name"

Weights are relative: 7 and 3 mean the same. A source by itself has none, and stays as it is given.
Standard library only: a laptop that submits a job reads them too.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError

_NUMBER: Final = r"[-+]?(?:\.?\d[\d.eE+-]*|nan|inf)"
_WEIGHTED: Final = re.compile(rf"({_NUMBER})\s+(\S.*)", re.IGNORECASE | re.DOTALL)
#: A comma belongs to a path, unless a weight follows it.
_SEPARATOR: Final = re.compile(rf",\s*(?={_NUMBER}\s+\S)", re.IGNORECASE)
_FORM: Final = 'write a mixture as "0.7 FIRST, 0.3 SECOND", with a weight before each source'
#: What a label may be made of: it is a part of the names of measures.
_LABEL: Final = re.compile(r"[^a-z0-9]+")
_MAX_LABEL: Final = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a ``--data``."""

    place: str
    """A file, a folder, an address or a name, as it would be given by itself."""
    weight: str
    """As it was given; empty for a source by itself."""
    share: float
    """Of the run's sequences; those of all sources add up to 1."""
    label: str
    """Short name, in small letters, digits and underscores; no other source of the mixture has
    it."""


def sources_of(data: str) -> tuple[Source, ...]:
    """The sources of a ``--data``.

    Raises:
        InputError: a weight is missing or no positive number, or a source is there twice.
    """
    texts = _SEPARATOR.split(data)
    found = [_WEIGHTED.fullmatch(text.strip()) for text in texts]
    if found == [None]:
        return (Source(place=data, weight="", share=1.0, label=_label(data, ())),)
    pairs = []
    for text, match in zip(texts, found, strict=True):
        if match is None:
            raise InputError(f"--data: {text.strip()} has no weight; {_FORM}")
        pairs.append((match[1], match[2].strip()))
    if len(pairs) == 1:
        raise InputError(
            f"--data has a weight and only one source, {pairs[0][1]}: leave the weight out, or "
            f"{_FORM}"
        )
    weights = [_weight(*pair) for pair in pairs]
    labels: list[str] = []
    places: set[str] = set()
    for _, place in pairs:
        if place.rstrip("/") in places:
            raise InputError(f"--data has {place} twice: give it once, with the sum of the weights")
        places.add(place.rstrip("/"))
        labels.append(_label(place, labels))
    return tuple(
        Source(place=place, weight=text, share=weight / sum(weights), label=label)
        for (text, place), weight, label in zip(pairs, weights, labels, strict=True)
    )


def places_of(data: str) -> list[str]:
    """The sources of a ``--data``, without their weights."""
    return [each.place for each in sources_of(data)]


def with_places(data: str, change: Callable[[str], str]) -> str:
    """The same ``--data`` with each of its sources changed."""
    return ", ".join(f"{each.weight} {change(each.place)}".lstrip() for each in sources_of(data))


def shares_with(sources: Sequence[Source], places: Sequence[str]) -> str:
    """A mixture with the same shares of other places; that place if it is one."""
    if len(sources) == 1:
        return places[0]
    return ", ".join(
        f"{each.share:.9g} {place}" for each, place in zip(sources, places, strict=True)
    )


def _weight(text: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(
            f"--data has weight {text} for {place}: give a positive number, or leave the source out"
        )
    return number


def _label(place: str, taken: Sequence[str]) -> str:
    last = place.rstrip("/").rpartition("/")[2].lower()
    stem = _LABEL.sub("_", last.partition(".")[0]).strip("_")[:_MAX_LABEL] or "source"
    names = (stem if number == 1 else f"{stem}_{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
