"""One run of a command: its log lines, its end, and the end of every process that it started.

Ray starts the launcher of a program on a node and keeps what it prints in files of its own. So
launchers write labelled lines to the stdout of the container's first process, which Linux lets them
open by its path.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import ClassVar, Final

from containers.host import machine
from contract import exits
from contract.nodes import ENV_LOG, node_label

#: A line without an end is shown after this long; so is what a progress bar has come to.
PARTIAL_S: Final = 2.0
PROGRESS_S: Final = 10.0
_CHUNK: Final = 65_536
#: A program that never ends a line must not fill the memory.
_LONGEST: Final = 65_536


class Lines:
    """Cuts a stream of bytes into lines.

    A progress bar writes over itself with carriage returns; only what it shows when its line ends,
    and every ``PROGRESS_S`` seconds, is a line.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""
        self._since = 0.0  # when the unfinished line began

    def feed(self, chunk: bytes, *, now: float, is_over: bool = False) -> None:
        """Take what was read until ``now``, in seconds of any clock; show a line that has not ended
        once it is old or long enough."""
        if not self._rest:
            self._since = now
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        limit = PROGRESS_S if b"\r" in self._rest else PARTIAL_S
        is_due = is_over or now - self._since >= limit or len(self._rest) > _LONGEST
        if is_due and self._rest.strip(b"\r"):
            whole.append(self._rest)
            self._rest = b""
        if whole:
            self._since = now
        for line in whole:
            # Keep what a terminal would show of an overwritten line.
            shown = next((part for part in reversed(line.split(b"\r")) if part), b"")
            self._emit(shown.decode(errors="replace").rstrip())


def copy_lines(source: int, emit: Callable[[str], None]) -> None:
    """Read a file descriptor to its end and ``emit`` its lines; for a thread of its own."""
    lines, is_over = Lines(emit), False
    while not is_over:
        ready, _, _ = select.select([source], [], [], 1.0)
        chunk = os.read(source, _CHUNK) if ready else b""
        is_over = bool(ready) and not chunk
        lines.feed(chunk, now=time.monotonic(), is_over=is_over)


def own_output() -> str:
    """Path under which other processes of this container write to this one's stdout."""
    return f"/proc/{os.getpid()}/fd/1"


class NodeLog:
    """Writes a program's lines to its node's log, each with the node's number."""

    def __init__(self, number: int, environment: Mapping[str, str]) -> None:
        self._label = node_label(number)
        self._lock = threading.Lock()
        self._file = os.open(environment.get(ENV_LOG) or own_output(), os.O_WRONLY | os.O_APPEND)

    def write(self, line: str) -> None:
        """Write one line; its control characters are passed on unchanged."""
        view = memoryview(f"{self._label} {line}\n".encode(errors="replace"))
        with self._lock:
            while view:
                view = view[os.write(self._file, view) :]


#: Marks a program and all that it starts, by the start's id.
ENV_START: Final = "TRAIN_PROGRAM_START"
_POLL_S: Final = 0.1
#: After SIGKILL; longer, and the kernel holds a process.
_KILL_S: Final = 5.0
#: What outlives its command may end by itself for so long.
_LEAVE_S: Final = 2.0
#: Commands that are started to run beside a program, and are not missed: shells and what their
#: loops wait with, monitors, servers of trackers, and what Python, PyTorch and Ray keep running.
_HELPERS: Final = re.compile(
    r"(?:^|[\s/])(?:-?(?:ba|da|k|z)?sh|sleep|tail|tee|cat|watch|h?top|nvtop|nvidia-smi|dcgmi|"
    r"[dimv]\w?stat|pidstat|ssh-agent|gpg-agent|redis-server|raylet|gcs_server|ray|wandb[\w-]*|"
    r"tensorboard(?:\.main)?|jupyter[\w-]*|mlflow|multiprocessing\.\w+|compile_worker)(?=$|[\s:/])"
)


