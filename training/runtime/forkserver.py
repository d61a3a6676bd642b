"""Fork Ray's worker processes from one that has already imported torch, Ray Train and the recipe.

Ray starts a new Python for every worker, actor and task: on two cores, a run of two workers spends
nine tenths of its time up to the first step on the same imports, done again in each of them. On
Linux, a server imports once, and each process that Ray asks for is a fork of it. Anything that does
not fit is started by Ray as usual; ``TRAIN_FORK=0`` switches all of this off.

Four kinds of process, all of them this file:

    command or node            starts a ForkServer, and has Ray call the client (``hook_ray``)
    └─ server                  imports torch and what else needs no Ray
       └─ server of a job      imports ray: Ray's core reads RAY_JOB_ID and RAY_RAYLET_PID when it
          │                    is imported, and aborts a worker that lacks them
          └─ ... of its workers   imports the recipe, while the one above serves Ray's own actors
    raylet
    └─ client                  what the raylet starts instead of Python: asks the server for a fork,
                               waits for its end, and ends in the same way

The tricks, and why each is needed:

* The raylet's command for workers is rewritten, because Ray has no hook there. ``py_executable`` of
  a runtime environment comes too late: Ray has been imported once by then.
* Servers have a single thread, or they refuse to fork: a lock that another thread holds would stay
  locked forever in the child. Arrow's allocator must be told not to start one.
* Ray's core must not have drawn a random number before the fork, or all forks would draw the same
  ids and Ray would take one's objects for another's. Ray's actor classes get a random id when their
  module is imported: while the server imports, Python draws it.
* Nothing touches CUDA before the fork, or the child could not use it. A server that has a GPU's
  device open refuses to fork.
* A fork is told the client's streams, folder, environment, limits, signal mask and process group,
  so that the raylet and Ray's logs see what they would see of a process of Ray's own.
* Servers end with the process that started them, the server of a job with its raylet, and forks
  with their server: nothing is left after a SIGKILL of any of them.
* The sockets are in Linux's abstract namespace: no file to clean up, no limit to the length of a
  path. Both ends check that the other one is the same user.

Ray's internals that this relies on (Ray 2.60) are checked by ``hook_ray`` before it changes any of
them, and tested in tests/training/test_forkserver.py: ``ray._private.services.start_ray_process``
gets the raylet's command line; that holds ``--python_worker_command=PYTHON SETUP_WORKER ...``;
setup_worker.py takes ``--serialized-runtime-env-context=JSON`` and ``--language=PYTHON`` and runs
the rest of the line.

When not to use it: for programs that are not this project's own recipes. A fork has modules that
such a program may want in another version. Only processes whose environment has TRAIN_PRELOAD are
forked, and ``training.runtime.driver`` sets that.
"""

# Nothing but what the client needs is imported up here: it is started once per worker.
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

#: "0" switches forking off.
SWITCH = "TRAIN_FORK"
#: Of a process that may be forked: modules to import first, with commas; may be empty.
PRELOAD = "TRAIN_PRELOAD"
#: Instead of a server's name.
NONE = "-"

#: Without Ray. torch._dynamo is imported by torch's optimizers and by DDP anyway.
WITHOUT_RAY = ("torch", "torch.distributed", "numpy", "pandas", "pyarrow.fs", "fsspec")
#: What every worker, actor and task of Ray Train imports.
OF_RAY = (
    "ray",
    "ray.train.torch",
    "ray.train.v2._internal.execution.controller.controller",
    "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
    "ray._private.workers.default_worker",
    "ray._private.runtime_env.context",
)
#: The first job of a Ray of its own.
FIRST_JOB = "01000000"

