"""``trainctl generate``: a run's model continues a text.

A job without workers loads the model, because it may be larger than a laptop. It leaves what it
has written in the bucket, beside the exports: a log has other lines too.
"""

import sys
from typing import Annotated, Final

import typer

from contract.runs import DEFAULT_NEW_TOKENS
from trainctl import output
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.jobs import new_id
from trainctl.here import needs_packages
from trainctl.options import AsJson, Best, RunName, WhereOrHere, Yes
from trainctl.watch import head_job

#: Loading a model of 7 B parameters takes minutes.
_MAX_SECONDS: Final = 3600


def generate(
    *,
    run: RunName,
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="After -- if it begins with a dash; - reads stdin.",
        ),
    ],
    tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to add.", metavar="N")
    ] = DEFAULT_NEW_TOKENS,
    seed: Annotated[int, typer.Option(help="Of the draws.", metavar="N")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Likeliest tokens, no draws.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Answer TEXT as a user's message.")] = False,
    best: Best = False,
    yes: Yes = False,
    as_json: AsJson = False,
    where: WhereOrHere,
) -> None:
    """Continue a text with a run's newest checkpoint.

    Prints what the model adds; --json has what it added before training too. On AWS a head's job
    does it, within an hour.
    """
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise UsageError("what stdin has is no text in UTF-8: give some text") from None
    if not text.strip():
        raise UsageError("TEXT is empty: give some text to continue")
    deployment = where.find(to_start=True)
    bucket = deployment.bucket
    options = (("--greedy", greedy), ("--chat", chat), ("--best", best))
    words = ["--tokens", str(tokens), f"--seed={seed}"]
    words += [option for option, is_set in options if is_set]
    if deployment.is_here:
        with needs_packages():
            from training.generate import main
        words += ["--json"] * as_json + ["--storage", bucket.uri]
        raise typer.Exit(main([*words, "--", run, text]))
    place = f"{bucket.uri}/exports/{new_id(run)}.json"
    command = ["python", "-m", "training.generate", *words, "--to", place, "--", run, text]
    job = head_job.run_command(deployment, run, command, max_seconds=_MAX_SECONDS, yes=yes)
    found = json_object(bucket.get(bucket.key(place)))
    if "after" not in found:
        raise CliError(f"{job} wrote no text to {place}; its log may have it: trainctl logs {job}")
    if as_json:
        output.print_json({"job": job, **found})
    else:
        output.print_text(str(found["after"]))
