"""The settings of a deployment: the only place that reads CDK's context.

``cdk.json`` holds every default and the presets. A preset beats the defaults, and what stands
beside those two tables in ``cdk.json``, or is given by ``-c name=value``, beats both. Whatever is
wrong is refused here, in one sentence, before anything is built from it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final, NoReturn

from contract.cluster_shape import ClusterShape, Pool
from contract.errors import InputError
from contract.images import content_tag
from contract.instance_types import (
    BLOCK,
    ON_DEMAND,
    SPOT,
    FileSystem,
    InstanceType,
    instance_type,
    instance_types,
)
from contract.nodes import DEFAULT_POOL, METRICS_NAMESPACE
from contract.text import did_you_mean
from contract.typed_json import loads
from stacks import setting_checks as checks

ROOT: Final = Path(__file__).parents[1]
#: Tables of ``cdk.json``.
PRESETS_KEY: Final = "presets"
DEFAULTS_KEY: Final = "defaults"
#: Settings that a pool may have: it has its own, or those of the deployment.
OF_A_POOL: Final = (
    *("worker_instance_type", "max_workers", "spot", "efa", "root_volume_gib", "worker_ami"),
    *("capacity_reservation_id", "capacity_reservation_type", "image_tag"),
    *("availability_zone", "subnet_id"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One deployment. ``load`` builds it from CDK's context; the defaults are in ``cdk.json``."""

    preset: str
    """Machines of the deployment: ``ddp``, ``fsdp``, ``cpu``; ``team``, with limits for many users;
    or one that you add to ``presets`` in ``cdk.json``."""
    deployment: str
    """Name of this deployment, where an account and region has several; empty: the only one. Its
    stacks begin with it; give it to ``trainctl`` as ``--deployment`` or ``TRAIN_DEPLOYMENT``."""
    region: str
    """Region to deploy to; empty: that of the AWS profile in use."""
    availability_zone: str
    """Zone of both subnets; empty: CloudFormation's choice. GPU types differ between zones. It can
    only be changed by destroying both stacks."""

    head_instance_type: str
    """Host of the head node."""
    head_trains: bool
    """If true, the head's GPUs train too: it needs the workers' GPU, and runs their image."""
    max_heads: int
    """Most head hosts at a time, 1 to 16: one for the standing cluster and one for each job."""
    worker_instance_type: str
    """Host of a worker node; a whole host is one task."""
    max_workers: int
    """Most worker hosts at a time, 1 to 128."""
    spot: bool
    """Use spot instances as worker hosts. Heads never are: a lost head restarts the job."""
    worker_ami: str
    """Parameter of Systems Manager with the AMI of hosts that train, made from ECS's AMI for
    Amazon Linux 2023; empty: ECS's newest."""
    instance_types: str
    """Types that ``contract/instance_types.json`` lacks, or has otherwise: name -> a row like those
    of that file, with the price."""
    capacity_reservation_id: str
    """Reserved capacity, in the deployment's zone, that worker hosts start in, without a placement
    group."""
    capacity_reservation_type: str
    """``block``: a capacity block for ML, of P types; ``on-demand``: another one."""
    pools: Mapping[str, Mapping[str, Any]]
    """More worker hosts, for ``submit --pool``: name -> ``worker_instance_type``, ``max_workers``,
    ``spot``, ``capacity_reservation_id`` and its type, ``efa``, ``root_volume_gib``,
    ``worker_ami``, ``image_tag``, ``availability_zone``, ``subnet_id``:
    [pools](operations.md#pools)."""
    efa: str
    """``auto``: EFA where several nodes train on a type that needs it for its full bandwidth;
    ``on``: where the type has it; ``off``: never, at most 100 Gb/s per node. EFA needs an image
    with libfabric: [network](network.md#efa)."""
    shared_storage: str
    """``fsx``: all hosts mount one FSx for Lustre at ``/mnt/shared``, billed until TrainingStack is
    destroyed: [shared file system](imagenet.md#a-shared-file-system). ``none``: data is in the
    bucket only."""
    fsx_deployment: str
    """``scratch``, or ``persistent``, which replaces servers that fail and costs more."""
    fsx_capacity_gib: int
    """Size of the file system, from which its speed follows: 1200, or a multiple of 2400."""
    fsx_mbps_per_tib: int
    """Speed of a persistent one, in MB/s for each TiB: 125, 250, 500 or 1000."""
    fsx_on_destroy: str
    """``export``: destroy writes what the bucket lacks there, or fails; ``delete``: it is lost."""
    root_volume_gib: int
    """Root volume of each host in GiB; 0: 200 with GPUs, 60 without."""
    max_job_hours: int
    """Longest deadline of a job, 1 to 336, which the state machine enforces."""
    max_jobs_per_user: int
    """Most jobs of a user at a time, while others of theirs wait; 0: no limit."""
    monthly_budget_usd: int
    """Budget for all jobs in a calendar month (UTC), at list prices: ``trainctl submit`` warns if a
    job may exceed it. 0: none."""
    budget_refuses: bool
    """Make ``trainctl submit`` refuse jobs when the budget is spent."""

    base_image: str
    """Image that both are built on, by digest; empty: Python on Debian. Set it in ``cdk.json``:
    ``make images`` and CI read it there."""
    image_tag: str
    """Tag of both images; empty: the hash of their content, as ``make images`` computes it."""
    namespace: str
    """Private DNS domain; the head is ``head.<namespace>``, after a deployment's name
    ``head.<deployment>.<namespace>``."""
    vpc_cidr: str
    """Addresses of the VPC, /16 to /24: hosts take two each, of half of them."""
    vpc_id: str
    """Existing VPC to use; empty: a new one. Its DNS support and host names have to be on."""
    subnet_id: str
    """Private subnet of it for all hosts, in ``availability_zone``."""

    bucket: str
    """Existing bucket to use, of this account and region; empty: a new one."""
    data_buckets: str
    """More buckets that jobs may read, separated by commas."""
    retain_bucket: bool
    """Keep the bucket after ``cdk destroy``; otherwise it is emptied and removed. Files of runs
    over 1 MiB move to Glacier Instant Retrieval after 30 days."""
    log_retention_days: int
    """Days that logs are kept."""
    container_insights: bool
    """Publish ECS's own metrics, at [a price](cost.md#what-costs-what), for the dashboard's network
    graph."""

    tags: str
    """Tags of everything that is deployed and of its hosts: ``CostCenter=42,Owner=ml``."""
    session_manager: bool
    """Let Session Manager open shells on hosts."""
    alarm_email: str
    """Address that alarms are sent to, which has to confirm; empty: only the console shows them."""

    github_repository: str
    """``owner/name`` whose workflow may push images; empty: none."""
    github_branch: str
    """Branch of it that may."""
    github_oidc_provider_arn: str
    """The account's provider for GitHub, if it has one: an account can have only one."""

    def __post_init__(self) -> None:
        checks.check(dataclasses.asdict(self))
        if self.availability_zone and not self.availability_zone.startswith(self.region):
            checks.refuse(
                "availability_zone",
                self.availability_zone,
                f"a zone of the region in use, {self.region}, such as {self.region}a",
            )
        self._check_machines()
        if bool(self.vpc_id) != bool(self.subnet_id):
            checks.refuse("subnet_id", self.subnet_id, "given with vpc_id, or empty without")
        if self.vpc_id and not self.availability_zone:
            checks.refuse("availability_zone", "", f"the zone of {self.subnet_id}")
        if self.monthly_budget_usd and self.log_retention_days < 60:
            # Costs are known for as long as the events are kept.
            checks.refuse(
                "log_retention_days", self.log_retention_days, "60 or more with monthly_budget_usd"
            )
        if len(self.pools) > checks.MOST_POOLS:
            checks.refuse(
                "pools",
                len(self.pools),
                f"{checks.MOST_POOLS} pools at most: ECS takes 20 capacity providers in a cluster, "
                "and two are of the head and the deployment's own workers",
            )
        for name in self.pools:
            try:
                self._check_pool(name)
            except InputError as error:
                raise InputError(f"pool {name}: {error}") from None
        if not self.vpc_id:
            self._check_addresses()

    def _check_machines(self) -> None:
        head, worker = self.head, self.worker
        if self.head_trains and head.gpu != worker.gpu:
            checks.refuse(
                "head_instance_type",
                head.name,
                f"a type with the GPU of the workers ({_gpu(worker)}) while head_trains is true: "
                "every step waits for the slowest",
            )
        if head.num_gpus and not self.head_trains:
            checks.refuse(
                "head_instance_type",
                head.name,
                "a type without GPUs while head_trains is false: they would be billed and idle",
            )
        if ON_DEMAND not in head.sold:
            checks.refuse("head_instance_type", head.name, "a type that is sold on demand")
        reserved = ON_DEMAND not in worker.sold
        if self.spot and (SPOT not in worker.sold or self.capacity_reservation_id):
            checks.refuse(
                "spot",
                True,
                f"false for {worker.name} with reserved capacity: it is no spot capacity",
            )
        if reserved and not self.capacity_reservation_id:
            checks.refuse(
                "capacity_reservation_id",
                "",
                f"the id of your capacity block: {worker.name} is only sold as reserved capacity",
            )
        is_block = self.capacity_reservation_id and self.capacity_reservation_type == "block"
        if is_block and BLOCK not in worker.sold:
            checks.refuse(
                "capacity_reservation_type",
                "block",
                f"on-demand for {worker.name}, of which no capacity blocks are sold",
            )
        self._check_efa()
        self._check_shared_storage()
        if self.root_volume_gib and not 30 <= self.root_volume_gib <= 16384:
            checks.refuse(
                "root_volume_gib", self.root_volume_gib, "30 to 16384, or 0 for as needed"
            )

    @property
    def in_pools(self) -> "dict[str, Settings]":
        """The deployment with the workers of a pool, by the pools' names."""
        return {name: self._in_pool(name) for name in self.pools}

    def _in_pool(self, name: str) -> "Settings":
        # On demand, unless the pool names a market itself.
        overrides = {"spot": False, "capacity_reservation_id": "", **self.pools[name]}
        kinds = {field.name: field.type for field in dataclasses.fields(Settings)}
        values: dict[str, Any] = {}
        for each, value in overrides.items():
            if each not in OF_A_POOL:
                _unknown(each, [*OF_A_POOL])
            values[each] = _parse(each, value, kinds[each])
        return dataclasses.replace(self, pools={}, **values)

    def _check_pool(self, name: str) -> None:
        if name == DEFAULT_POOL or not re.fullmatch("[a-z][a-z0-9-]{0,19}", name):
            checks.refuse("pools", name, "names of up to 20 of a-z, 0-9 and -, but no default")
        if self.head_trains:
            checks.refuse("head_trains", True, "false with pools: their jobs have other GPUs")
        pool = self._in_pool(name)
        if bool(pool.worker.num_gpus) != bool(self.worker.num_gpus):
            kind = "with" if self.worker.num_gpus else "without"
            checks.refuse(
                "worker_instance_type", pool.worker.name, f"a type {kind} GPUs, as the deployment's"
            )
        zone, own = pool.availability_zone, self.availability_zone
        if zone[:-1] != own[:-1]:
            checks.refuse("availability_zone", zone, f"in the region of the deployment's, {own!r}")
        if zone != own and self.vpc_id and pool.subnet_id == self.subnet_id:
            checks.refuse("subnet_id", pool.subnet_id, f"a subnet in {zone}")

    def _check_addresses(self) -> None:
        """Each host has an address, and its task another one."""
        own = self.availability_zone
        hosts = {own: self.max_heads + self.max_workers}
        for pool in self.in_pools.values():
            hosts[pool.availability_zone] = hosts.get(pool.availability_zone, 0) + pool.max_workers
        # CDK gives the training subnet half of the VPC. The other addresses there are for AWS,
        # endpoints and the shared file system.
        here, whole = hosts.pop(own), IPv4Network(self.vpc_cidr).num_addresses
        if 2 * here + 16 > whole // 2:
            checks.refuse(
                "vpc_cidr", self.vpc_cidr, f"a larger network, such as /22, for up to {here} hosts"
            )
        for zone, number in hosts.items():
            self.pool_cidr(zone, num_hosts=number)

    def pool_cidr(self, zone: str, *, num_hosts: int = 0) -> str:
        """Addresses of the pools in another zone: a sixteenth of the VPC, by the zone's letter.

        The training subnet has the upper half; the NAT gateway's is in the first sixteenth.

        Raises:
            InputError: there are none, or not enough for so many hosts.
        """
        number = ord(zone[-1]) - ord("a") + 1
        if number > 7:
            checks.refuse("availability_zone", zone, "one of the zones a to g")
        network = [*IPv4Network(self.vpc_cidr).subnets(4)][number]
        if 2 * num_hosts + 5 > network.num_addresses:
            checks.refuse("vpc_cidr", self.vpc_cidr, f"a larger network: {zone} has {network}")
        return str(network)

    @property
    def domain(self) -> str:
        """Private DNS domain of this deployment: Cloud Map has each name once in a region."""
        return ".".join(filter(None, [self.deployment.lower(), self.namespace]))

    @property
    def metrics_namespace(self) -> str:
        """CloudWatch's namespace of what the hosts report."""
        return "/".join(filter(None, [METRICS_NAMESPACE, self.deployment]))

    @property
    def num_training_nodes(self) -> int:
        """Most nodes of a job that train."""
        return self.max_workers + (1 if self.head_trains else 0)

    def _check_efa(self) -> None:
        if self.efa == "on" and not self.worker.efa_interfaces:
            checks.refuse("efa", self.efa, f"auto or off: {self.worker.name} has no EFA")
        if self.uses_efa and self.head_trains and not self.head.efa_interfaces:
            checks.refuse(
                "head_instance_type",
                self.head.name,
                f"a type with EFA, as {self.worker.name} is, while head_trains is true: NCCL "
                "uses one network for all. Or give -c efa=off",
            )

    def _check_shared_storage(self) -> None:
        gib = self.fsx_capacity_gib
        if gib != 1200 and not (gib > 0 and gib % 2400 == 0):
            checks.refuse("fsx_capacity_gib", gib, "1200 or a multiple of 2400: FSx has no others")

    @property
    def file_system(self) -> FileSystem | None:
        """File system that all hosts mount; None: there is none."""
        if self.shared_storage == "none":
            return None
        return FileSystem(
            deployment=self.fsx_deployment,
            capacity_gib=self.fsx_capacity_gib,
            mbps_per_tib=self.fsx_mbps_per_tib,
        )

    @property
    def shape(self) -> ClusterShape:
        """Hosts and limits, for the command line."""
        pools = {
            name: Pool(efa=each.uses_efa, **_values(each, Pool))
            for name, each in self.in_pools.items()
        }
        workers = {each.worker_instance_type for each in pools.values()}
        hosts = {self.head_instance_type, self.worker_instance_type, *workers}
        own = {name: each for name, each in self.own_types.items() if name in hosts}
        return ClusterShape(
            efa=self.uses_efa,
            shared=self.file_system,
            pools=pools,
            instance_types=own,
            **_values(self, ClusterShape),
        )

    @property
    def uses_efa(self) -> bool:
        """True if the hosts that train have EFA interfaces."""
        if self.efa == "auto":
            return self.num_training_nodes > 1 and self.worker.needs_efa
        return self.efa == "on"

    @property
    def without_efa(self) -> str:
        """Warning about missing EFA; empty if not needed."""
        if self.uses_efa or self.num_training_nodes < 2 or not self.worker.needs_efa:
            return ""
        machine = self.worker
        return (
            f"efa is off: each {machine.name} gets {machine.tcp_gbps:,g} of its "
            f"{machine.network_gbps:,g} Gb/s ({machine.efa_interfaces} EFA interfaces have all)"
        )

    @property
    def own_types(self) -> Mapping[str, InstanceType]:
        """Instance types of the setting ``instance_types``."""
        return _own_types(self.instance_types)

    @property
    def head(self) -> InstanceType:
        """The head's machine."""
        return _machine("head_instance_type", self.head_instance_type, self.own_types)

    @property
    def worker(self) -> InstanceType:
        """A worker's machine."""
        return _machine("worker_instance_type", self.worker_instance_type, self.own_types)


