"""``trainctl doctor``: what must be right before a job can run, and how to fix what is not."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import typer

from contract import exits, nodes
from contract import outputs as stack_outputs
from contract.instance_types import InstanceType
from trainctl import output
from trainctl.aws.cluster import NODES
from trainctl.aws.deployment import Deployment
from trainctl.aws.shape import Shape
from trainctl.errors import CliError, explained
from trainctl.options import AsJson, Profile, Region
from trainctl.plugin import PLUGIN

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
    fix: str = ""
    """A command, or what else to do."""


def doctor(*, as_json: AsJson = False, profile: Profile = None, region: Region = None) -> None:
    """Check what a job needs (credentials, stacks, images, quotas, roles) and how to fix it.

    Exits with 1 if a check fails.
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
        output.print_json([asdict(check) for check in checks])
    else:
        rows = [[check.state, check.what, check.found] for check in checks]
        output.print_table(["state", "what", "found"], rows, prose=["found"])
        for check in checks:
            if check.state != "ok" and check.fix:
                output.print_text(f"\n{check.what}: {check.found}\n  {check.fix}")
    bad = sum(check.state == "bad" for check in checks)
    failed = f"{bad} check{'' if bad == 1 else 's'} failed."
    output.say(failed if bad else "All checks passed.")
    raise typer.Exit(exits.FAILED if bad else exits.OK)


def _checks(deployment: Deployment) -> Iterator[Check]:
    from botocore.exceptions import BotoCoreError, ClientError

    shape = deployment.shape
    yield Check(
        what="credentials",
        state="ok",
        found=f"account {deployment.account_id}, {deployment.region}",
    )
    yield Check(
        what="stacks",
        state="ok",
        found=f"preset {shape.preset}, head {shape.head.name}, up to {shape.max_workers} x "
        f"{shape.worker.name}",
    )
    yield _plugin()
    for what, look in _looks(deployment).items():
        try:
            yield look(what=what)
        except (ClientError, BotoCoreError) as error:
            yield Check(what=what, state="unknown", found=str(explained(error) or error))


def _looks(deployment: Deployment) -> dict[str, Callable[..., Check]]:
    """What AWS is asked, by the name of the check."""
    shape = deployment.shape
    looks: dict[str, Callable[..., Check]] = {}
    for node in (nodes.WORKER,) if shape.head_trains else NODES:
        looks[f"image of the {node}"] = partial(_image, deployment, node)
    machines = {machine.name: machine for machine in (shape.head, shape.worker)}
    for name, machine in machines.items():
        looks[f"{name} offered"] = partial(_offered, deployment, machine)
    kinds = {"GPU" if machine.num_gpus else "CPU" for machine in machines.values()}
    for kind in sorted(kinds, reverse=True):
        looks[f"image of {kind} hosts"] = partial(_host_image, deployment, HOST_IMAGES[kind])
    for (family, spot), vcpus in needed_vcpus(shape).items():
        title = family.upper() if len(family) == 1 else family
        what = f"quota {title}, {'spot' if spot else 'on demand'}"
        looks[what] = partial(_quota, deployment, QUOTAS[family][spot], vcpus)
    for role, service in {**ROLES, **(SPOT_ROLE if shape.spot else {})}.items():
        looks[f"role {role}"] = partial(_role, deployment, role, service)
    return looks


def _plugin() -> Check:
    found = shutil.which(PLUGIN)
    return Check(
        what="plug-in",
        state="ok" if found else "unknown",
        found=found or f"{PLUGIN} is not installed; trainctl shell and open need it",
        fix="" if found else "see 'Install the Session Manager plugin' in AWS's documentation",
    )


def _image(deployment: Deployment, node: str, *, what: str) -> Check:
    outputs = {
        nodes.HEAD: stack_outputs.HEAD_REPOSITORY,
        nodes.WORKER: stack_outputs.WORKER_REPOSITORY,
    }
    address = deployment.output(outputs[node])
    name, tag = address.partition("/")[2], deployment.shape.image_tag
    if deployment.account.has_image(name, tag):
        return Check(what=what, state="ok", found=f"{name}:{tag}")
    return Check(
        what=what,
        state="bad",
        found=f"{name} has no image with the tag {tag!r}",
        fix="make images, with the sources that are deployed; or deploy an existing tag "
        "(-c image_tag=...)",
    )


def _offered(deployment: Deployment, machine: InstanceType, *, what: str) -> Check:
    zone = deployment.account.zone(deployment.output(stack_outputs.SUBNET))
    if deployment.account.offers(machine.name, zone):
        return Check(what=what, state="ok", found=f"in {zone}")
    return Check(
        what=what,
        state="bad",
        found=f"not in {zone}, where the training subnet is",
        fix="aws ec2 describe-instance-type-offerings --location-type availability-zone --filters "
        f"Name=instance-type,Values={machine.name}; then deploy into such a zone "
        "(-c availability_zone=...), which replaces the network",
    )


def _host_image(deployment: Deployment, parameter: str, *, what: str) -> Check:
    found = deployment.account.parameter(parameter)
    if found is not None:
        return Check(what=what, state="ok", found=found)
    return Check(
        what=what,
        state="bad",
        found=f"{parameter} is not published in {deployment.region}",
        fix="deploy into another region (--region, or -c region=...)",
    )


def family_of(machine: InstanceType) -> str:
    """Which quota an instance type counts against."""
    letter = machine.name[0]
    return letter if letter in ("g", "p") else "standard"


def needed_vcpus(shape: Shape) -> dict[tuple[str, bool], int]:
    """vCPUs that a job with all worker nodes takes, by (family, whether spot)."""
    needed: dict[tuple[str, bool], int] = {}
    for machine, count, spot in (
        (shape.head, 1, False),
        (shape.worker, shape.max_workers, shape.spot),
    ):
        if machine.purchase != "capacity-block":  # reserved already
            key = family_of(machine), spot
            needed[key] = needed.get(key, 0) + count * machine.vcpus
    return needed


def _quota(deployment: Deployment, code: str, vcpus: int, *, what: str) -> Check:
    value = deployment.account.ec2_quota(code)
    found = f"{value:.0f} vCPUs, a job with all worker nodes takes {vcpus}"
    if value >= vcpus:
        return Check(what=what, state="ok", found=found)
    return Check(
        what=what,
        state="bad",
        found=found,
        fix="aws service-quotas request-service-quota-increase --service-code ec2 "
        f"--quota-code {code} --desired-value {vcpus}",
    )


def _role(deployment: Deployment, role: str, service: str, *, what: str) -> Check:
    if deployment.account.has_role(role):
        return Check(what=what, state="ok", found="exists")
    return Check(
        what=what,
        state="bad",
        found="missing; the first use in an account may fail without it",
        fix=f"aws iam create-service-linked-role --aws-service-name {service}",
    )
