"""Copies of files in S3 on this node's disk, made before they are read.

Files that were fetched stay for the next job on the host. One process of a node fetches at a time;
the others wait, and find everything there.
"""

import hashlib
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from contract.errors import InputError
from contract.runs import safe_join
from contract.text import byte_size
from store import cache, storage
from training.data.pictures.index import StoredFile
from training.data.pictures.library import PictureSet

_THREADS: Final = 16
#: Of the disk, left to others.
_SPARE_BYTES: Final = 2 * 2**30


def on_disk(found: PictureSet) -> PictureSet:
    """The set, or its copy on this node's disk where it is in S3.

    Raises:
        InputError, UnreachableError: see ``fetch``.
    """
    if not storage.is_s3(found.root):
        return found
    files = {name: each for name, each in found.index.files.items() if name.endswith(".tar")}
    if not files:
        entries = (entry for split in (found.train, found.val) for entry in split)
        files = {entry.file: StoredFile(size=entry.size, sha256="") for entry in entries}
    # Named after all lines of the tables: another set, or another state of it, has another folder.
    name = hashlib.sha256(found.train.lines + found.val.lines).hexdigest()[:32]
    folder = cache.cache_dir() / "pictures" / name
    fetch(found.root, files, folder)
    return replace(found, root=str(folder))


def fetch(root: str, files: Mapping[str, StoredFile], folder: Path) -> None:
    """Bring the files below an address in S3 into a folder; those that are there stay.

    Args:
        files: their names; an empty checksum is not compared.

    Raises:
        InputError: the disk has no room for them, a file is missing or is not what was prepared,
            or the folder cannot be written.
        UnreachableError: S3 does not answer.
    """
    paths = {name: safe_join(folder, name, what="file") for name in files}

    def fetch_one(name: str) -> None:
        address = storage.join(root, name)

        def check(part: Path) -> None:
            expected = files[name].sha256
            if expected and storage.sha256(str(part)) != expected:
                raise InputError(f"{address} is not what was prepared: prepare the set again")

        storage.fetch(address, paths[name], check=check)

    with cache.locked(folder / ".lock"):
        missing = [
            name
            for name, path in paths.items()
            if not path.exists() or path.stat().st_size != files[name].size
        ]
        if not missing:
            return
        num_bytes = sum(files[name].size for name in missing)
        free = shutil.disk_usage(folder).free
        if free < num_bytes + _SPARE_BYTES:
            raise InputError(
                f"{root} does not fit on this node's disk: {folder} has {byte_size(free)} free, "
                f"{byte_size(num_bytes + _SPARE_BYTES)} are needed. Give the hosts a larger disk, "
                f"set {cache.CACHE_VARIABLE} to a folder with room, or pack the pictures with a "
                "smaller --size"
            )
        print(f"fetching {byte_size(num_bytes)} from {root}", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(fetch_one, missing))