def load(context: Mapping[str, Any], *, region: str = "") -> Settings:
    """Build the settings from all of CDK's context.

    Args:
        context: ``app.node.get_all_context()``: the content of ``cdk.json`` and of ``-c``.
        region: Region of the AWS profile in use, if known; only a zone is checked against it.

    Raises:
        InputError: A setting is unknown, missing, of the wrong type or not allowed.
    """
    fields = {field.name: field.type for field in dataclasses.fields(Settings)}
    for name in context:
        # CDK itself keeps feature flags and look-ups, whose names have one of these, and by
        # `cdk acknowledge` and `cdk cli-telemetry` two more.
        own = re.search("[:/@]|^acknowledged-issue-numbers$|^cli-telemetry$", name)
        if name not in {*fields, PRESETS_KEY, DEFAULTS_KEY} and not own:
            _unknown(name, [*fields])
    presets = _table(context, PRESETS_KEY)
    # A file of an earlier version has all of them beside the presets.
    defaults = _table({DEFAULTS_KEY: {}, **context}, DEFAULTS_KEY)
    preset = str(context.get("preset", ""))
    checks.one_of("preset", preset, tuple(presets))
    machines = presets[preset]
    if not isinstance(machines, Mapping):
        raise InputError(
            f"preset {preset} is {machines!r} in the table {PRESETS_KEY!r} in cdk.json: it must be "
            "a table of settings"
        )
    for name in (*defaults, *machines):
        if name not in fields:
            _unknown(name, [*fields])
    merged = {**defaults, **machines, **{name: context[name] for name in fields if name in context}}
    values = {}
    for name, kind in fields.items():
        if name not in merged:
            raise InputError(f"setting {name} is missing: give it in cdk.json or as -c {name}=…")
        values[name] = _parse(name, merged[name], kind)
    _check_kind(preset, presets, values)
    values["image_tag"] = values["image_tag"] or content_tag(ROOT, base=values["base_image"])
    settings = Settings(**values)
    if settings.availability_zone and region and not settings.region:
        dataclasses.replace(settings, region=region)  # raises where the zone is another region's
    return settings


