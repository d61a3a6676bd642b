"""What hosts cost, at list prices: before money is spent, and after."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contract import nodes
from trainctl.aws.shape import Shape

#: List prices of us-east-1 per hour, which is how instance types are priced too: a NAT gateway and
#: its public address.
NAT_USD_PER_HOUR: Final = 0.045 + 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """US dollars per hour of a head and of one worker node; None where a type has no list price."""

    head: float | None
    worker: float | None

    @classmethod
    def of(cls, shape: Shape) -> "Price":
        return cls(head=shape.head.usd_per_hour, worker=shape.worker.usd_per_hour)

    def per_hour(self, num_nodes: int) -> float | None:
        """Of a head and ``num_nodes`` worker nodes, the NAT gateway included."""
        if self.head is None or (num_nodes and self.worker is None):
            return None
        return self.head + num_nodes * (self.worker or 0) + NAT_USD_PER_HOUR

    def spent(self, seconds: Mapping[str, float]) -> float | None:
        """Cost of nodes that ran for so many seconds, by kind; without the NAT gateway."""
        if self.head is None or self.worker is None:
            return None
        hourly = {nodes.HEAD: self.head, nodes.WORKER: self.worker}
        return sum(hourly[node] * each / 3600 for node, each in seconds.items())


def dollars(usd: float | None) -> str:
    """``$1.23``, with as many digits as matter."""
    if usd is None:
        return "no list price: these hosts are reserved by capacity blocks"
    return f"${usd:.2f}" if usd >= 1 else f"${usd:.3f}"
