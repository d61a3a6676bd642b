"""Has the raylet call the client for its workers, by replacing what starts Ray's processes.

Ray has no hook there, and ``py_executable`` of a runtime environment comes too late: Ray has been
imported once by then. What this relies on (Ray 2.60) is checked before anything is replaced, and
tested in tests/training/test_forkserver.py: ``ray._private.services.start_ray_process`` gets the
raylet's command line; that holds ``--python_worker_command=PYTHON SETUP_WORKER ...``; and
setup_worker.py takes ``--serialized-runtime-env-context=JSON`` and ``--language=PYTHON`` and runs
the rest of the line.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from training.runtime.forkserver import client
from training.runtime.forkserver.client import NONE, PREFIX, PRELOAD

#: The first job of a Ray of its own.
FIRST_JOB: Final = "01000000"
_OPTION: Final = "--python_worker_command="


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give attributes other values for a while: each change is an owner, a name and a value."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in changes:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def hook_ray(server: str, *, expect: Sequence[str] = ()) -> Iterator[str | None]:
    """Have a raylet that this process starts meanwhile call the client for its workers.

    Args:
        server: name of the one that the client asks; "-": of none. The client then only starts
            Ray's own command, quoted as Ray ought to (Python may have spaces in its path).
        expect: values of ``PRELOAD`` for which the imports begin as soon as the raylet has been
            started. Only for a Ray of this command's own, which has a single job.

    Yields:
        Why Ray is left as it is; None when it is not.
    """
    from ray._private import services

    start = getattr(services, "start_ray_process", None)
    folder = os.path.join(os.path.dirname(os.path.abspath(services.__file__)), "workers")
    setup = os.path.join(folder, "setup_worker.py")
    if not callable(start) or not os.path.exists(setup):
        yield "this Ray starts its processes in a way unknown here"
        return
    usual = _OPTION + subprocess.list2cmdline([sys.executable, setup])
    words = [sys.executable, "-ISE", os.path.abspath(client.__file__), server, setup]
    ours = _OPTION + subprocess.list2cmdline(words)

    def start_ray_process(command: list[str], process_type: str, *given: Any, **more: Any) -> Any:
        if process_type != "raylet":
            return start(command, process_type, *given, **more)
        command = [
            ours + word.removeprefix(usual) if word.startswith(usual + " ") else word
            for word in command
        ]
        if not any(word.startswith(ours) for word in command):
            print(f"{PREFIX}the raylet's command is not as expected", file=sys.stderr)
            return start(command, process_type, *given, **more)
        found = start(command, process_type, *given, **more)
        if server != NONE:
            own = {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(found.process.pid)}
            for preload in expect:
                _prepare(server, {**os.environ, **own, PRELOAD: preload})
        return found

    with replaced((services, "start_ray_process", start_ray_process)):
        yield None


def _prepare(server: str, environment: Mapping[str, str]) -> None:
    """Have a server import for processes with this environment, which will be asked for soon."""
    with contextlib.suppress(OSError):  # a worker that needs it will start the usual way
        client.ask(server, {"steps": client.steps(environment), "argv": None}).close()
