"""``trainctl data``: data sets in the bucket."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from contract.text import byte_size, counted
from trainctl import output
from trainctl.aws.errors import UsageError
from trainctl.jobs import data_sets
from trainctl.options import AsJson, Where, Yes
from trainctl.runs import removal
from training import recipes
from training.data import catalog, contents, download


def put(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|NAME",
            help="Folder or file here; or a published data set: " + ", ".join(catalog.names()),
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
    yes: Yes = False,
    where: Where,
) -> None:
    """Upload a data set to the bucket; jobs read it with --data NAME.

    Asks before it replaces another one of that name.
    """
    published, place = catalog.find(source), Path(source).expanduser()
    if not source or (published is None and not place.exists()):
        raise UsageError(f"{source!r} is not a folder or file here; {catalog.by_name(source)}")
    default = source if published else place.resolve().name
    called = data_sets.check_name(default if name is None else name)
    deployment = where.find()
    bucket = deployment.bucket
    with output.ProgressLine() as progress:

        def ask(there: str) -> None:
            jobs = removal.users(deployment, f"{data_sets.PREFIX}{called}/")
            used = f"; {', '.join(jobs)} may train on it" if jobs else ""
            progress.confirm(f"Replace data set {called} ({there}{used})?", yes=yes)

        if published is not None:
            paths = download.published(published, report=_shown(progress, "downloading"))
            files, found = {path.name: path for path in paths}, None
        else:
            files = data_sets.files_of(place)
            found = contents.look(place, _shown(progress, "looking"))
        progress.update("hashing")
        stored = data_sets.put(
            bucket,
            called,
            files,
            by=deployment.user,
            contents=found,
            report=_shown(progress, "uploading"),
            ask=ask,
        )
    size = f"{counted(len(stored.files), 'file')}, {byte_size(stored.size)}"
    what = f", {found.words()}" if found and found.kind else ""
    kinds = {each.name: each.data_kind for each in recipes.ALL if each.data_kind}
    refused = found.refused if found else {}
    readers = [name for name, kind in kinds.items() if kind not in refused]
    if found is None:
        how = f"Train on it with --data {stored.name}"
    elif readers:
        how = f"Train recipe {', '.join(readers)} on it with --data {stored.name}"
    elif found.kind:
        how = f"No recipe can read it yet: {found.refused[catalog.TEXT]}"
    else:
        how = "No recipe reads such files; a program can (trainctl submit --code)"
    output.say(f"data set {stored.name}: {size}{what}. {how}")
    output.print_text(f"{bucket.uri}/{data_sets.PREFIX}{stored.name}")


def _shown(progress: output.ProgressLine, what: str) -> data_sets.Report:
    def show(done: int, total: int) -> None:
        progress.update(f"{what}: {_tenths(done, total)} of {byte_size(total)}")

    return show


def _tenths(done: int, total: int) -> str:
    """A share in tenths: where stderr is no terminal, each change is a line."""
    return f"{10 * (10 * done // max(total, 1))}%"


_PUBLISHED: Final = "published"


def ls(*, as_json: AsJson = False, where: Where) -> None:
    """List the data sets in the bucket, and the published ones."""
    bucket = where.find().bucket
    complete, incomplete = data_sets.stored(bucket)
    known = {each.name for each in complete}
    others = [each for each in catalog.ALL if each.name not in known]
    if as_json:
        output.print_json(
            {
                "stored": [{**asdict(each), "size": each.size} for each in complete],
                "incomplete": incomplete,
                _PUBLISHED: [
                    {"name": each.name, "kind": each.kind, "license": each.license}
                    for each in others
                ],
            }
        )
        return
    rows = [
        [each.name, f"in the bucket since {each.uploaded} UTC", byte_size(each.size)]
        for each in complete
    ]
    rows += [[name, "not complete: put it again", ""] for name in incomplete]
    rows += [
        [
            each.name,
            f"{_PUBLISHED}, nodes download it: {each.about}",
            byte_size(each.num_bytes),
        ]
        for each in others
        if each.name not in incomplete
    ]
    output.print_table(["name", "where", "size"], rows, prose=["where"])


def rm(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a data set.")],
    yes: Yes = False,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Remove a data set from the bucket, unless a job trains on it."""
    removal.remove(
        where.find(),
        f"data set {name!r}",
        f"{data_sets.PREFIX}{name}/",
        index_key=data_sets.list_key(name),
        yes=yes,
        as_json=as_json,
    )
