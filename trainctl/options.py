"""Options that several commands share, named as in the AWS CLI."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer

from trainctl import completion
from trainctl.aws.deployment import Deployment

T = TypeVar("T")

#: Variable with the name of the deployment, for all commands.
DEPLOYMENT: Final = "TRAIN_DEPLOYMENT"

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="ID of a job, or name of a run: its newest job.",
        autocompletion=completion.jobs,
    ),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run.", autocompletion=completion.runs)
]
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
        """As ``Deployment.find``."""
        return Deployment.find(
            profile=self.profile, region=self.region, name=self.deployment, to_start=to_start
        )


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
