"""A simulated world by seed: its clock, its events, and processes that wait for them.

Processes are greenlets, so the product's own synchronous code is a process here without a change,
and any two of them alternate at each call that takes time.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from greenlet import getcurrent, greenlet

BEGAN: Final = 1_795_305_600.0


class EndedError(BaseException):
    """A process is over: its host or its time has gone."""


class Process(greenlet):
    """A process; ``is_dead`` ends it when it next waits."""

    is_dead = False
    what = ""
    """What it was started for."""
    began: float = 0
    calls_left: float = float("inf")
    """It is killed when it makes one more call of AWS than these."""


class World:
    """Time passes from one event to the next."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.now = self._until = BEGAN
        self.history: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self.happened: Counter[str] = Counter()
        self._due: list[tuple[float, int, Callable[..., Any], Any]] = []
        self._number = itertools.count()
        self._hub = getcurrent()

    def time(self) -> float:
        return self.now

    monotonic = time

    def tell(self, what: str) -> None:
        self.history.append((self.now, what))

    def blame(self, what: str) -> None:
        """Something happened that must not."""
        self.tell(f"WRONG: {what}")
        self.wrong.append(what)

    def after(self, seconds: float, call: Callable[..., Any], *given: Any) -> None:
        heappush(self._due, (self.now + seconds, next(self._number), call, given))

    def run(self, until: float) -> None:
        due, self._until = self._due, until
        while due and due[0][0] <= until:
            self.now, _, call, given = heappop(due)
            call(*given)
        self.now = until

    # --- processes
    def spawn(self, call: Callable[..., Any], *given: Any) -> Process:
        def body() -> None:
            with contextlib.suppress(EndedError):
                call(*given)

        process = Process(body, self._hub)
        self.after(0, process.switch)
        return process

    def sleep(self, seconds: float) -> None:
        """Of the process that calls it."""
        current: Any = getcurrent()
        at = self.now + seconds
        if at <= self._until and not (self._due and self._due[0][0] <= at):
            self.now = at  # nothing else happens until then
        else:
            self.after(seconds, current.switch)
            self._hub.switch()
        if current.is_dead:
            raise EndedError

    def wait(self, register: Callable[[Callable[[], None]], None], seconds: float) -> bool:
        """Wait until what is registered is called; False when that takes longer."""
        current: Any = getcurrent()
        woken: list[bool] = []

        def wake(is_heard: bool) -> None:
            if not woken:
                woken.append(is_heard)
                current.switch()

        register(lambda: self.after(self.random.uniform(0.1, 2), wake, True))
        self.after(seconds, wake, False)
        self._hub.switch()
        if current.is_dead:
            raise EndedError
        return woken[0]
