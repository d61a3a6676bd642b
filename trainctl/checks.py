"""What ``trainctl doctor`` looks at in an account and region, and the command that fixes each.

The same for a deployment that is there and for one that is only planned. Not for what a command
needs to go on: that is asked where it is needed, and refused there.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from contract import nodes
from contract import outputs as stack_outputs
from contract.instance_types import InstanceType
from trainctl.aws.account import Account
from trainctl.aws.deployment import Deployment
from trainctl.aws.shape import Shape
from trainctl.errors import CliError, explained
from trainctl.images import repositories

_AMI: Final = "/aws/service/ecs/optimized-ami/amazon-linux-2023"
HOST_IMAGES: Final = {
    "GPU": f"{_AMI}/gpu/recommended/image_id",
    "CPU": f"{_AMI}/recommended/image_id",
}
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
#: Of the network: (service, code). CoreStack takes one of each.
VPCS: Final = ("vpc", "L-F678F1CE")
ADDRESSES: Final = ("ec2", "L-0263D0A3")
#: Resource policies of CloudWatch Logs in an account and region, which AWS does not raise.
MOST_LOG_POLICIES: Final = 10
#: What the templates ask of the CDK's bootstrap stack.
MIN_BOOTSTRAP: Final = 6
_AWS_DISK_KEY: Final = "alias/aws/ebs"
#: What EC2 Auto Scaling does with a disk's key.
_KEY_OPERATIONS: Final = (
    "Encrypt Decrypt ReEncryptFrom ReEncryptTo GenerateDataKey GenerateDataKeyWithoutPlaintext "
    "DescribeKey CreateGrant"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: str
    """``ok``; ``bad``; ``next`` for a step that has not been taken yet; ``unknown`` where it could
    not be looked at."""
    found: str
    fix: str = ""
    """The command that fixes it; empty where nothing needs it, or no single command does."""


Look = Callable[..., Check]
#: Asks for the zone in which hosts start; empty while CloudFormation has not chosen it yet.
Zone = Callable[[], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An account and region, and how the commands that are printed reach it."""

    account: Account
    region: str
    profile: str | None = None
    prefix: str = ""
    """Variables in front of ``make``."""

    def aws(self, command: str) -> str:
        """A command of the AWS CLI."""
        profile = f" --profile {self.profile}" if self.profile else ""
        return f"aws {command} --region {self.region}{profile}"

    def make(self, target: str, context: Mapping[str, str] | None = None) -> str:
        """A target of make, with settings of the deployment."""
        given = " ".join(f"-c {name}={value}" for name, value in (context or {}).items())
        arguments = f' ARGS="{given}"' if given else ""
        return f"{self.prefix}make {target}{arguments}"


def run(looks: Mapping[str, Look]) -> Iterator[Check]:
    """Look at everything; what AWS refuses to tell is no fault, but what the stacks lack is."""
    from botocore.exceptions import BotoCoreError, ClientError

    for what, look in looks.items():
        try:
            yield look(what=what)
        except (ClientError, BotoCoreError) as error:
            yield Check(what=what, state="unknown", found=str(explained(error) or error))
        except CliError as error:
            yield Check(what=what, state="bad", found=str(error))


# --- which ----------------------------------------------------------------------------------------
def of_hosts(
    place: Place,
    shape: Shape,
    zone: Zone,
    *,
    context: Mapping[str, str],
    is_deployed: bool,
) -> dict[str, Look]:
    """What hosts of these types and numbers need, by the name of the check.

    Args:
        context: settings of the deployment that were given by ``-c``.
        is_deployed: whether there is a network, which fixes the zone.
    """
    looks: dict[str, Look] = {}
    machines = {machine.name: machine for machine in (shape.head, shape.worker)}
    for name in machines:
        looks[f"{name} offered"] = partial(
            offered,
            place,
            name,
            beside=[*machines],
            zone=zone,
            context=context,
            is_deployed=is_deployed,
        )
    kinds = {"GPU" if machine.num_gpus else "CPU" for machine in machines.values()}
    for kind in sorted(kinds, reverse=True):
        looks[f"image of {kind} hosts"] = partial(host_image, place, HOST_IMAGES[kind])
    for (family, spot), vcpus in needed_vcpus(shape).items():
        title = family if family == "standard" else family.upper()
        what = f"quota {title}, {'spot' if spot else 'on demand'}"
        looks[what] = partial(
            vcpu_quota, place, QUOTAS[family, spot], vcpus, with_surplus=shape.surplus_heads > 0
        )
    for role, service in {**ROLES, **(SPOT_ROLE if shape.spot else {})}.items():
        looks[f"role {role}"] = partial(linked_role, place, role, service)
    looks["key of disks"] = partial(disk_key, place)
    return looks


