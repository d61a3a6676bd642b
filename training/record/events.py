"""Events that workers send to the record."""

import time
from typing import Any

# What a worker tells whoever keeps the record: {"type": "step" | "evaluation" | ..., ...}.
Event = dict[str, Any]


def phase(name: str) -> Event:
    """An event that says how far the start of a run has come; ``benchmarks.startup`` reads it."""
    return {"type": "phase", "name": name, "time": time.time()}
