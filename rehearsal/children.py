"""Child processes, progress at the terminal, and Ctrl-C.

Programs that are waited for are run so that an interruption leaves none of them behind. Processes
that a rehearsal leaves running are found again by what it wrote into their environment: a file of
process ids that is written too late loses a process, and one that is read too late names another
one. Linux only, as the rehearsal in containers is.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Final

from contract import text
from contract.errors import ReportedError

#: What an interrupted program gets to clean up after itself, before it is killed.
KILL_AFTER_S: Final = 20
#: Longest silence of ``Steps``; on a terminal its line moves ten times in that time.
QUIET_S = 10.0


class CommandError(ReportedError):
    """A program failed; the message has the end of what it printed."""


#: Lines of other programs, in words of our own. A step of a build, as Docker prints it: ``#9
#: [worker 4/17] RUN pip``, ``Step 4/17 : RUN pip``; a resource of a stack: ``CoreStack | 3/40 |``.
_PROGRESS: Final = (
    (re.compile(r"(?:#\d+ \[(?:\S+ )?|Step )(\d+)/(\d+)(?:\] | : )"), "step {} of {}"),
    (re.compile(r"(\w+) *\| *(\d+)/(\d+) *\|"), "{}, {} of {} resources"),
)
#: For ``Steps``: how far the program is that runs now.
heard: Final = [""]


def hear(line: str) -> None:
    """Note how far a program is, if a line has that."""
    for pattern, words in _PROGRESS:
        if found := pattern.match(line):
            heard[0] = words.format(*found.groups())


def open_group(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    stderr: int = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    """Start a program whose output is read. It leads a process group of its own: Ctrl-C reaches
    only this process, which ends the group (``end_group``)."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path | None = None,
    silent_s: float = threading.TIMEOUT_MAX,
    streams_together: bool = False,
) -> str:
    """Run a program to its end and return what it prints on stdout.

    Args:
        log: receives the command, and each line that it prints at once.
        streams_together: return what it prints on stderr, too, in the order of printing.

    Raises:
        CommandError: it failed, or printed nothing for ``silent_s`` seconds: how long it takes
            depends on the machine, and a line is a sign of life.
    """
    stderr = subprocess.STDOUT if streams_together else subprocess.PIPE
    process = open_group(command, environment=environment, folder=folder, stderr=stderr)
    name = " ".join([Path(command[0]).name, *command[1:4]])
    output: list[str] = []
    errors: list[str] = []
    printed_at = [time.monotonic()]
    with (log or Path(os.devnull)).open("a", encoding="utf-8", buffering=1) as file:
        file.write(f"$ {' '.join(command)}\n")

        def read(stream: IO[str], lines: list[str]) -> None:
            with stream:
                for line in stream:
                    lines.append(line)
                    file.write(line)
                    hear(line)
                    printed_at[0] = time.monotonic()

        readers = [
            threading.Thread(target=read, args=(stream, lines), daemon=True)
            for stream, lines in ((process.stdout, output), (process.stderr, errors))
            if stream
        ]
        try:
            for reader in readers:
                reader.start()
            while process.poll() is None or any(each.is_alive() for each in readers):
                if time.monotonic() > printed_at[0] + silent_s:
                    raise subprocess.TimeoutExpired(command, silent_s)
                time.sleep(0.05)
        except BaseException as error:
            end_group(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CommandError(f"{name} printed nothing for {silent_s:.0f} s") from None
    if process.returncode:
        said = ("".join(errors).strip() or "".join(output).strip())[-4000:]
        raise CommandError(f"{name} failed with exit code {process.returncode}:\n{said}")
    return "".join(output)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads a group, politely and then not, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=KILL_AFTER_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Steps:
    """Shows on stderr what is being done, and for how long: a moving line on a terminal, elsewhere
    a line that the seconds end, and another one whenever ``QUIET_S`` have passed."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0
        self._shown = ""
        self._is_open = False
        """True if the last line waits for its end."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._number += 1
        self._shown = f"[{self._number:2}/{self._total}] {what}"
        heard[0] = ""
        if not sys.stderr.isatty():
            self._print(f"{self._shown} ... ", end="")
            self._is_open = True
        began, over = time.monotonic(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(began, over), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            self.seconds[what] = time.monotonic() - began
            took = text.duration(round(self.seconds[what]))
            if self._is_open:
                self._is_open = False
                self._print(took)
            else:
                self._print(f"{self._shown} ... {took}")

    def _watch(self, began: float, over: threading.Event) -> None:
        """Show the step until it is over."""
        is_terminal = sys.stderr.isatty()
        while not over.wait(QUIET_S / 10 if is_terminal else QUIET_S):
            at = f": {heard[0]}" if heard[0] else ""
            after = f", {time.monotonic() - began:.0f} s"
            room = shutil.get_terminal_size().columns - len(self._shown) - len(after) - 1
            line = f"{self._shown}{at[: max(room, 0)]}{after}"
            self._print(line, end="" if is_terminal else "\n")

    def say(self, lines: str) -> None:
        """A line about the step that is going on."""
        for line in lines.splitlines():
            self._print(f"        {line}")

    def _print(self, line: str, end: str = "\n") -> None:
        # Over what moves there, or below what waits for its end.
        clear = "\r\x1b[K" if sys.stderr.isatty() else "\n" * self._is_open
        self._is_open = False
        print(f"{clear}{line}", end=end, file=sys.stderr, flush=True)


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
    for number, limit_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
        for pid in find(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + limit_s
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
