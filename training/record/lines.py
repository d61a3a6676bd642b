"""The lines of ``metrics.jsonl``. Standard library only.

A line that cannot be read loses only itself. Lines of steps that a resumed run did again are
forgotten (``without_redone``). Reader and writer of the file share both rules here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from contract.runs import METRICS_FILE
from training.record import events
from training.record.events import Damaged, Event, Resume

_E = TypeVar("_E")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of ``metrics.jsonl``."""

    text: str
    """As it stands in the file, so that it can be written again with fields unknown here."""
    event: Event | None
    """None for an event of a type that this version does not know."""
    step: int | None
    """The step that it belongs to; None for those that belong to none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The content of ``metrics.jsonl``, each step once."""

    lines: Sequence[Line] = ()
    num_damaged: int = 0
    """Lines that could not be read, those of earlier attempts included; a last one that is still
    being written does not count."""

    @property
    def events(self) -> list[Event]:
        return [line.event for line in self.lines if line.event is not None]

    def of(self, kind: type[_E]) -> list[_E]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


def parse_metrics(content: bytes) -> Metrics:
    """Read the content of a ``metrics.jsonl``."""
    kept: list[Line] = []
    num_damaged = 0
    *whole, last = content.split(b"\n")
    for text in [*whole, last]:
        if not text.strip():
            continue
        try:
            line = _parse(text.decode())
        except (ValueError, RecursionError):
            # A line without its end may still be being written, or a kill tore it in two.
            num_damaged += text is not last
            continue
        if isinstance(line.event, Damaged):
            num_damaged += line.event.lines
            continue  # the record writes it again, with the lines that are damaged now
        if isinstance(line.event, Resume):
            kept = without_redone(kept, line.event.step)
        kept.append(line)
    return Metrics(lines=kept, num_damaged=num_damaged)


def without_redone(lines: Iterable[Line], step: int) -> list[Line]:
    """The lines that stay when training continues after ``step``: what came later is done again."""
    return [line for line in lines if line.step is None or line.step <= step]


def _parse(text: str) -> Line:
    """
    Raises:
        ValueError: it is no JSON object, or lacks what its type means nothing without.
    """
    values: object = json.loads(text)
    if not isinstance(values, Mapping):
        raise ValueError(f"a line of {METRICS_FILE} is no JSON object: {text[:80]}")
    step = values.get("step")
    return Line(
        text=text.rstrip(),
        event=events.from_json(values),
        step=step if isinstance(step, int) else None,
    )
