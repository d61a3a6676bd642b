"""A job as its user asks for it: options and words, parsed once and checked without AWS.

The command line, a job file and Python all end here (``JobOptions``); the plan of a job starts
from here (``job_plan``).
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from contract import runs
from contract.command import is_launcher
from contract.files import check_pattern
from contract.job import DEFAULT_HANG_S
from contract.nodes import ENV_WITH_RUN, Range
from contract.times import DEFAULT_GRACE_S
from trainctl.aws.errors import UsageError
from trainctl.jobs import variables
from trainctl.jobs.code_folder import CodeFolder
from trainctl.jobs.job_options import JobOptions, On
from trainctl.jobs.programs import Program
from training import recipes, trials
from training.command import Command, UnknownOptionError, parse_job
from training.record import trackers
from training.trials import Tuning


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """Options of a job with their values parsed."""

    options: JobOptions
    words: Sequence[str]
    """A recipe with its settings, or a command."""
    nodes: Range | None
    """None: the deployment decides."""
    variables: Mapping[str, str]
    secrets: Mapping[str, str]
    """Name of the variable -> name of the secret with its value."""
    program: Program | None
    """The command and its code; None for a recipe."""
    tuning: Tuning | None = None
    """Settings of the recipe to try."""

    @classmethod
    def of(cls, options: JobOptions) -> Self:
        """Parse and check what needs no deployment.

        Raises:
            InputError, UsageError: it is wrong, or ``training.launch`` would refuse it.
        """
        words, excused = options.words or [], options.not_secret or ()
        tuning = _tuning(options, words)
        nodes = None if options.nodes is None else Range.parse(options.nodes, option="--nodes")
        _check_code_options(options)
        if words and words[0].startswith("-"):  # else it would be taken for the command
            option = words[0].partition("=")[0]
            if option in ("--workers", "-w"):
                raise UsageError(f"there is no option {option} here: see --nodes")
            raise UnknownOptionError(option, ())
        env, secrets = _variables(options)
        # The recipe is checked before the name that begins with it: its error is the better one.
        if options.code is None:
            program = None
            trackers.check_key(
                _check_recipe(words).report_to,
                env,
                has_key=lambda: "WANDB_API_KEY" in {*env, *secrets},
            )
            if options.on == On.NODES:
                raise UsageError(
                    "--on nodes is for the command of --code: a recipe runs on the head, and Ray "
                    "brings its workers to all nodes; leave --on out"
                )
        elif not words:
            raise UsageError("give the command after -- : --code DIR -- python ...")
        elif words[0] in recipes.NAMES:
            raise UsageError(
                f"{words[0]} is a recipe, and --code is for your own command: leave one of them out"
            )
        else:
            code = CodeFolder.of(options.code, excused)
            code.check_command(words)
            program = Program(code, words)
        if options.run is not None:
            runs.check_run_name(options.run)
        variables.refuse_secrets(env, words, excused)
        names = {*env, *(name.lstrip("-") for name, _ in variables.named(words))}
        for each in excused:
            is_file = options.code is not None and (options.code / each).is_file()
            if each.lstrip("-") not in names and not is_file:
                raise UsageError(
                    f"--not-secret is {each!r}: no file, variable or option of the command is "
                    "called so"
                )
        return cls(
            options=options,
            words=words,
            nodes=nodes,
            variables=env,
            secrets=secrets,
            program=program,
            tuning=tuning,
        )


def _variables(options: JobOptions) -> tuple[dict[str, str], dict[str, str]]:
    """Variables, and names of secrets.

    Raises:
        InputError, UsageError: one is not usable, or has two values.
    """
    env = variables.variables(options.env or [])
    secrets = variables.secrets(options.secret or [])
    if both := env.keys() & secrets.keys():
        raise UsageError(f"{', '.join(sorted(both))}: both --env and --secret give it")
    if options.with_run and ENV_WITH_RUN in {*env, *secrets}:
        raise UsageError(f"{ENV_WITH_RUN} is set by --with: leave one of them out")
    return env, secrets


def _tuning(options: JobOptions, words: Sequence[str]) -> Tuning | None:
    """
    Raises:
        InputError, UsageError: a setting cannot be tried.
    """
    if not options.vary:
        own = {
            "--trials": options.trials,
            "--metric": options.metric,
            "--stop-hopeless": options.stop_hopeless,
        }
        for name, value in own.items():
            if value:
                raise UsageError(f"{name} is for trials: give --vary NAME=V1,V2 too")
        return None
    if options.code:
        raise UsageError("--vary is for recipes: a program of your own reads its settings itself")
    recipe = _check_recipe(words).recipe
    found = Tuning.of(
        options.vary,
        trials=options.trials,
        metric=options.metric,
        hopeless=options.stop_hopeless,
    )
    found.measure(recipe)
    for name, values in found.vary.items():
        for value in values:
            _check_recipe([*words, *trials.options({name: value})])
    return found


def _check_code_options(options: JobOptions) -> None:
    """
    Raises:
        InputError, UsageError: an option is for programs only, or a pattern matches no file.
    """
    patterns = {"--keep-files": options.keep_files or (), "--skip-files": options.skip_files or ()}
    saves = "saves checkpoints and its record"
    of_code = {
        "--grace": (options.grace != DEFAULT_GRACE_S, "saves a checkpoint when it is told to end"),
        "--hang-minutes": (
            options.hang_minutes != DEFAULT_HANG_S / 60,
            "starts workers that hang again",
        ),
        **{option: (each, saves) for option, each in patterns.items()},
    }
    for option, (is_set, instead) in of_code.items():
        if is_set and not options.code:
            raise UsageError(f"{option} is for programs of your own (--code): a recipe {instead}")
    for option, each in patterns.items():
        for pattern in each:
            check_pattern(pattern, option=option)


def _check_recipe(words: Sequence[str]) -> Command:
    if not words:
        raise UsageError(
            f"give a recipe ({', '.join(recipes.NAMES)}), or --code DIR -- and a command"
        )
    if is_launcher(words[0]) or words[0].endswith(".py"):
        raise UsageError(
            f"{words[0]} is no recipe: for your own code name its folder: --code . -- "
            + shlex.join(words)
        )
    if words[0].endswith(".toml"):
        raise UsageError(f"{words[0]} is no recipe: give a job file with -f")
    return parse_job(words)
