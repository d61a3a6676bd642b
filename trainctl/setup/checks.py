"""Doctor's checks of an account and region, and the command that fixes each problem.

The same for a deployment that is there and for one that is only planned: ``of_hosts``,
``of_a_deploy`` and ``of_a_deployment`` are the tables of checks, by name. Not for what a command
needs to go on: that is checked where it is needed, and refused there.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from contract import outputs as stack_outputs
from contract.cluster_shape import ClusterShape
from contract.instance_types import ON_DEMAND, InstanceType
from contract.nodes import WORKER
from contract.text import counted, utc
from trainctl.aws.account import Account
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, explained
from trainctl.jobs.node_images import check_image, repositories
from trainctl.setup.checkout_settings import Planned
from trainctl.watch import boots

if TYPE_CHECKING:
    from stacks.settings import Settings

ROLES: Final = {
    "AWSServiceRoleForECS": "ecs.amazonaws.com",
    "AWSServiceRoleForAutoScaling": "autoscaling.amazonaws.com",
}
SPOT_ROLE: Final = {"AWSServiceRoleForEC2Spot": "spot.amazonaws.com"}
#: Quotas of EC2 count vCPUs, by family and whether on spot. P5 is with the other P on demand only.
QUOTAS: Final = {
    ("g", False): "L-DB2E81BA",
    ("g", True): "L-3819A6DF",
    ("p", False): "L-417A185B",
    ("p", True): "L-7212CCBC",
    ("p5", True): "L-C4BD4855",
    ("standard", False): "L-1216C47A",
    ("standard", True): "L-34B43A08",
}
#: Network quotas: (service, code). CoreStack takes one of each.
VPCS: Final = ("vpc", "L-F678F1CE")
ADDRESSES: Final = ("ec2", "L-0263D0A3")
#: Version of the CDK's bootstrap stack that the templates need, and its default name.
MIN_BOOTSTRAP: Final = 6
QUALIFIER: Final = "hnb659fds"


class Finding(NamedTuple):
    """Outcome of a check."""

    state: str
    """``ok``; ``bad``; ``next`` for a step that has not been taken yet; ``unknown`` where it could
    not be checked."""
    found: str
    fix: str = ""
    """The command that fixes it, or several, a line each; empty where nothing needs one."""


class Check(NamedTuple):
    """A finding with the name of its check."""

    what: str
    state: str
    found: str
    fix: str = ""


#: The checks of a table, by name.
Checks = dict[str, Callable[[], Finding]]
#: Looks up the zone in which hosts start; empty while CloudFormation has not chosen it yet.
Zone = Callable[[], str]


def ok(found: str) -> Finding:
    return Finding("ok", found)


def bad(found: str, fix: str = "") -> Finding:
    return Finding("bad", found, fix)


def run(checks: Checks) -> Iterator[Check]:
    """Make all checks. An answer that AWS refuses is unknown; what the stacks lack is bad."""
    for what, check in checks.items():
        try:
            found = check()
        except CliError as error:
            found = bad(str(error))
        except Exception as error:  # a finding: unknown
            found = Finding("unknown", str(explained(error)))
        yield Check(what, *found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An account and region, and how the commands that are printed reach it."""

    account: Account
    region: str
    profile: str | None = None
    prefix: str = ""
    """Variables in front of ``make``."""
    context: Mapping[str, str] = field(default_factory=dict)
    """Settings of the deployment, by ``-c``."""

    def with_profile(self, command: str) -> str:
        """A command of the AWS CLI or of the CDK's."""
        return f"{command} --profile {self.profile}" if self.profile else command

    def aws(self, command: str) -> str:
        """A command of the AWS CLI."""
        return self.with_profile(f"aws {command} --region {self.region}")

    def make(self, target: str) -> str:
        """A target of make."""
        return f"{self.prefix}make {target}"

    def deploy(self, **more: str) -> str:
        """The target that deploys, with the settings and more of them."""
        settings = {**self.context, **more}.items()
        words = " ".join(f"-c {name}={value}" for name, value in settings)
        return self.make(f'deploy ARGS="{words}"' if words else "deploy")

    def fixed(self, pool: str, **settings: str) -> str:
        """Instruction for changing settings of the deployment or of a pool."""
        return f"change pool {pool} in cdk.json" if pool else self.deploy(**settings)

    def increase(self, service: str, code: str, value: int) -> str:
        """The command that asks AWS for a larger quota."""
        return self.aws(
            f"service-quotas request-service-quota-increase --service-code {service} "
            f"--quota-code {code} --desired-value {value}"
        )


