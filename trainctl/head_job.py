"""A job of a head by itself that works on a run's sharded checkpoints: an export, a continuation.

No code is uploaded and no worker starts. Its log goes to stderr, because what the job makes is the
data of the command.
"""

from collections.abc import Sequence

from contract.errors import InputError
from contract.runs import CONFIG_FILE, check_run_name
from trainctl import follow, job_plan, output, run_list
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.files import json_object
from trainctl.job_log import Printer
from training import recipes


def run_command(
    deployment: Deployment, run: str, command: Sequence[str], *, max_seconds: int, yes: bool
) -> str:
    """Ask, run a command on a head, and show its log until it ends; return the job's id.

    Args:
        run: name of a run with sharded checkpoints.
        max_seconds: deadline of the job.
        yes: start without asking.

    Raises:
        UsageError: there is no such run.
        InputError: it has no sharded checkpoint that is complete.
        CliError: the job did not succeed.
    """
    check_run_name(run)
    bucket = deployment.bucket
    recorded = json_object(bucket.read_of_run(run, CONFIG_FILE))
    if not recorded:
        raise UsageError(f"there is no run {run!r} in {bucket.uri}: trainctl runs")
    recipes.by_name(str(recorded.get("recipe"))).check_sharded(run, run_uri=bucket.run(run).uri)
    if not any(each.is_complete for each in run_list.checkpoints(bucket, run) or []):
        raise InputError(
            f"run {run!r} has no complete checkpoint yet: trainctl checkpoints {run} shows when it "
            "has one"
        )

    plan = job_plan.head_only(deployment, run=run, command=command, max_seconds=max_seconds)
    job_plan.check(deployment, plan)
    output.say(plan.text())
    output.confirm("Start it?", yes=yes, default=not plan.is_expensive)
    job = job_plan.start(deployment, plan)
    if code := follow.follow(deployment, job, printer=Printer(on_stderr=True)):
        raise CliError(f"{job} did not succeed; the reason is in its log above", exit_code=code)
    return job
