"""Hosts and limits of a deployment, as its output ``ClusterShape`` has them in JSON."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from contract.admission import Limits
from contract.errors import InputError
from contract.instance_types import FileSystem, InstanceType, Prices, instance_type
from contract.job import ORDER_VERSION
from contract.nodes import DEFAULT_POOL, ClusterSize, Gpus
from contract.text import did_you_mean
from contract.typed_json import from_json, loads

#: How hosts of a pool are paid for.
MARKETS: Final = ("spot", "on-demand", "reserved")
#: Worker nodes of a deployment, or of a pool, at most.
MOST_WORKERS: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Worker hosts of another kind than the deployment's own. Fields as in ``ClusterShape``."""

    worker_instance_type: str
    max_workers: int
    spot: bool
    efa: bool
    image_tag: str
    root_volume_gib: int
    availability_zone: str
    """Empty: CloudFormation's choice, as of all other hosts."""
    capacity_reservation_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """Settings of a deployment that the command line needs."""

    preset: str
    head_instance_type: str
    head_trains: bool
    worker_instance_type: str
    max_workers: int
    """Worker nodes at a time, of all jobs and the standing cluster together."""
    spot: bool
    efa: bool
    """True if the hosts that train have EFA."""
    image_tag: str
    max_heads: int
    """Heads at a time, of all jobs and the standing cluster together."""
    root_volume_gib: int
    """Root volume of each host in GiB; 0: as large as its instance type has it."""
    max_job_hours: int
    """Longest deadline of a job."""
    log_retention_days: int
    """Days that ECS's events are kept, from which costs are computed."""
    capacity_reservation_id: str = ""
    """Reserved capacity that worker hosts start in."""
    instance_types: Mapping[str, InstanceType] = field(default_factory=dict)
    """Those of its hosts that have a row of their own in its settings."""
    max_jobs_per_user: int = 0
    """Jobs of a user at a time; 0: no limit."""
    monthly_budget_usd: int = 0
    """Budget for all jobs in one calendar month (UTC), in US dollars; 0: no budget."""
    budget_refuses: bool = False
    """True if no job may start once the budget is spent; False: only a warning."""
    base_image: str = ""
    """Base of its images; empty: the project's own."""
    shared: FileSystem | None = None
    """The file system that all hosts mount."""
    pools: Mapping[str, Pool] = field(default_factory=dict)
    """More worker hosts, by name."""

    def to_json(self) -> str:
        """The output, which also names the version of job orders."""
        values = dataclasses.asdict(self)
        values["order"] = ORDER_VERSION
        for name in ("shared", "instance_types", "pools"):
            if not values[name]:
                del values[name]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """
        Raises:
            InputError: it is no shape, or these stacks take other job orders than this trainctl
                writes.
        """
        values = loads(text, what="it")
        if (order := values.get("order")) != ORDER_VERSION:
            raise InputError(
                f"its jobs are described in version {order}, and this trainctl writes "
                f"version {ORDER_VERSION}"
            )
        found = from_json(cls, values, what="it", ignores_unknown=True)
        for each in found.in_pools.values():
            for name in (each.head_instance_type, each.worker_instance_type):
                instance_type(name, found.instance_types)
        return found

    @property
    def in_pools(self) -> "dict[str, ClusterShape]":
        """The deployment as a job in one pool sees it, by the pools' names, the default first."""
        found = {DEFAULT_POOL: self}
        for name, pool in self.pools.items():
            own = dataclasses.asdict(pool)
            del own["availability_zone"]
            found[name] = dataclasses.replace(self, **own)
        return found

    def in_pool(self, name: str) -> "ClusterShape":
        """Raises InputError: there is no such pool."""
        found = self.in_pools
        if name not in found:
            hint = did_you_mean(name, [*found], otherwise=f"there are {', '.join(found)}")
            raise InputError(f"there is no pool {name}: {hint}")
        return found[name]

    @property
    def market(self) -> str:
        """How its worker hosts are paid for."""
        return MARKETS[2 if self.capacity_reservation_id else 0 if self.spot else 1]

    @property
    def words(self) -> str:
        """``4 x NVIDIA A10G, spot``: a worker host."""
        gpus = f"{self.worker.num_gpus} x {self.worker.gpu.name}" if self.worker.gpu else "no GPUs"
        return f"{gpus}, {self.market}"

    @property
    def head(self) -> InstanceType:
        """The head's machine."""
        return instance_type(self.head_instance_type, self.instance_types)

    @property
    def worker(self) -> InstanceType:
        """A worker's machine."""
        return instance_type(self.worker_instance_type, self.instance_types)

    def prices(self, region: str) -> Prices:
        """List prices of its hosts today."""
        return Prices.of(
            region=region,
            head=self.head,
            worker=self.worker,
            spot=self.spot,
            disk_gib=self.root_volume_gib,
            shared=self.shared,
        )

    @property
    def limits(self) -> Limits:
        """Limits of its jobs, all together."""
        return Limits(
            max_heads=self.max_heads,
            max_workers=self.max_workers,
            max_jobs_per_user=self.max_jobs_per_user,
            pools={name: pool.max_workers for name, pool in self.pools.items()},
        )

    @property
    def min_nodes(self) -> int:
        """Worker nodes that training needs at least: none where the head trains."""
        return 0 if self.head_trains else 1

    @property
    def surplus_heads(self) -> int:
        """Head hosts that ECS starts for nothing: from zero it starts two where it may."""
        return min(self.max_heads, 2) - 1

    def size(self, num_nodes: int) -> ClusterSize:
        """Size of the Ray cluster of a head and ``num_nodes`` worker nodes."""
        heads = 1 if self.head_trains else 0
        return ClusterSize(
            num_nodes=num_nodes + 1,
            num_cpus=self.worker.vcpus * num_nodes + self.head.vcpus * heads,
            # A head's GPUs are Ray's, whether or not it trains.
            num_gpus=self.worker.num_gpus * num_nodes + self.head.num_gpus,
        )

    @property
    def gpus(self) -> Gpus:
        """GPUs of the hosts that train."""
        return Gpus(
            per_node=self.worker.num_gpus,
            on_head=self.head.num_gpus if self.head_trains else None,
        )
