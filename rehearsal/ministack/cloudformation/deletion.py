"""The deletion of a stack stops where a resource cannot be deleted: what it depends on stays.

The emulator goes on, and deletes the subnet and the bucket of a file system that is still there.
"""

from collections.abc import Iterator
from typing import Any

from rehearsal.ministack.internals import cloudformation, stacks
from rehearsal.ministack.switches import Strict, is_strict


class Order(list[str]):
    """Logical ids, each after those that it depends on.

    From the end to the beginning it is the order of a deletion: that leaves out what a resource
    depends on whose deletion has failed by then.
    """

    definitions: dict[str, Any]

    def __reversed__(self) -> Iterator[str]:
        blocked: set[str] = set()
        for name in [*self][::-1]:
            if name not in blocked:
                yield name
            if name in blocked or self._has_failed(name):
                definition = self.definitions.get(name, {})
                blocked |= stacks._extract_deps(definition, {*self.definitions})

    def _has_failed(self, name: str) -> bool:
        """Of these definitions' own stack."""
        for stack in cloudformation._stacks.values():
            if (stack.get("_template") or {}).get("Resources") is self.definitions:
                record = stack["_resources"].get(name, {})
                return bool(record.get("ResourceStatus") == "DELETE_FAILED")
        return False


def install() -> None:
    """Have the emulator delete in this order."""
    stock = stacks._topological_sort

    def sort(definitions: dict[str, Any], conditions: dict[str, Any]) -> list[str]:
        found = Order(stock(definitions, conditions))
        found.definitions = definitions
        return found

    if is_strict(Strict.DELETION):
        stacks._topological_sort = sort
