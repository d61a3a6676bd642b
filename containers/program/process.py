"""One start of a program's command: its lines, its end, and the end of all that it started."""

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from containers import processes
from containers.program.lines import copy_lines

#: Marks a program and all that it starts, by the start's id.
ENV_START: Final = "TRAIN_PROGRAM_START"


class Program:
    """One start of a command, with all that it starts itself."""

    def __init__(
        self,
        words: tuple[str, ...],
        *,
        folder: Path,
        environment: Mapping[str, str],
        emit: Callable[[str], None],
    ) -> None:
        """Start it.

        Args:
            emit: takes each line that it prints.

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
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it starts gets signals with it
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=copy_lines, args=(self._process.stdout.fileno(), emit), daemon=True
        )
        self._reader.start()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """SIGTERM, for the command only: it passes it on, as torchrun does, or it ends."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def terminate_rest(self) -> bool:
        """SIGTERM, once each, for what has outlived the command; return whether anything is left.

        Only for those whose parent is gone: a torchrun, say, ends its own processes.
        """
        left = {*processes.marked(ENV_START, self._mark), *processes.in_group(self._process.pid)}
        for pid in left - self._told:
            if processes.parent(pid) not in left:
                self._told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return bool(left)

    def clean_up(self) -> None:
        """SIGKILL for all that is left of it, and the last of its lines."""
        # The group first: a process that has changed its title has no mark any more.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.kill_marked(ENV_START, self._mark)
        self._process.wait()
        self._reader.join(5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
