"""Download of a run's files: those of its nodes, what Ray saved, and the model of a recipe.

Any job may write into the bucket, so the names in it become paths only through ``safe_join``, and
all of them are checked before the first file is written.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract import files, runs
from contract.errors import InputError
from contract.files import FileList, Mark, SavedFile, sha256_of
from contract.runs import safe_join
from contract.text import byte_size, counted
from trainctl.aws.deployment_bucket import DeploymentBucket
from trainctl.aws.errors import CliError, UsageError
from trainctl.jobs.code_folder import DOWNLOADED


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One file to fetch."""

    source: str
    """``node-0``, ``ray`` or ``model``."""
    name: str
    """Relative path below the source's folder."""
    size: int
    """Bytes."""
    target: Path
    key: str = ""
    """Key of what Ray or a recipe saved; empty for a node's file."""
    file: SavedFile | None = None
    """Its entry in the node's list; None for what Ray or a recipe saved."""


def find(
    bucket: DeploymentBucket,
    run: str,
    to: Path,
    *,
    pattern: str = "*",
    node: int | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> list[Wanted]:
    """Find a run's files; links are left out.

    Args:
        to: folder under which they will lie, by source: ``node-0/work/last.pt``.
        pattern: of the shell, for the name or path of a file or folder: ``*.pt``, ``work/logs``.
        node: only of this one.
        note: called with how many links are left out, in words, where there are any.

    Raises:
        UsageError: there is none.
        InputError: a name in the bucket leads out of ``to``.
    """
    runs.check_run_name(run)
    prefix = runs.output_prefix(run)
    found: list[Wanted] = []
    links: list[str] = []
    for number, content in sorted(_lists(bucket, prefix).items()):
        source = f"node-{number}"
        for file in content.files if node in (None, number) else ():
            name, size = file.name, file.size
            if not file.link:
                target = safe_join(to / source, name, what="file of the run")
                found.append(Wanted(source=source, name=name, size=size, target=target, file=file))
            elif files.matches(name, [pattern]):
                links.append(f"{source}/{name} -> {file.link}")
    of_job = {"ray": runs.ray_prefix(run), "model": f"{runs.run_prefix(run)}{runs.MODEL_DIR}/"}
    for source, folder in of_job.items() if node is None else ():
        for target, each in bucket.placed(folder, to / source).items():
            key, name = each.key, each.key.removeprefix(folder)
            found.append(Wanted(source=source, name=name, key=key, size=each.size, target=target))
    if not found:
        where = f"node {node} of run {run!r}" if node is not None else f"run {run!r}"
        raise UsageError(
            f"{where} has no files of a program and no model in {bucket.uri}: trainctl runs ls "
            f"lists the runs; a model in parts: trainctl export {run} --to DIR"
        )
    if links:
        note(f"{counted(len(links), 'link')} left out, the first is {links[0]}")
    matching = [each for each in found if files.matches(each.name, [pattern])]
    if not matching:
        raise UsageError(
            f"no file of run {run!r} matches {pattern!r}: there are {len(found)}, the first is "
            f"{found[0].name!r}"
        )
    return matching


def _lists(bucket: DeploymentBucket, prefix: str) -> dict[int, FileList]:
    """The newest list of each node: of the newest start that has one."""
    keys = [key.removeprefix(prefix) for key in bucket.keys(prefix + files.STARTS)]
    newest: dict[int, str] = {}
    for start in reversed(files.start_numbers(keys)):
        stored = bucket.keys(f"{prefix}{files.rounds_prefix(start)}")
        marks = files.newest_by_node(Mark.of(key.removeprefix(prefix) for key in stored))
        for number, mark in marks.items():
            newest.setdefault(number, (bucket.get(prefix + mark.key) or b"").decode())
        if (base := bucket.get(prefix + files.base_key(start))) is not None:
            newest = files.base_from_json(base) | newest
            break
    contents = {number: bucket.get(prefix + key) for number, key in newest.items()}
    # One that is missing was removed by the job, which has written a newer one.
    return {number: FileList.from_json(each) for number, each in contents.items() if each}


def _fetch_one(bucket: DeploymentBucket, run: str, wanted: Wanted) -> None:
    target = wanted.target
    folder = target.parents[wanted.name.count("/")]
    if not folder.exists():  # what was there may be the user's own
        folder.mkdir(parents=True)
        (folder / DOWNLOADED).touch()
        (folder / ".gitignore").write_text("*\n")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Again: what lies here may have become a link since the names were checked.
    safe_join(target.parent, target.name)
    part = target.with_name(f".{target.name[:200]}.part")
    try:
        if wanted.file is None:
            bucket.download(wanted.key, part)
        else:
            with part.open("wb") as content:
                for key in wanted.file.pieces:
                    piece = bucket.get(runs.output_prefix(run) + key)
                    if piece is None or hashlib.sha256(piece).hexdigest() != sha256_of(key):
                        raise CliError(
                            f"{wanted.name} of {wanted.source} has changed while it was fetched: "
                            "the job is running; run the command again"
                        )
                    content.write(piece)
            part.chmod(wanted.file.mode & 0o777 | 0o600)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def download(
    bucket: DeploymentBucket,
    run: str,
    to: Path,
    *,
    pattern: str = "*",
    node: int | None = None,
    report: Callable[[str], None] = lambda _text: None,
    note: Callable[[str], None] = lambda _text: None,
) -> list[Wanted]:
    """Find and fetch files; return what was fetched. What an earlier download left is replaced.

    Args:
        report: called with the progress, in words.
        note: as for ``find``.

    Raises:
        UsageError: there is no such file, or one of the user's own is in its place.
        CliError: a file differs from its node's list: its job is running, and has changed it.
        InputError: a name in the bucket leads out of ``to``, or a file cannot be written.
    """
    try:
        is_usable = to.is_dir() or not to.exists()
    except OSError as error:
        raise InputError(f"{to}: {error.strerror or error}: give another folder") from error
    if not is_usable:
        raise InputError(f"{to} is not a folder: give another one")
    wanted = find(bucket, run, to, pattern=pattern, node=node, note=note)
    for each in wanted:
        mark = each.target.parents[each.name.count("/")] / DOWNLOADED
        if each.target.is_file() and not mark.exists():
            raise UsageError(
                f"{each.target} is there, and trainctl download did not make its folder: give --to "
                "another folder"
            )
    total = sum(each.size for each in wanted)

    def say(files: int, size: int) -> None:
        num_files = counted(len(wanted), "file")
        report(f"{files} of {num_files}, {byte_size(size)} of {byte_size(total)}")

    done = 0
    for number, each in enumerate(wanted):
        say(number, done)
        try:
            _fetch_one(bucket, run, each)
        except OSError as error:
            raise InputError(
                f"cannot write {each.target}: {error.strerror or error}. Remove what is in its "
                "way, or give another folder"
            ) from error
        done += each.size
    say(len(wanted), total)
    return wanted
