"""``trainctl local down``: remove everything."""

from typing import Annotated

import typer

from trainctl import output
from trainctl.commands.local import loading


def down(
    *,
    images: Annotated[
        bool, typer.Option("--images", help="Remove the images too; building them takes minutes.")
    ] = False,
) -> None:
    """Remove its processes, containers and network; images stay, for the next time."""
    cycle = loading.load_cycle()
    with loading.errors(), cycle.uninterrupted():
        was_there = cycle.Rehearsal.here().down(cycle.Steps(1), keep_images=not images)
    output.say("Removed." if was_there else "Nothing was up.")
