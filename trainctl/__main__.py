"""``trainctl``: the command line of a deployment.

One file per command, one module that talks to AWS, and one place, here, where errors end.

All commands are imported at every start, so none of their modules imports AWS's clients, rich, or
the rehearsal before it needs them: ``trainctl --help`` would take three times as long.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from contract import exits
from trainctl import artifacts, cluster, dashboard, jobs, local, show, submit
from trainctl.doctor import doctor
from trainctl.errors import explained
from trainctl.help import WIDTH, Group
from trainctl.settings import settings
from trainctl.shell import shell

_EPILOG = (
    "Exit codes: 0 done; 1 it failed, the message says why; 2 wrong input; 130 Ctrl-C, which never "
    "stops what runs in the cloud. wait and --follow exit as the job does: 75 no capacity, 124 "
    "deadline, 143 stopped, else the code of its command. Data goes to stdout, everything else to "
    "stderr."
)

_JOBS: Final = "Jobs"
_AROUND: Final = "Around them"

app = typer.Typer(
    name="trainctl",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
    epilog=_EPILOG,
)
#: Settings of a recipe are not this program's options; they are checked all the same.
_PASSES_ON: Final = {"ignore_unknown_options": True}

app.command(context_settings=_PASSES_ON, rich_help_panel=_JOBS)(submit.submit)
app.command(context_settings=_PASSES_ON, rich_help_panel=_JOBS)(submit.plan)
app.command(rich_help_panel=_JOBS)(settings)
app.command(rich_help_panel=_JOBS)(jobs.ls)
app.command("show", rich_help_panel=_JOBS)(jobs.show_job)
app.command(rich_help_panel=_JOBS)(jobs.logs)
app.command(rich_help_panel=_JOBS)(jobs.wait)
app.command(rich_help_panel=_JOBS)(jobs.stop)
app.command(rich_help_panel=_JOBS)(jobs.cost)
app.command(rich_help_panel=_JOBS)(artifacts.export)
app.command(rich_help_panel=_JOBS)(artifacts.generate)
app.command("open", rich_help_panel=_AROUND)(dashboard.open_)
app.command(rich_help_panel=_AROUND)(shell)
app.command(rich_help_panel=_AROUND)(doctor)
app.add_typer(cluster.app, name="cluster", rich_help_panel=_AROUND)
app.add_typer(local.app, name="local", rich_help_panel=_AROUND)


def _version_text() -> str:
    from importlib import metadata

    return f"trainctl {metadata.version('ecs-train')}"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(_version_text())
        raise typer.Exit


@app.callback()
def trainctl(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Distributed training on Amazon ECS, from a laptop.

    Finds what make deploy has put into the account and region in use. A job brings its own cluster
    and takes it away again: trainctl submit ddp --workers 2 --follow

    Here, without AWS: python -m training.launch ddp --local
    """


@app.command(rich_help_panel=_AROUND)
def version() -> None:
    """Print the version."""
    print(_version_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    try:
        app(list(argv) if argv is not None else None, prog_name="trainctl")
    except SystemExit as end:  # typer's way to return a code, after it has shown a usage error
        return end.code if isinstance(end.code, int) else exits.OK
    except Exception as error:
        known = explained(error)
        if known is None:
            raise
        show.say(f"error: {known}")
        return known.exit_code
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
