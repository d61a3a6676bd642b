"""``trainctl export | generate``: what a run has made, without training.

Both run on a head alone, beside the bucket: a sharded checkpoint may be larger than a laptop.
"""

from pathlib import Path
from typing import Annotated

import typer

from contract import runs
from contract.runs import check_run_name
from trainctl import follow, show, submit
from trainctl.aws import Deployment
from trainctl.errors import CliError, UsageError
from trainctl.options import Profile, Region, Yes

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of an fsdp run.")]


def export(
    *,
    run: RunName,
    to: Annotated[str, typer.Option(help="New folder here, or s3:// address.", metavar="PLACE")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Make a run's newest checkpoint a folder that transformers loads."""
    if dtype not in ("fp32", "bf16", "fp16"):
        raise UsageError(f"--dtype is {dtype!r}: it must be fp32, bf16 or fp16")
    folder = None if to.startswith("s3://") else Path(to)
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--to {to} exists already: give a new folder")
    deployment = Deployment.find(profile=profile, region=region)
    place = to if folder is None else f"s3://{deployment.bucket}/exports/{submit.new_id(run)}"
    command = ["python", "-m", "training.export", run, "--to", place, "--dtype", dtype]
    _run_on_head(deployment, run, command, yes=yes)
    if folder is not None:
        prefix = place.partition(f"s3://{deployment.bucket}/")[2] + "/"
        show.say(f"fetching {place}")
        deployment.download_folder(prefix, folder)
    show.print_text(to)


def generate(
    *,
    run: RunName,
    prompt: Annotated[str, typer.Option(help="Text to be continued.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 60,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Continue a text with a run's model, before and after training."""
    deployment = Deployment.find(profile=profile, region=region)
    command = ["python", "-m", "training.generate", run, "--tokens", str(tokens), "--", prompt]
    _run_on_head(deployment, run, command, yes=yes)


def _run_on_head(deployment: Deployment, run: str, command: list[str], *, yes: bool) -> None:
    check_run_name(run)
    key = f"{runs.RUNS_PREFIX}/{run}/{runs.CONFIG_FILE}"
    recorded = show.parsed(deployment.read(key))
    if not recorded:
        raise UsageError(f"there is no run {run!r} in s3://{deployment.bucket}: trainctl ls")
    if recorded.get("recipe") != "fsdp":
        model = f"s3://{deployment.bucket}/{runs.RUNS_PREFIX}/{run}/{runs.MODEL_DIR}/"
        raise UsageError(
            f"run {run!r} was trained with {recorded.get('recipe')}, whose model is whole already: "
            f"aws s3 cp --recursive {model} DIR"
        )
    plan = submit.head_only(deployment, run=run, command=command)
    show.say(plan.text())
    show.confirm("Start it?", yes=yes)
    job = submit.start(deployment, plan)
    if code := follow.follow(deployment, job):
        raise CliError(f"{job} did not succeed; what it said is above", exit_code=code)