#: Variables that a process reads once, when it starts or imports: a fork would ignore them, so all
#: must be what they were for the server.
_READ_ONCE = (
    *("LD_", "DYLD_", "PYTHON", "MALLOC_", "JE_", "MIMALLOC_", "ARROW_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "RAY_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
)
#: But not these: they are read when used, or set anew for each process.
_READ_LATE = (
    "OMP_NUM_THREADS",  # see use_threads_of_environment
    "HF_TOKEN",
    "PYTHONBREAKPOINT",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_TRAIN_",
    "RAY_WARN_",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S",
)
#: What the server itself needs instead of what its environment says.
_OF_SERVER = {
    "OMP_NUM_THREADS": "1",  # no pool of threads before the fork
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks the driver's library, does not initialize CUDA
}
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: How likely the kernel is to end this process when memory runs out, 1000 at most.
_MEMORY_MARK = "/proc/self/oom_score_adj"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Servers below one server; more than a few would mean that a key changes all the time.
_MOST_SERVERS = 8
#: A job's server that has had nothing to do for so long ends; the next request starts another.
_IDLE_S = 120
_FORKED, _REFUSED = b"+", b"-"
#: Of the server's own lines, among what imports may print.
_PREFIX = "fork server: "


# --- in the command or the node -------------------------------------------------------------------
class ForkServer:
    """The first server, started by this process, with which it ends."""

    def __init__(
        self,
        *,
        modules: "Sequence[str]" = (),
        environment: "Mapping[str, str] | None" = None,
        show_log: bool = False,
    ) -> None:
        """Start it; it imports while this process goes on.

        Call it in the main thread: the server ends with the thread that has started it.

        Args:
            modules: what to import besides ``WITHOUT_RAY``; nothing that imports Ray.
            environment: what Ray will be started with; by default this process's own.
            show_log: let it write to stderr instead of keeping that for ``failure``.

        Raises:
            OSError: it cannot be started.
        """
        import secrets
        import subprocess

        self.name = f"train-fork-{secrets.token_hex(8)}"
        self._log = -1 if show_log else os.memfd_create("fork-server-log")
        output = 2 if show_log else self._log
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + self.name)
            listener.listen(256)
            # Not as a script, which would have this file's folder in its path and itself twice.
            start = (
                f"import sys; sys.path.insert(0, {_ROOT!r}); "
                "from training.runtime.forkserver import main; sys.exit(main(sys.argv[1:]))"
            )
            environment = dict(os.environ if environment is None else environment)
            given = {name: v for name, v in environment.items() if name.startswith(_READ_ONCE)}
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", start, "serve"),
                    *(str(listener.fileno()), str(os.getpid())),
                    *dict.fromkeys((*WITHOUT_RAY, *modules)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                env=environment | _OF_SERVER | {_GIVEN: json.dumps(given)},
            )

    @classmethod
    def start(
        cls,
        *,
        modules: "Sequence[str]" = (),
        environment: "Mapping[str, str] | None" = None,
        show_log: bool = False,
    ) -> "Self | None":
        """Like the constructor; None where there is none: switched off, not Linux, too old."""
        if os.environ.get(SWITCH) == "0" or not hasattr(os, "pidfd_open"):
            return None
        try:
            os.close(os.pidfd_open(os.getpid()))
            return cls(modules=modules, environment=environment, show_log=show_log)
        except OSError:
            return None

    @property
    def pid(self) -> int:
        return self._process.pid

    def complaint(self) -> "str | None":
        """Why it has ended, or did not fork, in its own words; None while all is well."""
        said = os.pread(self._log, 1 << 16, 0).decode(errors="replace") if self._log >= 0 else ""
        refusals = [line for line in said.splitlines() if line.startswith(_PREFIX)]
        if refusals:
            return refusals[-1].removeprefix(_PREFIX)
        code = self._process.poll()
        return None if code is None else f"it has ended with exit code {code}"

    def close(self) -> None:
        """End it, and with it whatever it has forked."""
        self._process.kill()
        self._process.wait()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def steps(environment: "Mapping[str, str]") -> "list[dict[str, Any]]":
    """What the servers below the first one do, one each, before a process with this environment is
    forked: import modules, the first of them Ray, which reads its variables then."""
    of_ray = {
        name: value
        for name, value in environment.items()
        if name.startswith("RAY_") and not name.startswith(_READ_LATE)
    }
    found: list[dict[str, Any]] = [{"environment": of_ray, "modules": [*OF_RAY]}]
    if preload := environment.get(PRELOAD):
        found.append({"environment": {}, "modules": preload.split(",")})
    return found


