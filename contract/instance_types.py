"""Facts and prices of the EC2 instance types that this project runs on, and of shared storage.

The stacks, the cost plan and the command line name an instance type and take every size of the
host, its container and its disk from here; none is typed a second time. A type that is not
listed is refused: add a row. Prices are list prices without discounts. They are frozen into a job's
order at submission, so that a later deploy of other hosts, or a newer price list, does not change
what a job has cost.

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

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Self

from contract.errors import InputError

# Limit of one network card, and so of one interface and one task, as AWS documents it.
CARD_GBPS: Final = 100.0


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
    """Whether it has units for bf16; without them the recipes compute in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """One row of AWS's table, and what an ECS host of that type has room for."""

    name: str
    vcpus: int
    memory_mib: int
    """Nominal; the operating system sees less, see ``container_memory_mib``."""
    gpu: Gpu | None
    num_gpus: int
    network_gbps: float
    """Sustained bandwidth, all network cards together; bursts ("up to") are not counted."""
    efa_interfaces: int
    """Most EFA interfaces over all network cards; 0: no EFA."""
    purchase: str
    """Either "on-demand", which is also sold as spot, or "capacity-block": only reserved."""
    usd_per_hour: float | None
    """On-demand list price in ``PRICED_REGIONS``; None where there is none."""

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
        return self.name.startswith("p") and self.efa_interfaces > 0

    @property
    def efa_cards(self) -> range:
        """Numbers of the network cards with EFA. P6-B300 has a card more, its first, without."""
        first = 1 if self.name.startswith("p6-b300") else 0
        return range(first, first + self.efa_interfaces)

    @property
    def copies_through_host(self) -> bool:
        """True if its GPUs exchange data through the host's memory: there is no NVLink."""
        return self.num_gpus > 1 and not self.name.startswith("p")

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


def _vcpus(size: str) -> int:
    """vCPUs by the name of a size: AWS gives each x four, and twice as many to the next size."""
    return {"large": 2, "metal": 96}.get(size) or 4 * int(size.removesuffix("xlarge") or 1)


# size, memory in GiB, GPUs, Gb/s, EFA interfaces, $/h
_Row = tuple[str, int, int, float, int, float | None]


def _family(
    family: str, gpu: Gpu | None, *rows: _Row, purchase: str = "on-demand"
) -> dict[str, InstanceType]:
    """The instance types of one family by name."""
    return {
        f"{family}.{size}": InstanceType(
            name=f"{family}.{size}",
            vcpus=_vcpus(size),
            memory_mib=memory_gib * 1024,
            gpu=gpu,
            num_gpus=num_gpus,
            network_gbps=gbps,
            efa_interfaces=efa,
            purchase=purchase,
            usd_per_hour=usd,
        )
        for size, memory_gib, num_gpus, gbps, efa, usd in rows
    }


def _cpu_family(
    family: str, *, gib: int, usd: float, efa: str = "", sizes: Mapping[str, float]
) -> dict[str, InstanceType]:
    """A family without GPUs, whose memory and price are in proportion to its vCPUs.

    Args:
        gib: memory of a vCPU.
        usd: price of a vCPU and hour.
        efa: the one size that has an EFA interface.
        sizes: with their Gb/s.
    """
    return _family(
        family,
        None,
        *(
            (size, gib * _vcpus(size), 0, gbps, int(size == efa), round(usd * _vcpus(size), 6))
            for size, gbps in sizes.items()
        ),
    )


# fmt: off
#              name                     GiB    TFLOPS GB/s
_T4 =      Gpu("Tesla T4",               16.0,    8.1,  320.0, has_bf16=False)
# Not an A10, whose sheet has 125 TFLOPS: the A10G, made for AWS, is given as 70 dense and
# 140 sparse. Arithmetic agrees: 80 SMs x 512 operations x 1.71 GHz, accumulating in fp32.
_A10G =    Gpu("NVIDIA A10G",            22.35,  70.0,  600.0)
_L4 =      Gpu("NVIDIA L4",              22.35, 121.0,  300.0)
_L40S =    Gpu("NVIDIA L40S",            44.7,  362.0,  864.0)
_A100_40 = Gpu("NVIDIA A100-SXM4-40GB",  40.0,  312.0, 1555.0)
_A100_80 = Gpu("NVIDIA A100-SXM4-80GB",  80.0,  312.0, 2039.0)
_H100 =    Gpu("NVIDIA H100 80GB HBM3",  80.0,  989.0, 3350.0)
_H200 =    Gpu("NVIDIA H200",           141.0,  989.0, 4800.0)
_B200 =    Gpu("NVIDIA B200",           179.0, 2250.0, 7700.0)
_B300 =    Gpu("NVIDIA B300 SXM6 AC",   268.0, 2250.0, 7700.0)
_PRO6000 = Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, 500.0, 1597.0)

