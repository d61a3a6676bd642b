"""``trainctl stop``: end a job early."""

from trainctl import output
from trainctl.options import JobName, Wait, Where, Yes
from trainctl.watch import follow


def stop(
    *,
    name: JobName,
    wait: Wait = True,
    yes: Yes = False,
    where: Where,
) -> None:
    """Stop a job. Its training saves a checkpoint first; the run can be resumed.

    Works while the stacks are being changed, and after a deploy has failed, too.
    """
    deployment = where.find()
    jobs = deployment.jobs
    job = jobs.find(name)
    left = jobs.alive(job) if job.is_over else []
    if job.is_over and not left:
        output.say(f"{job.id} has ended already: {job.reason}")
        return
    what = f"{job.id}, with nodes left: {len(left)}" if left else job.id
    output.confirm(f"Stop {what}?", yes=yes)
    if not follow.stop(deployment, job):
        output.say(
            f"{job.id} is called off: it ends when it next asks whether it is its turn. Its state: "
            f"trainctl show {job.id}"
        )
        return
    if not wait:
        output.say(f"Stopping. Its state: trainctl show {job.id}")
        return
    with output.ProgressLine() as progress:
        now = follow.wait_until_gone(deployment, job.id, hear=progress.update)
    output.say(follow.ending(deployment, now))
    output.say(f"Resume it: give the same trainctl submit again, with --run {job.run}")