# --- tables ---------------------------------------------------------------------------------------
def of_hosts(place: Place, shape: ClusterShape, zone: Zone, *, is_deployed: bool) -> Checks:
    """Checks for hosts of these types and numbers.

    Args:
        is_deployed: whether there is a network, which fixes the zone.
    """
    names = [*dict.fromkeys((shape.head.name, shape.worker.name))]
    is_spot = any(each.spot for each in shape.in_pools.values())
    roles = {**ROLES, **(SPOT_ROLE if is_spot else {})}
    offer = partial(offered, place, is_deployed=is_deployed)
    checks: Checks = {
        f"{name} offered": partial(offer, name, needed_types=names, zone=zone) for name in names
    }
    if name := shape.capacity_reservation_id:
        checks[name] = partial(reservation, place, shape, zone)
    for name, pool in shape.pools.items():
        machine, own = pool.worker_instance_type, pool.availability_zone
        where = partial(str, own) if own else zone
        checks[f"pool {name} offered"] = partial(offer, machine, needed_types=[machine], zone=where)
        if reserved := pool.capacity_reservation_id:
            checks[reserved] = partial(reservation, place, shape.in_pool(name), where, pool=name)
    for (family, spot), vcpus in needed_vcpus(shape).items():
        title = family if family == "standard" else family.upper()
        checks[f"quota {title}, {'spot' if spot else 'on demand'}"] = partial(
            vcpu_quota, place, QUOTAS[family, spot], vcpus, with_surplus=shape.surplus_heads > 0
        )
    for role, service in roles.items():
        checks[f"role {role}"] = partial(linked_role, place, role, service)
    return checks


def of_a_deploy(place: Place, plan: Planned, *, missing: Collection[str]) -> Checks:
    """Checks of an account for a deploy, besides those for its hosts.

    Args:
        missing: stacks that are not there yet.
    """
    checks: Checks = {"CDK bootstrap": partial(bootstrap, place, plan.qualifier)}
    is_new = stack_outputs.stacks(plan.settings.deployment)[0] in missing
    if is_new and plan.settings.vpc_id:
        checks["network"] = partial(network, place, plan.settings)
    elif is_new:
        checks["quota VPCs"] = partial(one_more, place, VPCS, Account.num_vpcs)
        checks["quota addresses"] = partial(one_more, place, ADDRESSES, Account.num_addresses)
    for name, pool in plan.settings.in_pools.items():
        if pool.subnet_id != plan.settings.subnet_id:
            checks[f"pool {name} network"] = partial(network, place, pool, pool=name)
    return checks


def of_a_deployment(place: Place, deployment: Deployment) -> Checks:
    """Checks of existing stacks for a job."""
    tags = dict.fromkeys(each.image_tag for each in deployment.shape.in_pools.values())
    own = deployment.shape.image_tag
    checks: Checks = {
        f"image of the {node}{'' if tag == own else f', {tag}'}": partial(
            image, place, deployment, repository, tag
        )
        for node, repository in repositories(deployment).items()
        for tag in (tags if node == WORKER else (own,))
    }
    checks["last boot"] = partial(last_boot, deployment)
    if stack_outputs.PUSH_ROLE in deployment.outputs:
        checks["images by CI"] = partial(pipeline, place, deployment)
    return checks


# --- checks ---------------------------------------------------------------------------------------
def last_boot(deployment: Deployment) -> Finding:
    """How the newest host started."""
    boot = boots.last(deployment)
    said = boots.line(boot) or "no host has started yet"
    return bad(said) if boot.get("failed") else ok(said)


