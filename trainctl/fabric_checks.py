"""What ``trainctl doctor`` looks at where hosts have EFA, or mount a file system together."""

from functools import partial
from typing import Final

from contract import outputs as stack_outputs
from contract.instance_types import PERSISTENT, SCRATCH, FileSystem, InstanceType
from trainctl.aws.deployment import Deployment
from trainctl.aws.shape import Shape
from trainctl.checks import Check, Look, Place, Zone, increase

#: Deployment -> FSx's name of it, and the quota of the storage of all such file systems in GiB.
KINDS: Final = {
    SCRATCH: ("SCRATCH_2", "L-AD2FC696"),
    PERSISTENT: ("PERSISTENT_2", "L-8F1B9C74"),
}
AVAILABLE: Final = "AVAILABLE"
#: It works, and goes back to AVAILABLE by itself.
CHANGING: Final = "UPDATING"
CREATING: Final = "CREATING"


def of_hosts(place: Place, shape: Shape, zone: Zone) -> dict[str, Look]:
    """What hosts of these types need, deployed or only planned."""
    machine = shape.worker
    return {f"EFA of {machine.name}": partial(efa, place, machine, zone)} if shape.efa else {}


def of_a_deploy(
    place: Place, wanted: FileSystem | None, *, there: FileSystem | None
) -> dict[str, Look]:
    """What a deploy needs for its file system.

    Args:
        there: the file system of the stacks that are there already, which would be changed.
    """
    if wanted is None:
        return {}
    is_the_same = there is not None and there.deployment == wanted.deployment
    more = wanted.capacity_gib - (there.capacity_gib if there and is_the_same else 0)
    if more <= 0:
        return {}
    return {"quota FSx": partial(storage_quota, place, wanted.deployment, more)}


def of_a_deployment(place: Place, deployment: Deployment) -> dict[str, Look]:
    """What a job needs of the file system that is there."""
    if deployment.shape.shared is None:
        return {}
    return {
        "shared file system": partial(file_system, place, deployment),
        "link with the bucket": partial(link, place, deployment),
    }


# --- what is looked at ----------------------------------------------------------------------------
def efa(place: Place, machine: InstanceType, zone: Zone, *, what: str) -> Check:
    """Whether the hosts get the interfaces that the launch template asks for."""
    here, offered = zone(), place.account.efa_interfaces(machine.name)
    wanted = machine.efa_interfaces
    if here and here not in place.account.zones_offering(machine.name):
        found = f"{machine.name} is not offered in {here}, with EFA or without"
    elif offered < wanted:
        found = (
            f"{place.region} offers it with {offered or 'no'} EFA interfaces, and the hosts ask "
            f"for {wanted}: deploy with -c efa=off, or with another type"
        )
    else:
        where = f", in {here}" if here else ""
        return Check(what=what, state="ok", found=f"{wanted} of {offered} interfaces{where}")
    return Check(what=what, state="bad", found=found)


def storage_quota(place: Place, deployment: str, more: int, *, what: str) -> Check:
    kind, code = KINDS[deployment]
    used, value = place.account.lustre_gib(kind), place.account.quota("fsx", code)
    is_enough = used + more <= value
    return Check(
        what=what,
        state="ok" if is_enough else "bad",
        found=f"{used} of {value:.0f} GiB of {deployment} storage in use, the deployment takes "
        f"{more} more",
        fix="" if is_enough else increase(place, "fsx", code, used + more),
    )


def file_system(place: Place, deployment: Deployment, *, what: str) -> Check:
    """Whether hosts can mount it, and in their own zone."""
    name = deployment.output(stack_outputs.SHARED)
    found, preset = place.account.file_system(name), deployment.shape.preset
    if found is None:
        return Check(
            what=what,
            state="bad",
            found=f"{name} is not there any more: no host can start. Deploy without it, and then "
            "with it",
            fix=place.make("deploy", {"preset": preset, "shared_storage": "none"}),
        )
    subnet = deployment.output(stack_outputs.SUBNET)
    if subnet not in found.subnets:
        return Check(
            what=what,
            state="bad",
            found=f"{name} is in {', '.join(found.subnets)}, and the hosts are in {subnet}: "
            "traffic between zones is slow and is billed",
            fix=f"{place.make('destroy')} && {place.make('deploy', {'preset': preset})}",
        )
    fix = place.aws(f"fsx describe-file-systems --file-system-ids {name}")
    return _of_state(what, name, found.lifecycle, found.reason, fix=fix)


def link(place: Place, deployment: Deployment, *, what: str) -> Check:
    """Whether the file system and the bucket exchange what is written to either."""
    name = deployment.output(stack_outputs.SHARED)
    found = place.account.link(name)
    if found is None:
        return Check(
            what=what,
            state="bad",
            found=f"{name} is linked with no bucket: nothing is read from it or written to it. "
            "Copy what is needed to the bucket, then destroy and deploy",
        )
    fix = place.aws(
        f"fsx describe-data-repository-associations --filters Name=file-system-id,Values={name}"
    )
    return _of_state(what, found.place, found.lifecycle, found.reason, fix=fix)


def _of_state(what: str, name: str, lifecycle: str, reason: str, *, fix: str) -> Check:
    said = f"{name} is {lifecycle}"
    if lifecycle in (AVAILABLE, CHANGING):
        return Check(what=what, state="ok", found=said)
    if lifecycle == CREATING:
        return Check(what=what, state="next", found=f"{said}: wait until it is {AVAILABLE}")
    return Check(what=what, state="bad", found=f"{said}{': ' if reason else ''}{reason}", fix=fix)
