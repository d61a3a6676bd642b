"""Facts and prices of the EC2 instance types that this project runs on, and of shared storage.

The stacks, the cost plan and the command line name an instance type and take every size of the
host, its container and its disk from here; none is typed a second time. ``instance_types.json`` has
the rows: ``.ci/instance_types.py`` writes them from what EC2 answers, and keeps prices and the
figures of GPUs, which EC2 does not tell. A type that is not listed can be a row of the setting
``instance_types``. Prices are list prices without discounts. They are frozen into a job's order at
submission, so that a later deploy of other hosts, or a newer price list, does not change what a job
has cost.

Sources, looked up in 2026-11:
- vCPUs, memory, GPUs, bandwidth, EFA: AWS's public instance type pages (what
  ``aws ec2 describe-instance-types`` prints).
- Prices in us-east-1: AWS's on-demand price list, Linux, as of 2026-02, and its public price pages
  of EBS, VPC and FSx.
- Prices in us-west-2: the same figures. SkyPilot's public catalog (catalogs/v8/aws/vms.csv, commit
  00148f2, whose date is not known here) has rows of both regions. These were compared, and none
  differs by more than a rounding in the sixth decimal: c5 large, xlarge, 9xlarge; c6i xlarge; c7i
  xlarge; g4dn xlarge, 8xlarge; g5 xlarge, 8xlarge, 12xlarge, 16xlarge, 24xlarge; g6 16xlarge,
  24xlarge; g6e 16xlarge, 24xlarge; m5 large, xlarge; m6i 2xlarge, 24xlarge, 32xlarge; m7i large,
  4xlarge, 8xlarge; p4d, p4de, p5 and p5en, all sizes; p5e has a price in neither. The other sizes
  are assumed to be equal too. A public page that cites AWS's price list of us-west-2 (2026-10-04)
  confirms a GiB of gp3, the NAT gateway's hour and its address; gp3's throughput and operations,
  the gateway's GB and FSx were found for us-east-1 only, and are assumed to be equal.
- What Linux keeps of the memory: measured per type by the Karpenter project, on EKS nodes.
- G7e and P6: public catalogs of 2026, not AWS's own pages. G7e's prices are in two or more, but
  those of 4xlarge and 8xlarge in one; its bandwidths, and its EFA interfaces, in one each. P6's
  prices are in one each, that of P6-B300 for us-west-2. The memory of P6-B200 hosts, of G7e hosts
  above 2xlarge and of an RTX PRO 6000 is assumed.
- Peaks: NVIDIA's data sheets, tensor cores, dense: half of what a sheet gives "with sparsity".
- Bandwidth of GPU memory: the same sheets.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from contract.errors import InputError
from contract.text import did_you_mean
from contract.typed_json import from_json

# Limit of one network card, and so of one interface and one task, as AWS documents it.
CARD_GBPS: Final = 100.0
#: EC2's classes of usage.
ON_DEMAND: Final = "on-demand"
SPOT: Final = "spot"
BLOCK: Final = "capacity-block"
SALES: Final = (ON_DEMAND, SPOT, BLOCK)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVIDIA's data sheet has it."""

    name: str
    """Name that ``nvidia-smi`` and ``torch.cuda.get_device_name`` print."""
    memory_gib: float
    """Per GPU, as EC2 gives it: the "24 GB" of an A10G are 24 x 10^9 bytes. What the driver has
    for programs differs by a few percent, and is less on a T4."""
    tflops: float
    """Dense tensor-core peak in 10^12 operations per second, in bf16, accumulating in fp32 as
    PyTorch does; peak in fp32 where the GPU has no bf16."""
    memory_gb_per_s: float
    """Bandwidth of its memory, in 10^9 bytes per second."""
    has_bf16: bool = True
    """True if the GPU has bf16 units; without them, recipes compute in fp32."""
    has_nvlink: bool = False
    """True if the GPUs of a host exchange data directly, and EFA reads and writes GPU memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """One row of AWS's table, and what an ECS host of that type has room for."""

    name: str
    vcpus: int
    memory_mib: int
    """Nominal; the operating system sees less, see ``container_memory_mib``."""
    network_gbps: float
    """Sustained bandwidth, all network cards together; bursts ("up to") are not counted."""
    gpu: Gpu | None = None
    num_gpus: int = 0
    efa_interfaces: int = 0
    """Most EFA interfaces over all network cards; 0: no EFA."""
    first_efa_card: int = 0
    """Number of the first network card with EFA."""
    sold: tuple[str, ...] = (ON_DEMAND, SPOT)
    """How: "on-demand", "spot", "capacity-block"."""
    usd_per_hour: float | None = None
    """On-demand list price in ``PRICED_REGIONS``; None where there is none."""

    def __post_init__(self) -> None:
        checks = {
            "name must be FAMILY.SIZE": re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", self.name),
            "vcpus must be 1 or more": self.vcpus >= 1,
            "memory_mib must be 2048 or more": self.memory_mib >= 2048,
            "network_gbps must be above 0": self.network_gbps > 0,
            "gpu and num_gpus go together": (self.gpu is None) == (self.num_gpus < 1),
            "efa_interfaces must be 0 to 128": 0 <= self.efa_interfaces <= 128,
            "first_efa_card must be 0 or 1": self.first_efa_card in (0, 1),
            f"sold must be some of {', '.join(SALES)}": self.sold and {*self.sold} <= {*SALES},
            "usd_per_hour must be above 0": self.usd_per_hour is None or self.usd_per_hour > 0,
        }
        if wrong := [what for what, holds in checks.items() if not holds]:
            raise InputError(wrong[0])

    @property
    def container_cpu(self) -> int:
        """ECS CPU units (1024 are a vCPU) of the one container that fills the host."""
        # An eighth of a vCPU for the ECS agent and whatever daemon task runs beside training.
        return self.vcpus * 1024 - 128

    @property
    def container_memory_mib(self) -> int:
        """Hard memory limit in MiB of the one container that fills the host."""
        # ECS places a task by what the agent registered, which is what Linux counts: the nominal
        # size less what firmware and kernel keep. That is 2 to 7 % (measured: m5.large has 7633 of
        # 8192 MiB left, g5.xlarge 15794 of 16384, p5.48xlarge 97.7 %); asking for one MiB more
        # than that leaves the task unplaced forever. 512 MiB are for the agents and Docker, some
        # of which c5.large needs for its kernel: it has 3691 of 4096 MiB left, 90 %.
        return _down_to_64(self.memory_mib * 0.93 - 512)

    @property
    def shm_mib(self) -> int:
        """Size in MiB of the container's /dev/shm; what is used of it counts as its memory."""
        # Ray's object store lives there and takes 30 % of the memory by default, or else goes to
        # the disk with a warning. The rest is for NCCL's buffers and the data loaders' batches.
        return _down_to_64(self.container_memory_mib * 0.4)

    @property
    def root_volume_gib(self) -> int:
        """Size in GiB of the root volume."""
        # The operating system of ECS's GPU hosts needs 30, a container image with CUDA and PyTorch
        # twice 10 while it is unpacked; the rest is for data and for checkpoints on their way out.
        return 200 if self.gpu else 60

    @property
    def root_volume_mibps(self) -> int:
        """gp3 throughput of the root volume in MiB/s."""
        # gp3 comes with 125, at which writing an image of 10 GB takes over a minute. The smallest
        # hosts cannot use all that is asked for here: g5.xlarge bursts to 3.5 Gb/s, 417 MiB/s.
        return 600 if self.gpu else 250

    @property
    def root_volume_iops(self) -> int:
        """gp3 operations per second of the root volume."""
        # EC2 refuses more than 0.25 MiB/s per operation/s; 3000 come free of charge.
        return max(3000, 4 * self.root_volume_mibps)

    @property
    def efa_huge_pages_mib(self) -> int:
        """MiB of huge pages for libfabric's buffers; the container's memory leaves room for them.

        The public solution for p4d.24xlarge, with four interfaces, reserves 5,120.
        """
        return min(5120, 1280 * self.efa_interfaces)

    @property
    def has_rdma(self) -> bool:
        """True if its EFA reads and writes the memory of GPUs on other hosts by itself."""
        return self.gpu is not None and self.gpu.has_nvlink and self.efa_interfaces > 0

    @property
    def efa_cards(self) -> range:
        """Numbers of the network cards with EFA."""
        return range(self.first_efa_card, self.first_efa_card + self.efa_interfaces)

    @property
    def copies_through_host(self) -> bool:
        """True if its GPUs exchange data through the host's memory: there is no NVLink."""
        return self.gpu is not None and self.num_gpus > 1 and not self.gpu.has_nvlink

    @property
    def tcp_gbps(self) -> float:
        """Network bandwidth of one container without EFA."""
        # An awsvpc task has one interface, on network card 0; the other cards are for EFA only.
        return min(self.network_gbps, CARD_GBPS)

    @property
    def needs_efa(self) -> bool:
        """True if only EFA reaches the bandwidth that the host is sold with."""
        return self.tcp_gbps < self.network_gbps


