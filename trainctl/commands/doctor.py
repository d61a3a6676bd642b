"""``trainctl doctor``: the checks of a deploy or a job, and the command that fixes each problem."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from textwrap import indent

import typer

from contract import exits
from contract import outputs as stack_outputs
from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from contract.text import counted
from trainctl import output
from trainctl.aws.account import Account
from trainctl.aws.clients import Clients
from trainctl.aws.deployment import Deployment, StacksError, open_session
from trainctl.aws.errors import CliError, explained
from trainctl.options import AsJson, Context, Where
from trainctl.setup import checkout_settings, checks, laptop, updates
from trainctl.setup.checks import Check, Place


def doctor(
    *,
    context: Context = None,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Check what a deploy or a job needs, and print the command that fixes each problem.

    Without stacks: whether they can be deployed with the settings of cdk.json (credentials,
    bootstrap, quotas, zone, roles, Node.js). With stacks: whether a job can run on them (the same,
    images). With -c it checks a deploy in any case.

    Exits with 1 if a check fails.
    """
    settings = checkout_settings.parse_settings(context or [])
    found = [*look(settings, where)]
    if as_json:
        output.print_json([check._asdict() for check in found])
    else:
        rows = [[check.state, check.what, check.found] for check in found]
        output.print_table(["state", "what", "found"], rows, prose=["found"])
        for check in found:
            if check.fix:
                output.print_text(f"\n{check.what}\n{indent(check.fix, '  ')}")
    bad = sum(check.state == "bad" for check in found)
    unknown = sum(check.state == "unknown" for check in found)
    said = [f"{counted(bad, 'check')} failed." if bad else "All checks passed."]
    if unknown:
        said.append(f"{unknown} could not be made.")
    output.say(" ".join(said))
    raise typer.Exit(exits.FAILED if bad else exits.OK)


def look(settings: dict[str, str], where: Where) -> Iterator[Check]:
    """All checks, in the order in which their problems are fixed.

    Args:
        settings: values of ``-c``, by name.
    """
    variables = {"AWS_PROFILE": where.profile, "AWS_REGION": where.region}
    prefix = "".join(f"{name}={value} " for name, value in variables.items() if value)
    try:
        session = open_session(profile=where.profile, region=where.region or settings.get("region"))
        account = Account(Clients(session))
        found = f"account {account.id}, {session.region_name}"
    except Exception as error:  # a finding, like any other
        said = str(explained(error))
        what = "region" if "no region" in said else "credentials"
        yield Check(what, "bad", said)  # which has the command that fixes it
        yield from checks.run({"Node.js": laptop.node})
        return
    yield Check("credentials", "ok", found)

    place = Place(
        account=account,
        region=session.region_name,
        profile=where.profile,
        prefix=prefix,
        context=settings,
    )
    deployment = None
    try:
        deployment = Deployment(session, name=where.deployment or settings.get("deployment"))
        deployment.check_ready()
        shape = deployment.shape
    except Exception as error:  # a finding, like any other
        stacks = error if isinstance(error, StacksError) else None
        state = stacks.state if stacks else "failed"
        # Deployed stacks have their share of the account already.
        missing = stacks.missing if stacks else ()
        helps = isinstance(error, CliError) and state != "changing"  # AWS itself may refuse
        fix = place.deploy() if helps else ""
        yield Check("stacks", "next" if state == "missing" else "bad", str(explained(error)), fix)
        yield from _before(place, missing=missing, network=deployment)
        return

    yield Check("stacks", "ok", _described(shape))
    if settings:
        yield from _before(place, missing=(), network=deployment)
        return

    place = replace(place, context={"preset": shape.preset})
    yield from checks.run(checks.of_a_deployment(place, deployment))
    if deployment.is_local:  # it has no quotas, zones and roles
        return

    def zone() -> str:
        return account.zone(deployment.output(stack_outputs.SUBNET))

    yield from checks.run(checks.of_hosts(place, shape, zone, is_deployed=True))


def _before(
    place: Place,
    *,
    missing: Collection[str],
    network: Deployment | None,
) -> Iterator[Check]:
    """Check what a deploy needs.

    Args:
        missing: the stacks that it would make.
        network: what is there of it already.
    """
    try:
        project = checkout_settings.project()
        plan = checkout_settings.read(project, place.context, region=place.region)
    except InputError as error:
        yield Check("settings", "bad", str(error))
        yield from checks.run({"Node.js": laptop.node})
        return
    shape, region = plan.shape, plan.settings.region
    yield Check("settings", "ok", _described(shape))
    if region not in ("", place.region):
        said = f"cdk.json deploys to {region}, and trainctl looks in {place.region}"
        yield Check("region", "bad", said, f"export AWS_REGION={region}")
        return

    subnet = network.outputs.get(stack_outputs.SUBNET) if network else None
    zone: checks.Zone = partial(str, plan.settings.availability_zone)
    if subnet:
        zone = partial(place.account.zone, subnet)
    update: checks.Checks = {}
    if network and network.is_there and not network.is_local:
        update = {"update": partial(updates.planned, place)}
    yield from checks.run(
        {
            "Node.js": laptop.node,
            **update,
            **checks.of_a_deploy(place, plan, missing=missing),
            **checks.of_hosts(place, shape, zone, is_deployed=bool(subnet)),
        }
    )


def _described(shape: ClusterShape) -> str:
    return (
        f"preset {shape.preset}, head {shape.head.name}, up to {shape.max_workers} x "
        f"{shape.worker.name}"
    )
