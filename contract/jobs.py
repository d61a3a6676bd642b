"""Jobs: what submits, runs and watches them agrees on."""

import re
from typing import Final

from contract.errors import InputError

# Jobs: what submits, runs and watches them must agree on.
JOB_GROUP: Final = "job:"  # before a job's id: the group of its ECS tasks
SECRETS_PREFIX: Final = "training/"  # only secrets with such names can be given to a job
STARTED_BY_MOST: Final = 36  # characters of startedBy, and so of a job's id
OVERRIDES_MOST: Final = 8192  # characters that ECS takes of what a task is started with


def worker_range(text: str) -> tuple[int, int]:
    """``"4"`` as (4, 4), and the elastic range ``"1:4"`` as (1, 4).

    Raises:
        InputError: it is neither, or the second number is below the first.
    """
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text.strip())
    if not match:
        raise InputError(
            f"--workers is {text}: it must be at least 1, or a range such as 1:4 (as many as can "
            "be had, one at least)"
        )
    least = int(match[1])
    most = int(match[2]) if match[2] else least
    if not least <= most:
        raise InputError(f"--workers is {text!r}: the first number is the smaller one")
    return least, most