def _down_to_64(mib: float) -> int:
    """``mib`` down to a multiple of 64."""
    return int(mib) // 64 * 64


_TABLE: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def instance_types(rows: Mapping[str, Any]) -> Mapping[str, InstanceType]:
    """The instance types of a table: name -> row, as in ``instance_types.json``.

    Raises:
        InputError: A row is wrong.
    """
    known = [each.name for each in dataclasses.fields(InstanceType)][1:]
    found = {}
    for name, row in rows.items():
        try:
            if not isinstance(row, Mapping):
                raise InputError(f"its row is {row!r}: it must be a table of {', '.join(known)}")
            for field in row:
                if field not in known:
                    every = f"there are {', '.join(known)}"
                    hint = did_you_mean(field, known, otherwise=every)
                    raise InputError(f"there is no field {field}: {hint}")
            values, gpu = dict(row), row.get("gpu")
            if isinstance(gpu, str):
                if gpu not in _TABLE["gpus"]:
                    known_gpus = f"give its figures, or one of {', '.join(_TABLE['gpus'])}"
                    raise InputError(f"gpu {gpu!r} is not known: {known_gpus}")
                values["gpu"] = _TABLE["gpus"][gpu]
            if why := _unusable(name):
                raise InputError(f"it {why}")
            found[name] = from_json(InstanceType, values | {"name": name}, what="its row")
        except InputError as error:
            raise InputError(f"instance type {name!r}: {error}") from None
    return MappingProxyType(found)


