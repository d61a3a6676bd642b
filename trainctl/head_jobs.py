"""Jobs that train nothing: a command on a head by itself, for one run's files.

``export`` and ``generate`` run beside the bucket, because a sharded checkpoint may be larger than
a laptop.
"""

from typing import Annotated

import typer

from contract.runs import CONFIG_FILE, check_run_name
from trainctl import completion, follow, job_plan, output
from trainctl.aws.deployment import Deployment
from trainctl.errors import CliError, UsageError
from training import recipes

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help=f"Name of a run with sharded checkpoints ({recipes.SHARDED}).",
        autocompletion=completion.runs,
    ),
]


def run_on_head(deployment: Deployment, run: str, command: list[str], *, yes: bool) -> None:
    """Run a command for an existing run with sharded checkpoints, and show its log.

    Raises:
        UsageError: there is no such run.
        InputError: its model needs no such command, or it has none.
        CliError: the job did not succeed.
    """
    check_run_name(run)
    bucket = deployment.bucket
    paths = bucket.run(run)
    recorded = output.json_object(bucket.read(bucket.key(paths.file(CONFIG_FILE))))
    if not recorded:
        raise UsageError(f"there is no run {run!r} in {bucket.uri}: trainctl runs")
    recipes.by_name(str(recorded.get("recipe"))).check_sharded(run, run_uri=paths.uri)
    plan = job_plan.head_only(deployment, run=run, command=command)
    job_plan.check(deployment, plan)
    output.say(plan.text())
    output.confirm("Start it?", yes=yes, default=not plan.is_expensive)
    job = job_plan.start(deployment, plan)
    if code := follow.follow(deployment, job):
        raise CliError(f"{job} did not succeed; its log above tells why", exit_code=code)
