"""ECS's words about the end of a task are read in one place, and each means one thing."""

import pytest

from contract.job_outcome import Ending, ending


@pytest.mark.parametrize(
    ("stop_code", "reason", "exit_code", "expected"),
    [
        ("SpotInterruption", "", 137, Ending.HOST_LOST),
        ("TerminationNotice", "", 137, Ending.HOST_LOST),
        ("", "Host EC2 (instance i-1) terminated.", None, Ending.HOST_LOST),
        ("UserInitiated", "stopped by user", 137, Ending.STOPPED),
        ("ServiceSchedulerInitiated", "Scaling activity", 143, Ending.SURPLUS),
        ("TaskFailedToStart", "CannotPullContainerError: not found", None, Ending.IMAGE_NOT_FOUND),
        ("TaskFailedToStart", "CannotPullContainerError: timeout", None, Ending.HOST_FAULT),
        ("TaskFailedToStart", "CannotStartContainerError: NVML", None, Ending.BAD_HOST),
        (
            "TaskFailedToStart",
            "CannotStartContainerError: error gathering device information while adding custom "
            'device "/dev/infiniband/uverbs0": no such file or directory',
            None,
            Ending.BAD_HOST,
        ),
        ("EssentialContainerExited", "", 76, Ending.BAD_HOST),
        ("EssentialContainerExited", "nvidia-container-cli", 1, Ending.EXITED),
        ("EssentialContainerExited", "OutOfMemoryError: x", 137, Ending.OUT_OF_MEMORY),
        ("EssentialContainerExited", "", 137, Ending.KILLED),
        ("EssentialContainerExited", "", 0, Ending.EXITED),
        ("EssentialContainerExited", "", 5, Ending.EXITED),
        ("TaskFailedToStart", "ResourceInitializationError", None, Ending.HOST_FAULT),
        (
            "TaskFailedToStart",
            "ResourceInitializationError: unable to pull secrets: ResourceNotFoundException",
            None,
            Ending.NOT_STARTED,
        ),
        ("TaskFailedToStart", "", None, Ending.NOT_STARTED),
        ("", "", None, Ending.NOT_STARTED),
    ],
)
def test_how_a_task_ended(
    stop_code: str, reason: str, exit_code: int | None, expected: Ending
) -> None:
    assert ending(stop_code=stop_code, reason=reason, exit_code=exit_code) is expected
