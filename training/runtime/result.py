"""Prints what a complete run has achieved, for every way to start one."""

import json
import os
from pathlib import Path

from training.recipes.recipe import Recipe
from training.record.result import Result


def print_result(
    result: Result,
    recipe: Recipe,
    run_uri: str,
    *,
    report: Path | None = None,
    as_json: bool,
) -> None:
    """Print a run's figures on stdout, as JSON or as a table.

    Args:
        result: what the record has as the outcome.
        recipe: of the run.
        run_uri: address of its folder.
        report: where its report is, if that is on this machine.
    """
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
        return
    from rich.console import Console

    from training.record.display import result_table

    places = {name: _near(place) for name, place in recipe.places(run_uri).items()}
    if report is not None:
        places["report"] = os.path.relpath(report)
    Console(soft_wrap=True).print(result_table(result, places, measures=recipe.measures))


def _near(place: str) -> str:
    """A folder below the current one, as a person would type it."""
    return place.removeprefix(f"{Path.cwd()}{os.sep}")
