"""The clock that waits are measured by, handed in so that a test can play hours in milliseconds."""

from typing import Protocol


class Clock(Protocol):
    """The module ``time``, or a test's own."""

    def time(self) -> float:
        """Unix time."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...
