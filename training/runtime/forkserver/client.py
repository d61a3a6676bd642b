"""The client: what the raylet starts instead of Python, and how it and a server talk.

    python -ISE client.py SERVER SETUP_WORKER ...

It asks the server for a fork, waits for its end, and ends in the same way. The raylet starts one
for every worker, so this file is run as a script, by itself: it imports nothing but what it needs,
and nothing of this project. The other modules import what both ends agree on from here.

A request is a file in memory (a JSON object), whose descriptor is sent along with the client's
three streams: there is no limit to its size, and the fork takes over the streams as they are.

* The sockets are in Linux's abstract namespace: no file to clean up, no limit to the length of a
  path. Both ends check that the other one is the same user.
* A fork is told the client's folder, environment, limits, signal mask and process group, so that
  the raylet and Ray's logs see what they would see of a process of Ray's own.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypedDict

    #: What Ray's runtime environment says of a worker; its keys are Ray's.
    Context = dict[str, Any]

    class Step(TypedDict):
        """What one server below the first one does before it forks."""

        environment: dict[str, str]
        modules: list[str]

    class Request(TypedDict, total=False):
        """What a client asks for: a process like itself. With ``argv`` None: imports only."""

        steps: list[Step]
        argv: list[str] | None
        context: Context
        environment: dict[str, str]
        folder: str
        memory: str
        group: int
        ignored: list[int]
        mask: list[int]
        nice: int
        files: tuple[int, int]
        parent: int  # added by the server


#: Of a process that may be forked: modules to import first, with commas; may be empty.
PRELOAD = "TRAIN_PRELOAD"
#: Instead of a server's name.
NONE = "-"
#: Of the lines that servers and clients write themselves, among what imports may print.
PREFIX = "fork server: "
#: The first byte of an answer: a process was forked, or a reason follows why not.
FORKED, REFUSED = b"+", b"-"
#: What every worker, actor and task of Ray Train imports.
OF_RAY = (
    "ray",
    "ray.train.torch",
    "ray.train.v2._internal.execution.controller.controller",
    "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
    "ray._private.workers.default_worker",
    "ray._private.runtime_env.context",
)
#: Of variables that a process reads when it starts, those that it reads again later, or that are
#: set anew for each process. ``fitness`` has the rest of the rule.
READ_LATE = (
    "OMP_NUM_THREADS",  # see use_threads_of_environment
    "HF_TOKEN",
    "PYTHONBREAKPOINT",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_TRAIN_",
    "RAY_WARN_",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S",
)
#: How likely the kernel is to end this process when memory runs out, 1000 at most.
MEMORY_MARK = "/proc/self/oom_score_adj"
#: Option of setup_worker.py.
CONTEXT = "--serialized-runtime-env-context="


def steps(environment: "Mapping[str, str]") -> "list[Step]":
    """What the servers below the first one do, one each, before a process with this environment is
    forked: import modules, the first of them Ray, which reads its variables then."""
    of_ray = {
        name: value
        for name, value in environment.items()
        if name.startswith("RAY_") and not name.startswith(READ_LATE)
    }
    found: list[Step] = [{"environment": of_ray, "modules": [*OF_RAY]}]
    if preload := environment.get(PRELOAD):
        found.append({"environment": {}, "modules": preload.split(",")})
    return found


def run(name: str, argv: "list[str]") -> int:
    """Have a server fork the worker that ``argv`` starts; return its exit code.

    Without a server that does, this process becomes what Ray would have started.
    """
    environment, context = dict(os.environ), context_of(argv)
    variables = environment | (context.get("env_vars") or {})
    if name != NONE and PRELOAD in variables:
        import resource

        request: Request = {
            "steps": steps(variables),
            "argv": argv,
            "context": context,
            "environment": environment,
            "folder": os.getcwd(),
            "memory": read(MEMORY_MARK),
            "group": os.getpgid(0),
            "ignored": [
                int(each)
                for each in (signal.SIGINT, signal.SIGTERM)
                if signal.getsignal(each) == signal.SIG_IGN
            ],
            "mask": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "nice": os.nice(0),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        reason = "it has ended"
        with contextlib.suppress(OSError), ask(name, request) as connection:
            answer = connection.recv(1)
            if answer == FORKED:
                # The raylet has marked this process as the first to go when memory runs out. The
                # fork has taken the mark over: it is the one that uses memory.
                write(MEMORY_MARK, "0")
                # The server knows how the fork ends, and kills it when this process ends first.
                status = connection.recv(4)
                return _end_like(struct.unpack("!i", status)[0]) if status else 1
            if answer == REFUSED:
                reason = connection.recv(4096).decode(errors="replace")
        if environment.get("RAY_RAYLET_PID") != str(os.getppid()):
            return 1  # the raylet has ended, and its server with it: this worker is not needed
        print(f"{PREFIX}{reason}: started the usual way", file=sys.stderr, flush=True)
    return os.execv(sys.executable, [sys.executable, *quoted(argv)])


def ask(name: str, request: "Request") -> socket.socket:
    """Send a request, and this process's standard streams. Raises OSError."""
    content = os.memfd_create("request")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.write(content, json.dumps(request).encode())
        connection.connect("\0" + name)
        if user_of(connection) != os.getuid():
            raise PermissionError("the server runs as another user")
        socket.send_fds(connection, [b"?"], [content, 0, 1, 2])
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(content)
    return connection


def read(path: str) -> str:
    """Content of a file of the kernel's; empty where it cannot be read."""
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


def write(path: str, content: str) -> None:
    """Set a value of the kernel's, where that is allowed."""
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(content)


def user_of(connection: socket.socket) -> int:
    """Id of the user at the other end."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", given)[1]
    return user


def context_of(argv: "Sequence[str]") -> "Context":
    """What Ray's runtime environment says of a worker."""
    for word in argv:
        if word.startswith(CONTEXT):
            found: Context = json.loads(word.removeprefix(CONTEXT) or "{}")
            return found
    return {}


def quoted(argv: "list[str]") -> "list[str]":
    """``argv`` with Python's path quoted: setup_worker.py hands it to a shell as it is."""
    import shlex

    context = context_of(argv)
    python = context.get("py_executable") or sys.executable
    if python != sys.executable or shlex.quote(python) == python:
        return argv
    word = CONTEXT + json.dumps({**context, "py_executable": shlex.quote(python)})
    return [argv[0], word, *(each for each in argv[1:] if not each.startswith(CONTEXT))]


def _end_like(status: int) -> int:
    """End as a process with this wait status did: by the same signal, or with its exit code."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
