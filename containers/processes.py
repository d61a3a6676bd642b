"""Processes by a variable of their environment, which all that they start inherits.

What a program leaves behind may have sessions, groups and parents of its own; its environment still
tells where it comes from. Linux only, which is what a node runs.
"""

import os
import signal
import time
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.05


def marked(name: str, value: str) -> list[int]:
    """Ids of the running processes whose environment began with ``name=value``, but this one."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _ids():
        if pid == os.getpid():
            continue
        try:
            # Of a zombie it is empty.
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue  # it has ended, or is another user's
    return found


def in_group(group: int) -> list[int]:
    """Ids of the running processes of a process group, also where they have overwritten their
    environment, as those do that change their title."""
    return [pid for pid in _ids() if (found := _stat(pid)) and found[2] == group]


def parent(pid: int) -> int:
    """Id of a process's parent; 0 where the process has ended."""
    found = _stat(pid)
    return found[1] if found else 0


def _ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and group of a process; None where it has ended, a zombie included."""
    try:
        # Its name, in brackets, may have spaces and brackets of its own.
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else (words[0], int(words[1]), int(words[2]))


def kill_marked(name: str, value: str, *, within_s: float = 5.0) -> int:
    """SIGKILL for all of them, again for those that were being started meanwhile; return how many.

    Args:
        within_s: returns after this long even where some are stuck in the kernel.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + within_s
    while (there := marked(name, value)) and time.monotonic() < deadline:
        for pid in there:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(_POLL_S)
    return len(killed)
