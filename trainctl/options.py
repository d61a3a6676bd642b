"""Options that several commands share, named as in the AWS CLI."""

import functools
import inspect
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer
from typer.exceptions import TyperException

from contract.text import did_you_mean
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError, is_unset
from trainctl.here import Here

T = TypeVar("T")

#: Variable with the name of the deployment, for all commands.
DEPLOYMENT: Final = "TRAIN_DEPLOYMENT"
#: Runs of this machine, unless --storage names another folder.
RUNS: Final = Path("runs")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="ID of a job, or name of a run: its newest job.",
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")]
Best = Annotated[
    bool, typer.Option("--best", help="The checkpoint that --keep-best has kept, not the newest.")
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="On this machine.", metavar="PORT")]
Browser = Annotated[bool, typer.Option(help="Open a browser.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where the deployment is. Each field is an option."""

    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Profile of the AWS configuration."),
    ] = None
    region: Annotated[
        str | None, typer.Option(metavar="REGION", help="Region of the deployment.")
    ] = None

    deployment: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", envvar=DEPLOYMENT, help="Deployment, where there are several."
        ),
    ] = None

    def find(self, *, to_start: bool = False) -> Deployment:
        """As ``Deployment.find``. Commands that are printed from now on name the same one."""
        known = {"deployment": os.environ.get(DEPLOYMENT)}
        options = asdict(self).items()
        chosen = {name: value for name, value in options if value not in (None, known.get(name))}
        output.set_options("".join(f" --{name} {shlex.quote(chosen[name])}" for name in chosen))
        return Deployment.find(
            profile=self.profile, region=self.region, name=self.deployment, to_start=to_start
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WhereOrHere(Where):
    """A deployment, or the runs of this machine: for commands that change nothing."""

    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Runs here, in this folder.",
            show_default=False,
        ),
    ] = None

    def find(self, *, to_start: bool = False) -> Deployment:
        if self.runs is not None:
            return Here(self.runs)
        try:
            return Where.find(self, to_start=to_start)
        except Exception as error:  # a reason to look elsewhere, or raised again
            if not (is_unset(error) and RUNS.is_dir()):
                raise
        output.say(f"No AWS account is set up here: these are the runs in {RUNS}")
        return Here(RUNS)


def flattened(command: Callable[..., T]) -> Callable[..., T]:
    """A command whose dataclasses are given field by field, each as an option.

    Typer reads a command's options from its signature, so the signature is what is changed.
    """
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    kinds = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}

    @functools.wraps(command)
    def with_options(**values: Any) -> T:
        for name, kind in kinds.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
        return command(**values)

    parameters = [
        option
        for name, each in signature.parameters.items()
        for option in (_options_of(kinds[name]) if name in kinds else [each])
    ]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


def _options_of(kind: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command."""
    types = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=types[each.name],
        )
        for each in fields(kind)
    ]


Context = Annotated[
    list[str] | None,
    typer.Option(
        "--context",
        "-c",
        metavar="NAME=VALUE",
        help="A deployment with this setting of cdk.json, as make deploy takes it; may be "
        "repeated.",
    ),
]


# --- values by name, of a job file or of Python ---------------------------------------------------
#: What no value by name stands for: a recipe or command, and where options come from.
_NOT_BY_NAME: Final = ("words", "file", "context")
#: Options that are tables: name of a variable -> its value.
_TABLES: Final = ("env", "secret")


def by_name(params: Any) -> Mapping[str, Any]:
    """A command's options, as Typer has them, by their long names in Python's spelling."""
    options = [each for each in params if each.name not in _NOT_BY_NAME]
    return {max(each.opts, key=len)[2:].replace("-", "_"): each for each in options}


def words_of(
    values: Mapping[str, object], options: Mapping[str, Any], *, also: Sequence[str] = ()
) -> list[str]:
    """The words of a command line that mean the same as these values.

    Args:
        options: of the command, by name.
        also: other names that the user may give, for the error.

    Raises:
        UsageError: there is no such option, or a value is of another type.
    """
    found = []
    for key, value in values.items():
        if key not in options:
            allowed = [*also, *options]
            hint = did_you_mean(key, allowed, otherwise=f"use {', '.join(allowed)}")
            raise UsageError(f"there is no option {key!r}: {hint}")
        option, name = options[key], f"--{key.replace('_', '-')}"
        if key in _TABLES:
            found += [
                f"{name}={each}={text(f'{key}.{each}', item)}"
                for each, item in table(key, value).items()
            ]
        elif option.multiple and isinstance(value, list | tuple):
            found += [f"{name}={text(f'an item of {key}', each)}" for each in value]
        elif not option.is_flag:
            found.append(f"{name}={text(key, value)}")
        elif isinstance(value, bool):
            found += [*(option.opts if value else option.secondary_opts)[:1]]
        else:
            raise wrong(key, value, "true or false")
    return found


def table(key: str, value: object) -> Mapping[str, object]:
    """``value``, if it is a table. Raises UsageError."""
    if not isinstance(value, Mapping):
        raise wrong(key, value, f"a table, [{key}]")
    return value


def text(key: str, value: object) -> str:
    """``value`` as a word of a command line. Raises UsageError where it cannot be one."""
    if not isinstance(value, str | int | float | os.PathLike) or isinstance(value, bool):
        raise wrong(key, value, "text or a number")
    return str(value)


def wrong(key: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{key} is {value!r}: it must be {wanted}")


# --- errors ---------------------------------------------------------------------------------------
def refusal(error: TyperException) -> UsageError:
    """Typer's error of an option, as this project words its own."""
    # Typer has values checked by pydantic.
    param, errors = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if param is None or errors is None:
        ctx, said = getattr(error, "ctx", None), error.format_message().rstrip(".")
        return UsageError(f"{said}; see {ctx.command_path} --help" if ctx else said)
    descriptor = param.type_descriptor
    if descriptor.choices:
        wanted = f"one of {', '.join(descriptor.choices)}"
    else:
        limits = [f"{each:,.10g}" for each in (param.min, param.max) if each is not None]
        wanted = "a whole number" if "int" in str(descriptor.annotation) else "a number"
        wanted += f" of at least {limits[0]}" * (len(limits) == 1)
        wanted += f" from {' to '.join(limits)}" * (len(limits) == 2)
    name = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar
    return UsageError(f"{name} is {errors()[0]['input']}: it must be {wanted}")
