"""What ECS's agent tells a container about its own task."""

import json
import os
import urllib.request
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError

_VARIABLE: Final = "ECS_CONTAINER_METADATA_URI_V4"
_TIMEOUT_S: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTask:
    """The task that this process runs in."""

    arn: str
    cluster: str


def own_task() -> OwnTask | None:
    """Ask the agent; None where none runs, as on a laptop.

    Raises:
        InputError: the agent's answer cannot be used.
    """
    address = os.environ.get(_VARIABLE)
    if not address:
        return None
    try:
        with urllib.request.urlopen(f"{address}/task", timeout=_TIMEOUT_S) as answer:
            task = json.load(answer)
        return OwnTask(arn=task["TaskARN"], cluster=task["Cluster"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{_VARIABLE}: the ECS agent does not say what this is: {error}") from None
