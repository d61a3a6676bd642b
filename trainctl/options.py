"""Options that several commands share, named as in the AWS CLI."""

from typing import Annotated

import typer

from trainctl import completion
from trainctl.aws.errors import UsageError

Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Profile of the AWS configuration."),
]
Region = Annotated[
    str | None, typer.Option("--region", metavar="REGION", help="Region of the deployment.")
]
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


def refuse_workers(given: str | None) -> None:
    """
    Raises:
        UsageError: a number of workers is given; it names the option that was meant.
    """
    if given is not None:
        raise UsageError(
            f"there is no option --workers here: it counts training processes, and a node runs one "
            f"on each of its GPUs. Give --nodes, the number of worker nodes (hosts), for example "
            f"--nodes {given}"
        )


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
#: ``--workers`` counts processes wherever it exists; here it would be taken for hosts.
NoWorkers = Annotated[
    str | None,
    typer.Option("--workers", "-w", hidden=True, callback=refuse_workers),
]
