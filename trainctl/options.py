"""Options that every command which talks to AWS has, as the AWS CLI calls them."""

from typing import Annotated

import typer

Profile = Annotated[
    str | None,
    typer.Option("--profile", help="Profile of the AWS configuration.", rich_help_panel="AWS"),
]
Region = Annotated[
    str | None, typer.Option("--region", help="Region of the deployment.", rich_help_panel="AWS")
]
