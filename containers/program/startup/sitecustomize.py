"""Python imports this by itself at its start, where this folder is on PYTHONPATH.

That is so for a job's own program on the head, and for what it starts through Ray: their Ray Train
and Ray Tune get the defaults of ``containers/program/ray_defaults.py``. Files are found by their
place, because a user's code may have a package called ``containers``.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _load(name: str, file: str | Path) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_load("_train_ray_defaults", _HERE.parent / "ray_defaults.py")
sys.modules["_train_ray_defaults"].install()

# Python takes the first one that it finds; the user's code or the system may have another.
_others = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
if (_next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others)) and _next.origin:
    _load("sitecustomize", _next.origin)
