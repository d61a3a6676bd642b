"""Counts the failures of a run's workers, for every way to start them."""


class Failures:
    """Failures in a row: the count starts anew once the workers have resumed from a later
    checkpoint than before. A run of weeks is not ended by the third failure of its life; one that
    makes no progress is."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: failures in a row that the run survives.
        """
        self._most = most
        self._number = self._begun_at = 0

    def is_one_too_many(self, begun_at: int, *, is_counted: bool = True) -> bool:
        """Take note of a failure; return whether it ends the run.

        Args:
            begun_at: step at which the workers that failed had begun.
            is_counted: False where the machine is to blame.
        """
        if begun_at > self._begun_at:
            self._number, self._begun_at = 0, begun_at
        self._number += is_counted
        return self._number > self._most
