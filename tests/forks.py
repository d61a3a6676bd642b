"""Processes of tests that need torch: forked from one that has imported it, once for all of them.

A process that imports torch and transformers itself takes five CPU seconds before it does anything.
``ranks`` are started with the variables that torchrun sets; what torchrun itself does is tested
with one run of a recipe and with the launcher of the nodes. Not for variables that torch reads
while it is imported: a fork has what the first process read.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from tests.eventually import eventually

#: ``multiprocessing`` knows the method by this name.
METHOD: Final = "forkserver"
FORKS: Final = multiprocessing.get_context(METHOD)
# Nothing of this project: another checkout may be the one that is installed.
FORKS.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.fsdp", "accelerate", "sklearn.datasets"),
        *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
        # The figures of a report: two seconds.
        *("matplotlib.figure", "matplotlib.backends.backend_agg"),
        *("matplotlib.backends.backend_svg",),
        *("transformers.models.gpt_neox.modeling_gpt_neox",),
        *("transformers.models.llama.modeling_llama",),
        *("transformers.models.efficientnet.modeling_efficientnet",),
        *("transformers.models.resnet.modeling_resnet",),
    ]
)
#: A process prints the stacks of what it does so often: a test that waits in vain shows where.
_STACKS_EVERY_S: Final = 85


def run(world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``work(*arguments)`` as so many ranks; return what each returns."""
    from benchmarks import rank_groups  # which imports torch

    return rank_groups.run(world_size, work, *arguments, method=METHOD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes of one start, one per rank."""

    processes: Sequence[BaseProcess]
    out: Path
    """What all of them print, appended."""
    err: Path

    def poll(self) -> int | None:
        """The exit code, once all have ended: that of the first which failed."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def wait(self, timeout_s: float = 400) -> list[int | None]:
        """Exit codes, by rank; None of those that still run."""
        deadline = time.monotonic() + timeout_s
        while running := [each.sentinel for each in self.processes if each.exitcode is None]:
            if time.monotonic() > deadline:
                break
            connection.wait(running, timeout=1)
        return [process.exitcode for process in self.processes]

    def communicate(self, timeout: float = 400) -> tuple[str, str]:
        """What all have printed and reported, after their end. Raises TimeoutError."""
        if None in self.wait(timeout):
            raise TimeoutError(self.text())
        return self.out.read_text(), self.err.read_text()

    def kill(self) -> None:
        """SIGKILL to all that still run; they have ended then."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def text(self) -> str:
        return "".join(each.read_text() for each in {self.out, self.err} if each.exists())

    def wait_for(self, words: str) -> None:
        """Wait until they have printed ``words``."""
        eventually(
            f"{words!r} in their output",
            lambda: words in self.text(),
            timeout_s=400,
            every_s=0.01,
            over=lambda: None if self.poll() is None else f"its end:\n{self.text()}",
        )


def ranks(command: Sequence[str], *, folder: Path, out: Path, err: Path, world: int = 2) -> Ranks:
    """Start a program as so many ranks.

    Args:
        command: what would follow ``python``: a script or ``-m`` and a module, and arguments.
        folder: in which it runs.
        out, err: files to which the two streams are appended; may be the same.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "none",
        }
        process = FORKS.Process(target=_run, args=(tuple(command), folder, variables, out, err))
        process.start()
        processes.append(process)
    return Ranks(processes=processes, out=out, err=err)


def _run(
    command: Sequence[str], folder: Path, variables: dict[str, str], out: Path, err: Path
) -> None:
    """What a forked process does."""
    for number, path in ((1, out), (2, err)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    faulthandler.dump_traceback_later(_STACKS_EVERY_S, repeat=True, file=2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if command[0] == "-m":
        sys.argv = [*command[1:]]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*command]
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
