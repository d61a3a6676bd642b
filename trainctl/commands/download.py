"""``trainctl download``: fetch a run's model, or the files that its program wrote."""

from pathlib import Path
from typing import Annotated

import typer

from contract.text import byte_size, counted
from trainctl import output
from trainctl.options import RunName, Where
from trainctl.runs import downloads


def download(
    *,
    run: RunName,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="[PATTERN]",
            help="Of the name or path of a file or folder: '*.pt', 'work/logs'.",
            show_default=False,
        ),
    ] = "*",
    to: Annotated[
        str, typer.Option(help="Folder here; the run's name by default.", metavar="DIR")
    ] = "",
    node: Annotated[
        int | None, typer.Option(min=0, help="Only what this node wrote.", metavar="N")
    ] = None,
    where: Where,
) -> None:
    """Fetch a run's files: DIR/model of a recipe; DIR/node-N/work, DIR/node-N/output,
    DIR/node-N/home and DIR/ray of a program.

    Also while its job is running: what has been copied so far. The model of fsdp: trainctl export.
    """
    bucket = where.find().bucket
    folder = Path(to or run)
    with output.ProgressLine() as progress:
        found = downloads.download(
            bucket,
            run,
            folder,
            pattern=pattern,
            node=node,
            report=progress.update,
            note=output.say,
        )
    for source in sorted({each.source for each in found}):
        of_source = [each for each in found if each.source == source]
        size = byte_size(sum(each.size for each in of_source))
        output.say(f"{source}: {counted(len(of_source), 'file')}, {size}")
    output.print_text(str(folder))
