"""``trainctl export``: a run's checkpoint as a folder that transformers loads.

A job without workers exports it beside the bucket, because a sharded checkpoint may be larger than
a laptop.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from contract.runs import CONFIG_FILE, DEFAULT_EXPORT_DTYPE, EXPORT_DTYPES, check_run_name
from trainctl import completion, follow, job_plan, output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.files import json_object
from trainctl.options import Where, Yes
from training import recipes

_DTYPES: Final = f"{', '.join([*EXPORT_DTYPES][:-1])} or {[*EXPORT_DTYPES][-1]}"


def export(
    *,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help=f"Name of a run with sharded checkpoints ({recipes.SHARDED}).",
            autocompletion=completion.runs,
        ),
    ],
    to: Annotated[str, typer.Option(help="New folder here, or s3:// address.", metavar="PLACE")],
    dtype: Annotated[str, typer.Option(help=f"{_DTYPES}.", metavar="TYPE")] = DEFAULT_EXPORT_DTYPE,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the adapters of a LoRA run, for peft.")
    ] = False,
    yes: Yes = False,
    where: Where,
) -> None:
    """Export a run's newest checkpoint to a folder that transformers loads."""
    if dtype not in EXPORT_DTYPES:
        raise UsageError(f"--dtype is {dtype!r}: it must be {_DTYPES}")
    folder = None if to.startswith("s3://") else Path(to)
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--to {to} exists already: give a new folder")
    deployment = where.find(to_start=True)
    bucket = deployment.bucket
    place = to if folder is None else f"{bucket.uri}/exports/{job_plan.new_id(run)}"
    command = ["python", "-m", "training.export", run, "--to", place, "--dtype", dtype]
    command += ["--adapters"] if adapters else []
    _run_on_head(deployment, run, command, yes=yes)
    if folder is not None:
        output.say(f"fetching {place}")
        bucket.download_folder(f"{bucket.key(place)}/", folder)
    output.print_text(to)


def _run_on_head(deployment: Deployment, run: str, command: list[str], *, yes: bool) -> None:
    """Run a command for an existing run with sharded checkpoints, and show its log.

    Raises:
        UsageError: there is no such run.
        InputError: it has no sharded checkpoints.
        CliError: the job did not succeed.
    """
    check_run_name(run)
    bucket = deployment.bucket
    recorded = json_object(bucket.read_of_run(run, CONFIG_FILE))
    if not recorded:
        raise UsageError(f"there is no run {run!r} in {bucket.uri}: trainctl runs")
    recipes.by_name(str(recorded.get("recipe"))).check_sharded(run, run_uri=bucket.run(run).uri)
    plan = job_plan.head_only(deployment, run=run, command=command)
    job_plan.check(deployment, plan)
    output.say(plan.text())
    output.confirm("Start it?", yes=yes, default=not plan.is_expensive)
    job = job_plan.start(deployment, plan)
    if code := follow.follow(deployment, job):
        raise CliError(f"{job} did not succeed; the reason is in its log above", exit_code=code)
