"""Options that several commands share, named as in the AWS CLI."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, get_type_hints

import typer

from trainctl import completion
from trainctl.aws.deployment import Deployment

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
Browser = Annotated[bool, typer.Option(help="Open a browser.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where the deployment is. Each field is an option."""

    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="Profile of the AWS configuration."),
    ] = None
    region: Annotated[
        str | None, typer.Option("--region", metavar="REGION", help="Region of the deployment.")
    ] = None

    def find(self, *, to_start: bool = False) -> Deployment:
        """As ``Deployment.find``."""
        return Deployment.find(profile=self.profile, region=self.region, to_start=to_start)


def options_of(kind: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command."""
    types = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.default is MISSING else field.default,
            annotation=types[field.name],
        )
        for field in fields(kind)
    ]


def takes_where(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of ``Where`` as options, if it takes one as ``where``.

    Typer reads a command's options from its signature, so the signature is what is changed.
    """
    signature = inspect.signature(command)
    if "where" not in signature.parameters:
        return command

    @functools.wraps(command)
    def with_options(*, profile: str | None, region: str | None, **values: object) -> None:
        command(where=Where(profile=profile, region=region), **values)

    own = [each for name, each in signature.parameters.items() if name != "where"]
    with_options.__signature__ = signature.replace(parameters=[*own, *options_of(Where)])  # type: ignore[attr-defined]
    return with_options


Context = Annotated[
    list[str] | None,
    typer.Option(
        "--context",
        "-c",
        metavar="NAME=VALUE",
        help="A deployment with this setting of cdk.json, as make deploy takes it; may be "
        "repeated.",
        show_default=False,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="A variable for the code."),
]
