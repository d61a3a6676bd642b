"""A scaling study on this machine: the same training with more and more local workers.

    python -m training.study ddp --workers 1,2 --steps 60 -- --preset digits

What follows ``--`` are settings of the recipe. Runs are trained one after the other, each by
``python -m training.launch RECIPE --local``; given again with the same --name, the study takes the
runs that are complete and continues the others. As jobs on hosts of their own: ``trainctl study``.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from contract import exits
from contract.errors import InputError
from contract.nodes import Range, numbers_of
from contract.runs import RunPaths, check_run_name
from training import recipes
from training.recipes.command import read_command
from training.record import reader
from training.study import draw
from training.study.series import Point, Series, command_of, text
from training.system import storage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # argparse finds no values for a list of them behind an option.
    place = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:place])
    try:
        return _study(given, words[place + 1 :])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.BAD_INPUT
    except KeyboardInterrupt:
        print("Stopped: the same command with the same --name resumes it", file=sys.stderr)
        return exits.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", choices=recipes.NAMES)
    parser.add_argument("--workers", default="1,2", help="numbers, with commas (default: 1,2)")
    parser.add_argument("--steps", type=int, help="of each run (default: all of its epochs)")
    parser.add_argument("--name", help="of the study; its runs are called NAME-WORKERS")
    parser.add_argument("--storage", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument("--output", help="folder for study.json and study.png (default: NAME)")
    parser.add_argument("--json", action="store_true", help="print one JSON array on stdout")
    return parser


def _study(given: argparse.Namespace, settings: Sequence[str]) -> int:
    words = command_of(given.recipe, settings, steps=given.steps)
    numbers = numbers_of(given.workers, option="--workers")
    name = check_run_name(given.name or f"study-{given.recipe}")
    for number in numbers:  # all of them, before the first one trains
        read_command(words, run=f"{name}-{number}", workers=Range(number, number))
    root = storage.runs_root(given.storage)
    points = []
    for number in numbers:
        run = f"{name}-{number}"
        print(f"{run}: {number} workers", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "training.launch", *words, "--local"]
        command += ["--workers", str(number), "--run", run, "--storage", given.storage]
        # Its result is not this command's: stdout is for the study.
        code = subprocess.run(command, stdout=2, check=False).returncode
        if code:
            print(f"error: run {run} ended with exit code {code}: see above", file=sys.stderr)
            return code if code > 0 else exits.FAILED
        points.append(Point.of(reader.read_metrics(RunPaths.of(root, run).uri), run=run))
    series = Series(recipe=given.recipe, points=tuple(points))
    files = draw.write([series], Path(given.output or name))
    if given.json:
        print(json.dumps([series.to_json()], indent=1))
    else:
        print(text(series))
    for file in files:
        print(file, file=sys.stderr)
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
