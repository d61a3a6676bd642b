"""A clock that only sleeping moves, and that lets things happen meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeClock:
    """Takes the place of the module ``time``; its Unix time and its monotonic time are the same."""

    now: float = 0.0
    script: list[tuple[float, Callable[[], Any]]] = field(default_factory=list)

    def at(self, when: float, happens: Callable[..., Any], *given: Any) -> None:
        """Call ``happens(*given)`` once the time ``when`` is reached."""
        self.script.append((when, lambda: happens(*given)))
        self.script.sort(key=lambda each: each[0])

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.script and self.script[0][0] <= until:
            when, happens = self.script.pop(0)
            self.now = max(self.now, when)
            happens()
        self.now = max(self.now, until)
