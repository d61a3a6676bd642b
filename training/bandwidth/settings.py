"""Settings of the bandwidth recipe. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError
from training.settings import RunConfig, Value, option

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthConfig(RunConfig):
    """All-reduces over all workers, timed for a series of sizes."""

    min_bytes: int = option(
        8, low=4, high=64 * GIB, help="smallest message in bytes", same_on_resume=False
    )
    max_bytes: int = option(
        0,
        low=0,
        high=64 * GIB,
        help="largest message in bytes (0: 4 GiB on GPUs, 64 MiB on CPUs)",
        same_on_resume=False,
    )
    factor: int = option(
        2, low=2, high=1024, help="each size is so many times the one before", same_on_resume=False
    )
    burn_in_s: int = option(
        0,
        low=0,
        high=86_400,
        help="seconds in which each GPU first multiplies matrices; a product that differs fails, "
        "and so does a GPU that is a fifth slower than the others",
        same_on_resume=False,
    )

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.max_bytes and self.max_bytes < self.min_bytes:
            raise InputError(
                f"--max-bytes is {self.max_bytes}: it must be at least --min-bytes, "
                f"{self.min_bytes}"
            )

    def sizes(self, *, on_gpu: bool) -> list[int]:
        """Bytes of each message: from the smallest, times the factor, up to the largest."""
        most = self.max_bytes or (4 * GIB if on_gpu else 64 * MIB)
        found = [self.min_bytes]
        while found[-1] * self.factor <= most:
            found.append(found[-1] * self.factor)
        return found


PRESETS: Final[Mapping[str, Mapping[str, Value]]] = {
    "all": {},
    # A few sizes only: seconds.
    "quick": {"min_bytes": MIB, "factor": 8},
}
