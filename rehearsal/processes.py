"""Child processes, progress at the terminal, and Ctrl-C.

Programs that are waited for are run so that an interruption leaves none of them behind. Processes
that a rehearsal leaves running are found again by what it wrote into their environment: a file of
process ids that is written too late loses a process, and one that is read too late names another
one. Linux only, as the rehearsal in containers is.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from contract import text

#: What an interrupted program gets to clean up after itself, before it is killed.
PATIENCE_S: Final = 20


class CommandError(RuntimeError):
    """A program failed; the message has the end of what it printed."""


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path | None = None,
    timeout_s: float | None = None,
    streams_together: bool = False,
) -> str:
    """Run a program to its end and return what it prints on stdout.

    It leads a process group of its own: Ctrl-C reaches only this process, which then ends the
    whole group.

    Args:
        log: receives the command and all that it prints.
        streams_together: return what it prints on stderr, too, in the order of printing.

    Raises:
        CommandError: it failed, or took longer than ``timeout_s``.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if streams_together else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    name = " ".join([Path(command[0]).name, *command[1:4]])
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        raise CommandError(f"{name} took longer than {timeout_s:.0f} s") from None
    except BaseException:
        end_group(process)
        raise
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n{errors or ''}{output}\n")
    if process.returncode:
        said = ((errors or "").strip() or output.strip())[-4000:]
        raise CommandError(f"{name} failed with exit code {process.returncode}:\n{said}")
    return output


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads a group, politely and then not, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=PATIENCE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Steps:
    """Says what is being done, and how long it took, on stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0
        self._is_line_open = False
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._number += 1
        began = time.monotonic()
        self._print(f"[{self._number:2}/{self._total}] {what} ... ", end="")
        self._is_line_open = True
        yield
        self.seconds[what] = time.monotonic() - began
        if not self._is_line_open:
            self._print("        ", end="")
        self._print(text.duration(round(self.seconds[what])))
        self._is_line_open = False

    def say(self, lines: str) -> None:
        """A line about the step that is going on."""
        if self._is_line_open:
            self._print("")
            self._is_line_open = False
        for line in lines.splitlines():
            self._print(f"        {line}")

    @staticmethod
    def _print(line: str, end: str = "\n") -> None:
        print(line, end=end, file=sys.stderr, flush=True)


@contextmanager
def _answering(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """SIGTERM and Ctrl-C both call ``handler``."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def interruptible() -> AbstractContextManager[None]:
    """SIGTERM and Ctrl-C both raise KeyboardInterrupt, also where a shell ignores SIGINT."""
    return _answering(signal.default_int_handler)


def uninterrupted() -> AbstractContextManager[None]:
    """Cleaning up goes on to its end, however often Ctrl-C is pressed."""

    def refuse(_number: int, _frame: FrameType | None) -> None:
        print("\nalready taking everything down; a moment", file=sys.stderr, flush=True)

    return _answering(refuse)


#: Name of the rehearsal, in the environment of each of its processes.
NAME: Final = "REHEARSAL_NAME"
#: What a process is for.
ROLE: Final = "REHEARSAL_ROLE"

# Started here: they wait for this process to take note of their end.
_started: list[subprocess.Popen[bytes]] = []


def start(
    command: Sequence[str], *, name: str, role: str, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process that stays when this one ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, NAME: name, ROLE: role},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started.append(process)
    # Linux lets this process go on a moment before the other has its environment.
    with suppress(OSError):
        while process.poll() is None and not Path(f"/proc/{process.pid}/environ").read_bytes():
            time.sleep(0.001)
    return process


def find(name: str, role: str | None = None) -> list[int]:
    """Ids of the processes of a rehearsal, of those with a role, or of all."""
    wanted = {f"{NAME}={name}".encode()} | ({f"{ROLE}={role}".encode()} if role else set())
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        # Ended in between, or another user's.
        with suppress(OSError):
            values = (folder / "environ").read_bytes().split(b"\0")
            if wanted <= {*values} and not _is_zombie(folder):
                found.append(int(folder.name))
    return sorted(found)


def end(name: str, *, timeout_s: float) -> int:
    """End all processes of a rehearsal, politely and then not; return how many there were."""
    pids = find(name)
    for number, patience_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
        for pid in find(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while find(name) and time.monotonic() < deadline:
            _take_note()
            time.sleep(0.1)
    _take_note()
    return len(pids)


def _take_note() -> None:
    """A process is a zombie until the one that has started it asks how it ended."""
    for process in _started:
        process.poll()


def _is_zombie(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
