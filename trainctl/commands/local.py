"""``trainctl local``: the whole system on this machine, without AWS."""

import shlex
from types import ModuleType
from typing import Annotated

import typer

from trainctl import output
from trainctl.aws.errors import CliError
from trainctl.options import AsJson


def up() -> None:
    """Build the images and deploy the stacks.

    After a failure or Ctrl-C what is up stays, and the same command continues. make local installs
    what this needs and runs it.
    """
    cycle = _rehearsal()
    cycle.up()
    output.print_text(
        "Up. Send other commands there:\n"
        '  eval "$(trainctl local env)"\n'
        "  trainctl submit ddp --nodes 2 --preset digits --follow\n"
        "Remove everything: trainctl local down"
    )


def status(*, as_json: AsJson = False) -> None:
    """Show what of it exists."""
    cycle = _rehearsal()
    found = cycle.Rehearsal.here().status()
    if as_json:
        output.print_json(found)
    elif not any(found[what] for what in ("processes", "containers", "networks")):
        output.print_text("Nothing is up. Start it: trainctl local up")
    else:
        output.print_table(["what", "found"], [[name, str(value)] for name, value in found.items()])
        if not found["aws_answers"]:
            output.say("the local AWS does not answer: trainctl local down removes what is left")


def env() -> None:
    """Print the variables that send AWS clients to the local deployment, for eval."""
    cycle = _rehearsal()
    variables = cycle.Rehearsal.here().environment()
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


def down(
    *,
    images: Annotated[
        bool, typer.Option("--images", help="Remove the images too; building them takes minutes.")
    ] = False,
) -> None:
    """Remove its processes, containers and network; images stay, for the next time."""
    cycle = _rehearsal()
    with cycle.uninterrupted():
        was_there = cycle.Rehearsal.here().down(cycle.Steps(1), keep_images=not images)
    output.say("Removed." if was_there else "Nothing was up.")


def _rehearsal() -> ModuleType:
    """``rehearsal.cycle``. Raises CliError where it is not installed."""
    try:
        from rehearsal import cycle
    except ModuleNotFoundError as error:
        raise CliError(
            f"trainctl local needs the rehearsal, and Python finds no module {error.name!r}: run "
            "make local in a checkout of this project"
        ) from None
    return cycle
