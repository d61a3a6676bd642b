"""``trainctl tune``: a job that tries settings of a recipe."""

from typing import Annotated

import typer

from trainctl.aws.errors import UsageError
from trainctl.commands.submit import submit
from trainctl.jobs.job_options import JobOptions
from trainctl.options import AsJson, Where, Yes


def tune(
    *,
    options: JobOptions,
    following: Annotated[
        bool, typer.Option("--follow", help="Show its log; Ctrl-C leaves it running.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Try settings of a recipe: a run each, on one node each, as many at a time as --nodes.

    The words are those of submit, with --vary; a job file may be given by its name only. The same
    --run again takes the results that are there. show and ui have the table.

    Examples: trainctl tune lr.toml;
    trainctl tune ddp --nodes 2 --vary lr=0.0005,0.001,0.002 --epochs 10
    """
    if not options.vary:
        raise UsageError("give the values to try: --vary NAME=V1,V2, or vary in a job file")
    submit(options=options, following=following, yes=yes, as_json=as_json, where=where)
