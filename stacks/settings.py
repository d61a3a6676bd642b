"""The settings of a deployment: the only place that reads CDK's context.

``cdk.json`` holds every default and the presets; ``-c name=value`` overrides one setting for one
command. Whatever is wrong is refused here, in one sentence, before anything is built from it.
"""

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from contract.errors import InputError
from contract.images import content_tag
from contract.instance_types import InstanceType, instance_type
from contract.job import MAX_SECONDS

ROOT: Final = Path(__file__).parents[1]
PRESETS_KEY: Final = "presets"

EFA_MODES: Final = ("auto", "on", "off")

# What CloudWatch Logs accepts as a retention, in days.
LOG_RETENTION_DAYS: Final = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731)

# Docker gives its bridge on every host this network: a VPC of the same addresses is not reachable
# from a container. The second is link-local: instance metadata and the time service live there.
RESERVED_NETWORKS: Final = ("172.17.0.0/16", "169.254.0.0/16")
PRIVATE_NETWORKS: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_ZONE = re.compile(r"[a-z]{2}(-[a-z]+)+-\d[a-z]")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
# With GitHub's ids of owner and repository, or without.
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}(@\d+)?/[A-Za-z0-9._-]{1,100}(@\d+)?")
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")
_PROVIDER_ARN = re.compile(
    r"arn:aws[a-z-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com"
)
_DOMAIN = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_RESERVATION = re.compile(r"cr-[0-9a-f]{17}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One deployment. ``load`` builds it from CDK's context; the defaults are in ``cdk.json``."""

    preset: str
    """One of the presets in ``cdk.json``: where the machines below come from unless given."""
    region: str
    """Region to deploy to; empty: that of the AWS profile in use."""
    availability_zone: str
    """Zone of both subnets; empty: the first of the region. GPU types differ between zones."""

    head_instance_type: str
    """Host of the head node."""
    head_trains: bool
    """Whether the head's own GPUs (CPUs in preset ``cpu``) train too."""
    max_heads: int
    """Most head hosts at a time: the standing cluster is one, each running job another."""
    worker_instance_type: str
    """Host of a worker node; a whole host is one task."""
    max_workers: int
    """Most worker hosts at a time."""
    spot: bool
    """Whether worker hosts are spot instances. Heads never are: a lost head restarts the job."""
    capacity_reservation_id: str
    """Capacity block of a reserved-only worker type; empty: none."""
    efa: str
    """``auto``: EFA where several nodes train on a type that reaches its bandwidth by EFA only;
    ``on``: where the type has it; ``off``: never, and nodes get what one network card has."""
    root_volume_gib: int
    """Root volume of each host in GiB; 0: as large as the host's images need."""
    max_job_hours: int
    """Longest time from a job's submission to its deadline; the state machine enforces it."""
    confirm_above_usd: int
    """Jobs whose maximum cost is above this, or unknown, start only if their user types y."""

    image_tag: str
    """Tag of both images in the two repositories; ``load`` puts the hash of what goes into them in
    the place of an empty one."""
    namespace: str
    """Private DNS domain; the head is ``head.<namespace>``."""
    vpc_cidr: str
    """Addresses of the VPC, /16 to /24."""
    interface_endpoints: bool
    """Whether ECR, Logs and SSM are reached through endpoints instead of the NAT gateway."""

    retain_bucket: bool
    """Whether the bucket survives ``cdk destroy``; otherwise it is emptied and removed."""
    archive_after_days: int
    """Age at which large files of runs move to storage for rarely read data; 0: never."""
    expire_after_days: int
    """Age at which large files of runs are deleted for good; 0: never."""
    log_retention_days: int
    """How long logs are kept."""

    alarm_email: str
    """Address that alarms are sent to; empty: they only show in the console."""
    idle_gpu_alarm_minutes: int
    """How long a GPU host may idle before the alarm."""

    github_repository: str
    """``owner/name`` whose workflow may push images; empty: none."""
    github_branch: str
    """Branch of it that may."""
    github_oidc_provider_arn: str
    """The account's provider for GitHub, if it has one: an account can have only one."""

    def __post_init__(self) -> None:
        _matches("region", self.region, _REGION, "a region such as eu-west-1, or empty")
        _matches(
            "availability_zone",
            self.availability_zone,
            _ZONE,
            "a zone such as eu-west-1a, or empty",
        )
        if self.availability_zone and not self.availability_zone.startswith(self.region):
            _refuse(
                "availability_zone",
                self.availability_zone,
                f"a zone of the region in use, {self.region}, such as {self.region}a",
            )
        self._check_machines()
        _matches(
            "image_tag", self.image_tag, _TAG, "an image tag, such as v1, or empty", empty=False
        )
        _matches(
            "namespace",
            self.namespace,
            _DOMAIN,
            "a DNS name in lower case, such as training.internal",
            empty=False,
        )
        _check_cidr("vpc_cidr", self.vpc_cidr)
        _in_range("archive_after_days", self.archive_after_days, 0, 3650)
        _in_range("expire_after_days", self.expire_after_days, 0, 3650)
        if 0 < self.expire_after_days <= self.archive_after_days:
            _refuse(
                "expire_after_days",
                self.expire_after_days,
                f"0 (never) or more than archive_after_days, {self.archive_after_days}",
            )
        if self.log_retention_days not in LOG_RETENTION_DAYS:
            _refuse(
                "log_retention_days",
                self.log_retention_days,
                f"one of {', '.join(map(str, LOG_RETENTION_DAYS))}",
            )
        _matches("alarm_email", self.alarm_email, _EMAIL, "an e-mail address, or empty")
        # No alarm on a query looks back further than three hours.
        _in_range("idle_gpu_alarm_minutes", self.idle_gpu_alarm_minutes, 10, 180)
        if self.idle_gpu_alarm_minutes % 5:
            _refuse("idle_gpu_alarm_minutes", self.idle_gpu_alarm_minutes, "a multiple of 5")
        _matches(
            "github_repository",
            self.github_repository,
            _REPOSITORY,
            "owner/name of one GitHub repository, or empty",
        )
        _matches(
            "github_branch",
            self.github_branch,
            _BRANCH,
            "the name of one branch, without wildcards",
            empty=False,
        )
        _matches(
            "github_oidc_provider_arn",
            self.github_oidc_provider_arn,
            _PROVIDER_ARN,
            "the ARN of the account's provider token.actions.githubusercontent.com, or empty",
        )

    def _check_machines(self) -> None:
        head, worker = self.head, self.worker
        if self.head_trains and head.gpu != worker.gpu:
            _refuse(
                "head_instance_type",
                head.name,
                f"a type with the GPU of the workers ({_gpu(worker)}) while head_trains is true: "
                "every step waits for the slowest",
            )
        if head.num_gpus and not self.head_trains:
            _refuse(
                "head_instance_type",
                head.name,
                "a type without GPUs while head_trains is false: they would be billed and idle",
            )
        if head.purchase != "on-demand":
            _refuse("head_instance_type", head.name, "a type that is sold on demand")
        _in_range("max_heads", self.max_heads, 1, 16)
        _in_range("max_workers", self.max_workers, 1, 64)
        _matches(
            "capacity_reservation_id",
            self.capacity_reservation_id,
            _RESERVATION,
            "the id of a capacity block (cr- and 17 hexadecimal digits), or empty",
        )
        reserved = worker.purchase == "capacity-block"
        if self.spot and (reserved or self.capacity_reservation_id):
            _refuse(
                "spot",
                True,
                f"false for {worker.name} from a capacity block: it is reserved, not spot",
            )
        if reserved and not self.capacity_reservation_id:
            _refuse(
                "capacity_reservation_id",
                "",
                f"the id of your capacity block: {worker.name} is only sold as reserved capacity",
            )
        self._check_efa()
        if self.root_volume_gib:
            _in_range("root_volume_gib", self.root_volume_gib, 30, 16384, zero="as needed")
        _in_range("max_job_hours", self.max_job_hours, 1, MAX_SECONDS // 3600)
        _in_range("confirm_above_usd", self.confirm_above_usd, 0, 1_000_000)

    @property
    def num_training_nodes(self) -> int:
        """Most nodes of a job that train."""
        return self.max_workers + (1 if self.head_trains else 0)

    def _check_efa(self) -> None:
        _one_of("efa", self.efa, EFA_MODES)
        if self.efa == "on" and not self.worker.efa_interfaces:
            _refuse("efa", self.efa, f"auto or off: {self.worker.name} has no EFA")
        if self.uses_efa and self.head_trains and not self.head.efa_interfaces:
            _refuse(
                "head_instance_type",
                self.head.name,
                f"a type with EFA, as {self.worker.name} is, while head_trains is true: NCCL "
                "uses one network for all. Or give -c efa=off",
            )

    @property
    def uses_efa(self) -> bool:
        """Whether the hosts that train have EFA interfaces."""
        if self.efa == "auto":
            return self.num_training_nodes > 1 and self.worker.needs_efa
        return self.efa == "on"

    @property
    def without_efa(self) -> str:
        """What is lost because there is no EFA, in words; empty where nothing is."""
        if self.uses_efa or self.num_training_nodes < 2 or not self.worker.needs_efa:
            return ""
        machine = self.worker
        return (
            f"efa is off: each {machine.name} gets {machine.tcp_gbps:,g} of its "
            f"{machine.network_gbps:,g} Gb/s ({machine.efa_interfaces} EFA interfaces have all)"
        )

    @property
    def head(self) -> InstanceType:
        """The head's machine."""
        return _machine("head_instance_type", self.head_instance_type)

    @property
    def worker(self) -> InstanceType:
        """A worker's machine."""
        return _machine("worker_instance_type", self.worker_instance_type)


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
        # Feature flags and cached look-ups of CDK itself have one of these in their names.
        if name not in {*fields, PRESETS_KEY} and not re.search("[:/@]", name):
            _unknown(name, [*fields])
    presets = context.get(PRESETS_KEY)
    if not isinstance(presets, Mapping):
        raise InputError(
            f"setting {PRESETS_KEY} is {presets!r}: it must be the table of presets in cdk.json, "
            "and cannot be given with -c"
        )
    preset = str(context.get("preset", ""))
    _one_of("preset", preset, tuple(presets))
    machines = presets[preset]
    if not isinstance(machines, Mapping):
        raise InputError(
            f"preset {preset} is {machines!r} in the table {PRESETS_KEY!r} in cdk.json: it must be "
            "a table of settings"
        )
    for name in machines:
        if name not in fields:
            _unknown(name, [*fields])
    given = {**machines, **{name: context[name] for name in fields if name in context}}
    values = {}
    for name, kind in fields.items():
        if name not in given:
            raise InputError(f"setting {name} is missing: give it in cdk.json or as -c {name}=…")
        assert isinstance(kind, type)  # the annotations above are plain types
        values[name] = _parse(name, given[name], kind)
    _check_kind(preset, presets, values)
    values["image_tag"] = values["image_tag"] or content_tag(ROOT)
    settings = Settings(**values)
    if settings.availability_zone and region and not settings.region:
        dataclasses.replace(settings, region=region)  # raises where the zone is another region's
    return settings


def _check_kind(
    preset: str, presets: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]
) -> None:
    """GPUs belong to where a preset has them: with ``-c`` a type is changed, not its kind."""
    own = presets[preset].get("worker_instance_type")
    if own is None:
        return
    has_gpus = bool(_machine("worker_instance_type", own).num_gpus)
    for name in ("head_instance_type", "worker_instance_type"):
        machine = _machine(name, values[name])
        if machine.num_gpus and not has_gpus:
            _refuse(name, machine.name, f"a type without GPUs in preset {preset}, which has none")
        if has_gpus and not machine.num_gpus and name == "worker_instance_type":
            _refuse(name, machine.name, f"a type with GPUs in preset {preset}, which has them")


def _parse(name: str, value: Any, kind: type) -> Any:
    """``value`` as ``kind``; what comes from ``-c`` is always text."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        _refuse(name, value, "true or false")
    if kind is int:
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value):
            return int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
            return int(value)  # CDK hands numbers of cdk.json on as floats
        _refuse(name, value, "a whole number")
    if not isinstance(value, str):
        _refuse(name, value, "text")
    return value


def _machine(name: str, value: str) -> InstanceType:
    try:
        return instance_type(value)
    except InputError as error:
        raise InputError(f"setting {name}: {error}") from None


def _gpu(machine: InstanceType) -> str:
    return machine.gpu.name if machine.gpu else "none"


def _check_cidr(name: str, value: str) -> None:
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        _refuse(name, value, f"a network such as 10.0.0.0/16 ({error})")
    if not 16 <= network.prefixlen <= 24:
        _refuse(name, value, "a network from /16 to /24: one subnet holds all hosts and tasks")
    if not any(network.subnet_of(ipaddress.IPv4Network(each)) for each in PRIVATE_NETWORKS):
        _refuse(name, value, f"inside one of the private networks {', '.join(PRIVATE_NETWORKS)}")
    for each in RESERVED_NETWORKS:
        if network.overlaps(ipaddress.IPv4Network(each)):
            _refuse(name, value, f"apart from {each}, which Docker uses on every host")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(name, value, f"one of {', '.join(allowed)}")


def _in_range(name: str, value: int, low: int, high: int, *, zero: str = "") -> None:
    if not low <= value <= high:
        _refuse(name, value, f"{low} to {high}" + (f", or 0 for {zero}" if zero else ""))


def _matches(
    name: str, value: str, pattern: re.Pattern[str], what: str, *, empty: bool = True
) -> None:
    if not (pattern.fullmatch(value) or (empty and not value)):
        _refuse(name, value, what)


def _unknown(name: str, known: list[str]) -> NoReturn:
    if name == "allow_without_efa":  # until November 2026
        raise InputError("the setting allow_without_efa is now efa: off has the same effect")
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    raise InputError(f"there is no setting {name}: {hint}")


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    raise InputError(
        f"setting {name} is {shown}: it must be {allowed} (give -c {name}=… or edit cdk.json)"
    )
