"""Files and texts damaged at random, and a reader that must take each or refuse it.

Cases are the same in each run: so many for each reader, or, with FUZZ_SECONDS, as many as it reads
in that time (``make fuzz``). A reader that hangs meets the time limit of its test.
"""

import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil

SECONDS: Final = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED: Final = 20261122
#: Cases of each reader without FUZZ_SECONDS.
CASES: Final = 300
#: More memory than a reader needs for what is a few kilobytes.
MEMORY: Final = 4 * 2**30

ODD: Final[list[Any]] = [
    *(None, True, -1, 0, 2**70, 1e400, float("nan"), 0.5),
    *("", "../../x", "/etc/passwd", "\0", "[/b]", "é\ud800"),
    *([], {}, [[]], {"a": 1}, [None], {"a": {"a": []}}),
]


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, left out or repeated."""
    found = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, other = draw.randrange(len(found) + 1), draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[min(at, other) : max(at, other)]
            case 2:
                found[at:at] = found[min(at, other) : max(at, other)][:64]
            case _:
                found[at:at] = draw.choice(
                    [b"\0", b"\xff", b"9" * 5000, b"[" * 3000, b"e999", b"-"]
                )
    return bytes(found)


def damaged_value(value: Any, draw: random.Random) -> Any:
    """JSON in which one value, somewhere, is another one or missing."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: damaged_value(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], damaged_value(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The one or, where it is JSON, the other."""
    if draw.random() < 0.5:
        try:
            return json.dumps(damaged_value(json.loads(content), draw)).encode()
        except ValueError:
            pass
    return damaged_bytes(content, draw)


def fuzz(
    content: bytes,
    read: Callable[[bytes], object],
    *errors: type[Exception],
    cases: int = CASES,
    damage: Callable[[bytes, random.Random], bytes] = damaged,
) -> None:
    """Read damaged forms of a file; only these errors may come of it.

    Args:
        content: is read first, as it is.
        cases: of a slow reader fewer.
    """
    draw, deadline, number = random.Random(SEED), time.monotonic() + SECONDS, 0
    read(content)
    with limited_memory():
        while time.monotonic() < deadline or (not SECONDS and number < cases):
            number += 1
            given = damage(content, draw)
            try:
                read(given)
            except errors:
                pass
            except Exception as error:
                raise AssertionError(f"input {number}: {given[:300]!r}") from error


def fuzz_text(
    text: str,
    read: Callable[[str], object],
    *errors: type[Exception],
    cases: int = CASES,
) -> None:
    """The same of a text."""
    fuzz(text.encode(), lambda given: read(given.decode(errors="replace")), *errors, cases=cases)


def fuzz_values(value: Any, read: Callable[[Any], object], *errors: type[Exception]) -> None:
    """The same of what was JSON and is read already."""

    def as_value(content: bytes) -> object:
        return read(json.loads(content))

    def damage(content: bytes, draw: random.Random) -> bytes:
        return json.dumps(damaged_value(json.loads(content), draw)).encode()

    fuzz(json.dumps(value).encode(), as_value, *errors, damage=damage)


@contextmanager
def limited_memory() -> Iterator[None]:
    """A blow-up of memory is an error here, and no end of the machine."""
    used = psutil.Process().memory_info().vms
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = [used + MEMORY, *(each for each in before[1:] if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