# Gb/s by size, of m and of c.
_GBPS_6I = {
    "large": 0.781, "xlarge": 1.562, "2xlarge": 3.125, "4xlarge": 6.25, "8xlarge": 12.5,
    "12xlarge": 18.75, "16xlarge": 25, "24xlarge": 37.5, "32xlarge": 50,
}
_GBPS_7I = {size.replace("32", "48"): gbps for size, gbps in _GBPS_6I.items()}

INSTANCE_TYPES: Final[Mapping[str, InstanceType]] = MappingProxyType({
    #   size           GiB GPU   Gb/s EFA  $/h
    **_family("g4dn", _T4,
        ("xlarge",      16, 1,      5,   0, 0.526),
        ("2xlarge",     32, 1,     10,   0, 0.752),
        ("4xlarge",     64, 1,     20,   0, 1.204),
        ("8xlarge",    128, 1,     50,   1, 2.176),
        ("12xlarge",   192, 4,     50,   1, 3.912),
        ("16xlarge",   256, 1,     50,   1, 4.352),
        ("metal",      384, 8,    100,   1, 7.824),
    ),
    **_family("g5", _A10G,
        ("xlarge",      16, 1,    2.5,   0, 1.006),
        ("2xlarge",     32, 1,      5,   0, 1.212),
        ("4xlarge",     64, 1,     10,   0, 1.624),
        ("8xlarge",    128, 1,     25,   1, 2.448),
        ("12xlarge",   192, 4,     40,   1, 5.672),
        ("16xlarge",   256, 1,     25,   1, 4.096),
        ("24xlarge",   384, 4,     50,   1, 8.144),
        ("48xlarge",   768, 8,    100,   1, 16.288),
    ),
    **_family("g6", _L4,
        ("xlarge",      16, 1,    2.5,   0, 0.8048),
        ("2xlarge",     32, 1,      5,   0, 0.9776),
        ("4xlarge",     64, 1,     10,   0, 1.3232),
        ("8xlarge",    128, 1,     25,   1, 2.0144),
        ("12xlarge",   192, 4,     40,   1, 4.6016),
        ("16xlarge",   256, 1,     25,   1, 3.3968),
        ("24xlarge",   384, 4,     50,   1, 6.6752),
        ("48xlarge",   768, 8,    100,   1, 13.3504),
    ),
    **_family("g6e", _L40S,
        ("xlarge",      32, 1,    2.5,   0, 1.861),
        ("2xlarge",     64, 1,      5,   0, 2.24208),
        ("4xlarge",    128, 1,     20,   0, 3.00424),
        ("8xlarge",    256, 1,     25,   1, 4.52856),
        ("12xlarge",   384, 4,    100,   1, 10.49264),
        ("16xlarge",   512, 1,     35,   1, 7.57719),
        ("24xlarge",   768, 4,    200,   2, 15.06559),
        ("48xlarge",  1536, 8,    400,   4, 30.13118),
    ),
    **_family("g7e", _PRO6000,
        ("2xlarge",     64, 1,     50,   0, 3.3631),
        ("4xlarge",    128, 1,     50,   0, 3.9982),
        ("8xlarge",    256, 1,    100,   1, 5.2682),
        ("12xlarge",   512, 2,    400,   1, 8.2861),
        ("24xlarge",  1024, 4,    800,   2, 16.5722),
        ("48xlarge",  2048, 8,   1600,   4, 33.1443),
    ),
    **_family("p4d", _A100_40,
        ("24xlarge",  1152, 8,    400,   4, 21.957642),
    ),
    **_family("p4de", _A100_80,
        ("24xlarge",  1152, 8,    400,   4, 27.44705),
    ),
    **_family("p5", _H100,
        ("4xlarge",    256, 1,    100,   1, 6.88),
        ("48xlarge",  2048, 8,   3200,  32, 55.04),
    ),
    **_family("p5e", _H200,
        ("48xlarge",  2048, 8,   3200,  32, None),
        purchase="capacity-block",  # AWS lists no on-demand price, and none at all in us-east-1
    ),
    **_family("p5en", _H200,
        ("48xlarge",  2048, 8,   3200,  16, 63.296),
    ),
    **_family("p6-b200", _B200,
        ("48xlarge",  2048, 8,   3200,   8, 113.9328),
    ),
    **_family("p6-b300", _B300,
        ("48xlarge",  4096, 8,   6400,  16, 142.416),
    ),
    **_cpu_family("m5", gib=4, usd=0.048, sizes={
        "large": 0.75, "xlarge": 1.25, "2xlarge": 2.5, "4xlarge": 5, "8xlarge": 10,
        "12xlarge": 12, "16xlarge": 20, "24xlarge": 25,
    }),
    **_cpu_family("m6i", gib=4, usd=0.048, efa="32xlarge", sizes=_GBPS_6I),
    **_cpu_family("m7i", gib=4, usd=0.0504, efa="48xlarge", sizes=_GBPS_7I),
    **_cpu_family("c5", gib=2, usd=0.0425, sizes={
        "large": 0.75, "xlarge": 1.25, "2xlarge": 2.5, "4xlarge": 5, "9xlarge": 12,
        "12xlarge": 12, "18xlarge": 25, "24xlarge": 25,
    }),
    **_cpu_family("c6i", gib=2, usd=0.0425, efa="32xlarge", sizes=_GBPS_6I),
    **_cpu_family("c7i", gib=2, usd=0.044625, efa="48xlarge", sizes=_GBPS_7I),
})
# fmt: on
_GPU_FAMILIES: Final = [
    *dict.fromkeys(name.partition(".")[0] for name, each in INSTANCE_TYPES.items() if each.gpu)
]


