"""``trainctl ls``: the jobs that were submitted."""

from typing import Annotated

import typer

from trainctl import output
from trainctl.options import AsJson, WhereOrHere
from trainctl.watch import overview


def ls(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="How many, newest first.", metavar="N")
    ] = 20,
    running: Annotated[bool, typer.Option("--running", help="Only running ones.")] = False,
    as_json: AsJson = False,
    where: WhereOrHere,
) -> None:
    """List jobs: state, nodes, share of the steps, age, cost at list prices and who submitted them.

    The job's id begins with the name of its run. A narrow terminal shows fewer columns.
    """
    deployment = where.find()
    jobs = deployment.jobs.newest(limit=limit, running=running)
    rows = overview.rows_of(deployment, jobs)
    if as_json:
        output.print_json([row.values() for row in rows])
    elif not rows:
        none = "No runs. Start one: trainctl run ddp"
        if not deployment.is_here:
            none = "No jobs. Start one: trainctl submit ddp"
        output.print_text(output.addressed(none))
    else:
        cells = [row.cells for row in rows]
        output.print_table(overview.COLUMNS, cells, optional=overview.OPTIONAL)
