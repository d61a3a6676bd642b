"""JSON of the record's dataclasses: one rule for writing and one for reading, for all of them.

A run's files outlive the version that wrote them, in both directions. So a reader ignores what it
does not know, and takes a value of the wrong kind for missing. What is missing gets the field's
default; without a default, a float becomes NaN, text becomes empty, and a missing whole number or
truth value makes the whole object unreadable.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Final, TypeVar, cast, get_type_hints

_T = TypeVar("_T")

_RATE: Final = "_per_s"
_FLOPS: Final = "flops"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How much was trained per second, over all workers or by one. In JSON, ``images_per_s``."""

    items: str
    """What is counted: ``images`` or ``tokens``."""
    per_s: float | None
    """Items per second; None while nothing has been measured."""


def to_json(value: Any, *, keep_none: bool = False) -> dict[str, object]:
    """A dataclass as JSON has it; what is None is left out unless ``keep_none`` is set."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(value):
        each = getattr(value, field.name)
        if isinstance(each, Rate):
            found[f"{each.items}{_RATE}"] = each.per_s
        elif each is not None or (keep_none and field.name != "rate"):
            found[field.name] = _plain(each)
    return found


def from_json(kind: type[_T], values: Mapping[str, object]) -> _T:
    """The dataclass that ``to_json`` wrote.

    Raises:
        ValueError: a field without which it means nothing is missing or of another kind.
    """
    found: dict[str, object] = {}
    for field, hint in _fields(cast("Any", kind)):
        value = _rate(values) if hint == Rate | None else values.get(field.name)
        if value is not None and _fits(value, hint):
            found[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is not MISSING:
            continue
        elif hint in _ABSENT:
            found[field.name] = _ABSENT[hint]
        else:
            raise ValueError(f"{field.name} is {value!r}: {kind.__name__} means nothing without it")
    return kind(**found)


def number(value: object) -> float | None:
    """``value`` as a float, or None when it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # JSON has no largest whole number
        return None
    return found if math.isfinite(found) else None


# What stands for a value that is missing, where a field has no default.
_ABSENT: Final[Mapping[object, object]] = {
    float: math.nan,
    str: "",
    tuple[str, ...]: (),
    tuple[str, ...] | None: None,
    float | None: None,
    int | None: None,
    str | None: None,
    Rate | None: None,
}


def _fits(value: object, hint: object) -> bool:
    if hint in (int, int | None):
        # Larger ones have no floating-point number, which what draws them needs.
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000
    if hint in (float, float | None):
        return isinstance(value, float) or _fits(value, int)
    if hint in (str, str | None):
        return isinstance(value, str)
    if hint in (tuple[str, ...], tuple[str, ...] | None):
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if hint == Rate | None:
        return isinstance(value, Rate)
    if hint is bool:
        return isinstance(value, bool)
    return dataclasses.is_dataclass(value)  # already read


def _rate(values: Mapping[str, object]) -> Rate | None:
    """The rate among an object's values; that of floating-point operations is another thing."""
    for name, value in values.items():
        items = name.removesuffix(_RATE)
        if items not in (name, "", _FLOPS):
            fits = _fits(value, float)
            return Rate(items=items, per_s=value if fits else None)  # type: ignore[arg-type]
    return None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@cache
def _fields(kind: type[Any]) -> list[tuple["dataclasses.Field[Any]", object]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind)]
