"""Starts the processes of an example as torchrun does, without importing torch for each of them.

The processes are forks (``tests.forks``), with the variables that torchrun sets. What torchrun
itself does is tested with the launcher of the nodes.
"""

import faulthandler
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from tests.forks import FORKS

#: Of one start of an example.
_END_S: Final = 90


def _run(script: Path, arguments: Sequence[str], variables: dict[str, str], log: Path) -> None:
    """What a forked process does."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(_END_S - 5, file=2)  # shows where it hangs
    os.chdir(script.parent)
    os.environ |= variables
    sys.argv = [script.name, *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes of one start, one per rank."""

    processes: Sequence[BaseProcess]
    log: Path
    """What all of them print, appended."""

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def wait(self) -> list[int | None]:
        """Exit codes, by rank."""
        deadline = time.monotonic() + _END_S
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        return [process.exitcode for process in self.processes]

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, words: str) -> None:
        """Wait until they have printed ``words``."""
        deadline = time.monotonic() + _END_S
        while words not in self.text():
            assert time.monotonic() < deadline, f"{words!r} is not in:\n{self.text()}"
            assert any(process.is_alive() for process in self.processes), self.text()
            time.sleep(0.01)


@contextmanager
def started(script: Path, *arguments: str, log: Path, world: int = 2) -> Iterator[Group]:
    """The processes of an example; none of them is left afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = FORKS.Process(target=_run, args=(script, arguments, variables, log))
        process.start()
        processes.append(process)
    group = Group(processes=processes, log=log)
    try:
        yield group
    finally:
        group.kill()
        for process in processes:
            process.join()
