"""``--nodes`` and ``--workers``: a number, a range of numbers, or several of them."""

import re
from dataclasses import dataclass
from typing import Self

from contract.errors import InputError


@dataclass(frozen=True, slots=True)
class Range:
    """How many nodes or workers a job or run is made for: at least ``low``, at most ``high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise InputError(f"range {self.low}:{self.high}: it must be 0 <= MIN <= MAX")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"

    @property
    def words(self) -> str:
        """``2``, or ``1 to 4``."""
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"

    @classmethod
    def parse(cls, text: str, *, option: str) -> Self:
        """``"4"`` as 4 to 4, and the elastic range ``"1:4"`` as 1 to 4.

        Args:
            option: name of the option that ``text`` was given to, for the error.

        Raises:
            InputError: it is neither, or MIN is above MAX.
        """
        match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text.strip())
        if not match:
            raise InputError(
                f"{option} is {text}: give a number, such as 2, or a range MIN:MAX, such as 1:4 "
                "(starts with 1 and grows to 4 when hosts become available)"
            )
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if low > high:
            raise InputError(f"{option} is {text}: in MIN:MAX, MIN must not be above MAX")
        return cls(low, high)


def numbers_of(text: str, *, option: str) -> list[int]:
    """``"1,2,4"`` as 1, 2 and 4: different numbers from 1 on, in their order.

    Args:
        option: name of the option that ``text`` was given to, for the error.

    Raises:
        InputError: it is something else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,3}", word) for word in words):
        raise InputError(f"{option} is {text!r}: give numbers with commas, such as 1,2,4")
    return sorted({int(word) for word in words})
