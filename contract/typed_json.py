"""Frozen dataclasses from JSON that others may have written: one rule for all of them.

``dataclasses.asdict`` writes them. Every value must have the type of its field. A run's record has
numbers with names of their own, which ``training.record.fields`` puts in their places first.
"""

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from enum import EnumType
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

from contract.errors import InputError

T = TypeVar("T")

_WORDS: Final[Mapping[object, str]] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "nothing",
}


def loads(text: str | bytes | None, *, what: str) -> dict[str, object]:
    """The object of a JSON text. Raises InputError where it has none.

    Args:
        what: names it in the error.
    """
    found = loads_if_any(text)
    if found is None:
        raise InputError(f"{what} is not a JSON object: {str(text)[:100]!r}")
    return found


def loads_if_any(text: str | bytes | None) -> dict[str, object] | None:
    """The object of a JSON text; None where it has none."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def from_json(
    kind: type[T], values: Mapping[str, object], *, what: str, ignores_unknown: bool = False
) -> T:
    """The dataclass that has these fields; those with a default may be missing.

    Args:
        what: names it in errors.
        ignores_unknown: leave out what this version does not know.

    Raises:
        InputError: a field is missing, unknown, or of another type.
    """
    found: dict[str, object] = {}
    types = fields_of(cast("Any", kind))
    for field, hint in types:
        if field.name in values:
            try:
                found[field.name] = _read(hint, values[field.name], ignores_unknown)
            except InputError:
                raise
            except ValueError as error:
                raise InputError(f"{field.name} {error}") from None
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{what} has no {field.name}")
    known = [field.name for field, _ in types]
    if not ignores_unknown and (unknown := sorted(values.keys() - known)):
        raise InputError(
            f"{what} has {', '.join(unknown)}, which this version does not know "
            f"({', '.join(sorted(known))}): another version has written it"
        )
    return kind(**found)


def _read(hint: Any, value: Any, ignores_unknown: bool) -> Any:
    """A value from JSON as the type ``hint`` has it.

    Raises:
        ValueError: it is of another type.
    """
    # Most values of a long record.
    if hint in (int, float) and is_number(value) and (hint is float or isinstance(value, int)):
        return value
    if type(value) is hint and hint is not int:
        return value
    if isinstance(hint, UnionType):
        for each in get_args(hint):
            with suppress(ValueError):
                return _read(each, value, ignores_unknown)
    elif get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_read(get_args(hint)[0], each, ignores_unknown) for each in value)
    elif get_origin(hint) is Mapping and isinstance(value, dict):
        item = get_args(hint)[1]
        return {key: _read(item, each, ignores_unknown) for key, each in value.items()}
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_json(hint, value, what=hint.__name__, ignores_unknown=ignores_unknown)
    elif isinstance(hint, EnumType) and value in [*hint]:
        return hint(value)
    raise ValueError(f"is {value!r}: it must be {_words(hint)}")


def is_number(value: object) -> TypeGuard[float]:
    """True for a number of JSON that a float can hold."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1000
    return isinstance(value, float)


@cache
def fields_of(kind: Any) -> list[tuple["dataclasses.Field[Any]", object]]:
    """The fields of a dataclass, each with its type."""
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind)]


def _words(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if isinstance(hint, EnumType):
        return f"one of {', '.join(hint)}"
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    return _WORDS.get(hint, "an object")