def _unusable(name: str) -> str:
    """Why no host of this name runs the images, in words; "" where nothing is known against it."""
    family = name.strip().lower().partition(".")[0]
    if family in ("p2", "p3", "p3dn"):
        return (
            "is too old: CUDA 13, which the images have, runs on no GPU before the T4 (g4dn); "
            f"choose one of {', '.join(_GPU_FAMILIES)}"
        )
    # Trainium, Inferentia and others; AMD's GPUs; Graviton has its g after the generation.
    if re.match(r"trn|inf|dl\d|p6e-|g4ad|[a-z]+\d+g", family):
        return (
            "cannot run the images, which are for x86 and NVIDIA's GPUs; "
            f"choose one of {', '.join(_GPU_FAMILIES)}"
        )
    return ""


INSTANCE_TYPES: Final = instance_types(_TABLE["types"])
_GPU_FAMILIES: Final = [
    *dict.fromkeys(name.partition(".")[0] for name, each in INSTANCE_TYPES.items() if each.gpu)
]


def instance_type(
    name: str, own: Mapping[str, InstanceType] = MappingProxyType({})
) -> InstanceType:
    """The instance type called ``name``, such as "g5.xlarge".

    Args:
        own: rows of the deployment, which come first.

    Raises:
        InputError: There is none of that name.
    """
    every = {**INSTANCE_TYPES, **own}
    if name in every:
        return every[name]
    if why := _unusable(name):
        raise InputError(f"instance type {name!r} {why}")

    sizes: dict[str, list[str]] = {}
    for known in every:
        family, _, size = known.partition(".")
        sizes.setdefault(family, []).append(size)

    near = difflib.get_close_matches(name.strip().lower(), every, n=3)
    family = name.strip().lower().partition(".")[0]
    raise InputError(
        f"instance type {name!r} is not known"
        + (f" (nearest: {', '.join(near)})" if near else "")
        + (
            f": {family} has the sizes {', '.join(sizes[family])}"
            if family in sizes
            else f": the families are {', '.join(sizes)}"
        )
        + "; choose one of these, or give its row in the setting instance_types"
    )


