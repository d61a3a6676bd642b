"""Options that every command which talks to AWS has, as the AWS CLI calls them."""

from typing import Annotated

import typer

Profile = Annotated[
    str | None,
    typer.Option("--profile", help="Profile of the AWS configuration."),
]
Region = Annotated[str | None, typer.Option("--region", help="Region of the deployment.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job's id, or the name of a run: its newest job."),
]
