"""What a program prints, line by line and labelled, in its node's container log.

Ray starts the launcher of a program on a node and keeps what it prints in files of its own. The
container's first process therefore opens a named pipe, and launchers write there. Not for commands
of the head: they inherit the container's own streams.
"""

import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from contract.nodes import ENV_LOG_PIPE, node_label

#: A line without an end is shown after this long; so is what a progress bar has come to.
PARTIAL_S: Final = 2.0
PROGRESS_S: Final = 10.0
_CHUNK: Final = 65_536
#: A program that never ends its line must not fill the memory.
_LONGEST: Final = 65_536


class Lines:
    """Cuts a stream of bytes into lines.

    A progress bar writes over itself with carriage returns; only what it shows when its line ends,
    and every ``PROGRESS_S`` seconds, is a line.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""
        self._since = 0.0  # when the rest was begun, or last shown

    def feed(self, chunk: bytes, *, now: float) -> None:
        """Take what was read at ``now``, in seconds of any clock."""
        if not self._rest:
            self._since = now
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            self._show(line)
        if whole:
            self._since = now
        # Of a progress bar, what has been written over is not needed any more.
        head, mark, tail = self._rest.rpartition(b"\r")
        if mark and tail:
            self._rest = b"\r" + tail
        elif mark:
            self._rest = b"\r" + _last(head) + b"\r"
        if len(self._rest) > _LONGEST:
            self.flush()

    def tick(self, *, now: float) -> None:
        """Show a line that is not ended yet, once it is old enough."""
        limit = PROGRESS_S if b"\r" in self._rest else PARTIAL_S
        if self._rest and now - self._since >= limit:
            self.flush()

    def flush(self) -> None:
        """Show what there is of a line that has not ended."""
        rest, self._rest = self._rest, b""
        if rest.strip(b"\r"):
            self._show(rest)

    def _show(self, line: bytes) -> None:
        self._emit(_last(line).decode(errors="replace").rstrip())


def _last(line: bytes) -> bytes:
    """What a terminal shows of a line that was written over."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


def copy_lines(source: int, emit: Callable[[str], None]) -> None:
    """Read a file descriptor to its end and ``emit`` its lines; for a thread of its own."""
    lines = Lines(emit)
    while True:
        ready, _, _ = select.select([source], [], [], 1.0)
        if ready:
            chunk = os.read(source, _CHUNK)
            if not chunk:
                break
            lines.feed(chunk, now=time.monotonic())
        lines.tick(now=time.monotonic())
    lines.flush()


class NodeLog:
    """Writes a program's lines to its node's log, each with the node's number."""

    def __init__(self, number: int, environment: Mapping[str, str]) -> None:
        self._label = node_label(number)
        self._lock = threading.Lock()
        self._file = _opened(environment.get(ENV_LOG_PIPE, ""))

    def write(self, line: str) -> None:
        """One line; its ends and control characters are the program's own business."""
        text = f"{self._label} {line}\n".encode(errors="replace")
        with self._lock:
            if self._file is None:
                sys.stdout.write(text.decode())
                sys.stdout.flush()
                return
            view = memoryview(text)
            while view:
                view = view[os.write(self._file, view) :]

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _opened(path: str) -> int | None:
    """The pipe of this node's first process; None where there is none."""
    try:
        if path and stat.S_ISFIFO(os.stat(path).st_mode):
            return os.open(path, os.O_WRONLY)
    except OSError:
        pass
    return None


@contextmanager
def log_pipe(folder: Path) -> Iterator[Path]:
    """A named pipe in ``folder`` whose lines go to this process's stdout, until the end."""
    path = folder / "log"
    os.mkfifo(path, mode=0o600)
    # Open at both ends, so that it never ends while launchers come and go.
    source = os.open(path, os.O_RDWR)
    stop_read, stop_write = os.pipe()
    thread = threading.Thread(target=_relay, args=(source, stop_read), daemon=True)
    thread.start()
    try:
        yield path
    finally:
        os.close(stop_write)
        thread.join(5)
        path.unlink()


def _relay(source: int, stop: int) -> None:
    out = sys.stdout.fileno()
    while True:
        ready, _, _ = select.select([source, stop], [], [])
        if source in ready:
            _write_all(out, os.read(source, _CHUNK))
        elif stop in ready:  # and all that was written before has been read
            break
    os.close(source)
    os.close(stop)


def _write_all(out: int, content: bytes) -> None:
    while content:
        content = content[os.write(out, content) :]
