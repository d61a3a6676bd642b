"""JSON of the record's dataclasses: one rule for writing and one for reading.

A reader ignores keys that it does not know. A key that is missing gets the field's default; without
a default, or with a value of another kind, the whole object cannot be read.

Numbers that have names of their own (``named``) stand beside the fields, as ``accuracy`` or
``forward_s``, and a list under the field's name names them.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, cast

from contract import typed_json
from contract.typed_json import fields_of, is_number

_T = TypeVar("_T")

_RATE: Final = "_per_s"

Named = Mapping[str, float]
"""Numbers by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How much was trained per second, over all workers or by one. In JSON, ``images_per_s``."""

    items: str
    """Unit of the rate: ``images`` or ``tokens``."""
    per_s: float | None
    """Items per second; None while nothing has been measured."""


class Rated:
    """A dataclass with a rate."""

    __slots__ = ()
    rate: Rate | None

    @property
    def items_per_s(self) -> float | None:
        return None if self.rate is None else self.rate.per_s


class Record:
    """A dataclass that a run keeps as JSON."""

    __slots__ = ()
    _KEEPS_NONE = False
    """Fields that are None are in JSON too."""

    def to_json(self) -> dict[str, object]:
        return to_json(self, keep_none=self._KEEPS_NONE)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """
        Raises:
            ValueError: a field is missing or of another kind.
        """
        return from_json(cls, values)


def named(*, suffix: str = "") -> Mapping[str, object]:
    """Metadata of a field of type ``Named``.

    Args:
        suffix: what follows the names in JSON.
    """
    return {"suffix": suffix}


def to_json(value: Any, *, keep_none: bool = False) -> dict[str, object]:
    """A dataclass as JSON has it; what is None is left out unless ``keep_none`` is set."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(value):
        each = getattr(value, field.name)
        if isinstance(each, Rate):
            found[f"{each.items}{_RATE}"] = each.per_s
        elif "suffix" in field.metadata:
            if each or keep_none:
                found[field.name] = [*each]
            found |= {f"{name}{field.metadata['suffix']}": number for name, number in each.items()}
        elif each is not None or (keep_none and field.name != "rate"):
            found[field.name] = _plain(each)
    return found


def from_json(kind: type[_T], values: Mapping[str, object]) -> _T:
    """The dataclass that ``to_json`` wrote.

    Raises:
        ValueError: a field is missing or of another kind.
    """
    found = {**values}
    fields = fields_of(cast("Any", kind))
    for field, _ in fields:
        if "suffix" in field.metadata:
            names = values.get(field.name)
            # Taken out, whatever other field is called so.
            raw = {
                str(name): found.pop(f"{name}{field.metadata['suffix']}", None)
                for name in (names if isinstance(names, list) else [])
            }
            found[field.name] = {name: each for name, each in raw.items() if is_number(each)}
    if issubclass(kind, Rated):
        found["rate"] = _rate(found)
    return typed_json.from_json(kind, found, what=kind.__name__, ignores_unknown=True)


def number(value: object) -> float | None:
    """``value`` as a float, or None when it is not a finite number."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def _rate(values: Mapping[str, object]) -> dict[str, object] | None:
    """The rate among an object's values; that of floating-point operations is another thing."""
    for name, value in values.items():
        items = name.removesuffix(_RATE)
        if items not in (name, "", "flops"):
            return {"items": items, "per_s": value if is_number(value) else None}
    return None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
