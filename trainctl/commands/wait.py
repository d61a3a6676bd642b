"""``trainctl wait``: wait until a job has finished."""

import typer

from contract import exits
from trainctl import output
from trainctl.options import AsJson, JobName, Where
from trainctl.watch import follow


def wait(*, name: JobName, as_json: AsJson = False, where: Where) -> None:
    """Wait for a job to finish and exit with its status.

    0 it succeeded; 74 files lost; 75 no capacity; 124 deadline; 143 stopped by a user; else the
    exit code of its code, or 1.
    """
    deployment = where.find()
    job = deployment.jobs.find(name)
    try:
        job = follow.watch(deployment, job.id)
    except KeyboardInterrupt:
        output.say(f"\nThe job keeps running; wait again: trainctl wait {job.id}")
        raise typer.Exit(exits.INTERRUPTED) from None
    if as_json:
        output.print_json(follow.values(job))
    else:
        output.print_text(follow.ending(deployment, job))
    raise typer.Exit(job.shell_code)
