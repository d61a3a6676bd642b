"""Heads of jobs that have ended, as Step Functions describes their tasks."""

from typing import Any


def head(code: int | None = None, **task: Any) -> dict[str, Any]:
    """One with this exit code; ``reason``: that of its container."""
    container = {} if code is None else {"ExitCode": code}
    if reason := task.pop("reason", ""):
        container["Reason"] = reason
    return {"Containers": [container], "StopCode": "EssentialContainerExited", **task}
