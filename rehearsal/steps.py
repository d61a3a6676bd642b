"""What a person at the terminal sees and does while the rehearsal works: steps, and Ctrl-C."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from contract import text


class Steps:
    """Says what is being done, and how long it took, on stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0
        self._is_line_open = False
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._number += 1
        began = time.monotonic()
        self._print(f"[{self._number:2}/{self._total}] {what} ... ", end="")
        self._is_line_open = True
        yield
        self.seconds[what] = time.monotonic() - began
        if not self._is_line_open:
            self._print("        ", end="")
        self._print(text.duration(round(self.seconds[what])))
        self._is_line_open = False

    def say(self, lines: str) -> None:
        """A line about the step that is going on."""
        if self._is_line_open:
            self._print("")
            self._is_line_open = False
        for line in lines.splitlines():
            self._print(f"        {line}")

    @staticmethod
    def _print(line: str, end: str = "\n") -> None:
        print(line, end=end, file=sys.stderr, flush=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and Ctrl-C both raise KeyboardInterrupt, also where a shell ignores SIGINT."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Cleaning up goes on to its end, however often Ctrl-C is pressed."""

    def refuse(_number: int, _frame: FrameType | None) -> None:
        print("\nalready taking everything down; a moment", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, refuse) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
