"""``trainctl submit``: a job that brings its own cluster."""

from typing import Annotated

import typer

from trainctl import output
from trainctl.jobs import job_plan
from trainctl.jobs.job_options import JobOptions
from trainctl.jobs.job_request import JobRequest
from trainctl.options import AsJson, Where, Yes
from trainctl.watch import follow


def submit(
    *,
    options: JobOptions,
    following: Annotated[
        bool, typer.Option("--follow", help="Show its log; Ctrl-C leaves it running.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Start a job: a head and its workers, which end with it.

    Prints the maximum cost before starting; above $100, or where it is not known, Enter means no.
    The job keeps running after this command exits. With --follow the exit code is the job's.

    Examples: trainctl submit ddp --nodes 2 --epochs 10 --data fashion-mnist;
    trainctl submit --code . --nodes 1:4 -- python my_script.py --lr 0.1;
    trainctl submit -f job.toml --epochs 20
    """
    request = JobRequest.of(options)
    deployment = where.find(to_start=True)
    plan = job_plan.plan_of(deployment, request)
    job_plan.ask(plan, yes=yes)
    with output.ProgressLine() as progress:
        progress.update("starting the job")
        job = job_plan.start(deployment, plan)
    if as_json:
        place = plan.place and plan.place.to_json()
        output.print_json({"job": job, "run": plan.spec.run, "queue": place})
    else:
        output.print_text(job)
    if following:
        raise typer.Exit(follow.follow(deployment, job))
    output.say(
        f"Started.\n  its log        trainctl logs {job} --follow\n"
        f"  until it ends  trainctl wait {job}\n  stop it        trainctl stop {job}"
    )
