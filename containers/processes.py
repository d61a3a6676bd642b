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
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            # Of a zombie it is empty.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


def in_group(group: int) -> list[int]:
    """Ids of the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # After the program's name, in parentheses: state, parent, group.
            state, _parent, its = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has ended
        if int(its) == group and state not in ("Z", "X"):
            found.append(int(entry.name))
    return found


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
