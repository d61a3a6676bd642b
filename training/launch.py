"""Start a recipe: ``python -m training.launch RECIPE``.

The same command trains in plain processes on one machine (``--local``), on the Ray cluster whose
head it runs on, and, started by torchrun, without Ray. Giving a run's name again resumes it.
"""

import argparse
import dataclasses
import difflib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from contract import exits, nodes, runs
from contract.errors import InputError
from contract.jobs import worker_range
from contract.runs import check_run_name
from training import storage
from training.data import sources
from training.recipes.config import (
    BUILT_IN_DATA,
    BUILT_IN_PRESET,
    CONFIGS,
    PRESETS,
    RunConfig,
    differences,
)
from training.record.result import Result

_EPILOG: Final = """\
exit codes:
  0    the run is complete
  1    something failed; the message says where the logs are
  2    wrong input, or a loss that is not a number
  130  ended by Ctrl-C, 143 by SIGTERM; the same command resumes the run

examples:
  python -m training.launch ddp --local
  python -m training.launch fsdp --local --workers 2
  python -m training.launch ddp --local --workers 2 --data DIR --run mine
  python -m training.launch ddp --storage s3://BUCKET --workers 8 --data s3://BUCKET/data
  torchrun --standalone --nproc-per-node 2 -m training.launch -- ddp --data DIR
"""


_DATA_HELP: Final = {
    "ddp": "folder, http(s):// or s3:// address of the data (default: built-in digits)",
    "fsdp": "text: a file, a folder, http(s)://, s3:// or a Hugging Face data set, "
    "hf://owner/name, as .txt, .jsonl or .parquet (default: Python's help texts)",
}


