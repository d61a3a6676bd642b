"""Prices of a job's hosts and of shared storage, frozen into the job's order at submission.

What a job has cost follows from its order, so that a later deploy of other hosts, or a newer price
list, does not change it. Not for prices to pay by: they are list prices without discounts.

Sources, looked up in 2026-11: AWS's public price pages of EC2, EBS, VPC and FSx. Prices are those
of us-east-1; what costs how much in another region is not known here.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from contract.errors import InputError
from contract.instance_types import InstanceType

#: The region whose list prices this project knows.
PRICED_REGION: Final = "us-east-1"

_HOURS_PER_MONTH: Final = 730  # by which AWS converts what it bills by the month
# gp3, US dollars per month: a GiB; a MiB/s above those that come with it; an operation/s likewise.
_GP3_GIB: Final = 0.08
_GP3_MIBPS: Final = 0.04
_GP3_IOPS: Final = 0.005
_GP3_FREE_MIBPS: Final = 125
_GP3_FREE_IOPS: Final = 3000

#: A NAT gateway and its public address, US dollars per hour. A GB through it costs 0.045 more.
NAT_USD_PER_HOUR: Final = 0.045 + 0.005

#: Kinds of FSx for Lustre, and FSx's list prices for SSD storage, US dollars for a GiB and month.
SCRATCH: Final = "scratch"
PERSISTENT: Final = "persistent"
SCRATCH_MBPS_PER_TIB: Final = 200

_SCRATCH_GIB_MONTH: Final = 0.140
#: MB/s for each TiB -> price.
PERSISTENT_GIB_MONTH: Final[Mapping[int, float]] = {125: 0.145, 250: 0.210, 500: 0.340, 1000: 0.600}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPrice:
    """What one host costs."""

    type: str
    """Instance type."""
    disk_gib: int
    """Root volume."""
    usd_per_hour: float | None
    """Instance and root volume; None: not known."""

    @classmethod
    def of(cls, machine: InstanceType, *, region: str, disk_gib: int = 0) -> Self:
        """Of a type in a region.

        Args:
            disk_gib: root volume; 0: as large as the type has it by default.
        """
        size = disk_gib or machine.root_volume_gib
        usd = machine.usd_per_hour if region == PRICED_REGION else None
        if usd is not None:
            usd = round(usd + disk_usd_per_hour(machine, size), 6)
        return cls(type=machine.name, disk_gib=size, usd_per_hour=usd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What the hosts of a job cost. On demand: spot instances usually cost less."""

    region: str
    head: HostPrice
    worker: HostPrice
    spot: bool
    """Whether worker hosts are spot instances."""
    nat_usd_per_hour: float | None
    """The deployment's NAT gateway; None: not known."""
    shared_usd_per_hour: float | None = 0.0
    """The deployment's shared file system; None: not known; 0: it has none."""

    @classmethod
    def of(
        cls,
        *,
        region: str,
        head: InstanceType,
        worker: InstanceType,
        spot: bool,
        disk_gib: int = 0,
        shared: FileSystem | None = None,
    ) -> Self:
        """At today's list prices."""
        is_priced = region == PRICED_REGION
        usd_shared = shared.usd_per_hour if shared else 0.0
        return cls(
            region=region,
            head=HostPrice.of(head, region=region, disk_gib=disk_gib),
            worker=HostPrice.of(worker, region=region, disk_gib=disk_gib),
            spot=spot,
            nat_usd_per_hour=NAT_USD_PER_HOUR if is_priced else None,
            shared_usd_per_hour=round(usd_shared, 6) if is_priced or not shared else None,
        )

    def hosts_usd_per_hour(self, num_nodes: int) -> float | None:
        """Of a head and ``num_nodes`` worker nodes."""
        if self.head.usd_per_hour is None:
            return None
        if not num_nodes:
            return self.head.usd_per_hour
        if self.worker.usd_per_hour is None:
            return None
        return self.head.usd_per_hour + num_nodes * self.worker.usd_per_hour

    def usd_per_hour(self, num_nodes: int) -> float | None:
        """The same, with the NAT gateway and the shared file system."""
        hosts = self.hosts_usd_per_hour(num_nodes)
        if hosts is None or self.standing_usd_per_hour is None:
            return None
        return hosts + self.standing_usd_per_hour

    @property
    def standing_usd_per_hour(self) -> float | None:
        """Of what the deployment has with and without jobs: NAT gateway, shared file system."""
        if self.nat_usd_per_hour is None or self.shared_usd_per_hour is None:
            return None
        return self.nat_usd_per_hour + self.shared_usd_per_hour

    @property
    def standing(self) -> str:
        """The same in words."""
        shared = self.shared_usd_per_hour is None or self.shared_usd_per_hour > 0
        return "the NAT gateway and the shared file system" if shared else "the NAT gateway"

    @property
    def why_unknown(self) -> str:
        """Why a price is missing, in a phrase; "" where none is."""
        if self.region != PRICED_REGION:
            return f"list prices are known for {PRICED_REGION} only, not for {self.region}"
        for host in (self.head, self.worker):
            if host.usd_per_hour is None:
                return f"{host.type} has no list price"
        return ""

    def to_json(self) -> dict[str, object]:
        """As ``from_json`` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """
        Raises:
            InputError: it is not what ``to_json`` wrote.
        """
        try:
            hosts = {name: _host(values[name]) for name in ("head", "worker")}
            return cls(
                region=str(values["region"]),
                spot=bool(values["spot"]),
                nat_usd_per_hour=_usd(values["nat_usd_per_hour"]),
                shared_usd_per_hour=_usd(values["shared_usd_per_hour"]),
                **hosts,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"prices of a job's order are not understood ({error!r}): trainctl submit sets them"
            ) from None


def disk_usd_per_hour(machine: InstanceType, gib: int) -> float:
    """Of a root volume of ``gib`` GiB with the throughput that hosts of this type have."""
    throughput = max(0, machine.root_volume_mibps - _GP3_FREE_MIBPS)
    operations = max(0, machine.root_volume_iops - _GP3_FREE_IOPS)
    month = gib * _GP3_GIB + throughput * _GP3_MIBPS + operations * _GP3_IOPS
    return month / _HOURS_PER_MONTH


def _host(values: Mapping[str, Any]) -> HostPrice:
    return HostPrice(
        type=str(values["type"]),
        disk_gib=int(values["disk_gib"]),
        usd_per_hour=_usd(values["usd_per_hour"]),
    )


def _usd(value: Any) -> float | None:
    return None if value is None else float(value)
