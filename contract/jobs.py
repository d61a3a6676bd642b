"""The number of workers as ``training`` still reads it; everything else is in ``contract.job``."""

import re

from contract.errors import InputError
from contract.job import JOB_GROUP as JOB_GROUP
from contract.job import MAX_JOB_ID as STARTED_BY_MOST  # noqa: F401
from contract.job import MAX_OVERRIDES as OVERRIDES_MOST  # noqa: F401
from contract.job import SECRETS_PREFIX as SECRETS_PREFIX


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
