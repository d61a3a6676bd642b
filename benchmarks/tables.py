"""Output that all benchmarks share."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from training.system.devices import environment


def report(result: Mapping[str, Any]) -> None:
    """Print a benchmark's figures, as one JSON object on stdout, with the command, the machine and
    the versions that they were measured on.

    Args:
        result: figures by name; ``ratio`` is the headline, larger is better.
    """
    assert "ratio" in result
    command = " ".join(sys.orig_argv[1:])
    print(json.dumps({**result, "environment": {**environment(), "command": command}}, indent=1))


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that are there now."""
    import psutil

    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(each.cpu_times()[:2]) for each in children)


def say(text: str) -> None:
    """Show progress on stderr."""
    print(text, file=sys.stderr, flush=True)
