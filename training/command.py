"""Command line of a recipe, built from its record, and the run that it asks for.

Standard library only. A laptop that submits a job (``read_command``) and the node that trains
(``training.launch``) take the same steps here, so that both refuse the same things in the same
words: ``parse`` the words, ``configure`` the settings for a range of workers, ``resume`` the run
that is recorded under the name. What only a node can know, such as the data, is not looked at.
"""

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

from contract import nodes, runs
from contract.errors import InputError
from contract.job import LOOK
from contract.nodes import Gpus, Range
from contract.text import decimal, integer
from contract.typed_json import loads_if_any
from training.recipe import Recipe
from training.recipes import NAMES, by_name
from training.record import trackers
from training.settings import (
    RunConfig,
    Value,
    check_values,
    differences,
    fields_of,
    is_longer,
    kind_of,
    option_name,
)

EPILOG: Final = """\
exit codes:
  0    the run is complete
  1    something failed; the message names the folder of the logs
  2    wrong input, or a loss that is not a number
  79   the storage does not answer, or a disk is full; the same command resumes the run
  130  ended by Ctrl-C, 143 by SIGTERM; the same command resumes the run

examples:
  python -m training.launch ddp --local
  python -m training.launch ddp --local --workers 2 --data DIR --run mine
  python -m training.launch ddp --storage s3://BUCKET --workers 8 --data s3://BUCKET/data
  torchrun --standalone --nproc-per-node 2 -m training.launch -- ddp --data DIR
"""
#: Options that a job does not take from its user, because the one who starts it decides them.
NOT_FOR_JOBS: Final = ("--local", "--workers", "--run", "--storage", "--json", LOOK)

#: Of a machine that has the command line only.
NEEDS_PACKAGES: Final = (
    "training needs packages that are not installed, {} first of all: run make venv in a checkout "
    "and use its .venv/bin"
)
_HELP: Final = ("-h", "--help")


class OptionError(InputError):
    """Words that are no valid command line; ``--help`` shows what is."""


class UnknownOptionError(OptionError):
    """There is no such option."""

    def __init__(self, option: str, known: Sequence[str], *, otherwise: str = "") -> None:
        """
        Args:
            known: the options that there are; the message names one that is alike.
            otherwise: end of the message where none is.
        """
        guess = _guess(option.partition("=")[0], known) or otherwise
        super().__init__(f"unknown option {option}{guess}")
        self.option, self.known = option, known


class RunCompleteError(InputError):
    """The run has nothing left to train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A recipe's command line, parsed. Settings have the right types and nothing more."""

    recipe: Recipe
    settings: Mapping[str, Value]
    """The settings that were given, by field name."""
    preset: str
    """The one that was given, or the default one."""
    data: str | None
    storage: str
    run: str | None
    workers: Range | None
    local: bool
    max_failures: int
    report_to: tuple[str, ...]
    overwrite: bool
    take_over: bool
    json: bool
    look: bool
    verbose: bool

    @property
    def explicit_settings(self) -> dict[str, Value]:
        """Settings of the preset and of the command line, without defaults."""
        return {**self.recipe.presets[self.preset], **self.settings}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Settings and status from the record of an earlier attempt at a run."""

    settings: Mapping[str, object] | None
    """``config.json``; None where it is missing."""
    is_complete: bool

    @classmethod
    def of(cls, config: bytes | None, result: bytes | None) -> Self | None:
        """From the content of ``config.json`` and ``result.json``, each None where there is no such
        file; a damaged one counts as missing.

        Returns:
            None when there is no settings file and no sign that the run is complete.
        """
        settings, outcome = loads_if_any(config), loads_if_any(result)
        is_complete = outcome is not None and outcome.get("status") == "succeeded"
        return cls(settings=settings, is_complete=is_complete) if settings or is_complete else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a recipe, for a list of them."""

    option: str
    default: Value
    help: str


