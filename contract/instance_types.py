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
- Peaks: NVIDIA's data sheets, tensor cores, dense: half of what a sheet gives "with sparsity".
- Bandwidth of GPU memory: the same sheets.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

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
    """Dense tensor-core peak in 10^12 operations per second, in bf16, or in fp16 where the GPU has
    no bf16 (T4), accumulating in fp32 as PyTorch does."""
    memory_gb_per_s: float
    """Bandwidth of its memory, in 10^9 bytes per second."""


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


# size, vCPUs, memory in GiB, GPUs, Gb/s, EFA interfaces, $/h
_Row = tuple[str, int, int, int, float, int, float | None]


def _family(
    family: str, gpu: Gpu | None, *rows: _Row, purchase: str = "on-demand"
) -> dict[str, InstanceType]:
    """The instance types of one family by name."""
    return {
        f"{family}.{size}": InstanceType(
            name=f"{family}.{size}",
            vcpus=vcpus,
            memory_mib=memory_gib * 1024,
            gpu=gpu,
            num_gpus=num_gpus,
            network_gbps=gbps,
            efa_interfaces=efa,
            purchase=purchase,
            usd_per_hour=usd,
        )
        for size, vcpus, memory_gib, num_gpus, gbps, efa, usd in rows
    }


# fmt: off
#              name                     GiB    TFLOPS GB/s
_T4 =      Gpu("Tesla T4",               16.0,   65.0,  320.0)
# Not an A10, whose sheet has 125 TFLOPS: the A10G, made for AWS, is given as 70 dense and
# 140 sparse. Arithmetic agrees: 80 SMs x 512 operations x 1.71 GHz, accumulating in fp32.
_A10G =    Gpu("NVIDIA A10G",            22.35,  70.0,  600.0)
_L4 =      Gpu("NVIDIA L4",              22.35, 121.0,  300.0)
_L40S =    Gpu("NVIDIA L40S",            44.7,  362.0,  864.0)
_A100_40 = Gpu("NVIDIA A100-SXM4-40GB",  40.0,  312.0, 1555.0)
_A100_80 = Gpu("NVIDIA A100-SXM4-80GB",  80.0,  312.0, 2039.0)
_H100 =    Gpu("NVIDIA H100 80GB HBM3",  80.0,  989.0, 3350.0)
_H200 =    Gpu("NVIDIA H200",           141.0,  989.0, 4800.0)