def of_a_deploy(
    place: Place,
    *,
    missing: Collection[str],
    qualifier: str,
    makes_github_provider: bool,
    context: Mapping[str, str],
) -> dict[str, Look]:
    """What a deploy needs of an account beside what its hosts do.

    Args:
        missing: stacks that are not there yet.
        qualifier: of the CDK's bootstrap.
        makes_github_provider: whether the settings have the deploy make one.
        context: settings of the deployment that were given by ``-c``.
    """
    looks: dict[str, Look] = {"CDK bootstrap": partial(bootstrap, place, qualifier)}
    if stack_outputs.CORE_STACK in missing:
        looks["quota VPCs"] = partial(one_more, place, VPCS, Account.num_vpcs)
        looks["quota addresses"] = partial(one_more, place, ADDRESSES, Account.num_addresses)
        if makes_github_provider:
            looks["GitHub provider"] = partial(github_provider, place, context=context)
    if stack_outputs.TRAINING_STACK in missing:
        looks["policies of logs"] = partial(log_policies, place)
    return looks


def of_a_deployment(place: Place, deployment: Deployment) -> dict[str, Look]:
    """What a job needs of the stacks that are there."""
    looks: dict[str, Look] = {
        f"image of the {node}": partial(image, place, repository, deployment.shape.image_tag)
        for node, repository in repositories(deployment).items()
    }
    for node, output in (
        (nodes.HEAD, stack_outputs.HEAD_PROVIDER),
        (nodes.WORKER, stack_outputs.WORKER_PROVIDER),
    ):
        looks[f"{node} hosts in use"] = partial(protection, place, deployment, output)
    return looks


# --- what is looked at ----------------------------------------------------------------------------
def image(place: Place, repository: str, tag: str, *, what: str) -> Check:
    if place.account.has_image(repository, tag):
        return Check(what=what, state="ok", found=f"{repository}:{tag}")
    return Check(
        what=what,
        state="bad",
        found=f"{repository} has no image with the tag {tag!r}, which is deployed: build and push "
        "it with the sources that were deployed, or deploy a tag that is there (-c image_tag=...)",
        fix=place.make("images"),
    )


def protection(place: Place, deployment: Deployment, output: str, *, what: str) -> Check:
    """Whether scale-in spares the hosts that run something."""
    provider = deployment.output(output)
    if place.account.protects_hosts(provider):
        return Check(what=what, state="ok", found="protected from scale-in")
    return Check(
        what=what,
        state="bad",
        found="scale-in may terminate a host in use and keep an idle one",
        fix=place.aws(
            f"ecs update-capacity-provider --name {provider} "
            "--auto-scaling-group-provider managedTerminationProtection=ENABLED"
        ),
    )


def offered(
    place: Place,
    machine: str,
    *,
    beside: list[str],
    zone: Zone,
    context: Mapping[str, str],
    is_deployed: bool,
    what: str,
) -> Check:
    """Whether an instance type is offered in the zone; a better one offers all ``beside``."""
    here, offering = zone(), place.account.zones_offering(machine)
    if here in offering:
        return Check(what=what, state="ok", found=f"in {here}")
    if not here and place.account.zones() <= offering:
        return Check(what=what, state="ok", found=f"in every zone of {place.region}")
    lacks = f"not in {here}" if here else f"not in every zone of {place.region}"
    common = set.intersection(*(place.account.zones_offering(each) for each in beside))
    if not common:
        return Check(
            what=what,
            state="bad",
            found=f"{lacks}, and no zone of {place.region} offers {' and '.join(beside)}: "
            "choose other types (-c worker_instance_type=..., head_instance_type) or a region",
        )
    better = {**context, "availability_zone": min(common)}
    deploy = place.make("deploy", better)
    if is_deployed and here:
        lacks += ", where the training subnet is: another zone replaces the network"
        deploy = f"{place.make('destroy')} && {deploy}"
    elif not here:
        lacks += (
            f", and the deploy may take any of them: give one of {', '.join(sorted(common))} with "
            "-c availability_zone=..."
        )
    return Check(what=what, state="bad", found=lacks, fix=deploy)


def host_image(place: Place, parameter: str, *, what: str) -> Check:
    found = place.account.parameter(parameter)
    if found is not None:
        return Check(what=what, state="ok", found=found)
    return Check(
        what=what,
        state="bad",
        found=f"{parameter} is not published in {place.region}: deploy into another region "
        "(--region, or -c region=...)",
    )


def family_of(machine: InstanceType, *, spot: bool) -> str:
    """Which quota an instance type counts against."""
    if spot and machine.name.startswith("p5"):
        return "p5"
    letter = machine.name[0]
    return letter if letter in ("g", "p") else "standard"


