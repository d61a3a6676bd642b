"""A rehearsal for one file of tests, and its end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rehearsal import processes
from rehearsal.cycle import Rehearsal, Steps
from rehearsal.engine import EngineError


@contextmanager
def brought_up(**options: Any) -> Iterator[Rehearsal]:
    """Everything up, with ``Rehearsal.up``'s options; whatever a test does to it, nothing is left.

    Skips, and says why, where there is no Docker Engine or something is up already.
    """
    try:
        found = Rehearsal.here()
    except EngineError as error:
        pytest.skip(f"no Docker Engine: {error}")
    if any(found.status()[what] for what in ("processes", "containers", "networks")):
        pytest.skip("a local deployment is up already: trainctl local down")
    try:
        found.up(Steps(6 if options.get("standing", True) else 5), **options)
        yield found
    finally:
        os.environ.pop(processes.NAME, None)
        found.down(Steps(1))
