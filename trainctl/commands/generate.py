"""``trainctl generate``: text from a run's model."""

from typing import Annotated

import typer

from trainctl import head_jobs
from trainctl.aws.deployment import Deployment
from trainctl.options import Profile, Region, Yes


def generate(
    *,
    run: head_jobs.RunName,
    prompt: Annotated[str, typer.Option(help="Text to be continued.", metavar="TEXT")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.", metavar="N")] = 60,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message in the chat template.")
    ] = False,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Continue a text with a run's model, before and after training."""
    deployment = Deployment.find(profile=profile, region=region, to_start=True)
    options = ["--tokens", str(tokens), *(["--chat"] if chat else [])]
    command = ["python", "-m", "training.generate", run, *options, "--", prompt]
    head_jobs.run_on_head(deployment, run, command, yes=yes)