def needed_vcpus(shape: Shape) -> dict[tuple[str, bool], int]:
    """vCPUs that a job with all worker nodes takes, by (family, whether spot).

    Managed scaling starts two hosts where there was none, of which the keeper's sweep terminates
    one within about ten minutes; only a group's maximum prevents it. For workers that is counted
    anyway.
    """
    needed: dict[tuple[str, bool], int] = {}
    for machine, count, spot in (
        (shape.head, 1 + shape.surplus_heads, False),
        (shape.worker, shape.max_workers, shape.spot),
    ):
        if machine.purchase != "capacity-block":  # reserved already
            key = family_of(machine, spot=spot), spot
            needed[key] = needed.get(key, 0) + count * machine.vcpus
    return needed


def vcpu_quota(place: Place, code: str, vcpus: int, *, with_surplus: bool, what: str) -> Check:
    value = place.account.quota("ec2", code)
    surplus = ", with the second head host that ECS starts from zero" if with_surplus else ""
    return Check(
        what=what,
        state="ok" if value >= vcpus else "bad",
        found=f"{value:.0f} vCPUs, a job with all worker nodes takes {vcpus}{surplus}",
        fix="" if value >= vcpus else increase(place, "ec2", code, vcpus),
    )


def one_more(
    place: Place, quota: tuple[str, str], count: Callable[[Account], int], *, what: str
) -> Check:
    """Whether the region has room for one more of something."""
    used, value = count(place.account), place.account.quota(*quota)
    return Check(
        what=what,
        state="ok" if used < value else "bad",
        found=f"{used} of {value:.0f} in use, the deployment takes one",
        fix="" if used < value else increase(place, *quota, used + 1),
    )


def increase(place: Place, service: str, code: str, value: int) -> str:
    """The command that asks AWS for a larger quota."""
    return place.aws(
        f"service-quotas request-service-quota-increase --service-code {service} "
        f"--quota-code {code} --desired-value {value}"
    )


def log_policies(place: Place, *, what: str) -> Check:
    used = place.account.num_log_policies()
    if used < MOST_LOG_POLICIES:
        found = f"{used} of {MOST_LOG_POLICIES} in use, the deployment takes one"
        return Check(what=what, state="ok", found=found)
    return Check(
        what=what,
        state="bad",
        found=f"all {used} resource policies of CloudWatch Logs are in use, and the deployment "
        "takes one: delete one that is not needed (aws logs delete-resource-policy --policy-name "
        "NAME)",
        fix=place.aws("logs describe-resource-policies"),
    )


def github_provider(place: Place, *, context: Mapping[str, str], what: str) -> Check:
    """An account can have one provider for GitHub; CoreStack makes it where none is given."""
    arn = place.account.github_provider()
    if arn is None:
        return Check(what=what, state="ok", found="none yet, the deploy makes it")
    return Check(
        what=what,
        state="bad",
        found="the account has one already, and the deploy cannot make another",
        fix=place.make("deploy", {**context, "github_oidc_provider_arn": arn}),
    )


def bootstrap(place: Place, qualifier: str, *, what: str) -> Check:
    found = place.account.parameter(f"/cdk-bootstrap/{qualifier}/version")
    profile = f" --profile {place.profile}" if place.profile else ""
    fix = f"npx cdk bootstrap aws://{place.account.id}/{place.region}{profile}"
    if found is None:
        said = f"not done in {place.region}; once per account and region"
        return Check(what=what, state="bad", found=said, fix=fix)
    if int(found) < MIN_BOOTSTRAP:
        said = f"version {found}, and the stacks need {MIN_BOOTSTRAP}"
        return Check(what=what, state="bad", found=said, fix=fix)
    return Check(what=what, state="ok", found=f"version {found}")


def linked_role(place: Place, role: str, service: str, *, what: str) -> Check:
    if place.account.has_role(role):
        return Check(what=what, state="ok", found="exists")
    return Check(
        what=what,
        state="bad",
        found="missing; the first use in an account may fail without it",
        fix=place.aws(f"iam create-service-linked-role --aws-service-name {service}"),
    )


def disk_key(place: Place, *, what: str) -> Check:
    """Hosts whose disk has a customer's key end at their launch without a grant."""
    key = place.account.default_disk_key()
    if key == _AWS_DISK_KEY:
        return Check(what=what, state="ok", found="AWS's own")
    role = "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
    return Check(
        what=what,
        state="unknown",
        found=f"the account's default is {key}: if it is a customer key, hosts terminate at their "
        "launch unless EC2 Auto Scaling may use it",
        fix=place.aws(
            f"kms create-grant --key-id {key} --grantee-principal "
            f"arn:aws:iam::{place.account.id}:{role} --operations {_KEY_OPERATIONS}"
        ),
    )
