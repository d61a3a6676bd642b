"""What a run's program wrote, fetched from the bucket: its nodes' files, and what Ray saved.

Any job may write into the bucket, so the names in it become paths only through ``safe_join``, and
all of them are checked before the first file is written.
"""

import fnmatch
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract import runs
from contract.errors import InputError
from contract.runs import MANIFEST, Manifest, SavedFile, safe_join
from trainctl.aws.clients import code_of
from trainctl.aws.errors import CliError, UsageError
from trainctl.aws.files import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One file to fetch."""

    source: str
    """``node-0``, or ``ray``."""
    name: str
    """Relative path below the source's folder."""
    key: str
    size: int
    """Bytes."""
    target: Path
    file: SavedFile | None = None
    """What the node's list has of it; None for what Ray saved."""


def find(
    bucket: Bucket,
    run: str,
    to: Path,
    *,
    pattern: str = "*",
    node: int | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> list[Wanted]:
    """What there is of a run's files; links are left out.

    Args:
        to: folder under which they will lie, by source: ``node-0/work/last.pt``.
        pattern: of the shell, for a file's name or its path: ``*.pt``, ``work/logs/*``.
        node: only of this one.
        note: called with how many links are left out, in words, where there are any.

    Raises:
        UsageError: there is none.
        InputError: a name in the bucket leads out of ``to``.
    """
    runs.check_run_name(run)
    prefix = runs.output_prefix(run)
    named = [runs.node_of(folder) for folder in bucket.listed(prefix)[1]]
    found: list[Wanted] = []
    links: list[str] = []
    for number in sorted(each for each in named if each is not None):
        if node in (None, number):
            manifest = _manifest(bucket, run, number)
            found += _of_node(manifest, run, number, to)
            links += [
                f"node-{number}/{each.name} -> {each.link}"
                for each in manifest.files
                if each.link and _matches(each.name, pattern)
            ]
    if node is None:
        of_ray = runs.ray_prefix(run)
        for key, size in bucket.sizes(of_ray).items():
            name = key.removeprefix(of_ray)
            if name and not name.endswith("/"):
                target = safe_join(to / "ray", name, what="object of the run")
                found.append(Wanted(source="ray", name=name, key=key, size=size, target=target))
    if not found:
        where = f"node {node} of run {run!r}" if node is not None else f"run {run!r}"
        raise UsageError(
            f"{where} has no files of a program in {bucket.uri}/{prefix}: trainctl ls lists the "
            f"runs; a recipe's model: aws s3 cp --recursive {bucket.run(run).model}/ DIR"
        )
    if links:
        note(f"{len(links)} links are left out, the first is {links[0]}")
    matching = [each for each in found if _matches(each.name, pattern)]
    if not matching:
        raise UsageError(
            f"none of the {len(found)} files of run {run!r} matches {pattern!r}: the first is "
            f"{found[0].name!r}"
        )
    return matching


def _matches(name: str, pattern: str) -> bool:
    inner = name.partition("/")[2]  # without work/ or output/
    texts = (name, inner, name.rpartition("/")[2])
    return any(fnmatch.fnmatchcase(text, pattern) for text in texts)


def _manifest(bucket: Bucket, run: str, number: int) -> Manifest:
    content = bucket.read(runs.output_prefix(run, number) + MANIFEST)
    return Manifest(generation=0, writer="") if content is None else Manifest.from_json(content)


def _of_node(manifest: Manifest, run: str, number: int, to: Path) -> list[Wanted]:
    prefix = runs.output_prefix(run, number)
    folder = to / f"node-{number}"
    return [
        Wanted(
            source=f"node-{number}",
            name=file.name,
            key=prefix + file.object,
            size=file.size,
            target=safe_join(folder, file.name, what="file of the run"),
            file=file,
        )
        for file in manifest.files
        if not file.link
    ]


def fetch(
    bucket: Bucket, wanted: list[Wanted], report: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Fetch files; what lies there already is replaced.

    Args:
        report: called before each file with the numbers of files and bytes that have been fetched.

    Raises:
        CliError: a file differs from its node's list: its job is running, and has changed it.
        InputError: a file cannot be written.
    """
    done = 0
    for number, each in enumerate(wanted):
        report(number, done)
        try:
            _fetch_one(bucket, each)
        except OSError as error:
            raise InputError(
                f"cannot write {each.target}: {error.strerror or error}. Remove what is in its "
                "way, or give another folder"
            ) from error
        done += each.size
    report(len(wanted), done)


def _fetch_one(bucket: Bucket, wanted: Wanted) -> None:
    from botocore.exceptions import ClientError

    target = wanted.target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Again: what lies here may have become a link since the names were checked.
    safe_join(target.parent, target.name)
    part = target.with_name(f".{target.name[:200]}.part")
    try:
        try:
            bucket.download(wanted.key, part)
        except ClientError as error:
            if code_of(error) not in ("NoSuchKey", "404") or wanted.file is None:
                raise
            raise _has_changed(wanted) from None
        if wanted.file is not None:
            _check(part, wanted)
            part.chmod(wanted.file.mode & 0o777 | 0o600)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _check(part: Path, wanted: Wanted) -> None:
    with part.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if wanted.file is not None and found != wanted.file.sha256:
        raise _has_changed(wanted)


def _has_changed(wanted: Wanted) -> CliError:
    return CliError(
        f"{wanted.name} of {wanted.source} has changed while it was fetched: the job is "
        "running; give the command again"
    )


def download(
    bucket: Bucket,
    run: str,
    to: Path,
    *,
    pattern: str = "*",
    node: int | None = None,
    report: Callable[[str], None] = lambda _text: None,
    note: Callable[[str], None] = lambda _text: None,
) -> list[Wanted]:
    """Find and fetch; return what was fetched.

    Args:
        report: called with how far it is, in words.
        note: as for ``find``.

    Raises:
        as ``find`` and ``fetch``.
    """
    try:
        is_usable = to.is_dir() or not to.exists()
    except OSError as error:
        raise InputError(f"{to}: {error.strerror or error}: give another folder") from error
    if not is_usable:
        raise InputError(f"{to} is no folder: give another one")
    wanted = find(bucket, run, to, pattern=pattern, node=node, note=note)
    total = sum(each.size for each in wanted)

    def say(files: int, size: int) -> None:
        report(f"{files} of {len(wanted)} files, {_mib(size)} of {_mib(total)} MiB")

    fetch(bucket, wanted, say)
    return wanted


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
