"""How ECS ended a task, read from its stop code, its reason and its exit code.

``trainctl cluster up`` and the function that cleans up after jobs draw different conclusions, and
read ECS's words once, here.
"""

import re
from enum import Enum, auto
from typing import Final

from contract import exits

#: Stop codes of a task whose host went away below it.
_HOST_LOST: Final = ("SpotInterruption", "TerminationNotice")


class Ending(Enum):
    """How a task ended."""

    HOST_LOST = auto()
    """Its host was reclaimed, terminated or stopped."""
    STOPPED = auto()
    """A user, or a program for one, stopped it."""
    SURPLUS = auto()
    """Its service had more tasks than it should keep."""
    IMAGE_NOT_FOUND = auto()
    """Its image could not be pulled."""
    OUT_OF_MEMORY = auto()
    """Linux killed it because it used more memory than it may."""
    KILLED = auto()
    """SIGKILL from elsewhere."""
    EXITED = auto()
    """Its container ended by itself, with an exit code."""
    NOT_STARTED = auto()
    """Its container never ran."""


def ending(*, stop_code: str, reason: str, exit_code: int | None) -> Ending:
    """How a task ended.

    Args:
        stop_code: of the task.
        reason: of its container, or of the task where the container has none.
        exit_code: of its container; None where it has none.
    """
    if stop_code in _HOST_LOST or re.search(r"Host EC2 .*(terminated|stopped)", reason):
        return Ending.HOST_LOST
    if stop_code == "UserInitiated":
        return Ending.STOPPED
    if stop_code == "ServiceSchedulerInitiated":
        return Ending.SURPLUS
    if "CannotPullContainer" in reason:
        return Ending.IMAGE_NOT_FOUND
    if "OutOfMemory" in reason:
        return Ending.OUT_OF_MEMORY
    if exit_code == exits.KILLED:
        return Ending.KILLED
    return Ending.NOT_STARTED if exit_code is None else Ending.EXITED
