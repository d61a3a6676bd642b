"""Hooks for the user's program: Python imports this file at each start with this folder on
PYTHONPATH.

That is so for a job's own program, on the head and on all nodes, and for what it starts, also
through Ray. An exception that nothing catches is noted for the job's outcome, and so is the exit
code that a shell may ignore (``containers/program/watch/ends.py``), unless the shell expects a
failure; what the program prints is written line by line; Ray gets the defaults of
``containers/program/start/ray_defaults.py``; steps are counted by
``containers/program/watch/steps.py``; torchvision fetches FashionMNIST over HTTPS;
a torchrun that would wait for the other nodes in vain ends. These files are
found by their place, because a user's code may have a package called ``containers``.
"""

import importlib.machinery
import importlib.util
import io
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, Optional, Type

_HERE = Path(__file__).resolve().parent


def _load(name: str, file: Any) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _Finder(MetaPathFinder):
    """Finds the modules that are changed, and changes them once they have been run."""

    def __init__(self, changes: Dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Any, _target: Any = None) -> Any:
        change = self._changes.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            try:
                change(module)
            except AttributeError as error:
                said = "give storage_path and name in the program's RunConfig"
                print(f"[ray] {fullname} is of another version ({error}): {said}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _print_whole_lines() -> None:
    """Write each line at once and in one piece.

    The processes of a node share one pipe. Without a buffer, ``print`` writes a text and its end
    one after the other, and another process may write between them. torchrun and DeepSpeed start
    their processes with ``python -u``, so this has to be undone here.
    """
    # As in containers.program.start.on_node; a test compares them. Another value is the user's own.
    if os.environ.get("PYTHONUNBUFFERED") != "lines":
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(line_buffering=True, write_through=False)


def _note_errors(folder: str) -> None:
    """Write an exception that nothing catches to a file, in one line, before it is printed."""
    import threading

    printed, printed_of_thread = sys.excepthook, threading.excepthook

    def note(
        kind: Type[BaseException], value: BaseException, where: Optional[TracebackType]
    ) -> None:
        try:
            import json
            import re
            import signal
            import time
            import traceback

            text, rank, name = str(value).strip(), os.environ.get("RANK", ""), kind.__name__
            frames = [(each.filename, each.lineno) for each in traceback.extract_tb(where)]
            said = text.partition("\n")[0]
            # Of a process that was killed, or ended without an exception, only torchrun tells.
            launched = getattr(value, "get_first_failure", None)
            number, failure = launched() if launched else ("", None)
            if failure and not Path(folder, f"{failure.pid}.json").exists():
                rank, name, frames, said = str(number), "", [], f"exit code {failure.exitcode}"
                if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                    said = f"killed by {failure.signal_name()}"
            # A worker of a DataLoader or of Ray: its own traceback is in the text.
            elif others := re.findall(r' File "(.+)", line (\d+)', text):
                name, said, frames = "", text.rpartition("\n")[2], others
            skip = re.compile(rf"site-packages|<frozen|{re.escape(sys.base_prefix)}")
            own = [each for each in frames if not skip.search(each[0])]
            place = f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""
            noted = {
                "at": time.time(),
                "parent": os.getppid(),
                "rank": rank,
                "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
                "line": ": ".join(filter(None, (name, said[:200]))) + place,
            }
            path = Path(folder) / f"{os.getpid()}.json"
            new = path.with_suffix(".new")
            new.write_text(json.dumps(noted), encoding="utf-8")
            new.replace(path)  # whole, or not there
        except Exception:  # the program's own error must be printed
            pass

    def of_program(*error: Any) -> None:
        note(*error)
        printed(*error)

    def of_thread(ended: Any) -> None:
        if ended.exc_type is not SystemExit:  # with which a thread may end
            note(ended.exc_type, ended.exc_value, ended.exc_traceback)
        printed_of_thread(ended)

    sys.excepthook, threading.excepthook = of_program, of_thread


def _fetch_over_https(module: Any) -> None:
    """Let torchvision fetch FashionMNIST, whose hashes it knows, from where its authors keep it:
    nodes do not reach the plain HTTP address that torchvision has for it."""
    place = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
    module.FashionMNIST.mirrors = [place]


def _refuse_apart(module: Any) -> None:
    """End a torchrun that a program of the job starts in such a way that it waits for the other
    nodes in vain; one that names fewer nodes than the job's may be meant so."""
    begin = module.elastic_launch.__init__

    def begin_together(self: Any, config: Any, *others: Any, **named: Any) -> None:
        reasons = []
        if config.max_nodes >= int(os.environ["NUM_NODES"]):
            ask = _load("_train_ask", _HERE.parent / "ask.py")
            address, rank = config.rdzv_endpoint, config.rdzv_configs.get("rank")
            if address.rpartition(":")[0] == os.environ.get("PET_MASTER_ADDR"):
                address = None  # the job's own
            reasons = [*ask.apart(config.rdzv_backend, address, rank, int(os.environ["NODE_RANK"]))]
        if reasons:
            sys.exit(f"error: torchrun: {reasons[0]}")
        begin(self, config, *others, **named)

    module.elastic_launch.__init__ = begin_together


_print_whole_lines()
# As in contract.nodes; a test compares them.
if _errors := os.environ.get("TRAIN_ERRORS"):
    try:
        _is_noted = _load("_train_ends", _HERE.parents[1] / "watch" / "ends.py").begin(_errors)
    except Exception:  # the program must run without a note
        _is_noted = True
    if _is_noted:
        _note_errors(_errors)
_changes: Dict[str, Callable[[Any], None]] = {"torchvision.datasets.mnist": _fetch_over_https}
# A program may have given them another meaning.
_numbers = [os.environ.get(name, "") for name in ("NUM_NODES", "NODE_RANK")]
if all(map(str.isdecimal, _numbers)) and _numbers[0] != "1":
    _changes["torch.distributed.launcher.api"] = _refuse_apart
if os.environ.get("TRAIN_WATCH"):
    _changes.update(_load("_train_steps", _HERE.parents[1] / "watch" / "steps.py").CHANGES)
# A program that runs beside Ray, in a job that keeps what it saves.
if os.environ.get("TRAIN_RAY_STORAGE"):
    _changes.update(_load("_train_ray_defaults", _HERE.parent / "ray_defaults.py").CHANGES)
sys.meta_path.insert(0, _Finder(_changes))

# Python takes the first one that it finds; the user's code or the system may have another.
_others = [path for path in sys.path if Path(path or ".").resolve() != _HERE]
if (_next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others)) and _next.origin:
    _load("sitecustomize", _next.origin)