def hook_ray(server: str, *, expect: "Sequence[str] | None" = None) -> "str | None":
    """Have the raylet that this process starts next call the client for its workers.

    Args:
        server: name of the one that the client asks; "-": of none. The client then only starts
            Ray's own command, quoted as Ray ought to (Python may have spaces in its path).
        expect: values of ``PRELOAD`` for which the imports begin as soon as the raylet has been
            started. Only for a Ray of this command's own, which has a single job.

    Returns:
        Why Ray was left as it is; None when it was not.
    """
    import subprocess

    from ray._private import services

    start = getattr(services, "start_ray_process", None)
    folder = os.path.join(os.path.dirname(os.path.abspath(services.__file__)), "workers")
    setup = os.path.join(folder, "setup_worker.py")
    if not callable(start) or not os.path.exists(setup):
        return "this Ray starts its processes in a way unknown here"
    usual = "--python_worker_command=" + subprocess.list2cmdline([sys.executable, setup])
    client = [sys.executable, "-ISE", os.path.abspath(__file__), "client"]
    client += [server, setup]
    ours = "--python_worker_command=" + subprocess.list2cmdline(client)

    def start_ray_process(command: "list[str]", process_type: str, *given: "Any", **more: "Any"):  # type: ignore[no-untyped-def]
        is_raylet = process_type == "raylet"
        if is_raylet:
            command = [
                ours + word.removeprefix(usual) if word.startswith(usual + " ") else word
                for word in command
            ]
            if not any(word.startswith(ours) for word in command):
                print(f"{_PREFIX}the raylet's command is not as expected", file=sys.stderr)
                return start(command, process_type, *given, **more)
        found = start(command, process_type, *given, **more)
        if is_raylet and server != NONE:
            own = {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(found.process.pid)}
            for preload in expect or ():
                _prepare(server, {**os.environ, **own, PRELOAD: preload})
        return found

    services.start_ray_process = start_ray_process
    return None


def _prepare(server: str, environment: "Mapping[str, str]") -> None:
    """Have a server import for processes with this environment, which will be asked for soon."""
    with contextlib.suppress(OSError):  # a worker that needs it will start the usual way
        _ask(server, {"steps": steps(environment), "argv": None}).close()


