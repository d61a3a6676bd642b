"""Processes that a rehearsal leaves running, found again by what it wrote into their environment.

No file of process ids: one that is written too late loses a process, and one that is read too late
names another process. Linux only, as the rehearsal in containers is.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

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
