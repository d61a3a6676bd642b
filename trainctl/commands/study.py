"""``trainctl study``: how training scales with the number of nodes."""

from pathlib import Path
from typing import Annotated

import typer

from contract import exits
from contract.nodes import numbers_of
from trainctl import api, completion, output
from trainctl import study as studies
from trainctl.aws.deployment import Deployment
from trainctl.errors import CliError, UsageError
from trainctl.options import AsJson, Env, NoWorkers, Profile, Region, Yes
from trainctl.pricing import dollars
from trainctl.variables import variables
from training.study.series import Point, Series, command_of, comparisons, text


def study(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE [SETTINGS]",
            help="A recipe that trains, and its settings, such as --epochs 3.",
            show_default=False,
            autocompletion=completion.words,
        ),
    ] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", "-n", metavar="N,N,...", help="Worker nodes of each job.")
    ] = "1,2",
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of each run.", show_default="all of its epochs"),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            metavar="efa,tcp",
            help="Run the series over EFA, over TCP, or over both, on hosts with EFA.",
            show_default="as deployed",
        ),
    ] = "",
    _workers: NoWorkers = None,
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Of the study: its runs are called NAME-NODES; the same again continues it.",
            show_default="study-RECIPE",
        ),
    ] = "",
    max_hours: Annotated[
        float, typer.Option("--max-hours", metavar="HOURS", help="Deadline of each job.")
    ] = 2.0,
    env: Env = None,
    to: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for study.json and study.png.",
            show_default="NAME",
        ),
    ] = "",
    yes: Yes = False,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Train on more and more nodes, a job for each, and show how it scales.

    Time, efficiency and cost per epoch, where the time goes, and what holds it back. Prints the
    maximum cost of all jobs before starting. Ctrl-C leaves the running job alone.

    Example: trainctl study imagenet --nodes 1,2,4 --steps 200 --data NAME
    """
    if not words:
        raise UsageError("give a recipe and its settings: trainctl study ddp --nodes 1,2")
    command = command_of(words[0], words[1:], steps=steps)
    called = name or f"study-{words[0]}"
    options: api.Options = {
        "max_hours": max_hours,
        "env": variables(env or []),
        "profile": profile,
        "region": region,
    }
    numbers = numbers_of(nodes, option="--nodes")
    shape = Deployment.find(profile=profile, region=region, to_start=True).shape
    networks = studies.networks(network, has_efa=shape.efa)
    runs = studies.wanted(command, name=called, nodes=numbers, networks=networks, options=options)
    _confirm(runs, yes=yes, limit=shape.confirm_above_usd)
    found: dict[str, list[Point]] = {}
    failure: CliError | None = None
    try:
        for run, job, point in studies.points(runs):
            if point is None:
                output.say(f"{job.run}: job {job.id}")
            else:
                found.setdefault(run.network, []).append(point)
    except CliError as error:
        failure = error  # what the others have shown is shown all the same
    except KeyboardInterrupt:
        output.say("\nThe job keeps running; the same command continues the study")
        raise typer.Exit(exits.INTERRUPTED) from None
    if found:
        series = [
            Series(recipe=words[0], points=tuple(points), network=name)
            for name, points in found.items()
        ]
        _show(series, Path(to or called), as_json=as_json)
    if failure is not None:
        raise failure


def _confirm(runs: list[studies.Wanted], *, yes: bool, limit: float) -> None:
    """Show what the jobs that are not there yet can cost, and ask.

    Args:
        limit: US dollars above which Enter means no.
    """
    costs = [plan.usd_at_most for each in runs if (plan := each.plan()) is not None]
    if not costs:
        return
    known = [usd for usd in costs if usd is not None]
    total = sum(known) if len(known) == len(costs) else None
    jobs = "1 job" if len(costs) == 1 else f"{len(costs)} jobs, one after the other"
    output.say(f"{jobs}; at most {dollars(total)} altogether")
    is_expensive = total is None or total > limit
    output.confirm("Start them?", yes=yes, default=not is_expensive)


def _show(series: list[Series], folder: Path, *, as_json: bool) -> None:
    from training.study import draw

    files = draw.write(series, folder)
    if as_json:
        output.print_json([each.to_json() for each in series])
    else:
        output.print_text("\n\n".join([*map(text, series), *comparisons(series)]))
    for file in files:
        output.say(str(file))
    if len(files) == 1:
        output.say("no picture: pip install matplotlib, and give the same command again")
