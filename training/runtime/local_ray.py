"""The Ray of a run on one machine: started with only the processes that such a run uses.

``ray.init`` starts an autoscaler's monitor, a log monitor, an API server and a dashboard agent too,
and it has no options for that: together five CPU seconds of imports. They are left out by replacing
what starts them in ``ray._private`` (Ray 2.60) for as long as ``ray.init`` runs; where one of the
names is not there, Ray starts as it always does. TRAIN_RAY_HELPERS=1 leaves them in.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError
from training.runtime import agent_stub
from training.runtime.forkserver import NONE, ForkServer, hook_ray
from training.runtime.forkserver.ray_hook import replaced

HELPERS: Final = "TRAIN_RAY_HELPERS"

# Plasma is not used here, but Ray would take a third of the memory for it.
_OBJECT_STORE_BYTES: Final = 100 * 2**20
#: What Ray adds to its folder for a socket: /session_<date>_<pid>/sockets/plasma_store.
_SOCKET_CHARACTERS: Final = 62
_LONGEST_SOCKET: Final = 107  # <linux/un.h>, less the byte that ends it


def start(
    *, num_cpus: int, verbose: bool, server: ForkServer | None, expect: Sequence[str] = ()
) -> None:
    """Start Ray for this process only. Call it in the main thread: Ray ends with the thread.

    Args:
        num_cpus: processors that Ray may hand out.
        verbose: show Ray's own log lines.
        server: forks its processes.
        expect: see ``hook_ray``.

    Raises:
        InputError: Ray has no folder that it could use.
    """
    import ray

    # What is replaced in Ray is put back as soon as it has started.
    with contextlib.ExitStack() as changes:
        hook = hook_ray(server.name if server else NONE, expect=expect)
        reason = changes.enter_context(hook)
        if reason and verbose:
            print(f"fork server: {reason}", file=sys.stderr)
        if os.environ.get(HELPERS) != "1":
            changes.enter_context(_without_helpers(logs=verbose))
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=verbose,
            configure_logging=verbose,
            _temp_dir=str(folder()),
        )


def folder() -> Path:
    """Where Ray keeps its sockets and logs: its usual place, if this user may use it.

    Raises:
        InputError: no place is short enough and can be written.
    """
    # Windows has neither such ids nor a folder that all users share.
    user = os.getuid() if hasattr(os, "getuid") else None
    usual = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    tried = []
    for place in dict.fromkeys((usual, tempfile.gettempdir(), "/tmp")):
        # Another user's Ray may have made the first: it would be in the way of this one's.
        for name in ("ray",) if user is None else ("ray", f"ray-{user}"):
            path = Path(place).absolute() / name
            if len(os.fsencode(path)) + _SOCKET_CHARACTERS > _LONGEST_SOCKET:
                tried.append(f"{path} (too long for Ray's sockets)")
                continue
            try:
                path.mkdir(mode=0o700, exist_ok=True)
                if user in (None, path.stat().st_uid) and os.access(path, os.W_OK):
                    return path
                tried.append(f"{path} (another user's)")
            except OSError as error:
                tried.append(f"{path} ({error.strerror})")
    raise InputError(
        f"Ray needs a folder for its sockets and logs, and cannot use {', '.join(tried)}: set "
        "RAY_TMPDIR to a folder that you may write, with a path of at most 40 characters"
    )


class LostWorkers:
    """Finds worker processes that have ended before they joined Ray.

    Ray itself would wait for such a process for minutes, and where it had got far enough, forever.
    """

    def __init__(self) -> None:
        self._log = Path()
        self._read = 0
        # Worker -> process, of those that may still be lost.
        self._started: dict[str, int] = {}

    def look(self, logs: Path) -> str | None:
        """What Ray's logs say of the first worker that is lost; None if none is.

        A look reads on from where the one before it stopped: the log of a long run is long.

        Args:
            logs: folder of the session's logs. raylet.out names the processes that were started;
                each writes its job into files of its own as soon as it has joined.
        """
        try:
            self._read_on(logs / "raylet.out")
            for worker, pid in [*self._started.items()]:
                if _is_running(pid):
                    continue
                own = "".join(
                    file.read_text(errors="replace") for file in logs.glob(f"*-{worker}-*")
                )
                if ":job_id:" in own:
                    del self._started[worker]
                    continue
                said = own.strip() or (logs / "raylet.err").read_text(errors="replace").strip()
                return (
                    "\n".join(said.splitlines()[-20:]) or f"process {pid} ended, and said nothing"
                )
        except OSError:
            pass  # there is no log yet
        return None

    def _read_on(self, log: Path) -> None:
        if log != self._log:
            self._log, self._read, self._started = log, 0, {}
        with log.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]  # the rest of the last one is still to come
        self._read += len(lines)
        for line in lines.decode(errors="replace").splitlines():
            if found := re.search(r"Started worker process with pid (\d+) worker_id=(\w+)", line):
                self._started[found[2]] = int(found[1])
            # Ray ends surplus workers, some of which have never had anything to do.
            elif found := re.search(
                r"Disconnecting worker, graceful=true,.* worker_id=(\w+)", line
            ):
                self._started.pop(found[1], None)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # a zombie is none, nor where there is no /proc
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


@contextlib.contextmanager
def _without_helpers(*, logs: bool) -> Iterator[None]:
    """Have ``ray.init`` start GCS, raylet and the agent of runtime environments, and no more.

    Args:
        logs: keep the process that brings the workers' lines to this one.
    """
    from ray._private import node, parameter, services, utils

    parameters = parameter.RayParams

    class Parameters(parameters):  # type: ignore[misc,valid-type]
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.no_monitor = True
            self.include_log_monitor = logs

    start_ray_process = services.start_ray_process

    def start(command: list[str], process_type: str, *given: Any, **more: Any) -> Any:
        if process_type == "raylet" and sys.platform == "linux":
            command = [
                _stub(word) if word.startswith("--dashboard_agent_command=") else word
                for word in command
            ]
        return start_ray_process(command, process_type, *given, **more)

    changes = (
        (parameter, "RayParams", Parameters),
        (node.Node, "start_api_server", lambda *_given, **_more: None),
        # It would import aiohttp, opentelemetry and pydantic to see whether they are there.
        (utils, "get_dashboard_dependency_error", lambda: None),
        (services, "start_ray_process", start),
    )
    if not all(hasattr(owner, name) for owner, name, _ in changes):
        yield
        return
    with replaced(*changes):
        yield


def _stub(word: str) -> str:
    """The raylet's command for its agent, with ``agent_stub`` in the agent's place."""
    option, _, command = word.partition("=")
    given = dict(
        each.removeprefix("--").split("=", 1)
        for each in shlex.split(command)
        if each.startswith(("--session-dir=", "--node-id="))
    )
    if len(given) != 2:
        return word
    stub = [sys.executable, "-ISE", os.path.abspath(agent_stub.__file__)]
    return f"{option}={subprocess.list2cmdline([*stub, given['session-dir'], given['node-id']])}"