def read_command(
    words: Sequence[str],
    *,
    run: str,
    workers: Range,
    gpus: Gpus = nodes.ONE_EACH,
    storage: str = "",
    recorded: Recorded | None = None,
) -> RunConfig:
    """Check a recipe's command line on the laptop that submits it.

    Args:
        words: recipe and options, without those that the job adds itself.
        run: name of the run.
        workers: training processes, one per GPU, that the job will have.
        gpus: those of the hosts, which have only some of the numbers within ``workers``.
        storage: address under which the runs are kept.
        recorded: what the bucket has of the run.

    Returns:
        The settings with the largest number of workers, as the node will have them.

    Raises:
        InputError: ``training.launch`` would refuse it, in the same words. Of the class
            ``RunCompleteError`` where it would find nothing left to do.
    """
    command = parse_job(words)
    config = configure(command, run=run, storage=storage, workers=workers, gpus=gpus)
    return resume(config, recorded, command)


def parse_job(words: Sequence[str]) -> Command:
    """Parse recipe and options of a job, and check what does not depend on its workers.

    Raises:
        InputError: a setting is wrong or missing, or the job sets it itself.
    """
    for word in words:
        name = word.partition("=")[0]
        if name in NOT_FOR_JOBS:
            meant = "; give --nodes" if name == "--workers" else ""
            raise OptionError(
                f"{name} is not an option of a job's recipe: the job sets it itself{meant}"
            )
        if name in _HELP and words[0] in NAMES:  # argparse would print launch's help and exit
            raise OptionError(
                f"{name} is not an option of a job's recipe: trainctl settings {words[0]} shows "
                "the settings"
            )
    command = parse(words)
    check(command)
    return command


def parse(words: Sequence[str]) -> Command:
    """Parse recipe and options.

    Raises:
        InputError: the recipe is unknown, of the class ``OptionError`` where an option is.
    """
    if not words:
        raise InputError(f"no recipe is given: choose {', '.join(NAMES)}")
    if words[0].startswith("-"):
        raise InputError(
            f"unknown option before the recipe {words[0]!r}: begin with one of {', '.join(NAMES)}"
        )
    recipe = by_name(words[0])
    found = parser(recipe).parse_args(words[1:])
    for name, value in vars(found).items():
        if value == []:  # what argparse makes of --option=--
            raise OptionError(f"{option_name(name)} needs a value")
    fields = fields_of(recipe.config)
    settings = {
        name: value
        for name, value in vars(found).items()
        if name in fields and fields[name].metadata["cli"]
    }
    preset = _preset(recipe, found.preset, found.data)
    workers = None if found.workers is None else Range.parse(found.workers, option="--workers")
    if found.max_failures < 0:
        raise InputError(f"--max-failures is {found.max_failures}: it must be at least 0")
    report_to = tuple(filter(None, found.report_to.split(",")))
    if unknown := {*report_to} - {*trackers.NAMES}:
        raise InputError(
            f"--report-to is {found.report_to!r}: {min(unknown)} is none of "
            f"{', '.join(trackers.NAMES)}"
        )
    return Command(
        recipe=recipe,
        settings=settings,
        preset=preset,
        data=found.data,
        storage=found.storage,
        run=found.run,
        workers=workers,
        local=found.local,
        max_failures=found.max_failures,
        report_to=report_to,
        overwrite=found.overwrite,
        take_over=found.take_over,
        json=found.json,
        look=found.look,
        verbose=found.verbose,
    )


def check(command: Command) -> None:
    """Check what can be checked before the number of workers is known.

    Raises:
        InputError: a setting is wrong or missing.
    """
    recipe = command.recipe
    check_values(recipe.config, command.explicit_settings)
    recipe.check_data(command.data)
    if recipe.check is not None:
        recipe.check(command.preset, command.explicit_settings)


