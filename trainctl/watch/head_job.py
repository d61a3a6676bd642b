"""A job of a head by itself that works on a run's sharded checkpoints: an export, a continuation.

No code is uploaded and no worker starts. Its log goes to stderr, because what the job makes is the
data of the command.
"""

from collections.abc import Sequence

from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import Range
from contract.runs import CONFIG_FILE
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.errors import CliError
from trainctl.jobs import job_plan
from trainctl.runs import run_list
from trainctl.watch import follow
from trainctl.watch.job_log import JobLog
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
    bucket = deployment.bucket
    found = run_list.checkpoints(bucket, run)
    recipe = json_object(bucket.read_of_run(run, CONFIG_FILE)).get("recipe")
    if recipe:
        recipes.by_name(str(recipe)).check_sharded(run, run_uri=bucket.run(run).uri)
    if not any(each.is_complete for each in found):
        raise InputError(
            f"run {run!r} has no complete checkpoint of a recipe yet: trainctl checkpoints {run}"
        )

    shape = deployment.shape
    spec = JobSpec(
        run=run,
        command=tuple(command),
        nodes=Range(0, 0),
        max_seconds=min(max_seconds, shape.max_job_hours * 3600),
        prices=shape.prices(deployment.region),
        submitter=deployment.user,
        user_id=deployment.user_id,
    )
    plan = job_plan.JobPlan(spec=spec, shape=shape, workers=None)
    job_plan.check(deployment, plan)
    job_plan.ask(plan, yes=yes)
    job = job_plan.start(deployment, plan)
    if code := follow.follow(deployment, job, log=JobLog(deployment.logs, on_stderr=True)):
        raise CliError(f"{job} did not succeed; the reason is in its log above", exit_code=code)
    return job
