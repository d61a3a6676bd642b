"""``trainctl run``: a recipe trains on this machine."""

from dataclasses import fields
from typing import Annotated

import typer

from contract.command import is_launcher
from trainctl.aws.errors import UsageError
from trainctl.jobs.job_options import JobOptions
from training import recipes
from training.command import UnknownOptionError, parse


def run(
    *,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [SETTINGS]",
            help=f"One of {', '.join(recipes.NAMES)}, and its settings (trainctl "
            "settings lists them).",
        ),
    ],
) -> None:
    """Train a recipe on this machine, without AWS. The same --run again resumes it.

    Needs torch. Example: trainctl run ddp --workers 2 --run mine --data DIR
    """
    if words[0].startswith("--code") or is_launcher(words[0]) or words[0].endswith(".py"):
        raise UsageError(
            "only recipes are trained by this command: start a program of yours itself, such as "
            "torchrun train.py; for AWS: trainctl submit --code DIR -- COMMAND"
        )
    try:
        parse(words)
    except UnknownOptionError as error:
        if error.option[2:].replace("-", "_") in {each.name for each in fields(JobOptions)}:
            raise UsageError(f"{error.option} is for jobs on AWS: leave it out here") from None
        raise
    from training.launch import main  # a laptop without torch has all other commands

    raise typer.Exit(main([*words, "--local"]))
