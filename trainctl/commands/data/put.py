"""``trainctl data put``: upload a data set to the bucket of the deployment."""

from pathlib import Path
from typing import Annotated

import typer

from contract.text import byte_size
from trainctl import data_sets, output
from trainctl.aws.deployment import Deployment
from trainctl.errors import UsageError
from trainctl.options import Profile, Region
from training.data import catalog, download


def put(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|NAME",
            help="Folder or file here; or a published data set: " + ", ".join(catalog.names()),
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NAME",
            help="What --data calls it then.",
            show_default="the name of the folder or data set",
        ),
    ] = None,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Upload a data set to the bucket; jobs read it with --data NAME."""
    published, place = catalog.find(source), Path(source).expanduser()
    if published is None and not place.exists():
        raise UsageError(f"{source} is no folder and no file here; {catalog.by_name(source)}")
    default = source if published else place.resolve().name
    called = data_sets.check_name(default if name is None else name)
    bucket = Deployment.find(profile=profile, region=region).bucket
    with output.Progress() as progress:
        if published is not None:
            paths = download.published(published, report=_shown(progress, "downloading"))
            files = {path.name: path for path in paths}
        else:
            files = data_sets.files_of(place)
        progress.update("hashing")
        stored = data_sets.put(bucket, called, files, report=_shown(progress, "uploading"))
    output.say(
        f"data set {stored.name}: {len(stored.files)} files, {byte_size(stored.size)}. Train on "
        f"it with --data {stored.name}"
    )
    output.print_text(f"{bucket.uri}/{data_sets.PREFIX}{stored.name}")


def _shown(progress: output.Progress, what: str) -> data_sets.Report:
    def show(done: int, total: int) -> None:
        # In tenths: where stderr is no terminal, each change is a line.
        progress.update(f"{what}: {10 * (10 * done // max(total, 1))}% of {byte_size(total)}")

    return show
