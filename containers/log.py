"""A node's own lines in its container's log."""

import sys


def say(message: str) -> None:
    """One line to the container's log."""
    print(f"node: {message}", file=sys.stderr, flush=True)
