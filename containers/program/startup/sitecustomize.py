"""Python imports this by itself at its start, where this folder is on PYTHONPATH.

That is so for a job's own program, on the head and on all nodes, and for what it starts, also
through Ray. Its Ray Train and Ray Tune get the defaults of ``containers/program/ray_defaults.py``;
what it prints is written line by line. Files are found by their place, because a user's code may
have a package called ``containers``.
"""

import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

_HERE = Path(__file__).resolve().parent
#: File -> what to do where a module that it changes is of a version that it does not know.
_CHANGED = {
    "ray_defaults": "give storage_path and name in the program's RunConfig",
}


#: Module -> what changes it.
_Changes = Mapping[str, Callable[[ModuleType], None]]


def _install(changes: _Changes, otherwise: str) -> None:
    """Make changes from now on.

    Args:
        changes: to modules that have not been imported yet.
        otherwise: what a user is told to do where a module is of another version, which cannot be
            changed.
    """
    sys.meta_path.insert(0, _Finder(changes, otherwise))


class _Finder(MetaPathFinder):
    def __init__(self, changes: _Changes, otherwise: str) -> None:
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


def _load(name: str, file: str | Path) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _print_whole_lines() -> None:
    """Write each line at once and in one piece.

    The processes of a node share one pipe. Without a buffer, ``print`` writes a text and its end
    one after the other, and another process may write between them. torchrun and DeepSpeed start
    their processes with ``python -u``, so this has to be undone here.
    """
    # As in containers.program.launch; a test compares them. Another value is the user's own.
    if os.environ.get("PYTHONUNBUFFERED") != "lines":
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(line_buffering=True, write_through=False)


_print_whole_lines()
for _name, _otherwise in _CHANGED.items():
    _load(f"_train_{_name}", _HERE.parent / f"{_name}.py")
    if (_changes := sys.modules[f"_train_{_name}"]).is_needed():
        _install(_changes.CHANGES, _otherwise)

# Python takes the first one that it finds; the user's code or the system may have another.
_others = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
if (_next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others)) and _next.origin:
    _load("sitecustomize", _next.origin)
