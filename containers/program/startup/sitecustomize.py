"""Python imports this by itself at its start, where this folder is on PYTHONPATH.

That is so for a job's own program, on the head and on all nodes, and for what it starts, also
through Ray. Its Ray Train and Ray Tune get the defaults of ``containers/program/ray_defaults.py``,
its torchruns ids of their own (``torchruns.py``); what it prints is written line by line. Files are
found by their place, because a user's code may have a package called ``containers``.
"""

import importlib.machinery
import importlib.util
import io
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
#: File -> what to do where a module that it changes is of a version that it does not know.
_CHANGED = {
    "ray_defaults": "give storage_path and name in the program's RunConfig",
    "torchruns": "give each torchrun of the job an --rdzv-id of its own",
}


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
_load("_train_imports", _HERE.parent / "imports.py")
for _name, _otherwise in _CHANGED.items():
    _load(f"_train_{_name}", _HERE.parent / f"{_name}.py")
    if (_changes := sys.modules[f"_train_{_name}"]).is_needed():
        sys.modules["_train_imports"].install(_changes.CHANGES, _otherwise)

# Python takes the first one that it finds; the user's code or the system may have another.
_others = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
if (_next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others)) and _next.origin:
    _load("sitecustomize", _next.origin)
