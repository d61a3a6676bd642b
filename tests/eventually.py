"""Waiting in tests: until something is true, or until it can no longer become true."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    what: str,
    condition: Callable[[], T | None],
    *,
    timeout_s: float = 60,
    every_s: float = 0.2,
    over: Callable[[], object] = lambda: None,
) -> T:
    """Wait until ``condition`` returns something true, and return that.

    Args:
        what: is awaited, for the message.
        over: returns why it can no longer become true, such as the end of a process or a job;
            something false while it can.

    Raises:
        AssertionError: it was over first, or ``timeout_s`` seconds have passed.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if reason := over():
            # The last thing before the end may have been what is awaited.
            if found := condition():
                return found
            raise AssertionError(f"never: {what}: {reason}")
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(every_s)
    return found