INSTANCE_TYPES: Final[Mapping[str, InstanceType]] = MappingProxyType({
    #   size        vCPU   GiB GPU   Gb/s EFA  $/h
    **_family("g4dn", _T4,
        ("xlarge",     4,   16, 1,      5,   0, 0.526),
        ("2xlarge",    8,   32, 1,     10,   0, 0.752),
        ("4xlarge",   16,   64, 1,     20,   0, 1.204),
        ("8xlarge",   32,  128, 1,     50,   1, 2.176),
        ("12xlarge",  48,  192, 4,     50,   1, 3.912),
        ("16xlarge",  64,  256, 1,     50,   1, 4.352),
        ("metal",     96,  384, 8,    100,   1, 7.824),
    ),
    **_family("g5", _A10G,
        ("xlarge",     4,   16, 1,    2.5,   0, 1.006),
        ("2xlarge",    8,   32, 1,      5,   0, 1.212),
        ("4xlarge",   16,   64, 1,     10,   0, 1.624),
        ("8xlarge",   32,  128, 1,     25,   1, 2.448),
        ("12xlarge",  48,  192, 4,     40,   1, 5.672),
        ("16xlarge",  64,  256, 1,     25,   1, 4.096),
        ("24xlarge",  96,  384, 4,     50,   1, 8.144),
        ("48xlarge", 192,  768, 8,    100,   1, 16.288),
    ),
    **_family("g6", _L4,
        ("xlarge",     4,   16, 1,    2.5,   0, 0.8048),
        ("2xlarge",    8,   32, 1,      5,   0, 0.9776),
        ("4xlarge",   16,   64, 1,     10,   0, 1.3232),
        ("8xlarge",   32,  128, 1,     25,   1, 2.0144),
        ("12xlarge",  48,  192, 4,     40,   1, 4.6016),
        ("16xlarge",  64,  256, 1,     25,   1, 3.3968),
        ("24xlarge",  96,  384, 4,     50,   1, 6.6752),
        ("48xlarge", 192,  768, 8,    100,   1, 13.3504),
    ),
    **_family("g6e", _L40S,
        ("xlarge",     4,   32, 1,    2.5,   0, 1.861),
        ("2xlarge",    8,   64, 1,      5,   0, 2.24208),
        ("4xlarge",   16,  128, 1,     20,   0, 3.00424),
        ("8xlarge",   32,  256, 1,     25,   1, 4.52856),
        ("12xlarge",  48,  384, 4,    100,   1, 10.49264),
        ("16xlarge",  64,  512, 1,     35,   1, 7.57719),
        ("24xlarge",  96,  768, 4,    200,   2, 15.06559),
        ("48xlarge", 192, 1536, 8,    400,   4, 30.13118),
    ),
    **_family("p4d", _A100_40,
        ("24xlarge",  96, 1152, 8,    400,   4, 21.957642),
    ),
    **_family("p4de", _A100_80,
        ("24xlarge",  96, 1152, 8,    400,   4, 27.44705),
    ),
    **_family("p5", _H100,
        ("4xlarge",   16,  256, 1,    100,   1, 6.88),
        ("48xlarge", 192, 2048, 8,   3200,  32, 55.04),
    ),
    **_family("p5e", _H200,
        ("48xlarge", 192, 2048, 8,   3200,  32, None),
        purchase="capacity-block",  # AWS lists no on-demand price, and none at all in us-east-1
    ),
    **_family("p5en", _H200,
        ("48xlarge", 192, 2048, 8,   3200,  16, 63.296),
    ),
    **_family("m5", None,
        ("large",      2,    8, 0,   0.75,   0, 0.096),
        ("xlarge",     4,   16, 0,   1.25,   0, 0.192),
        ("2xlarge",    8,   32, 0,    2.5,   0, 0.384),
        ("4xlarge",   16,   64, 0,      5,   0, 0.768),
        ("8xlarge",   32,  128, 0,     10,   0, 1.536),
        ("12xlarge",  48,  192, 0,     12,   0, 2.304),
        ("16xlarge",  64,  256, 0,     20,   0, 3.072),
        ("24xlarge",  96,  384, 0,     25,   0, 4.608),
    ),
    **_family("m6i", None,
        ("large",      2,    8, 0,  0.781,   0, 0.096),
        ("xlarge",     4,   16, 0,  1.562,   0, 0.192),
        ("2xlarge",    8,   32, 0,  3.125,   0, 0.384),
        ("4xlarge",   16,   64, 0,   6.25,   0, 0.768),
        ("8xlarge",   32,  128, 0,   12.5,   0, 1.536),
        ("12xlarge",  48,  192, 0,  18.75,   0, 2.304),
        ("16xlarge",  64,  256, 0,     25,   0, 3.072),
        ("24xlarge",  96,  384, 0,   37.5,   0, 4.608),
        ("32xlarge", 128,  512, 0,     50,   1, 6.144),
    ),
    **_family("m7i", None,
        ("large",      2,    8, 0,  0.781,   0, 0.1008),
        ("xlarge",     4,   16, 0,  1.562,   0, 0.2016),
        ("2xlarge",    8,   32, 0,  3.125,   0, 0.4032),
        ("4xlarge",   16,   64, 0,   6.25,   0, 0.8064),
        ("8xlarge",   32,  128, 0,   12.5,   0, 1.6128),
        ("12xlarge",  48,  192, 0,  18.75,   0, 2.4192),
        ("16xlarge",  64,  256, 0,     25,   0, 3.2256),
        ("24xlarge",  96,  384, 0,   37.5,   0, 4.8384),
        ("48xlarge", 192,  768, 0,     50,   1, 9.6768),
    ),
    **_family("c5", None,
        ("large",      2,    4, 0,   0.75,   0, 0.085),
        ("xlarge",     4,    8, 0,   1.25,   0, 0.17),
        ("2xlarge",    8,   16, 0,    2.5,   0, 0.34),
        ("4xlarge",   16,   32, 0,      5,   0, 0.68),
        ("9xlarge",   36,   72, 0,     12,   0, 1.53),
        ("12xlarge",  48,   96, 0,     12,   0, 2.04),
        ("18xlarge",  72,  144, 0,     25,   0, 3.06),
        ("24xlarge",  96,  192, 0,     25,   0, 4.08),
    ),
    **_family("c6i", None,
        ("large",      2,    4, 0,  0.781,   0, 0.085),
        ("xlarge",     4,    8, 0,  1.562,   0, 0.17),
        ("2xlarge",    8,   16, 0,  3.125,   0, 0.34),
        ("4xlarge",   16,   32, 0,   6.25,   0, 0.68),
        ("8xlarge",   32,   64, 0,   12.5,   0, 1.36),
        ("12xlarge",  48,   96, 0,  18.75,   0, 2.04),
        ("16xlarge",  64,  128, 0,     25,   0, 2.72),
        ("24xlarge",  96,  192, 0,   37.5,   0, 4.08),
        ("32xlarge", 128,  256, 0,     50,   1, 5.44),
    ),
    **_family("c7i", None,
        ("large",      2,    4, 0,  0.781,   0, 0.08925),
        ("xlarge",     4,    8, 0,  1.562,   0, 0.1785),
        ("2xlarge",    8,   16, 0,  3.125,   0, 0.357),
        ("4xlarge",   16,   32, 0,   6.25,   0, 0.714),
        ("8xlarge",   32,   64, 0,   12.5,   0, 1.428),
        ("12xlarge",  48,   96, 0,  18.75,   0, 2.142),
        ("16xlarge",  64,  128, 0,     25,   0, 2.856),
        ("24xlarge",  96,  192, 0,   37.5,   0, 4.284),
        ("48xlarge", 192,  384, 0,     50,   1, 8.568),
    ),
})
# fmt: on


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
            "before the T4 (g4dn); choose one of g4dn, g5, g6, g6e, p4d, p4de, p5, p5e and p5en"
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
            hosts = {name: HostPrice(**values[name]) for name in ("head", "worker")}
            return cls(**{**values, **hosts})
        except (KeyError, TypeError) as error:
            raise InputError(
                f"prices of a job's order are not understood ({error!r}): trainctl submit sets them"
            ) from None


def disk_usd_per_hour(machine: InstanceType, gib: int) -> float:
    """Price of a root volume of ``gib`` GiB with the throughput that hosts of this type have."""
    throughput = max(0, machine.root_volume_mibps - _GP3_FREE_MIBPS)
    operations = max(0, machine.root_volume_iops - _GP3_FREE_IOPS)
    month = gib * _GP3_GIB + throughput * _GP3_MIBPS + operations * _GP3_IOPS
    return month / _HOURS_PER_MONTH
