"""Files of a data set on this node: a published one by its name, from a folder, an HTTP(S) mirror
or S3.

A folder is used where it is. Anything remote is fetched into the node's cache once, under a file
lock, so that eight workers on a node cost one download; a file appears there whole or not at all.
The cache outlives jobs, and what is in S3 may be replaced in the meantime: a file from there is
fetched again when its ETag has changed.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from contract.errors import InputError, UnreachableError
from contract.runs import safe_join
from store import cache, storage
from training.data import catalog, download
from training.data.download import Report


def is_remote(source: str) -> bool:
    """True for an address that has to be fetched, False for a folder."""
    return source.startswith(("http://", "https://", "s3://"))


def check_way(place: str) -> None:
    """Fail at once if a published data set has to be fetched and cannot be.

    Raises:
        UnreachableError: there is no way to its server.
    """
    if data := catalog.find(place):
        download.check_way(data)


def local_files(source: str, names: Sequence[str], *, report: Report | None = None) -> list[Path]:
    """Return the paths of ``names`` on this node, fetching them first if ``source`` is remote.

    Args:
        source: The name of a published data set, or a folder, ``http(s)://host/path`` or
            ``s3://bucket/prefix`` that holds the files.
        names: File names directly below it.
        report: Called while a published data set is downloaded.

    Raises:
        InputError: The folder or a file is missing or empty, or the mirror does not serve it.
        UnreachableError: the mirror or S3 does not answer.
    """
    if data := catalog.find(source):
        return download.published(data, report=report)
    if is_remote(source):
        return _fetched(source.rstrip("/"), names)
    folder = Path(source)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(
            f"data folder {source} {what}: give the folder that holds {names[0]}, or leave "
            f"--data out to train on the built-in digits; {catalog.by_name(folder.name)}"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        there = f"has no {', '.join(missing)}" if any(folder.iterdir()) else "is empty"
        if len(missing) < len(names) or there == "is empty":
            there += f": it must hold {', '.join(names)}"
        raise InputError(f"data folder {source} {there}")
    return [folder / name for name in names]


def bytes_here(source: str, name: str) -> int:
    """Bytes of a file of a remote source that are in the node's cache; 0 where it is not."""
    file = safe_join(cache.cache_dir() / _folder_name(source), name)
    return file.stat().st_size if file.exists() else 0


def _folder_name(source: str) -> str:
    if catalog.find(source):
        return source
    return hashlib.sha256(source.rstrip("/").encode()).hexdigest()[:16]


def _fetched(source: str, names: Sequence[str]) -> list[Path]:
    folder = cache.cache_dir() / _folder_name(source)
    with cache.locked(folder / ".lock"):
        for name in names:
            url, target = f"{source}/{name}", safe_join(folder, name)
            if not url.startswith("s3://"):
                if not target.exists():
                    _fetch(url, target)
                continue
            mark, found = target.with_name(f".{target.name}.etag"), _etag(url)
            if not target.exists() or not mark.exists() or mark.read_bytes() != found:
                # Removed first and written last: a mark never describes another content.
                mark.unlink(missing_ok=True)
                storage.fetch(url, target)
                storage.write_bytes(str(mark), found)
    return [folder / name for name in names]


def discard(source: str, names: Sequence[str]) -> None:
    """Forget fetched files that turned out to be damaged, so that the next try fetches again."""
    if is_remote(source) or catalog.find(source):
        folder = cache.cache_dir() / _folder_name(source)
        with cache.locked(folder / ".lock"):
            for name in names:
                (folder / name).unlink(missing_ok=True)


def _fetch(url: str, target: Path) -> None:
    """Download ``url`` beside ``target`` and move it into place once it is complete."""
    try:
        with storage.whole_file(target) as part:
            download.download(url, part, resumes=False)
    except ConnectionError as error:
        raise UnreachableError(str(error)) from None


def _etag(url: str) -> bytes:
    """ETag of an object in S3, which changes with its content."""
    with storage.reading(url):
        return str(storage.filesystem(url).info(url)["ETag"]).encode()
