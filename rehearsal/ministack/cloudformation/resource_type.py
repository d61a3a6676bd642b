"""What a CloudFormation type consists of here, and what the types of all services share.

A handler is ``create(logical_id, properties, stack) -> (physical id, attributes)``,
``update(physical_id, old, new, stack, logical_id)`` for changes in place, with the same result, and
``delete(physical_id, properties)``. What replaces a resource is in its ``Type``: the engine then
makes the new one, and deletes the old one after the stack is updated.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Properties = dict[str, Any]
Result = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Type:
    """Handlers of one CloudFormation type, and what AWS documents about its properties."""

    create: Callable[[str, Properties, str], Result]
    update: Callable[[str, Properties, Properties, str, str], Result]
    delete: Callable[[str, Properties], None]
    required: tuple[str, ...] = ()
    replacing: tuple[str, ...]
    """Properties whose change makes a new resource."""
    in_place: tuple[str, ...]
    """Properties whose change leaves the resource the same."""


def call(what: str, response: tuple[int, Any, Any]) -> str:
    """Body of an answer of one of the emulator's services. Raises ValueError on an error."""
    status, _headers, body = response
    text = body.decode() if isinstance(body, bytes) else str(body)
    if status >= 400:
        found = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
        raise ValueError(f"{what}: {found[1] if found else text}")
    return text


def element(xml: str, name: str) -> str:
    """Text of the first element called ``name``."""
    found = re.search(rf"<{name}>(.*?)</{name}>", xml)
    if not found:
        raise ValueError(f"the emulator answered without <{name}>: {xml}")
    return found[1]


def existing(store: Any, key: str, what: str) -> Any:
    """Record ``key`` of a store of the emulator. Raises ValueError if there is none."""
    record = store.get(key)
    if record is None:
        raise ValueError(f"{what} {key!r} does not exist")
    return record


def checked(name: str, kind: Type) -> dict[str, Any]:
    """The handlers of a type, which first refuse properties that are missing or unknown."""

    def check(logical_id: str, properties: Properties) -> None:
        for required in kind.required:
            if required not in properties:
                raise ValueError(f"{name} {logical_id}: the property {required} is missing")
        for found in properties:
            if found not in (*kind.replacing, *kind.in_place):
                raise ValueError(f"{name} {logical_id}: the local AWS knows no property {found}")

    def create(logical_id: str, properties: Properties, stack: str) -> Result:
        check(logical_id, properties)
        return kind.create(logical_id, properties, stack)

    def update(
        physical_id: str, old: Properties, new: Properties, stack: str, logical_id: str
    ) -> Result:
        check(logical_id, new)
        return kind.update(physical_id, old, new, stack, logical_id)

    return {
        "create": create,
        "update": update,
        "update_with_logical_id": True,
        "delete": kind.delete,
    }