class _Parser(argparse.ArgumentParser):
    """argparse, with one line per error, a guess at what was meant, and where the help is."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments: ") and words:
            known = [option for action in self._actions for option in action.option_strings]
            message = f"unknown option {words[0]}{_guess(words[0].split('=')[0], known)}"
        print(f"error: {message}\nsee: python -m {self.prog} --help", file=sys.stderr)
        sys.exit(exits.BAD_INPUT)


def _guess(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {close[0]}?" if close else ""


def parser(recipe: str | None = None) -> argparse.ArgumentParser:
    """The command line, with the options of ``recipe``, or of no recipe in particular."""
    top = _Parser(
        prog=f"training.launch {recipe}" if recipe else "training.launch",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if recipe is None:
        top.add_argument("recipe", metavar="RECIPE", help=f"one of: {', '.join(CONFIGS)}")
    where = top.add_argument_group("where it runs")
    where.add_argument(
        "--local",
        action="store_true",
        help="plain processes on this machine, with a Ray of their own",
    )
    where.add_argument(
        "--workers",
        metavar="N|MIN:MAX",
        help="training processes, or a range: as many as can be had, more when more come "
        "(default: a GPU each, or 1 without GPUs)",
    )
    where.add_argument(
        "--max-failures",
        type=int,
        default=2,
        metavar="N",
        help="times that a lost worker is replaced and the run resumed (default: 2)",
    )
    what = top.add_argument_group("what it reads and writes")
    what.add_argument(
        "--data",
        metavar="SOURCE",
        help=_DATA_HELP.get(recipe or "", "folder, http(s):// or s3:// address of the data"),
    )
    what.add_argument(
        "--storage",
        default=os.environ.get(nodes.ENV_STORAGE) or "runs",
        metavar="PLACE",
        help="folder or s3://BUCKET[/PREFIX] that keeps the runs (default: the cluster's bucket on "
        "a node, else runs)",
    )
    what.add_argument("--run", metavar="NAME", help="name of the run (default: recipe and time)")
    what.add_argument(
        "--overwrite", action="store_true", help="delete an earlier run of that name first"
    )
    what.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    what.add_argument("--verbose", action="store_true", help="show Ray's own log lines too")
    if recipe is not None:
        _add_settings(top, recipe)
    return top


def _add_settings(top: argparse.ArgumentParser, recipe: str) -> None:
    group = top.add_argument_group("settings (defaults are those of the preset)")
    presets = PRESETS[recipe]
    group.add_argument("--preset", help=f"starting point: {', '.join(presets)}")
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
    for field in dataclasses.fields(CONFIGS[recipe]):
        limits = field.metadata
        if not limits["cli"]:
            continue
        option = "--" + field.name.replace("_", "-")
        text = limits["help"].replace("%", "%%")
        if "(default:" not in text:
            text += f" (default: {field.default})"
        if field.type == "bool":
            group.add_argument(
                option,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            choices = limits["choices"]
            group.add_argument(
                option,
                type=kinds[str(field.type)],
                default=argparse.SUPPRESS,
                metavar="|".join(choices) if choices else str(field.type).upper(),
                help=text,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    # Before torch is loaded: its profiler announces itself on stderr with every use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        parser().print_help()
        return exits.OK if given else exits.BAD_INPUT
    recipe = given[0]
    if recipe not in CONFIGS:
        kind = "option before the recipe" if recipe.startswith("-") else "recipe"
        hint = _guess(recipe, list(CONFIGS)) or f": choose {', '.join(CONFIGS)}"
        print(f"error: unknown {kind} {recipe!r}{hint}", file=sys.stderr)
        return exits.BAD_INPUT
    options = parser(recipe).parse_args(given[1:])
    try:
        config = build_config(recipe, vars(options))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from training.runtime.torchrun import run_torchrun

            return run_torchrun(config, as_json=options.json)
        from training.runtime.driver import Driver

        return Driver(config, options).run()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.BAD_INPUT


def build_config(recipe: str, options: dict[str, Any]) -> RunConfig:
    """Combine preset, recorded settings of a run to resume, and the options given.

    Raises:
        InputError: A value is wrong, storage cannot be used, or the run to resume was started
            with other settings.
    """
    presets = PRESETS[recipe]
    data = options["data"]
    # What suits 60,000 photographs does not suit the digits that train without --data.
    fitting = BUILT_IN_PRESET[recipe] if data is None else next(iter(presets))
    preset = options["preset"] or fitting
    if preset not in presets:
        raise InputError(
            f"unknown preset {preset!r}{_guess(preset, list(presets))}; {recipe} has "
            f"{', '.join(presets)}"
        )
    names = {field.name for field in dataclasses.fields(CONFIGS[recipe])}
    own = {name: value for name, value in options.items() if name in names and value is not None}
    # torchrun's processes must agree on the name, and each reads its own clock.
    stamp = os.environ.get("TORCHELASTIC_RUN_ID") or time.strftime("%Y%m%d-%H%M%S")
    root = storage.runs_root(options["storage"])
    run = check_run_name(f"{recipe}-{stamp}" if options["run"] is None else options["run"])
    num_workers, least = _num_workers(options)
    values = {
        **presets[preset],
        **own,
        "recipe": recipe,
        "run": run,
        "storage": root,
        "data": _absolute(data) if data is not None else BUILT_IN_DATA[recipe],
        "num_workers": num_workers,
        "preset": preset,
    }
    config = CONFIGS[recipe](**values)
    for fewer in range(least, num_workers):
        dataclasses.replace(config, num_workers=fewer)  # raises where it could not go on with them
    if options["max_failures"] < 0:
        raise InputError(f"--max-failures is {options['max_failures']}: it must be at least 0")
    # What can be seen at once is said at once; the content is looked at while Ray starts.
    if config.data != BUILT_IN_DATA[recipe] and not sources.is_remote(config.data):
        _look_at_data(config)
    if recipe == "fsdp" and "model" not in {**presets[preset], **own}:
        raise InputError(
            f"preset {preset} trains a model that is there: give --model a Hugging Face id, a "
            "folder or an s3:// address (or --preset tiny, a small one with random weights)"
        )
    storage.check_writable(root)
    return _continued(config, own, overwrite=options["overwrite"])


def _look_at_data(config: RunConfig) -> None:
    if config.recipe == "ddp":
        sources.local_files(config.data, sources.FILES)
    elif "://" not in config.data and not Path(config.data).exists():
        raise InputError(
            f"text {config.data} does not exist: give --data a file, a folder or an address"
        )


def _continued(config: RunConfig, own: dict[str, Any], *, overwrite: bool) -> RunConfig:
    """Take over from an earlier attempt what must not change, and refuse what did."""
    from training.record import reader

    run_uri = storage.join(config.storage, config.run)
    if overwrite and os.environ.get("RANK", "0") == "0":
        storage.remove_folder(run_uri)
    recorded = None if overwrite else reader.read_json(run_uri, runs.CONFIG_FILE)
    if recorded is None:
        return config.begun({})
    if recorded.get("recipe") != config.recipe:
        raise InputError(
            f"run {config.run!r} was trained with recipe {recorded.get('recipe')!r}: choose "
            "another --run, or --overwrite to start it afresh"
        )
    config = config.begun({name: value for name, value in recorded.items() if name not in own})
    if found := differences(recorded, config):
        raise InputError(
            f"run {config.run!r} cannot be resumed with other settings:\n  "
            + "\n  ".join(found)
            + "\ngive the settings it has, or choose another --run, or --overwrite to start it "
            "afresh"
        )
    return config


def _num_workers(options: dict[str, Any]) -> tuple[int, int]:
    """How many workers the run is made for, and with how few it goes on."""
    if "WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    least = workers = None
    if options["workers"] is not None:
        least, workers = worker_range(options["workers"])
        if least < 1:
            raise InputError(f"--workers is {options['workers']}: it must be at least 1")
    if not options["local"]:
        return workers or 1, least or 1
    if least != workers:
        raise InputError(
            f"--workers is {options['workers']}: a range needs a cluster that grows; with --local, "
            "give a number"
        )
    from training import machine

    available, kind = machine.num_devices()
    # Two to a CPU are slow but right, and enough to try how a run goes on elsewhere.
    most = available if kind == "GPUs" else 2 * available
    if workers is not None and workers > most:
        raise InputError(
            f"--workers is {workers}, but this machine has {available} {kind}: use at most {most}"
        )
    number = workers or (available if kind == "GPUs" else 1)
    return number, number


def _absolute(data: str) -> str:
    """Workers run in another folder: make a local folder's path absolute."""
    if "://" in data or data in BUILT_IN_DATA.values():
        return data
    return str(Path(data).expanduser().absolute())


def places(run_uri: str, recipe: str) -> dict[str, str]:
    """Where the result of a complete run is to be found, for ``print_result``."""
    found = {"report": storage.join(run_uri, runs.REPORT_FILE)}
    if recipe == "fsdp":  # sharded; whole only if somebody wants it so
        return {**found, "model": f"python -m training.export {run_uri} --to DIR"}
    return {**found, "model": storage.join(run_uri, runs.MODEL_DIR)}


def print_result(result: Result, places: dict[str, str], *, as_json: bool) -> None:
    """Print a run's figures on stdout, as JSON or as a table."""
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
        return
    from rich.console import Console

    from training.record.display import result_table

    Console(soft_wrap=True).print(result_table(result, places))


if __name__ == "__main__":
    sys.exit(main())