def pipeline(place: Place, deployment: Deployment) -> Finding:
    """Variables of the repository on GitHub, with which its workflow pushes images."""
    outputs = {
        f"{node.upper()}_REPOSITORY": name for node, name in stack_outputs.REPOSITORIES.items()
    }
    outputs["AWS_PUSH_ROLE"] = stack_outputs.PUSH_ROLE
    values = {name: deployment.output(each) for name, each in outputs.items()}
    values["AWS_REGION"] = place.region
    fix = "\n".join(f"gh variable set {name} --body {value}" for name, value in values.items())
    return Finding("next", "pushed once the repository on GitHub has its variables", fix)


def network(place: Place, settings: "Settings", *, pool: str = "") -> Finding:
    """Check an existing VPC and subnet that hosts, or those of a pool, are to start in."""
    vpc, name = settings.vpc_id, settings.subnet_id
    subnet, fixed = place.account.subnet(name), partial(place.fixed, pool)
    if subnet["VpcId"] != vpc:
        return bad(f"{name} is in {subnet['VpcId']}", fixed(vpc_id=subnet["VpcId"]))
    zone = subnet["AvailabilityZone"]
    if zone != settings.availability_zone:
        return bad(f"{name} is in {zone}", fixed(availability_zone=zone))
    if not place.account.dns_names(vpc):
        attribute = place.aws(f"ec2 modify-vpc-attribute --vpc-id {vpc}")
        return bad(
            f"{vpc} has no DNS names, by which nodes find the head",
            f"{attribute} --enable-dns-support\n{attribute} --enable-dns-hostnames",
        )
    routes = place.account.routes(name, vpc)
    outside = [each for each in routes if each.get("DestinationCidrBlock") == "0.0.0.0/0"]
    if not outside:
        return bad(f"{name} has no working route to 0.0.0.0/0: hosts could not reach ECS")
    if outside[0].get("GatewayId", "").startswith("igw-"):
        return bad(f"{name} is public, and hosts get no public address: take a private subnet")
    # An endpoint's route goes to a list of prefixes.
    has_endpoint = any(each.get("GatewayId", "").startswith("vpce-") for each in routes)
    cost = "" if has_endpoint else "; it has no gateway endpoint for S3: data may be billed per GB"
    return ok(f"{name} in {zone}{cost}")


def image(place: Place, deployment: Deployment, repository: str, tag: str) -> Finding:
    try:
        return ok(check_image(deployment, repository, tag))
    except CliError as error:
        return bad(str(error), place.make("images"))


def offered(
    place: Place,
    machine: str,
    *,
    needed_types: list[str],
    zone: Zone,
    is_deployed: bool,
) -> Finding:
    """Check that the zone offers an instance type; a better zone offers all ``needed_types``."""
    here, offering = zone(), place.account.zones_offering(machine)
    if here in offering:
        return ok(f"in {here}")
    if not here and place.account.zones() <= offering:
        return ok(f"in every zone of {place.region}")
    lacks = f"not in {here}" if here else f"not in every zone of {place.region}"
    common = set.intersection(*(place.account.zones_offering(each) for each in needed_types))
    if not common:
        return bad(
            f"{lacks}, and no zone of {place.region} offers {' and '.join(needed_types)}: "
            "choose other types (-c worker_instance_type=..., head_instance_type) or a region",
        )
    deploy = place.deploy(availability_zone=min(common))
    if is_deployed and here:
        lacks += ", where the training subnet is: another zone replaces the network"
        deploy = f"{place.make('destroy')} && {deploy}"
    elif not here:
        lacks += (
            f", and the deploy may take any of them: give one of {', '.join(sorted(common))} with "
            "-c availability_zone=..."
        )
    return bad(lacks, deploy)


