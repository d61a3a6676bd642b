"""Measures: the figures, beside its loss, by which a run is judged. Standard library only.

A recipe declares its own (``training.recipes.recipe``), and the record of a run repeats them, so
that a report can be drawn where the recipe is not known.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contract.text import percent, significant

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A figure by which a run is judged, beside its loss. A line of ``metrics.jsonl``."""

    name: str
    """Key of its values in evaluations and in ``result.json``: ``accuracy``."""
    label: str = ""
    """What people read in its place; empty: the name in words."""
    meaning: str = ""
    """What it is, in a phrase."""
    form: str = "number"
    """How values are written: ``number``, or ``percent`` for a share from 0 to 1."""
    unit: str = ""
    """Written after a value: ``GB/s``."""
    higher_is_better: bool = True
    """Whether the best value is the largest or the smallest."""

    @property
    def is_usable(self) -> bool:
        """Whether the name can be a key in JSON and the name of a file."""
        return _NAME.fullmatch(self.name) is not None

    @property
    def title(self) -> str:
        """The label, or the name in words, with a capital letter."""
        text = self.label or self.name.replace("_", " ")
        return text[:1].upper() + text[1:]

    def words(self, value: float) -> str:
        """A value for people: ``93.61%``, ``54.6``, ``92.4 GB/s``."""
        if self.form == "percent":
            return percent(value)
        text = f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else significant(value)
        return f"{text} {self.unit}".rstrip()

    @property
    def phrase_label(self) -> str:
        """The label within a line; an abbreviation keeps its capitals."""
        title = self.title
        return title if title[1:2].isupper() else title[:1].lower() + title[1:]

    def phrase(self, value: float) -> str:
        """A value with its label, within a line: ``accuracy 93.61%``."""
        return f"{self.phrase_label} {self.words(value)}"


ACCURACY: Final = Measure(
    name="accuracy",
    meaning="share of the test images that were classified right, 0 to 1",
    form="percent",
)
PERPLEXITY: Final = Measure(
    name="perplexity",
    meaning="``exp(loss)`` of a language model",
    higher_is_better=False,
)


def described(name: str, declared: Sequence[Measure]) -> Measure:
    """The declared measure of that name, or one made from the name: less is better for
    ``loss_web``."""
    known = (each for each in declared if each.name == name)
    return next(known, Measure(name=name, higher_is_better=not name.startswith("loss")))
