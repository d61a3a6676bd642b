"""Whether the file system that all hosts share is in this container, before the node joins.

A host that could not mount it gets no task. One that has lost it, after a restart for example,
would show an empty folder here, and a run would train on nothing.
"""

from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
KIND: Final = "lustre"


def faults(folder: str, mounts: Path = MOUNTS) -> list[str]:
    """What is wrong with the mount, a line each; empty when it is as it should be.

    Args:
        folder: Where it should be.
        mounts: What Linux has mounted for this process: proc(5), mountinfo.
    """
    for line in mounts.read_text().splitlines():
        mounted, _, source = line.partition(" - ")
        if mounted.split()[4] == folder:
            found = source.split()[0]
            if found != KIND:
                return [f"{folder} is {found} and not {KIND}: the shared file system is not there"]
            return []
    return [f"nothing is mounted at {folder}: the shared file system is not there"]
