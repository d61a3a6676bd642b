"""Shell completion: names that are known here, and jobs and runs of the deployment.

Typer offers those that begin with what is typed.

A completion must be quick and silent: AWS has two seconds, and a failure completes nothing.
"""

import contextlib
import threading
from typing import Final

import typer

from contract import runs as run_files
from training import command, recipes
from training.data import catalog

AWS_S: Final = 2.0
_JOBS_MOST: Final = 100


def recipe() -> list[str]:
    return [*recipes.NAMES]


def words(ctx: typer.Context, incomplete: str) -> list[str]:
    """A recipe; after it, its settings, presets and data sets."""
    # Some shells take --data=x for three words.
    given = [word for word in ctx.params.get("words") or [] if word != "="]
    if ctx.params.get("code") is not None:
        return []
    if not given:
        return recipe()
    found = next((each for each in recipes.ALL if each.name == given[0]), None)
    if found is None:
        return []
    if incomplete.startswith("-"):
        left_out = {*command.NOT_FOR_JOBS, "-h", "--help", *given}
        actions = command.parser(found)._actions
        options = [option for action in actions for option in action.option_strings]
        return [option for option in options if option not in left_out]
    if given[-1] == "--data":
        return [each.name for each in catalog.ALL]
    return [*found.presets] if given[-1] == "--preset" else []


def jobs(ctx: typer.Context) -> list[str]:
    """IDs of jobs, and the runs whose newest job they could mean."""
    job_ids, run_names = _of_the_deployment(ctx)
    return [*job_ids, *run_names]


def runs(ctx: typer.Context) -> list[str]:
    """Names of the runs in the bucket."""
    return _of_the_deployment(ctx)[1]


def _of_the_deployment(ctx: typer.Context) -> tuple[list[str], list[str]]:
    """Jobs and runs, as far as AWS answers in time."""
    job_ids: list[str] = []
    run_names: list[str] = []

    def ask() -> None:
        from trainctl.aws.deployment import Deployment

        with contextlib.suppress(Exception):
            deployment = Deployment.find(
                profile=ctx.params.get("profile"),
                region=ctx.params.get("region"),
                name=ctx.params.get("deployment"),
            )
            job_ids.extend(deployment.jobs.newest_ids(limit=_JOBS_MOST))
            run_names.extend(deployment.bucket.listed(f"{run_files.RUNS_PREFIX}/")[1])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(AWS_S)
    return job_ids, run_names
