"""``trainctl compare``: results, settings and curves of runs side by side."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from contract.runs import CONFIG_FILE, METRICS_FILE, RESULT_FILE, check_run_name
from trainctl import completion, output
from trainctl.aws.errors import UsageError, place_of_make
from trainctl.aws.files import Bucket, json_object
from trainctl.options import AsJson, Where
from training import recipes
from training.record.result import Result

#: As many as there are colors that anyone can tell apart.
_MOST: Final = 5
#: Settings that say where a run is, and not how it was trained.
_PLACES: Final = ("run", "storage")


def compare(
    *,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Names of runs, or folders of runs here: runs/mine.",
            autocompletion=completion.runs,
        ),
    ],
    to: Annotated[
        str, typer.Option("--output", "-o", help="File of the page.", metavar="FILE")
    ] = "comparison.html",
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Compare runs of recipes: results, cost, the settings that differ, and their curves.

    Prints a table, and writes a page with the curves too, which needs nothing else.
    """
    if not 2 <= len(set(runs)) == len(runs) <= _MOST:
        raise UsageError(f"give the names of two to {_MOST} runs, each once")
    with TemporaryDirectory() as scratch:
        folders = {run: Path(run) for run in runs if "/" in run}
        if len(folders) < len(runs):
            bucket = where.find().bucket
            folders = {
                run: folders.get(run) or _fetched(bucket, run, Path(scratch)) for run in runs
            }
        configs = {run: _read(folder, CONFIG_FILE) for run, folder in folders.items()}
        results = {run: _read(folder, RESULT_FILE) for run, folder in folders.items()}
        if none := [run for run, config in configs.items() if not config]:
            raise UsageError(f"{none[0]} is not the run of a recipe: it has no {CONFIG_FILE}")
        settings = [row for row in _rows(configs) if len({*row[1:]}) > 1 and row[0] not in _PLACES]
        if as_json:
            differing = [row[0] for row in settings]
            output.print_json({"differing": differing, "settings": configs, "results": results})
            return
        figures = _rows({run: _figures(result) for run, result in results.items()})
        output.print_table(["", *runs], [*figures, *settings])
        try:
            from training.record.comparison import write_comparison

            write_comparison(Path(to), folders, figures=figures, settings=settings)
        except ImportError as error:
            said = f"no page with curves: it needs {error.name}, which make venv installs"
            output.say(f"{said}{place_of_make(said)}")
            return
        except OSError as error:
            raise UsageError(f"cannot write {to}: {error}. Give another --output") from None
    output.say(f"with curves: {to}")


def _fetched(bucket: Bucket, run: str, scratch: Path) -> Path:
    """A folder with what is compared of a run in the bucket."""
    folder = scratch / check_run_name(run)
    folder.mkdir()
    for name in (CONFIG_FILE, METRICS_FILE, RESULT_FILE):
        (folder / name).write_bytes(bucket.read_of_run(run, name) or b"")
    return folder


def _read(folder: Path, name: str) -> dict[str, object]:
    file = folder / name
    return json_object(file.read_bytes() if file.is_file() else None)


def _rows(values: Mapping[str, Mapping[str, object]]) -> list[list[str]]:
    """A row for each name: the name, and the value of each run."""
    names = {name: "" for each in values.values() for name in each}
    return [[name, *(str(each.get(name, "-")) for each in values.values())] for name in names]


def _figures(values: Mapping[str, object]) -> dict[str, str]:
    """The figures of a result, in words."""
    from training.record import display

    try:
        result = Result.from_json(values)
    except ValueError:
        return {"state": "not ended"}
    measures = (each for recipe in recipes.ALL for each in recipe.measures)
    return {"state": result.status, **display.figures(result, measures=[*measures])}
