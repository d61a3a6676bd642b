"""``trainctl data verify``: whether a prepared set of pictures is still what was prepared."""

from typing import Annotated

import typer

from contract import exits
from trainctl import output
from trainctl.options import AsJson, Profile, Region
from training.data.pictures import verify as pictures
from training.data.pictures.destination import Destination


def verify(
    *,
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR|s3://...", help="What data prepare has written.", show_default=False
        ),
    ],
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Read a prepared set, compare all checksums and counts; exit with 1 where one differs."""
    at = Destination(uri=place.rstrip("/"), profile=profile, region=region)
    with output.Progress() as progress:

        def show(done: int, total: int) -> None:
            progress.update(f"reading: {10 * (10 * done // max(total, 1))}% of {total:,} files")

        verdict = pictures.verify(at, report=show)
    index = verdict.index
    for each in verdict.wrong:
        output.say(f"wrong: {each}")
    if as_json:
        output.print_json(
            {
                "form": index.form,
                "size": index.size,
                "encoding": index.encoding,
                "classes": len(index.classes),
                "pictures": dict(index.counts),
                "left_out": list(index.damaged),
                "wrong": list(verdict.wrong),
            }
        )
    else:
        counts = " + ".join(f"{num:,} {split}" for split, num in index.counts.items())
        found = f"{len(verdict.wrong):,} wrong" if verdict.wrong else "all whole"
        output.print_text(f"{counts} pictures of {len(index.classes):,} classes: {found}")
    if verdict.wrong:
        raise typer.Exit(exits.FAILED)
