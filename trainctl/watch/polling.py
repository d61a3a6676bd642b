"""Poll intervals of waits for AWS.

All clients of an account share its limits. The tightest is that of CloudWatch's FilterLogEvents, 5
calls a second for an account and region; of the others an account has 10 to 20 a second. Ten people
who follow their jobs at this pace make 2 of those calls a second at most.
"""

import time
from typing import Final

#: Between two looks while something changes; ``aws logs tail --follow`` has the same.
SHORTEST_S: Final = 5.0
#: The same when nothing has changed for a while.
LONGEST_S: Final = 15.0
#: Interval between two requests for a job's nodes, which take five calls.
NODES_EVERY_S: Final = 30.0
#: A local AWS has no limits, and no other users.
LOCAL_S: Final = 1.0
_GROWTH: Final = 1.5


class Polling:
    """Waits between two looks: for longer each time that nothing has changed."""

    def __init__(self, *, is_local: bool) -> None:
        self._shortest, self._longest = (LOCAL_S, LOCAL_S) if is_local else (SHORTEST_S, LONGEST_S)
        self._nodes_every = LOCAL_S if is_local else NODES_EVERY_S
        self._next = self._shortest
        self._nodes_at: float | None = None

    def wait(self, *, changed: bool, at_most: float | None = None) -> None:
        """Sleep until the next look.

        Args:
            changed: whether this look has found anything new.
            at_most: seconds that are left.
        """
        self._next = self._shortest if changed else self._next
        time.sleep(self._next if at_most is None else max(0.0, min(self._next, at_most)))
        self._next = min(self._next * _GROWTH, self._longest)

    def nodes_are_due(self) -> bool:
        """True if the nodes are due at this poll."""
        now = time.monotonic()
        if self._nodes_at is not None and now - self._nodes_at < self._nodes_every:
            return False
        self._nodes_at = now
        return True
