"""``trainctl doctor``: what must be right before a job can run, and what mends it."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import typer

from contract import exits, nodes
from contract import outputs as stack_outputs
from contract.instance_types import InstanceType
from trainctl import show
from trainctl.aws import NODES, Deployment
from trainctl.errors import CliError, explained
from trainctl.options import AsJson, Profile, Region
from trainctl.shell import PLUGIN

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
#: Quotas of EC2 count vCPUs, by family: (on demand, spot).
QUOTAS: Final = {
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "p": ("L-417A185B", "L-7212CCBC"),
    "standard": ("L-1216C47A", "L-34B43A08"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: str
    """``ok``, ``bad``, or ``unknown`` where it could not be looked at."""
    found: str
    mend: str = ""
    """A command, or what else to do."""


def doctor(*, as_json: AsJson = False, profile: Profile = None, region: Region = None) -> None:
    """Check what a job needs: credentials, stacks, images, quotas, roles; say what mends it.

    Exits with 1 where something is wrong.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    checks: list[Check] = []
    try:
        deployment = Deployment.find(profile=profile, region=region)
    except (CliError, BotoCoreError, ClientError) as error:
        known = explained(error)
        assert known is not None
        checks.append(Check(what="deployment", state="bad", found=str(known)))
    else:
        checks += _checks(deployment)
    if as_json:
        show.print_json([asdict(check) for check in checks])
    else:
        show.print_table(
            ["", "what", "found"], [[check.state, check.what, check.found] for check in checks]
        )
        for check in checks:
            if check.state != "ok" and check.mend:
                show.print_text(f"\n{check.what}: {check.found}\n  {check.mend}")
    bad = sum(check.state == "bad" for check in checks)
    show.say("All is well." if not bad else f"{bad} to mend.")
    raise typer.Exit(exits.FAILED if bad else exits.OK)


def _checks(deployment: Deployment) -> Iterator[Check]:
    from botocore.exceptions import BotoCoreError, ClientError

    shape = deployment.shape
    yield Check(
        what="credentials", state="ok", found=f"account {deployment.account}, {deployment.region}"
    )
    yield Check(
        what="stacks",
        state="ok",
        found=f"preset {shape.preset}, head {shape.head.name}, up to {shape.max_workers} x "
        f"{shape.worker.name}",
    )
    yield _plugin()
    machines = {machine.name: machine for machine in (shape.head, shape.worker)}
    images = {
        "GPU": any(machine.num_gpus for machine in machines.values()),
        "CPU": any(not machine.num_gpus for machine in machines.values()),
    }
    roles = {**ROLES, **(SPOT_ROLE if shape.spot else {})}
    looks: dict[str, tuple[Callable[..., Check], tuple[Any, ...]]] = {
        **{
            f"image of the {node}": (_image, (node,))
            for node in ((nodes.WORKER,) if shape.head_trains else NODES)
        },
        **{f"{name} offered": (_offered, (machine,)) for name, machine in machines.items()},
        **{
            f"image of {kind} hosts": (_host_image, (HOST_IMAGES[kind],))
            for kind, wanted in images.items()
            if wanted
        },
        **{
            f"quota {family.upper() if len(family) == 1 else family}, "
            f"{'spot' if spot else 'on demand'}": (_quota, (QUOTAS[family][spot], vcpus))
            for (family, spot), vcpus in needed_vcpus(deployment).items()
        },
        **{f"role {role}": (_role, (role, service)) for role, service in roles.items()},
    }
    for what, (look, arguments) in looks.items():
        try:
            yield look(deployment, what, *arguments)
        except (ClientError, BotoCoreError) as error:
            yield Check(what=what, state="unknown", found=str(explained(error) or error))


def _plugin() -> Check:
    found = shutil.which(PLUGIN)
    return Check(
        what="plug-in",
        state="ok" if found else "unknown",
        found=found or f"{PLUGIN} is not installed; trainctl shell and open need it",
        mend="" if found else "see 'Install the Session Manager plugin' in AWS's documentation",
    )