def configure(command: Command, *, run: str, storage: str, workers: Range, gpus: Gpus) -> RunConfig:
    """The settings with the most workers, checked for every number that whole hosts can have.

    Raises:
        InputError: a setting is wrong or missing, or does not suit one of the numbers.
    """
    check(command)
    if workers.low < 1:
        raise InputError(f"--workers is {workers}: it must be at least 1")
    values: dict[str, Any] = {
        **command.explicit_settings,
        "recipe": command.recipe.name,
        "run": run,
        "storage": storage,
        "data": command.recipe.built_in_data if command.data is None else command.data,
        "num_workers": workers.high,
        "preset": command.preset,
    }
    config = command.recipe.config(**values)
    for number in gpus.possible(workers):
        dataclasses.replace(config, num_workers=number)  # raises where so few do not suit
    return config


def resume(config: RunConfig, recorded: Recorded | None, command: Command) -> RunConfig:
    """Take over from an earlier attempt what must not change.

    Args:
        config: as ``configure`` returned it.
        recorded: the record under the run's name; None where there is none.

    Raises:
        InputError: the run was started with another recipe or other settings, or, of the class
            ``RunCompleteError``, it is complete.
    """
    if recorded is None or command.overwrite:
        return config.begun({})
    earlier = recorded.settings or {}
    if earlier and earlier.get("recipe") != config.recipe:
        raise InputError(
            f"run {config.run!r} was trained with recipe {earlier.get('recipe')!r}: choose "
            "another --run, or --overwrite to delete it and start again"
        )
    config = config.begun({k: value for k, value in earlier.items() if k not in command.settings})
    settings, done = command.settings, recorded.is_complete
    if found := differences(earlier, config, command_settings=settings, is_complete=done):
        raise InputError(
            f"run {config.run!r} cannot be resumed with other settings:\n  "
            + "\n  ".join(found)
            + "\ngive the settings it has, or choose another --run, or --overwrite to delete it "
            "and start again"
        )
    if done and not any(is_longer(name, earlier, config) for name in settings):
        raise RunCompleteError(
            f"run {config.run!r} is already complete; --overwrite deletes it and starts again"
        )
    return config


def listed(recipe: Recipe, preset: str) -> list[Setting]:
    """The settings of a recipe, with the defaults of a preset."""
    values: Mapping[str, Any] = recipe.presets[preset]
    return [
        Setting(
            option=option_name(name),
            default=values.get(name, field.default),
            help=field.metadata["help"],
        )
        for name, field in fields_of(recipe.config).items()
        if field.metadata["cli"]
    ]


def help_text(words: Sequence[str]) -> str:
    """The help of a command line that asks for it: of the recipe and the preset that it names.

    Raises:
        InputError: there is no such recipe or preset.
    """
    if not words or words[0].startswith("-"):
        return parser().format_help()
    recipe = by_name(words[0])
    asking = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    asking.add_argument("--preset", nargs="?")
    asking.add_argument("--data", nargs="?")
    found, _ = asking.parse_known_args([word for word in words[1:] if word not in _HELP])
    preset = _preset(recipe, found.preset, found.data)
    return parser(recipe, preset=preset).format_help()


def _preset(recipe: Recipe, preset: str | None, data: str | None) -> str:
    if preset is None:
        return recipe.preset_for(data)
    if preset not in recipe.presets:
        raise InputError(
            f"unknown preset {preset!r}{_guess(preset, [*recipe.presets])}; {recipe.name} has "
            f"{', '.join(recipe.presets)}"
        )
    return preset


