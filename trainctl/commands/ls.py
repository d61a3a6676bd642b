"""``trainctl ls``: the jobs that were submitted."""

from typing import Annotated

import typer

from contract.text import utc
from trainctl import follow, output
from trainctl.aws.deployment import Deployment
from trainctl.aws.jobs import Job, Place
from trainctl.options import AsJson, Profile, Region


def _state(deployment: Deployment, job: Job, place: Place | None) -> str:
    """How it ended, how far its run is, or its place in the queue."""
    if place:
        return f"queued: {place.words}"
    progress = follow.progress_of(deployment, job)
    return f"{job.reason}: {progress.short()}" if progress else job.reason


def ls(
    *,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="How many, newest first.", metavar="N")
    ] = 20,
    running: Annotated[bool, typer.Option("--running", help="Only running ones.")] = False,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """List jobs."""
    deployment = Deployment.find(profile=profile, region=region)
    jobs = deployment.jobs.newest(limit=limit, running=running)
    is_there = any(not job.is_over for job in jobs)
    queue = deployment.jobs.queue(deployment.shape.limits) if is_there else {}
    if as_json:
        output.print_json([follow.values(job, queue.get(job.id)) for job in jobs])
    elif not jobs:
        output.print_text("No jobs. Start one: trainctl submit ddp")
    else:
        rows = [
            [
                job.id,
                job.run,
                _state(deployment, job, queue.get(job.id)),
                utc(job.began),
                follow.lasted(job),
            ]
            for job in jobs
        ]
        output.print_table(["job", "run", "state", "submitted", "for"], rows, prose=["state"])
