"""``trainctl data prepare``: make a set of pictures that trains fast out of ImageNet's download."""

from pathlib import Path
from typing import Annotated

import typer

from contract import exits
from trainctl import output
from trainctl.errors import UsageError
from trainctl.options import Profile, Region
from training.data.pictures import prepare as pictures
from training.data.pictures.destination import Destination
from training.data.pictures.index import ENCODINGS, FORMS, JPEG, PACKED

_LAYOUTS = ("imagenet",)
_SHOWN_DAMAGED = 20


def prepare(
    *,
    layout: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT", help="How the source is arranged: imagenet.", show_default=False
        ),
    ],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Folder or .tar here: train/ and val/, or the archives as they are downloaded.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="DIR|s3://...", help="Where the set is written.", show_default=False
        ),
    ],
    form: Annotated[str, typer.Option(metavar="FORM", help=f"{', '.join(FORMS)}.")] = PACKED,
    size: Annotated[
        int,
        typer.Option(
            metavar="PIXELS", help="Of packed pictures: pixels that the shorter side is shrunk to."
        ),
    ] = pictures.DEFAULT_SIZE,
    encoding: Annotated[
        str, typer.Option(metavar="ENCODING", help=f"Of packed pictures: {', '.join(ENCODINGS)}.")
    ] = JPEG,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="To work at a time.", show_default="one for each core"
        ),
    ] = None,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Make a set of pictures that trains fast; jobs read it with --data DIR or --data s3://...

    Damaged pictures are listed and left out. An interrupted preparation continues.
    """
    if layout not in _LAYOUTS:
        raise UsageError(f"{layout} is no layout that is known: give {', '.join(_LAYOUTS)}")
    if source.startswith("s3://"):
        raise UsageError(
            f"{source} is in S3: fetch it first (aws s3 sync {source} DIR), or have a job prepare "
            "it there: trainctl submit --code . --run prepare --nodes 1 -- python -m "
            f"training.data.pictures prepare {source} --to {to}"
        )
    wish = pictures.Wish(form=form, size=size, encoding=encoding)
    target = Destination(uri=to.rstrip("/"), profile=profile, region=region)
    with output.Progress() as progress:

        def show(what: str, done: int, total: int) -> None:
            # In tenths: where stderr is no terminal, each change is a line.
            share = f"{10 * (10 * done // total)}% of {total:,} pictures" if total else f"{done:,}"
            progress.update(f"{what}: {share}")

        try:
            index = pictures.prepare(
                Path(source).expanduser(), target, wish, processes=processes or 0, report=show
            )
        except KeyboardInterrupt:
            output.say("interrupted; give the command again, it continues")
            raise typer.Exit(exits.INTERRUPTED) from None
    for each in index.damaged[:_SHOWN_DAMAGED]:
        output.say(f"left out: {each}")
    if (more := len(index.damaged) - _SHOWN_DAMAGED) > 0:
        output.say(f"and {more:,} more, listed in {target.uri}/index.json")
    counts = " + ".join(f"{index.counts[split]:,} {split}" for split in index.counts)
    output.say(
        f"{counts} pictures of {len(index.classes):,} classes, {len(index.damaged):,} damaged. "
        "Check them at any time with trainctl data verify"
    )
    output.print_text(target.uri)