class _Parser(argparse.ArgumentParser):
    """argparse that raises OptionError, with a guess at what was meant."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments: ") and words:
            known = [option for action in self._actions for option in action.option_strings]
            raise UnknownOptionError(words[0], known)
        if found := re.fullmatch(r"argument (--[\w-]+)\S*: (expected|ignored).*", message):
            message = f"{found[1]} {'needs a' if found[2] == 'expected' else 'takes no'} value"
        elif found := re.fullmatch(
            r"argument (--[\w-]+): invalid (integer|decimal) value: (.*)", message
        ):
            what = "a whole number" if found[2] == "integer" else "a number"
            message = f"{found[1]} is {found[3]}: it must be {what}"
        raise OptionError(message)


def parser(recipe: Recipe | None = None, *, preset: str | None = None) -> argparse.ArgumentParser:
    """The command line with the options of ``recipe``, or of no recipe in particular.

    Args:
        preset: the one whose defaults the help texts show; the recipe's first one without it.

    The parser raises OptionError instead of ending the program. Settings that are not given are
    not in its result.
    """
    top = _Parser(
        prog=f"python -m training.launch {recipe.name if recipe else ''}".rstrip(),
        description="Train a recipe: in processes of this machine (--local), on the Ray cluster "
        "whose head this is, or, started by torchrun, without Ray. The name of an earlier run "
        "resumes it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if recipe is None:
        top.add_argument("recipe", metavar="RECIPE", help=f"one of: {', '.join(NAMES)}")
    where = top.add_argument_group("where it runs")
    where.add_argument(
        "--local",
        action="store_true",
        help="plain processes on this machine",
    )
    where.add_argument(
        "--workers",
        metavar="N|MIN:MAX",
        help="training processes, or a range: starts with MIN and grows to MAX when hosts become "
        "available (default: one for each GPU, of the cluster or with --local of this machine; "
        "1 without GPUs)",
    )
    where.add_argument(
        "--max-failures",
        type=integer,
        default=2,
        metavar="N",
        help="failures in a row, with no new checkpoint between, that a run gets over (default: 2)",
    )
    what = top.add_argument_group("what it reads and writes")
    what.add_argument(
        "--data",
        metavar="SOURCE",
        help=recipe.data_help if recipe else "folder, http(s):// or s3:// address of the data",
    )
    what.add_argument(
        "--storage",
        default=os.environ.get(nodes.ENV_STORAGE) or runs.RUNS_PREFIX,
        metavar="PLACE",
        help="folder or s3://BUCKET[/PREFIX] that keeps the runs (default: the cluster's bucket on "
        "a node, else runs)",
    )
    what.add_argument("--run", metavar="NAME", help="name of the run (default: recipe and time)")
    what.add_argument(
        "--report-to",
        default="",
        metavar="NAME,...",
        help="show the curves in tensorboard, wandb, or tensorboard,wandb too",
    )
    what.add_argument("--overwrite", action="store_true", help="delete an earlier run of that name")
    what.add_argument("--take-over", action="store_true", help="end what trains the run now")
    what.add_argument(
        LOOK, action="store_true", help="read and check data, tokenizer and template, and end"
    )
    what.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    what.add_argument(
        "--verbose",
        action="store_true",
        help="show what the workers print, or Ray's log lines on a cluster",
    )
    if recipe is not None:
        _add_settings(top, recipe, preset or recipe.preset_for(None))
    return top


def _add_settings(top: argparse.ArgumentParser, recipe: Recipe, preset: str) -> None:
    group = top.add_argument_group(f"settings (defaults are those of preset {preset})")
    group.add_argument("--preset", help=f"starting point: {', '.join(recipe.presets)}")
    fields = fields_of(recipe.config)
    for each in listed(recipe, preset):
        field = fields[each.option[2:].replace("-", "_")]
        text = each.help.replace("%", "%%")
        if "(default:" not in text:
            text += f" (default: {each.default})"
        if kind_of(field) is bool:
            group.add_argument(
                each.option,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
            continue
        choices = field.metadata["choices"]
        group.add_argument(
            each.option,
            type={int: integer, float: decimal}.get(kind_of(field), kind_of(field)),
            default=argparse.SUPPRESS,
            metavar="|".join(choices) if choices else kind_of(field).__name__.upper(),
            help=text,
        )


def _guess(word: str, known: Sequence[str]) -> str:
    # Dashes that all options share make none of them alike.
    names = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f": did you mean {names[close[0]]}?" if close else ""