#: Regions whose list prices this project knows: those of this file, in each of them.
PRICED_REGIONS: Final = ("us-east-1", "us-west-2")

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
    def usd_per_hour(self) -> float:
        """At the list prices of ``PRICED_REGIONS``."""
        is_scratch = self.deployment == SCRATCH
        month = _SCRATCH_GIB_MONTH if is_scratch else PERSISTENT_GIB_MONTH[self.mbps_per_tib]
        return month * self.capacity_gib / _HOURS_PER_MONTH


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPrice:
    """Price of one host."""

    type: str
    """Instance type."""
    disk_gib: int
    """Root volume."""
    usd_per_hour: float | None
    """Instance and root volume; None: not known."""

    @classmethod
    def of(cls, machine: InstanceType, *, region: str, disk_gib: int = 0) -> Self:
        """Price of an instance type in a region.

        Args:
            disk_gib: root volume; 0: as large as the type has it by default.
        """
        size = disk_gib or machine.root_volume_gib
        usd = machine.usd_per_hour if region in PRICED_REGIONS else None
        if usd is not None:
            usd = round(usd + disk_usd_per_hour(machine, size), 6)
        return cls(type=machine.name, disk_gib=size, usd_per_hour=usd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of a job's hosts. On demand: spot instances usually cost less."""

    region: str
    head: HostPrice
    worker: HostPrice
    spot: bool
    """True if worker hosts are spot instances."""
    nat_usd_per_hour: float | None
    """The deployment's NAT gateway; None: not known."""
    shared_usd_per_hour: float | None = 0.0
    """The deployment's shared file system; None: not known; 0: it has none."""
    pools: Mapping[str, HostPrice] = field(default_factory=dict)
    """Worker hosts by pool, of a job that has several; ``worker`` is of its first."""

    @property
    def dearest(self) -> Self:
        """The same with the dearest of its worker hosts: a price that is not known is the first."""
        hosts = [self.worker, *self.pools.values()]
        worker = max(hosts, key=lambda each: (each.usd_per_hour is None, each.usd_per_hour or 0))
        return replace(self, worker=worker)

    def workers_in(self, pool: str) -> HostPrice:
        """Its worker hosts in a pool."""
        return self.pools.get(pool, self.worker)

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
        is_priced = region in PRICED_REGIONS
        usd_shared = shared.usd_per_hour if shared else 0.0
        return cls(
            region=region,
            head=HostPrice.of(head, region=region, disk_gib=disk_gib),
            worker=HostPrice.of(worker, region=region, disk_gib=disk_gib),
            spot=spot,
            nat_usd_per_hour=NAT_USD_PER_HOUR if is_priced else None,
            shared_usd_per_hour=round(usd_shared, 6) if is_priced or not shared else None,
        )

    def usd_per_hour(self, num_nodes: int) -> float | None:
        """Price of a head, ``num_nodes`` worker nodes, NAT gateway and shared file system."""
        worker = self.worker.usd_per_hour if num_nodes else 0.0
        head, standing = self.head.usd_per_hour, self.standing_usd_per_hour
        if head is None or worker is None or standing is None:
            return None
        return head + num_nodes * worker + standing

    @property
    def standing_usd_per_hour(self) -> float | None:
        """Price of what the deployment always has: NAT gateway, shared file system."""
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
        """Reason for a missing price, in a phrase; "" if none is missing."""
        hosts = (self.head, self.worker, *self.pools.values())
        if self.region not in PRICED_REGIONS:
            types = " and ".join(sorted({host.type for host in hosts}))
            return (
                f"list prices are known for {' and '.join(PRICED_REGIONS)} only, not for "
                f"{self.region}: AWS's price pages have those of {types}, docs/cost.md adds them "
                "up, and --max-hours limits the time"
            )
        for host in hosts:
            if host.usd_per_hour is None:
                return f"{host.type} has no list price"
        return ""


def disk_usd_per_hour(machine: InstanceType, gib: int) -> float:
    """Price of a root volume of ``gib`` GiB with the throughput that hosts of this type have."""
    throughput = max(0, machine.root_volume_mibps - _GP3_FREE_MIBPS)
    operations = max(0, machine.root_volume_iops - _GP3_FREE_IOPS)
    month = gib * _GP3_GIB + throughput * _GP3_MIBPS + operations * _GP3_IOPS
    return month / _HOURS_PER_MONTH
