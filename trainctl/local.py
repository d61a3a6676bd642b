"""``trainctl local up | status | down | env``: the whole system on this machine, without AWS."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from trainctl import show
from trainctl.errors import CliError
from trainctl.help import Group
from trainctl.options import AsJson

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="The whole system on this machine: real containers, a local AWS, no account. Needs a "
    "Docker Engine on Linux.",
)


@contextmanager
def _errors() -> Iterator[None]:
    from rehearsal import cycle

    try:
        yield
    except cycle.ERRORS as error:
        raise CliError(str(error)) from None


@app.command()
def up() -> None:
    """Build the images, deploy the stacks, bring up a standing cluster of three containers.

    After a failure or Ctrl-C nothing of it is left.
    """
    from rehearsal import cycle

    with _errors():
        cycle.up()
    show.print_text(
        "Up. Send other commands there:\n"
        '  eval "$(trainctl local env)"\n'
        "  trainctl cluster status\n"
        "  trainctl shell -- ray status\n"
        "Remove everything: trainctl local down"
    )


@app.command()
def status(*, as_json: AsJson = False) -> None:
    """What of it is there."""
    from rehearsal.cycle import Rehearsal

    with _errors():
        found = Rehearsal.here().status()
    if as_json:
        show.print_json(found)
    elif not any(found[what] for what in ("processes", "containers", "networks")):
        show.print_text("Nothing is up. Start it: trainctl local up")
    else:
        show.print_table(["what", "found"], [[name, str(value)] for name, value in found.items()])
        if not found["aws_answers"]:
            show.say("the local AWS does not answer: trainctl local down removes what is left")


@app.command()
def env() -> None:
    """Print the variables that send AWS clients to the local deployment, for eval."""
    from rehearsal.cycle import Rehearsal

    with _errors():
        variables = Rehearsal.here().environment()
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def down(
    *,
    images: Annotated[
        bool, typer.Option("--images", help="Remove the images too; building them takes minutes.")
    ] = False,
) -> None:
    """Remove its processes, containers and network; images stay, for the next time."""
    from rehearsal import cycle

    with _errors(), cycle.uninterrupted():
        was_there = cycle.Rehearsal.here().down(cycle.Steps(1), keep_images=not images)
    show.say("Removed." if was_there else "Nothing was up.")
