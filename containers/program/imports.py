"""Changes to modules of other packages, each made right after the program has imported the module.

``startup/sitecustomize.py`` loads this file in each Python of a user's job, and so it imports
nothing of this project, which the user's code may hide.
"""

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Final

#: Module -> what changes it.
Changes = Mapping[str, Callable[[ModuleType], None]]


def install(changes: Changes, otherwise: str) -> None:
    """Make changes from now on.

    Args:
        changes: to modules that have not been imported yet.
        otherwise: what a user is told to do where a module is of another version, which cannot be
            changed.
    """
    sys.meta_path.insert(0, _Finder(changes, otherwise))


class _Finder(MetaPathFinder):
    def __init__(self, changes: Changes, otherwise: str) -> None:
        self._changes: Final = changes
        self._otherwise: Final = otherwise

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        run: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                change(module)
            except (AttributeError, ImportError, TypeError) as error:
                print(
                    f"This version of {fullname} cannot be changed ({error}): {self._otherwise}",
                    file=sys.stderr,
                )

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
