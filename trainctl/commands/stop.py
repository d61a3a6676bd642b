"""``trainctl stop``: end a job before its time."""

import time
from typing import Annotated

import typer

from contract.times import JOB_STOP_S
from trainctl import follow, output
from trainctl.aws.deployment import Deployment
from trainctl.errors import CliError
from trainctl.options import JobName, Profile, Region, Yes


def stop(
    *,
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is gone.")] = True,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Stop a job. Its training saves a checkpoint first; the run can be resumed."""
    deployment = Deployment.find(profile=profile, region=region)
    jobs = deployment.jobs
    job = jobs.find(name)
    if job.is_over:
        output.say(f"{job.id} has ended already: {job.reason}")
        return
    output.confirm(f"Stop {job.id}?", yes=yes)
    jobs.stop(job)
    if not wait:
        output.say(f"Stopping. Its state: trainctl show {job.id}")
        return
    deadline = time.monotonic() + JOB_STOP_S
    with output.Progress() as progress:
        while True:
            now = jobs.find(job.id)
            left = jobs.alive(now)
            if now.is_over and not left:
                break
            if time.monotonic() > deadline:
                raise CliError(
                    f"{job.id} still has {len(left)} tasks; the sweep stops orphaned tasks every "
                    f"five minutes. Their state: trainctl show {job.id}"
                )
            progress.update(f"waiting for {len(left)} nodes to save and end")
            time.sleep(follow.POLL_S)
    output.say(follow.ending(deployment, now))
    output.say(f"Resume it: give the same trainctl submit again, with --run {job.run}")
