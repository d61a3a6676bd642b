"""JSON of the record's dataclasses: one rule for writing and one for reading, for all of them.

A run's files outlive the version that wrote them, in both directions. So a reader ignores what it
does not know, and takes a value of the wrong kind for missing. What is missing gets the field's
default; without a default, a float becomes NaN, text becomes empty, and a missing whole number or
truth value makes the whole object unreadable.

Numbers that have names of their own (``named``) stand beside the fields, as ``accuracy`` or
``forward_s``, and a list under the field's name names them.
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

Named = Mapping[str, float]
"""Numbers by name."""
Known = Mapping[str, float | None]
"""The same; None where a number is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How much was trained per second, over all workers or by one. In JSON, ``images_per_s``."""

    items: str
    """What is counted: ``images`` or ``tokens``."""
    per_s: float | None
    """Items per second; None while nothing has been measured."""


def named(*, suffix: str = "") -> Mapping[str, object]:
    """Metadata of a field of type ``Named`` or ``Known``.

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
        ValueError: a field without which it means nothing is missing or of another kind.
    """
    found: dict[str, object] = {}
    fields = _fields(cast("Any", kind))
    taken: set[str] = set()  # keys that belong to numbers with names, whatever else has that name
    for field, hint in fields:
        if "suffix" in field.metadata:
            keys = {
                f"{name}{field.metadata['suffix']}": name for name in _names(values.get(field.name))
            }
            found[field.name] = {
                name: values[key]
                for key, name in keys.items()
                if key in values and (_fits(values[key], float) or _is_gap(values[key], hint))
            }
            taken.update(keys)
    others = {key: value for key, value in values.items() if key not in taken}
    for field, hint in fields:
        if field.name in found:
            continue
        value = _rate(others) if hint == Rate | None else others.get(field.name)
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


def _names(listed: object) -> list[str]:
    """The names of a field's numbers, from the list in the file."""
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _is_gap(value: object, hint: object) -> bool:
    return value is None and hint == Known


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
