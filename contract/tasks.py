"""What this project has written on a task or a host, read from ECS's description of it."""

from collections.abc import Mapping
from typing import Any, Final

from contract.job import JOB_GROUP
from contract.nodes import ENV_DEADLINE

#: Attribute of a host whose agent was found disconnected: the Unix time of the sweep that saw it.
DISCONNECTED_SINCE: Final = "train.disconnected-since"


def job_of(task: Mapping[str, Any]) -> str:
    """The job that a task belongs to; "" for one of the standing cluster."""
    group = str(task.get("group") or "")
    return group.removeprefix(JOB_GROUP) if group.startswith(JOB_GROUP) else ""


def told(task: Mapping[str, Any], name: str) -> str | None:
    """A variable of the environment that a task was started with."""
    for container in (task.get("overrides") or {}).get("containerOverrides") or []:
        for each in container.get("environment") or []:
            if each["name"] == name:
                return str(each["value"])
    return None


def deadline_of(task: Mapping[str, Any], *, default: float) -> float:
    """Unix time at which the job of a task ends."""
    value = told(task, ENV_DEADLINE)
    try:
        return float(value) if value else default
    except ValueError:  # the state machine writes none that is no number
        return 0


def disconnected_since(host: Mapping[str, Any]) -> float | None:
    """Unix time since which a host's agent is known to be disconnected; None: not known."""
    for each in host.get("attributes") or []:
        if each["name"] == DISCONNECTED_SINCE:
            try:
                return float(each.get("value") or 0)
            except ValueError:  # the sweep writes none that is no number
                return 0
    return None
