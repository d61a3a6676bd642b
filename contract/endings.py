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
#: What is wrong with an image that another attempt cannot pull either.
_NO_IMAGE: Final = r"not found|manifest unknown|does not exist|no such image|platform"
#: GPUs or EFA devices that are not there when a container starts, and a full disk: the next task
#: fails there too.
_BAD_HOST: Final = (
    r"nvidia-container|libnvidia|libcuda|NVML|could not select device driver|"
    r"custom device \W*/dev/infiniband|no space left on device"
)
#: The host or AWS could not do its part.
_HOST_FAULT: Final = (
    r"Cannot(Pull|Create|Start|Inspect)Container|ResourceInitialization|ContainerRuntime|"
    r"DockerTimeout|\bAGENT\b|agent .*disconnect|Throttl|Rate exceeded|"
    r"ECS\.(AmazonECS|Server)Exception"
)
#: Of a secret: what AWS says then, it says again.
_NO_SECRET: Final = r"ResourceNotFoundException|AccessDenied"


class Ending(Enum):
    """How a task ended."""

    HOST_LOST = auto()
    """Its host was reclaimed, terminated or stopped."""
    STOPPED = auto()
    """A user, or a program for one, stopped it."""
    SURPLUS = auto()
    """Its service had more tasks than it should keep."""
    IMAGE_NOT_FOUND = auto()
    """There is no such image."""
    BAD_HOST = auto()
    """Its host is not fit to run it: its GPUs do not answer, or its disk is full."""
    HOST_FAULT = auto()
    """Its host or AWS could not start it: a pull, a secret, the agent, throttling."""
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
        reason: of its container, or of the task where the container has none; the error of RunTask
            where there is no task.
        exit_code: of its container; None where it has none.
    """
    if stop_code in _HOST_LOST or re.search(r"Host EC2 .*(terminated|stopped)", reason):
        return Ending.HOST_LOST
    if stop_code == "UserInitiated":
        return Ending.STOPPED
    if stop_code == "ServiceSchedulerInitiated":
        return Ending.SURPLUS
    has_not_run = exit_code is None
    if exit_code == exits.BAD_HOST or (has_not_run and _says(_BAD_HOST, reason)):
        return Ending.BAD_HOST
    if "CannotPullContainer" in reason and _says(_NO_IMAGE, reason):
        return Ending.IMAGE_NOT_FOUND
    if "OutOfMemory" in reason:
        return Ending.OUT_OF_MEMORY
    if exit_code == exits.KILLED:
        return Ending.KILLED
    if has_not_run:
        is_fault = _says(_HOST_FAULT, reason) and not _says(_NO_SECRET, reason)
        return Ending.HOST_FAULT if is_fault else Ending.NOT_STARTED
    return Ending.EXITED


def _says(pattern: str, reason: str) -> bool:
    return re.search(pattern, reason, re.IGNORECASE) is not None
