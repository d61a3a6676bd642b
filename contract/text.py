"""Numbers, durations and names in words."""

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path


def duration(seconds: float) -> str:
    """``12 s`` of a whole number, ``42.1 s``, ``3 min 5 s`` or ``2 h 7 min``."""
    seconds = max(seconds, 0)
    if round(seconds, 1) < 60:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def age(seconds: float) -> str:
    """``12 s``, ``3 min``, ``2 h`` or ``5 d``: whole units, for a column."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def utc(moment: datetime) -> str:
    """``2026-11-22 09:05 UTC`` of any moment with a time zone."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def percent(share: float) -> str:
    """``93.61%`` of 0.93612."""
    return f"{100 * share:.2f}%"


def significant(value: float) -> str:
    """Four significant digits; all of those before the point: ``52,581``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def compact(value: float) -> str:
    """``950``, ``23,450`` or ``11.18 M``."""
    for size, unit in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def dollars(usd: float | None) -> str:
    """``$1.23``, and ``$0.005`` of less than a cent; ``unknown`` where it is not known."""
    if usd is None:
        return "unknown"
    if not usd:
        return "$0"
    return f"${usd:,.2f}" if usd >= 0.01 else f"${usd:.3f}"


def counted(number: int, noun: str) -> str:
    """``1 worker`` or ``3,450 workers``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def byte_size(number: float) -> str:
    """Bytes for people: ``5 B``, ``11.6 MB``, ``1.2 GB``."""
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def listed(names: Sequence[str], *, most: int = 5) -> str:
    """``a, b`` of two names; of more than ``most``, the first ones ``and 7 more``."""
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """``did you mean ddp?`` of ``dpd``; ``otherwise`` where nothing known is alike."""
    close = difflib.get_close_matches(word, [*known], n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def integer(text: str) -> int:
    """``int``, of ASCII digits only.

    Raises:
        ValueError: the text is not such a number, for example ``1_000``.
    """
    return int(_ascii(text))


def decimal(text: str) -> float:
    """``float``, of ASCII digits only.

    Raises:
        ValueError: the text is not such a number, for example ``1_000``.
    """
    return float(_ascii(text))


def _ascii(text: str) -> str:
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is not a number in ASCII digits")
    return text


def program(name: str) -> str:
    """Word that starts a program of this Python's environment in a shell here: its path, unless
    the shell finds it by its name."""
    found = Path(sys.executable).with_name(name)
    if not found.exists() or shutil.which(name) == str(found):
        return name
    return shlex.quote(min(str(found), os.path.relpath(found), key=len))
