"""From seconds to bandwidth, as NVIDIA's nccl-tests computes it (its doc/PERFORMANCE.md).

Algorithm bandwidth is the size of the message over the time that it took. Bus bandwidth corrects
it by what the collective has to move for that, so that it can be compared with the speed of the
link at any number of workers. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: Of n ranks: how often each byte of the message crosses the busiest link.
_CROSSINGS: Final[Mapping[str, int]] = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One collective at one size."""

    collective: str
    num_bytes: int
    """Size of the whole message: of what an all-gather receives, say."""
    seconds: float
    """Of one repetition, mean over the ranks and repetitions."""
    slowest_s: float
    """Of one repetition on the slowest rank."""

    @property
    def algorithm_gb_per_s(self) -> float:
        """Algorithm bandwidth in 10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9

    def bus_gb_per_s(self, num_ranks: int) -> float:
        """Bus bandwidth in 10^9 bytes per second; 0 for a single rank, which sends nothing."""
        share = (num_ranks - 1) / num_ranks
        return self.algorithm_gb_per_s * _CROSSINGS[self.collective] * share
