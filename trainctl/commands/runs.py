"""``trainctl runs``: the runs in the bucket."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from contract.runs import run_prefix
from contract.text import age, byte_size
from trainctl import output
from trainctl.jobs import job_plan
from trainctl.options import AsJson, RunName, Where, Yes
from trainctl.runs import removal, run_list
from trainctl.watch import overview


def ls(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many, newest first.", metavar="N")
    ] = 20,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """List the runs in the bucket, those of other people and of old jobs too."""
    deployment = where.find()
    being_trained = deployment.jobs.newest(limit=job_plan.RUNNING_LOOKED_AT, running=True)
    rows = overview.rows_of(deployment, being_trained)
    unfinished = {row.job.run: (row.job.recipe, row.state) for row in rows}
    found = run_list.newest(deployment.bucket, limit=limit, unfinished=unfinished)
    if as_json:
        output.print_json([{**asdict(run), "updated": run.updated.isoformat()} for run in found])
    elif not found:
        hint = output.addressed("Start one: trainctl submit ddp")
        output.print_text(f"No runs in {deployment.bucket.uri}. {hint}")
    else:
        cells = [
            [
                run.name,
                run.recipe or "own code",
                run.state,
                "" if run.step is None else f"{run.step:,}",
                run.measure,
                age((datetime.now(tz=UTC) - run.updated).total_seconds()),
                byte_size(run.size),
            ]
            for run in found
        ]
        columns = ["run", "recipe", "state", "step", "measure", "changed", "size"]
        output.print_table(columns, cells, optional=["recipe", "size", "step", "measure"])


def rm(
    *,
    run: RunName,
    yes: Yes = False,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Remove a run from the bucket: record, checkpoints, model, files of its program.

    Refused while a job of it is queued or running.
    """
    removal.remove(
        where.find(),
        f"run {run!r}",
        run_prefix(run),
        yes=yes,
        as_json=as_json,
    )