def _table(context: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table of ``cdk.json``."""
    if isinstance(found := context.get(key), Mapping):
        return found
    raise InputError(
        f"setting {key} is {found!r}: it must be that table of cdk.json, and cannot be given with "
        "-c"
    )


def _check_kind(
    preset: str, presets: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]
) -> None:
    """GPUs belong to where a preset has them: with ``-c`` a type is changed, not its kind."""
    own = presets[preset].get("worker_instance_type")
    if own is None:
        return
    types = _own_types(values["instance_types"])
    has_gpus = bool(_machine("worker_instance_type", own, types).num_gpus)
    for name in ("head_instance_type", "worker_instance_type"):
        machine = _machine(name, values[name], types)
        if machine.num_gpus and not has_gpus:
            checks.refuse(
                name, machine.name, f"a type without GPUs in preset {preset}, which has none"
            )
        if has_gpus and not machine.num_gpus and name == "worker_instance_type":
            checks.refuse(
                name, machine.name, f"a type with GPUs in preset {preset}, which has them"
            )


def _values(settings: Settings, kind: type) -> dict[str, Any]:
    """The settings that are fields of another class under the same name, and of the same kind."""
    others = {"efa", "shared", "pools", "instance_types"}
    names = {each.name for each in dataclasses.fields(kind)} - others
    return {name: getattr(settings, name) for name in names}


def _parse(name: str, value: Any, kind: object) -> Any:
    """``value`` as ``kind``; what comes from ``-c`` is always text."""
    if name == "pools":
        return _tables(name, value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        checks.refuse(name, value, "true or false")
    if kind is int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
            return int(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and value == int(value):
            return int(value)  # CDK hands numbers of cdk.json on as floats
        checks.refuse(name, value, "a whole number")
    if name == "instance_types" and isinstance(value, Mapping):
        # With -c it is text already; CDK hands numbers of cdk.json on as floats.
        return re.sub(r"(\d)\.0\b", r"\1", json.dumps(value))
    if not isinstance(value, str):
        checks.refuse(name, value, "text")
    return value


def _tables(name: str, value: Any) -> Mapping[str, Mapping[str, Any]]:
    """Tables by their names, or the JSON of that."""
    with suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    if not (isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values())):
        checks.refuse(name, value, 'tables by their names, such as {"l4": {"max_workers": 4, …}}')
    return value


def _own_types(table: str) -> Mapping[str, InstanceType]:
    """Instance types of a JSON table."""
    try:
        return instance_types(loads(table, what="it"))
    except InputError as error:
        raise InputError(f"setting instance_types: {error}") from None


def _machine(name: str, value: str, own: Mapping[str, InstanceType]) -> InstanceType:
    try:
        return instance_type(value, own)
    except InputError as error:
        raise InputError(f"setting {name}: {error}") from None


def _gpu(machine: InstanceType) -> str:
    return machine.gpu.name if machine.gpu else "none"


def _unknown(name: str, known: list[str]) -> NoReturn:
    hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
    raise InputError(f"there is no setting {name}: {hint}")
