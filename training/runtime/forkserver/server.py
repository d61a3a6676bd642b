"""A server: imports, then forks processes of Ray's, and servers that import more before they do.

The first one imports torch and what else needs no Ray. Below it is one for each job, which imports
Ray: Ray's core reads RAY_JOB_ID and RAY_RAYLET_PID when it is imported, and aborts a worker that
lacks them. Below that is one for the job's workers, which imports the recipe while the one above
serves Ray's own actors. Each ends with the process that has started it, the server of a job with
its raylet too: nothing is left after a SIGKILL of any of them.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from training.runtime.forkserver import fitness
from training.runtime.forkserver.client import FORKED, PREFIX, REFUSED, user_of
from training.runtime.forkserver.forked import be_killed_with
from training.runtime.forkserver.parent import GIVEN

if TYPE_CHECKING:
    from training.runtime.forkserver.client import Request, Step

#: Servers below one server; more than a few would mean that a key changes all the time.
_MOST_SERVERS = 8
#: A job's server that has had nothing to do for so long ends; the next request starts another.
_IDLE_S = 120


class Server:
    """Imports, then forks: workers, and servers that import more before they do the same.

    ``serve`` returns in a forked worker, with its request, and never in a server.
    """

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self._listener: socket.socket | None = listener
        self._inbox: socket.socket | None = None
        self._given: dict[str, str] = json.loads(os.environ.pop(GIVEN))
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

    def import_all(self, modules: Sequence[str]) -> None:
        """Import, and find out whether this process may fork afterwards."""
        for module in modules:
            try:
                import_module(module)
                if module == "ray":
                    fitness.draw_ids_of_classes_in_python()
            except Exception as error:
                self._unfit = f"cannot import {module}: {type(error).__name__}: {error}"
                return
        self._unfit = fitness.why_not_to_fork(
            os.listdir("/proc/self/task"), fitness.open_files("/proc/self/fd")
        )
        try:
            has_core = "ray" in sys.modules
            if not self._unfit and has_core and fitness.random_id() == fitness.random_id():
                self._unfit = "an import has had Ray's core draw a random number"
        except OSError as error:
            self._unfit = f"cannot fork: {error.strerror}"
        # What is there now is in use until the end: looking at it would only copy its pages.
        gc.collect()
        gc.freeze()

    def serve(self) -> "Request":
        """Answer requests, in a server; in a forked worker, return its request."""
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

    def _take(self, source: socket.socket) -> "Request | None":
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
            if user_of(connection) == os.getuid():
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
            request: Request = json.loads(os.pread(files[0], os.fstat(files[0]).st_size, 0))
            unfit = self._unfit
            if depth == 0 and not unfit and request["argv"] is not None:
                unfit = fitness.why_not_forked(request, self._given)
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

    def _refuse(self, reason: str, files: list[int]) -> None:
        print(PREFIX + reason, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), socket.socket(fileno=files.pop()) as client:
            client.sendall(REFUSED + reason.encode()[:4000])

    def _fork(self, request: "Request", files: list[int]) -> "Request | None":
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
            client.sendall(FORKED)
        return None

    def _hand_down(self, step: "Step", depth: int, files: list[int]) -> None:
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

    def _begin(self, step: "Step") -> None:
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
