"""One start of a program's command: its lines, its end, and the end of all that it started."""

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

    def clean_up(self) -> None:
        """SIGKILL for all that is left of it, and the last of its lines."""
        processes.kill_marked(ENV_START, self._mark)
        self._process.wait()
        self._reader.join(5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
