"""``trainctl``: the command line of a deployment.

One file per command in ``trainctl/commands``, one package that talks to AWS, and one place, here,
where errors end.

All commands are imported at every start, so none of their modules imports AWS's clients, rich, or
the rehearsal before it needs them: ``trainctl --help`` would take three times as long.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer
from typer.exceptions import TyperException

from contract import exits, faults
from trainctl import output
from trainctl.aws.errors import explained
from trainctl.commands import (
    checkpoints,
    cluster,
    cost,
    data,
    doctor,
    download,
    export,
    generate,
    local,
    logs,
    ls,
    plan,
    predict,
    release,
    report,
    run,
    runs,
    settings,
    shell,
    show,
    stop,
    submit,
    top,
    ui,
    wait,
)
from trainctl.commands import open as open_
from trainctl.help import WIDTH, HelpCommand, HelpGroup, RecipeCommand, ShellCommand, TuneCommand
from trainctl.options import flattened, refusal

_EPILOG = (
    "Exit codes: 0 done; 1 failed, with the reason in the message; 2 wrong input; 79 AWS does not "
    "answer; 130 Ctrl-C, which never stops what runs in the cloud (0 where it ends open "
    "or ui). wait and --follow exit with the job's status: 74 files lost, 75 no capacity, 79 "
    "storage, 80 hung, 124 deadline, 143 stopped, else the code of its command. Data goes to "
    "stdout, everything else to stderr."
)

_JOBS: Final = "Jobs"
_OTHER: Final = "Clusters and deployment"

app = typer.Typer(
    name="trainctl",
    cls=HelpGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
    epilog=_EPILOG,
)
#: Settings of a recipe are not this program's options; they are checked all the same.
_PASSES_ON: Final = {"ignore_unknown_options": True}

_takes_recipe = app.command(cls=RecipeCommand, context_settings=_PASSES_ON, rich_help_panel=_JOBS)
_takes_recipe(flattened(submit.submit))
app.command(
    "tune",
    cls=TuneCommand,
    context_settings=_PASSES_ON,
    rich_help_panel=_JOBS,
    help="""Try settings of a recipe: a run each, on one node each, as many at a time as --nodes.

    The words and options are those of submit, with --vary; or give a job file. The same --run again
    takes the results that are there. show and ui have the table.

    Examples: trainctl tune lr.toml;
    trainctl tune ddp --nodes 2 --vary lr=0.0005,0.001,0.002 --epochs 10""",
)(flattened(submit.submit))
_takes_recipe(flattened(plan.plan))
_takes_recipe(run.run)
of_jobs = (settings.settings, ls.ls, ui.ui, show.show, top.top, logs.logs, wait.wait)
of_runs = (checkpoints.checkpoints, report.report, download.download)
for panel, commands in (
    (
        _JOBS,
        (
            *of_jobs,
            stop.stop,
            release.release,
            cost.cost,
            *of_runs,
            export.export,
            generate.generate,
            predict.predict,
        ),
    ),
    (_OTHER, (open_.open_, shell.shell, doctor.doctor)),
):
    for command in commands:
        name = command.__name__.rstrip("_")
        kind = ShellCommand if command is shell.shell else HelpCommand
        app.command(name, cls=kind, rich_help_panel=panel)(flattened(command))


def _add_group(name: str, about: str, *commands: Callable[..., None], panel: str) -> None:
    group = typer.Typer(cls=HelpGroup, help=about)
    for each in commands:
        group.command(cls=HelpCommand)(flattened(each))
    app.add_typer(group, name=name, rich_help_panel=panel)


_add_group(
    "cluster",
    "The standing cluster: a head and workers that stay until taken down.",
    *(cluster.up, cluster.status, cluster.down),
    panel=_OTHER,
)
_add_group(
    "data",
    "Data sets in the bucket, which jobs train on by name: --data NAME.",
    *(data.put, data.ls, data.rm),
    panel=_JOBS,
)
_add_group(
    "runs",
    "The runs in the bucket; without a command, it lists them.",
    *(runs.ls, runs.rm),
    panel=_JOBS,
)
_add_group(
    "local",
    "The whole system on this machine: real containers, a local AWS, no account. Needs a Docker "
    "Engine on Linux.",
    *(local.up, local.status, local.env, local.down),
    panel=_OTHER,
)


def _print_version(wanted: bool) -> None:
    from importlib import metadata

    if wanted:
        print(f"trainctl {metadata.version('ecs-train')}")
        raise typer.Exit


@app.callback()
def trainctl(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Distributed training on Amazon ECS, from a laptop.

    Finds what make deploy has created in the account and region in use. A job brings its own
    cluster and releases it at its end: trainctl submit ddp --nodes 2 --follow

    Here, without AWS: trainctl run ddp
    """


@faults.command(say=lambda line: faults.say(output.addressed(line)), explain=explained)
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = list(argv) if argv is not None else None
    try:
        with exits.on_closed_pipe():
            return app(words, prog_name="trainctl", standalone_mode=False) or exits.OK
    except TyperException as error:
        raise refusal(error) from None
    except typer.Abort:  # Ctrl-C
        return exits.INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # of typer and rich, which exit with 1
            return exits.CLOSED_PIPE
        return end.code if isinstance(end.code, int) else exits.OK


if __name__ == "__main__":
    sys.exit(main())
