"""When a checkpoint is due by the clock. Standard library only."""

import time
from collections.abc import Callable


class Timetable:
    """When a checkpoint is due by the clock, however long the steps take."""

    def __init__(self, minutes: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            minutes: at most so long between two checkpoints; 0: never due.
            clock: seconds, from any beginning.
        """
        self._every_s, self._clock = 60 * minutes, clock
        self._saved_at = clock()

    def is_due(self) -> bool:
        return self._every_s > 0 and self._clock() - self._saved_at >= self._every_s

    def saved(self) -> None:
        """Take note that a checkpoint is being saved."""
        self._saved_at = self._clock()