class ProgramProcess:
    """One start of a command, with all that it starts itself."""

    _commands: ClassVar[set[int]] = set()
    """Ids of the commands that this process has started, and waits for itself."""
    _starting: ClassVar[threading.Lock] = threading.Lock()
    """Held until the id of a new one is among them."""

    def __init__(
        self,
        words: tuple[str, ...],
        *,
        folder: Path | None,
        environment: Mapping[str, str],
        emit: Callable[[str], None] | None = None,
        adopts: bool = False,
    ) -> None:
        """Start it.

        Args:
            folder: where it runs; None: where this process does.
            emit: takes each line that it prints; None: it prints where this process does.
            adopts: this process becomes the parent of the program's orphans, to find them.

        Raises:
            OSError: there is no such program.
        """
        self._mark = uuid.uuid4().hex
        self._terminated: set[int] = set()
        self._adopts = adopts
        if adopts:
            machine.adopt_orphans()
        with self._starting:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env={**environment, ENV_START: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if emit else None,
                stderr=subprocess.STDOUT if emit else None,
                start_new_session=True,  # its group, by which what has no mark any more is found
            )
            self._commands.add(self._process.pid)
        self._born = machine.processes()[self._process.pid].born
        self._reader: threading.Thread | None = None
        if emit is not None:
            assert self._process.stdout is not None
            self._reader = threading.Thread(
                target=copy_lines, args=(self._process.stdout.fileno(), emit), daemon=True
            )
            self._reader.start()

    def poll(self) -> int | None:
        """Its exit code, once it has ended; 128 + N where signal N ended it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """SIGTERM, for the command only: it passes it on, as torchrun does, or it ends."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, until: Callable[[], float]) -> None:
        """Wait for the command's end.

        Args:
            until: ``time.monotonic()`` after which it is not waited for; asked again and again.
        """
        while self.poll() is None and time.monotonic() < until():
            time.sleep(_POLL_S)

    def end(self, until: Callable[[], float] = lambda: 0.0) -> int:
        """End what is left of it: SIGTERM for what has outlived the command, which a shell, say,
        has not told, and SIGKILL for all of it when the time is over. Return its exit code.

        Args:
            until: as in ``wait``; by default there is no time.
        """
        while time.monotonic() < until() and self._terminate_rest():
            time.sleep(_POLL_S)
        over = time.monotonic() + _KILL_S
        # Again for those that were being started meanwhile.
        while (left := self.left()) and time.monotonic() < over:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(_POLL_S / 10)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it, for a GPU
            self._process.wait(_KILL_S)
        if self._reader is not None:
            self._reader.join(5)
            if self._process.stdout is not None and not self._reader.is_alive():
                self._process.stdout.close()
        self._commands.discard(self._process.pid)
        code = self.poll()
        return exits.KILLED if code is None else code

    def left(self) -> set[int]:
        """Process ids of what is left of it.

        One that has cleared or overwritten its environment has no mark, and one with a session of
        its own is in no group of ours: those are found by their parents.
        """
        with self._starting:
            there = machine.processes()
        found = {
            *machine.marked(ENV_START, self._mark),
            *(pid for pid, each in there.items() if self._is_own(pid, each)),
        }
        while more := {pid for pid, each in there.items() if each.parent in found} - found:
            found |= more
        return found

    def _is_own(self, pid: int, entry: machine.ProcessEntry) -> bool:
        """True for those of its group, and for its orphans, of which this process is the parent;
        what this process has started itself is in the same session, or is a command."""
        if entry.group == self._process.pid:
            return entry.state not in "ZX"
        is_child = entry.parent == os.getpid() and entry.session != os.getsid(0)
        is_orphan = is_child and entry.born >= self._born and pid not in self._commands
        if self._adopts and is_orphan and entry.state == "Z":
            # As init would, or its id would be taken for as long as this process lives.
            with contextlib.suppress(ChildProcessError):  # another thread was first
                os.waitpid(pid, os.WNOHANG)
        return self._adopts and is_orphan and entry.state not in "ZX"

    def _terminate_rest(self) -> bool:
        """SIGTERM, once each, for what has outlived the command; return whether anything is left.

        Only for those whose parent is gone: a torchrun, say, ends its own processes.
        """
        left = self.left()
        for pid in _roots(left) - self._terminated:
            self._terminated.add(pid)
            _signal(pid, signal.SIGTERM)
        return bool(left)

    def outlived(self) -> dict[int, list[str]]:
        """Words of what still runs although the command has ended with 0, by process id, without
        helpers and child processes. A moment is given to what ends by itself."""
        if self.poll() != exits.OK:
            return {}
        until = time.monotonic() + _LEAVE_S
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        found = {
            pid: words
            for pid in left
            if (words := machine.words(pid)) and not _HELPERS.search(" ".join(words[:3]))
        }
        return {pid: found[pid] for pid in _roots(found)}


def _roots(pids: Collection[int]) -> set[int]:
    """Those of some processes whose parent is none of them."""
    there = machine.processes()
    return {pid for pid in pids if pid in there and there[pid].parent not in pids}


def _signal(pid: int, number: signal.Signals) -> None:
    # The process has ended, or its number is another user's now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
