"""In what the emulator is as strict as AWS, by name. Imported inside ``.venv-aws`` only.

All of it, unless ``REHEARSAL_FORGIVES`` names some, separated by commas: a test shows by it what
each of them changes.
"""

import os
from enum import StrEnum


class Strict(StrEnum):
    """What AWS does and the emulator on its own does not."""

    POLICIES = "policies"
    """Calls of roles and services are refused unless the deployed policies allow them."""
    PATIENCE = "patience"
    """A task that no host comes for ends after a while."""
    REVISIONS = "revisions"
    """A revision of a task definition that was deregistered starts no task."""
    FILTERS = "filters"
    """``startedBy`` is the only filter of a list of tasks."""
    EXEC = "exec"
    """ECS Exec reaches a task only if it was started for it."""
    REQUESTS = "requests"
    """Requests in JSON, states of Step Functions and ECS's resources of a template have what the
    model of their service allows, and nothing else."""
    ARCHITECTURE = "architecture"
    """An image for other processors than the hosts' does not start."""
    CONSISTENCY = "consistency"
    """Lists of tasks, and what is told of executions, lag behind what has happened."""
    DELETION = "deletion"
    """What a resource depends on whose deletion has failed is not deleted."""
    ERRORS = "errors"
    """Step Functions gives errors of ECS the names that it does on AWS."""


def forgiven() -> set[Strict]:
    """What is switched off. Raises ValueError for a name that is none."""
    given = os.environ.get("REHEARSAL_FORGIVES", "")
    return {Strict(name) for name in given.split(",") if name}


def is_strict(about: Strict) -> bool:
    """Whether the emulator does as AWS does."""
    return about not in forgiven()
