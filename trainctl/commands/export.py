"""``trainctl export``: a run's checkpoint as a folder that transformers loads.

A job without workers exports it beside the bucket, because a sharded checkpoint may be larger than
a laptop.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from trainctl import output
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import new_id
from trainctl.here import needs_packages
from trainctl.options import Best, RunName, WhereOrHere, Yes
from trainctl.watch import head_job

#: Deadline: a model of some ten billion parameters is written within it.
_MAX_SECONDS: Final = 2 * 3600
Dtype = Literal["auto", "fp32", "bf16", "fp16"]


def export(
    *,
    run: RunName,
    to: Annotated[str, typer.Option(help="New folder here, or s3:// address.", metavar="PLACE")],
    dtype: Annotated[
        Dtype, typer.Option(help="fp32, bf16 or fp16; auto: as the model came.", metavar="TYPE")
    ] = "auto",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the adapters of a LoRA run, for peft.")
    ] = False,
    best: Best = False,
    yes: Yes = False,
    where: WhereOrHere,
) -> None:
    """Export a run's newest checkpoint to a folder that transformers loads."""
    folder = None if to.startswith("s3://") else Path(to)
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--to {to} exists already: give a new folder")
    deployment = where.find(to_start=True)
    bucket = deployment.bucket
    words = ["--dtype", dtype]
    words += [option for option, is_set in (("--adapters", adapters), ("--best", best)) if is_set]
    if deployment.is_here:
        with needs_packages():
            from training.export import main
        raise typer.Exit(main([run, "--to", to, *words, "--storage", bucket.uri]))
    place = to if folder is None else f"{bucket.uri}/exports/{new_id(run)}"
    command = ["python", "-m", "training.export", run, "--to", place, *words]
    head_job.run_command(deployment, run, command, max_seconds=_MAX_SECONDS, yes=yes)
    if folder is not None:
        output.say(f"fetching {place}")
        bucket.fetch(f"{bucket.key(place)}/", folder)
    output.print_text(to)