def use_threads_of_environment() -> None:
    """Give torch as many threads as OMP_NUM_THREADS says, as it would have on its own.

    It asks when it is loaded, which in a fork was before Ray decided on the number.
    """
    if _is_fork and (number := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        import torch

        torch.set_num_threads(max(1, int(number)))


# --- the client -----------------------------------------------------------------------------------
def _client(name: str, argv: "list[str]") -> int:
    """Have a server fork the worker that ``argv`` starts; return its exit code.

    Without a server that does, this process becomes what Ray would have started.
    """
    environment, context = dict(os.environ), _context(argv)
    variables = environment | (context.get("env_vars") or {})
    if name != NONE and PRELOAD in variables:
        import resource

        request = {
            "steps": steps(variables),
            "argv": argv,
            "context": context,
            "environment": environment,
            "folder": os.getcwd(),
            "memory": _read(_MEMORY_MARK),
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
        with contextlib.suppress(OSError), _ask(name, request) as connection:
            answer = connection.recv(1)
            if answer == _FORKED:
                # The raylet has marked this process as the first to go when memory runs out. The
                # fork has taken the mark over: it is the one that uses memory.
                _write(_MEMORY_MARK, "0")
                # The server knows how the fork ends, and kills it when this process ends first.
                status = connection.recv(4)
                return _end_like(struct.unpack("!i", status)[0]) if status else 1
            if answer == _REFUSED:
                reason = connection.recv(4096).decode(errors="replace")
        if environment.get("RAY_RAYLET_PID") != str(os.getppid()):
            return 1  # the raylet has ended, and its server with it: this worker is not needed
        print(f"{_PREFIX}{reason}: started the usual way", file=sys.stderr, flush=True)
    return os.execv(sys.executable, [sys.executable, *_quoted(argv)])


def _ask(name: str, request: "dict[str, Any]") -> socket.socket:
    """Send a request, and this process's standard streams. Raises OSError."""
    content = os.memfd_create("request")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.write(content, json.dumps(request).encode())
        connection.connect("\0" + name)
        if _user_of(connection) != os.getuid():
            raise PermissionError("the server runs as another user")
        socket.send_fds(connection, [b"?"], [content, 0, 1, 2])
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(content)
    return connection


def _read(path: str) -> str:
    """Content of a file of the kernel's; empty where it cannot be read."""
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


def _write(path: str, content: str) -> None:
    """Set a value of the kernel's, where that is allowed."""
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(content)


def _user_of(connection: socket.socket) -> int:
    """Id of the user at the other end."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", given)[1]
    return user


_CONTEXT = "--serialized-runtime-env-context="


def _context(argv: "Sequence[str]") -> "dict[str, Any]":
    """What Ray's runtime environment says of a worker."""
    for word in argv:
        if word.startswith(_CONTEXT):
            found: dict[str, Any] = json.loads(word.removeprefix(_CONTEXT) or "{}")
            return found
    return {}


def _quoted(argv: "list[str]") -> "list[str]":
    """``argv`` with Python's path quoted: setup_worker.py hands it to a shell as it is."""
    import shlex

    context = _context(argv)
    python = context.get("py_executable") or sys.executable
    if python != sys.executable or shlex.quote(python) == python:
        return argv
    word = _CONTEXT + json.dumps({**context, "py_executable": shlex.quote(python)})
    return [argv[0], word, *(each for each in argv[1:] if not each.startswith(_CONTEXT))]


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


# --- the servers ----------------------------------------------------------------------------------
#: Carries the environment that the first server was given, before ``_OF_SERVER`` was added.
_GIVEN = "TRAIN_FORK_GIVEN"
_is_fork = False


class _Server:
    """Imports, then forks: workers, and servers that import more before they do the same.

    ``serve`` returns in a forked worker, with its request, and never in a server.
    """

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self._listener: socket.socket | None = listener
        self._inbox: socket.socket | None = None
        self._given: dict[str, str] = json.loads(os.environ.pop(_GIVEN))
        self._raylet = -1
        self._unfit = ""
        #: By the file that becomes readable at its end: its id, and the client that waits for that.
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        #: Of those, the clients that have ended first.
        self._killed: set[int] = set()
        #: By what they have done: the socket to their inbox, and their id.
        self._servers: dict[str, tuple[socket.socket, int]] = {}
        self._end_with(parent)

    def _end_with(self, parent: int) -> None:
        be_killed_with(parent)
        # Ctrl-C and SIGTERM go to the whole group of a command, which then ends in its own way.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def import_all(self, modules: "Sequence[str]") -> None:
        import gc
        from importlib import import_module

        for module in modules:
            try:
                import_module(module)
                if module == "ray":
                    _draw_ids_of_classes_in_python()
            except Exception as error:
                self._unfit = f"cannot import {module}: {type(error).__name__}: {error}"
                return
        self._unfit = _why_not_to_fork(os.listdir("/proc/self/task"), _open_files("/proc/self/fd"))
        try:
            if not self._unfit and "ray" in sys.modules and _random_id() == _random_id():
                self._unfit = "an import has had Ray's core draw a random number"
        except OSError as error:
            self._unfit = f"cannot fork: {error.strerror}"
        # What is there now is in use until the end: looking at it would only copy its pages.
        gc.collect()
        gc.freeze()

    def serve(self) -> "dict[str, Any]":
        busy_at = time.monotonic()
        while True:
            # In the order in which they are answered if several happen at once.
            watched: dict[int, tuple[str, Any]] = {}
            if self._raylet >= 0:
                watched[self._raylet] = ("raylet", None)
            for process, (_, client) in self._workers.items():
                watched[process] = ("ended", process)
                if process not in self._killed:
                    watched[client.fileno()] = ("unwanted", process)
            for each in (self._listener, self._inbox):
                if each is not None:
                    watched[each.fileno()] = ("request", each)
            poll = select.poll()  # no file of its own, which a fork would have to close
            for file in watched:
                poll.register(file, select.POLLIN)
            # One at a time: what it does may close files of the others.
            for file, _event in poll.poll(10_000)[:1]:
                match watched[file]:
                    case "raylet", _:
                        os._exit(0)  # and all that was forked is killed with it
                    case "ended", process:
                        self._report(process)
                    case "unwanted", process:  # the raylet has killed its client
                        os.kill(self._workers[process][0], signal.SIGKILL)
                        self._killed.add(process)
                    case _, source:
                        request = self._take(source)
                        if request is not None:
                            return request
            self._forget_servers_that_ended()
            if self._workers or self._servers or self._listener is not None:
                busy_at = time.monotonic()
            elif time.monotonic() > busy_at + _IDLE_S:
                os._exit(0)

    def _take(self, source: socket.socket) -> "dict[str, Any] | None":
        """Answer a request; return it if this process is the worker that it asks for.

        Its files are the request itself, three streams, and the connection to the client.
        """
        depth = 0
        if source is self._listener:
            try:
                connection, _ = source.accept()
            except OSError:
                return None  # the client has gone, or there are too many open files
            connection.settimeout(5)
            files: list[int] = []
            if _user_of(connection) == os.getuid():
                with contextlib.suppress(OSError):
                    files = socket.recv_fds(connection, 1, 4)[1]
            connection.setblocking(True)
            files.append(connection.detach())
        else:
            said, files, _, _ = socket.recv_fds(source, 1, 5)
            if not said:
                os._exit(0)  # the server above has ended
            depth = said[0]
        try:
            for file in files:
                os.set_inheritable(file, False)
            if len(files) != 5:
                return None
            request: dict[str, Any] = json.loads(os.pread(files[0], os.fstat(files[0]).st_size, 0))
            unfit = self._unfit
            if depth == 0 and not unfit and request["argv"] is not None:
                unfit = _why_not_forked(request, self._given)
            if unfit:
                self._refuse(unfit, files)
            elif depth < len(request["steps"]):
                self._hand_down(request["steps"][depth], depth + 1, files)
            elif request["argv"] is not None:
                return self._fork(request, files)
            return None
        finally:
            for file in files:
                os.close(file)

    def _refuse(self, reason: str, files: "list[int]") -> None:
        print(_PREFIX + reason, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), socket.socket(fileno=files.pop()) as client:
            client.sendall(_REFUSED + reason.encode()[:4000])

    def _fork(self, request: "dict[str, Any]", files: "list[int]") -> "dict[str, Any] | None":
        here = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(f"cannot fork: {error.strerror}", files)
            return None
        client = socket.socket(fileno=files.pop())
        if pid == 0:
            self._close_all()
            client.close()
            for file, stream in zip(files[1:], (0, 1, 2), strict=True):
                os.dup2(file, stream)
            return {**request, "parent": here}  # the files themselves are closed in ``_take``
        try:
            self._workers[os.pidfd_open(pid)] = (pid, client)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            files.append(client.detach())
            self._refuse(f"cannot watch a fork: {error.strerror}", files)
            return None
        with contextlib.suppress(OSError):  # its client has gone, which is noticed in ``serve``
            client.sendall(_FORKED)
        return None

    def _hand_down(self, step: "dict[str, Any]", depth: int, files: "list[int]") -> None:
        """Pass a request on to the server that has done ``step``; fork that first, if need be."""
        key = json.dumps(step, sort_keys=True)
        self._forget_servers_that_ended()
        if key not in self._servers:
            if len(self._servers) >= _MOST_SERVERS:
                self._refuse("too many different environments", files)
                return
            here = os.getpid()
            try:
                outbox, inbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                pid = os.fork()
            except OSError as error:
                self._refuse(f"cannot fork a server: {error.strerror}", files)
                return
            if pid == 0:
                outbox.close()
                self._close_all()
                self._inbox = inbox
                self._end_with(here)
                self._begin(step)
                return  # to ``serve``, where the request comes in once more
            inbox.close()
            outbox.setblocking(False)
            self._servers[key] = (outbox, pid)
        try:
            socket.send_fds(self._servers[key][0], [bytes([depth])], files)
        except OSError as error:  # it has ended, or its inbox is full
            self._refuse(f"the server of the job does not answer: {error.strerror}", files)

    def _begin(self, step: "dict[str, Any]") -> None:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            if step["environment"]:
                del os.environ[name]
        os.environ.update(step["environment"])
        if raylet := step["environment"].get("RAY_RAYLET_PID"):
            try:
                self._raylet = os.pidfd_open(int(raylet))
            except OSError:
                os._exit(0)  # it has ended already
        self.import_all(step["modules"])

    def _report(self, process: int) -> None:
        """Tell a worker's client how it has ended."""
        pid, client = self._workers.pop(process)
        self._killed.discard(process)
        _, status = os.waitpid(pid, 0)
        with client, contextlib.suppress(OSError):
            client.sendall(struct.pack("!i", status))
        os.close(process)

    def _forget_servers_that_ended(self) -> None:
        for key, (outbox, pid) in [*self._servers.items()]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                outbox.close()
                del self._servers[key]

    def _close_all(self) -> None:
        """Close what belongs to the server that has forked this process."""
        for each in (self._listener, self._inbox):
            if each is not None:
                each.close()
        for outbox, _ in self._servers.values():
            outbox.close()
        for process, (_, client) in self._workers.items():
            os.close(process)
            client.close()
        if self._raylet >= 0:
            os.close(self._raylet)
        self._listener = self._inbox = None
        self._raylet = -1
        self._workers, self._servers, self._killed = {}, {}, set()


def be_killed_with(parent: int) -> None:
    """Have Linux kill this process when ``parent``, which has started it, ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before that
        os._exit(0)


def _draw_ids_of_classes_in_python() -> None:
    """Keep Ray's core from seeding its generator while modules with actor classes are imported."""
    import types

    from ray import actor
    from ray._raylet import ActorClassID as ClassID

    vars(actor)["ActorClassID"] = types.SimpleNamespace(
        from_random=lambda: ClassID(os.urandom(ClassID.size()))
    )


def _random_id() -> str:
    """An id as a fork of this process, and of Ray's core in it, would draw it."""
    from ray._raylet import JobID, PlacementGroupID

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, PlacementGroupID.of(JobID.from_int(1)).hex().encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        found = said.read()
    os.waitpid(pid, 0)
    return found


def _open_files(folder: str) -> "list[str]":
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(os.path.join(folder, name)))
    return found


def _why_not_to_fork(threads: "Sequence[str]", files: "Sequence[str]") -> str:
    """Why a process with these threads and open files must not fork; empty when it may."""
    if len(threads) > 1:
        return f"{len(threads)} threads run after the imports, where only one may"
    if any(each.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd")) for each in files):
        return "an import has opened a GPU, which a fork could not use"
    return ""


def _why_not_forked(request: "dict[str, Any]", given: "Mapping[str, str]") -> str:
    """Why a process cannot be a fork of a server with the environment ``given``; empty if it can.

    What Ray's runtime environments do (pip, conda, a container, another Python) shows in the
    context; what they set, and what the raylet's environment has, must not be something that a
    process only reads when it starts.
    """
    argv, context = request["argv"], request["context"]
    if "--language=PYTHON" not in argv:
        return "not a worker of Python"
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):
        return "its runtime environment has a command of its own"
    if context.get("py_executable") not in (None, sys.executable):
        return "its runtime environment has a Python of its own"
    wanted = {
        name: value
        for name, value in request["environment"].items()
        if not name.startswith("RAY_")  # the server of a job is started with these
    } | (context.get("env_vars") or {})
    names = {
        name
        for name in (*wanted, *given)
        if name.startswith(_READ_ONCE) and not name.startswith(_READ_LATE)
    }
    for name in sorted(names):
        if wanted.get(name) != given.get(name) and (not name.startswith("RAY_") or name in wanted):
            return f"its environment has another {name}"
    return ""


# --- the forked worker ----------------------------------------------------------------------------
def _become(request: "dict[str, Any]") -> None:
    """Be the process that Ray has asked for."""
    global _is_fork
    import resource
    import runpy

    be_killed_with(request["parent"])
    with contextlib.suppress(OSError):  # the client has ended, and this process is about to
        os.setpgid(0, request["group"])
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.SIGTERM not in request["ignored"]:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    os.nice(max(0, request["nice"] - os.nice(0)))
    _write(_MEMORY_MARK, request["memory"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])

    import numpy as np
    from ray._private.utils import update_envs

    update_envs(request["context"].get("env_vars") or {})
    # Or all forks would draw the same numbers. A fork seeds Python's own generator by itself.
    np.random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    _is_fork = True
    own = [w for w in request["argv"][1:] if not w.startswith((_CONTEXT, "--language="))]
    sys.argv = own
    runpy.run_path(own[0], run_name="__main__")


def main(arguments: "list[str]") -> int:
    role, *rest = arguments
    if role == "client":
        return _client(rest[0], rest[1:])
    listener, parent, *modules = rest
    server = _Server(socket.socket(fileno=int(listener)), int(parent))
    server.import_all(modules)
    _become(server.serve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
