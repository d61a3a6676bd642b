"""The file system that all hosts of a deployment mount: how fast it is, and what it costs.

Prices are FSx's list prices for SSD storage in us-east-1, looked up in 2026-11, in US dollars for a
GiB and month.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

SCRATCH: Final = "scratch"
PERSISTENT: Final = "persistent"
SCRATCH_MBPS_PER_TIB: Final = 200

_SCRATCH_GIB_MONTH: Final = 0.140
#: MB/s for each TiB -> price.
PERSISTENT_GIB_MONTH: Final[Mapping[int, float]] = {125: 0.145, 250: 0.210, 500: 0.340, 1000: 0.600}
_HOURS_PER_MONTH: Final = 730


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """FSx for Lustre."""

    deployment: str
    """``scratch``: what a failed server held is lost; ``persistent``: servers are replaced."""
    capacity_gib: int
    mbps_per_tib: int
    """MB/s for each TiB of a persistent one; scratch has always 200."""

    @property
    def mbps(self) -> float:
        """What all hosts together read or write, in MB/s."""
        is_scratch = self.deployment == SCRATCH
        return (
            (SCRATCH_MBPS_PER_TIB if is_scratch else self.mbps_per_tib) * self.capacity_gib / 1024
        )

    @property
    def usd_per_hour(self) -> float:
        """At the list prices of us-east-1."""
        is_scratch = self.deployment == SCRATCH
        month = _SCRATCH_GIB_MONTH if is_scratch else PERSISTENT_GIB_MONTH[self.mbps_per_tib]
        return month * self.capacity_gib / _HOURS_PER_MONTH

    def to_json(self) -> dict[str, object]:
        """As ``from_json`` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """
        Raises:
            KeyError, ValueError: it is not what ``to_json`` wrote.
        """
        return cls(
            deployment=str(values["deployment"]),
            capacity_gib=int(values["capacity_gib"]),
            mbps_per_tib=int(values["mbps_per_tib"]),
        )