def reservation(place: Place, shape: ClusterShape, zone: Zone, *, pool: str = "") -> Finding:
    """Check the reserved capacity of the workers, which only a failed launch would tell of."""
    fixed = partial(place.fixed, pool)
    found, here = place.account.reservation(shape.capacity_reservation_id), zone()
    machine, where, state = (found[key] for key in ("InstanceType", "AvailabilityZone", "State"))
    if machine != shape.worker.name:
        return bad(f"of {machine}", fixed(worker_instance_type=machine))
    if where != here:
        fix = fixed(availability_zone=where)
        return bad(f"in {where}, and hosts start in {here or 'any zone'}", fix)
    if (total := found["TotalInstanceCount"]) < shape.max_workers:
        fix = fixed(max_workers=str(total))
        return bad(f"of {counted(total, 'host')}, and max_workers is {shape.max_workers}", fix)
    until = f", until {utc(found['EndDate'])}" if "EndDate" in found else ""
    said = f"{counted(total, 'host')} in {where}, {state}{until}"
    if state == "scheduled":
        return Finding("next", f"{said}, from {utc(found['StartDate'])}")
    return ok(said) if state == "active" else bad(said)


def needed_vcpus(shape: ClusterShape) -> dict[tuple[str, bool], int]:
    """vCPUs that a job with all worker nodes takes, by family and whether on spot.

    Managed scaling starts two hosts where there was none, of which the keeper's sweep terminates
    one within about ten minutes; only a group's maximum prevents it. For workers that is counted
    anyway.
    """
    needed: dict[tuple[str, bool], int] = {}
    for each in shape.in_pools.values():  # a job is in one at a time
        if key := _quota_of(each.worker, each.spot):
            needed[key] = max(needed.get(key, 0), each.max_workers * each.worker.vcpus)
    if key := _quota_of(shape.head, spot=False):
        needed[key] = needed.get(key, 0) + (1 + shape.surplus_heads) * shape.head.vcpus
    return needed


def _quota_of(machine: InstanceType, spot: bool) -> tuple[str, bool] | None:
    """Key of ``QUOTAS``; None for what is reserved already, or of a family whose quota on spot is
    not in the table."""
    if ON_DEMAND not in machine.sold or (spot and machine.name.startswith("p6")):
        return None
    family = machine.name[0] if machine.name[0] in ("g", "p") else "standard"
    return ("p5" if spot and machine.name.startswith("p5") else family, spot)


def within(place: Place, quota: tuple[str, str], needed: int, said: str) -> Finding:
    """Check that a quota suffices; its value takes the place of ``{quota}`` in what is said."""
    value = place.account.quota(*quota)
    found = said.format(quota=round(value))
    return ok(found) if needed <= value else bad(found, place.increase(*quota, needed))


def vcpu_quota(place: Place, code: str, vcpus: int, *, with_surplus: bool) -> Finding:
    surplus = ", with the second head host that ECS starts from zero" if with_surplus else ""
    said = f"{{quota}} vCPUs, a job with all worker nodes takes {vcpus}{surplus}"
    return within(place, ("ec2", code), vcpus, said)


def one_more(place: Place, quota: tuple[str, str], count: Callable[[Account], int]) -> Finding:
    """Check that the region has room for one more of something."""
    used = count(place.account)
    return within(place, quota, used + 1, f"{used} of {{quota}} in use, the deployment takes one")


def bootstrap(place: Place, qualifier: str) -> Finding:
    found = place.account.parameter(f"/cdk-bootstrap/{qualifier or QUALIFIER}/version")
    own = f" --qualifier {qualifier}" if qualifier else ""
    fix = place.with_profile(f"npx cdk bootstrap aws://{place.account.id}/{place.region}{own}")
    if found is None:
        return bad(f"not done in {place.region}; once per account and region", fix)
    if int(found) < MIN_BOOTSTRAP:
        return bad(f"version {found}, and the stacks need {MIN_BOOTSTRAP}", fix)
    return ok(f"version {found}")


def linked_role(place: Place, role: str, service: str) -> Finding:
    if place.account.has_role(role):
        return ok("exists")
    return bad(
        "missing; the first use in an account may fail without it",
        place.aws(f"iam create-service-linked-role --aws-service-name {service}"),
    )
