"""One start of a command: its lines, its end, and the end of all that it started."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from containers import processes
from containers.program.lines import copy_lines
from contract import exits

#: Marks a program and all that it starts, by the start's id.
ENV_START: Final = "TRAIN_PROGRAM_START"
_POLL_S: Final = 0.1
#: After SIGKILL; longer, and the kernel holds a process.
_KILL_S: Final = 5.0


class Program:
    """One start of a command, with all that it starts itself."""

    def __init__(
        self,
        words: tuple[str, ...],
        *,
        folder: Path | None,
        environment: Mapping[str, str],
        emit: Callable[[str], None] | None = None,
    ) -> None:
        """Start it.

        Args:
            folder: where it runs; None: where this process does.
            emit: takes each line that it prints; None: it prints where this process does.

        Raises:
            OSError: there is no such program.
        """
        self._mark = uuid.uuid4().hex
        self._told: set[int] = set()
        self._process = subprocess.Popen(
            words,
            cwd=folder,
            env={**environment, ENV_START: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if emit else None,
            stderr=subprocess.STDOUT if emit else None,
            start_new_session=True,  # its group, by which what has no mark any more is found
        )
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
        self._process.wait()
        if self._reader is not None:
            self._reader.join(5)
            if self._process.stdout is not None and not self._reader.is_alive():
                self._process.stdout.close()
        code = self.poll()
        return exits.KILLED if code is None else code

    def left(self) -> set[int]:
        """Process ids of what is left of it."""
        # By the group too: a process that has changed its title has no mark any more.
        return {*processes.marked(ENV_START, self._mark), *processes.in_group(self._process.pid)}

    def _terminate_rest(self) -> bool:
        """SIGTERM, once each, for what has outlived the command; return whether anything is left.

        Only for those whose parent is gone: a torchrun, say, ends its own processes.
        """
        left = self.left()
        for pid in left - self._told:
            if processes.parent(pid) not in left:
                self._told.add(pid)
                _signal(pid, signal.SIGTERM)
        return bool(left)


def _signal(pid: int, number: signal.Signals) -> None:
    # It has ended, or has become another user's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