def _image(deployment: Deployment, what: str, node: str) -> Check:
    from botocore.exceptions import ClientError

    outputs = {
        nodes.HEAD: stack_outputs.HEAD_REPOSITORY,
        nodes.WORKER: stack_outputs.WORKER_REPOSITORY,
    }
    address = deployment.output(outputs[node])
    name, tag = address.partition("/")[2], deployment.shape.image_tag
    try:
        deployment.client("ecr").describe_images(repositoryName=name, imageIds=[{"imageTag": tag}])
    except ClientError as error:
        if error.response["Error"]["Code"] != "ImageNotFoundException":
            raise
        return Check(
            what=what,
            state="bad",
            found=f"{name} has no image with the tag {tag!r}",
            mend=f"python -m containers.publish --{node} {address} (docs/operations.md, Images), "
            "or deploy a tag that is there (-c image_tag=...)",
        )
    return Check(what=what, state="ok", found=f"{name}:{tag}")


def _offered(deployment: Deployment, what: str, machine: InstanceType) -> Check:
    ec2 = deployment.client("ec2")
    subnet = deployment.output(stack_outputs.SUBNET)
    zone = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["AvailabilityZone"]
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone",
        Filters=[
            {"Name": "instance-type", "Values": [machine.name]},
            {"Name": "location", "Values": [zone]},
        ],
    )["InstanceTypeOfferings"]
    if offers:
        return Check(what=what, state="ok", found=f"in {zone}")
    return Check(
        what=what,
        state="bad",
        found=f"not in {zone}, where the training subnet is",
        mend="aws ec2 describe-instance-type-offerings --location-type availability-zone --filters "
        f"Name=instance-type,Values={machine.name}; then deploy into such a zone "
        "(-c availability_zone=...), which replaces the network",
    )


def _host_image(deployment: Deployment, what: str, parameter: str) -> Check:
    from botocore.exceptions import ClientError

    try:
        found = deployment.client("ssm").get_parameter(Name=parameter)["Parameter"]["Value"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "ParameterNotFound":
            raise
        return Check(
            what=what,
            state="bad",
            found=f"{parameter} is not published in {deployment.region}",
            mend="deploy into another region (--region, or -c region=...)",
        )
    return Check(what=what, state="ok", found=str(found))


def family_of(machine: InstanceType) -> str:
    """Which quota an instance type counts against."""
    letter = machine.name[0]
    return letter if letter in ("g", "p") else "standard"


def needed_vcpus(deployment: Deployment) -> dict[tuple[str, bool], int]:
    """vCPUs that a job with all workers takes, by (family, whether spot)."""
    shape = deployment.shape
    needed: dict[tuple[str, bool], int] = {}
    for machine, count, spot in (
        (shape.head, 1, False),
        (shape.worker, shape.max_workers, shape.spot),
    ):
        if machine.purchase != "capacity-block":  # reserved already
            key = family_of(machine), spot
            needed[key] = needed.get(key, 0) + count * machine.vcpus
    return needed


def _quota(deployment: Deployment, what: str, code: str, vcpus: int) -> Check:
    quota: dict[str, Any] = deployment.client("service-quotas").get_service_quota(
        ServiceCode="ec2", QuotaCode=code
    )["Quota"]
    value = float(quota["Value"])
    found = f"{value:.0f} vCPUs, a job with all workers takes {vcpus}"
    if value >= vcpus:
        return Check(what=what, state="ok", found=found)
    return Check(
        what=what,
        state="bad",
        found=found,
        mend="aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {code} --desired-value {vcpus}",
    )


def _role(deployment: Deployment, what: str, role: str, service: str) -> Check:
    from botocore.exceptions import ClientError

    try:
        deployment.client("iam").get_role(RoleName=role)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchEntity":
            raise
        return Check(
            what=what,
            state="bad",
            found="not there; the first use in an account may fail without it",
            mend=f"aws iam create-service-linked-role --aws-service-name {service}",
        )
    return Check(what=what, state="ok", found="there")
