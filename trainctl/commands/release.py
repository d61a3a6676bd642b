"""``trainctl release``: end the hosts that ``--keep`` has kept."""

from contract import times
from contract.text import counted, duration
from trainctl import output
from trainctl.options import Where, Yes


def release(*, yes: Yes = False, where: Where) -> None:
    """Release the hosts that are kept for your next job, after submit --keep."""
    deployment = where.find()
    kept = deployment.jobs.kept_for(deployment.user_id)
    if not kept:
        output.say("No hosts are kept for you")
        return
    hosts = counted(len(kept), "host")
    output.confirm(f"Release {hosts}?", yes=yes, default=True)
    for task in kept:
        deployment.jobs.release(task)
    within = duration(times.TAKEN_HOST_S + times.SWEEP_EVERY_S)
    output.say(f"{hosts} released; the keeper terminates what no job takes within {within}")