def instance_type(name: str) -> InstanceType:
    """The instance type called ``name``, such as "g5.xlarge".

    Raises:
        InputError: There is none of that name in the table.
    """
    if name in INSTANCE_TYPES:
        return INSTANCE_TYPES[name]

    sizes: dict[str, list[str]] = {}
    for known in INSTANCE_TYPES:
        family, _, size = known.partition(".")
        sizes.setdefault(family, []).append(size)

    near = difflib.get_close_matches(name.strip().lower(), INSTANCE_TYPES, n=3)
    family = name.strip().lower().partition(".")[0]
    if family in ("p2", "p3", "p3dn"):
        raise InputError(
            f"instance type {name!r} is too old: CUDA 13, which the images have, runs on no GPU "
            f"before the T4 (g4dn); choose one of {', '.join(_GPU_FAMILIES)}"
        )
    if re.match("trn|inf|g5g|p6e-", family):
        raise InputError(
            f"instance type {name!r} cannot run the images, which are for x86 and NVIDIA's GPUs; "
            f"choose one of {', '.join(_GPU_FAMILIES)}"
        )
    raise InputError(
        f"instance type {name!r} is not known"
        + (f" (nearest: {', '.join(near)})" if near else "")
        + (
            f": {family} has the sizes {', '.join(sizes[family])}"
            if family in sizes
            else f": the families are {', '.join(sizes)}"
        )
        + "; choose one of these, or add a row to contract/instance_types.py"
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
        if self.region not in PRICED_REGIONS:
            types = " and ".join(sorted({self.head.type, self.worker.type}))
            return (
                f"list prices are known for {' and '.join(PRICED_REGIONS)} only, not for "
                f"{self.region} (AWS's price pages have those of {types})"
            )
        for host in (self.head, self.worker):
            if host.usd_per_hour is None:
                return f"{host.type} has no list price"
        return ""


def disk_usd_per_hour(machine: InstanceType, gib: int) -> float:
    """Price of a root volume of ``gib`` GiB with the throughput that hosts of this type have."""
    throughput = max(0, machine.root_volume_mibps - _GP3_FREE_MIBPS)
    operations = max(0, machine.root_volume_iops - _GP3_FREE_IOPS)
    month = gib * _GP3_GIB + throughput * _GP3_MIBPS + operations * _GP3_IOPS
    return month / _HOURS_PER_MONTH
