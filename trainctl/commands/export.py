"""``trainctl export``: a run's checkpoint as a folder that transformers loads."""

from pathlib import Path
from typing import Annotated, Final

import typer

from contract.exports import DEFAULT_DTYPE, DTYPES
from trainctl import head_jobs, job_plan, output
from trainctl.aws.deployment import Deployment
from trainctl.errors import UsageError
from trainctl.options import Profile, Region, Yes

_DTYPES: Final = f"{', '.join([*DTYPES][:-1])} or {[*DTYPES][-1]}"


def export(
    *,
    run: head_jobs.RunName,
    to: Annotated[str, typer.Option(help="New folder here, or s3:// address.", metavar="PLACE")],
    dtype: Annotated[str, typer.Option(help=f"{_DTYPES}.", metavar="TYPE")] = DEFAULT_DTYPE,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the adapters of a LoRA run, for peft.")
    ] = False,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Export a run's newest checkpoint to a folder that transformers loads."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}: it must be {_DTYPES}")
    folder = None if to.startswith("s3://") else Path(to)
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--to {to} exists already: give a new folder")
    deployment = Deployment.find(profile=profile, region=region, to_start=True)
    bucket = deployment.bucket
    place = to if folder is None else f"{bucket.uri}/exports/{job_plan.new_id(run)}"
    command = ["python", "-m", "training.export", run, "--to", place, "--dtype", dtype]
    command += ["--adapters"] if adapters else []
    head_jobs.run_on_head(deployment, run, command, yes=yes)
    if folder is not None:
        output.say(f"fetching {place}")
        bucket.download_folder(f"{bucket.key(place)}/", folder)
    output.print_text(to)
