"""Shards of a set in S3, on this node's disk: fetched once, while training has already begun.

    python -m training.data.pictures.shard_cache    # of a reader of training pictures; ends with it

A shard's file is called by its checksum, so what is there is right, whatever happens in the bucket.
One process per node fetches at a time; those of other ranks wait, and take over when it ends.
Decoders read a shard from the disk as soon as it is there, and ask S3 for pictures until then.
Imports no torch.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from contract.runs import safe_join
from contract.text import byte_size
from training.data import download, sources
from training.data.pictures import library
from training.data.pictures.destination import sha256_of
from training.data.pictures.index import StoredFile
from training.data.pictures.library import PictureSet
from training.system import storage

_FOLDER: Final = "pictures"
_THREADS: Final = 8
#: Of the disk, left to others.
_SPARE_BYTES: Final = 2 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    name: str
    stored: StoredFile
    path: Path


def cached_paths(found: PictureSet) -> dict[str, Path]:
    """Where each shard of a set in S3 is, or will be, on this node; empty for any other set."""
    return {each.name: each.path for each in _shards(found)}


class Fetcher:
    """Fetches the shards of a set in the background, until it is closed or all of them are here."""

    def __init__(self, found: PictureSet) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if _missing(found):
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "training.data.pictures.shard_cache", found.root, found.fingerprint),
                ],
                stdin=subprocess.PIPE,  # whose end tells it of ours
                stdout=subprocess.DEVNULL,
                env=child_environment(),
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def child_environment() -> dict[str, str]:
    """Of a Python that imports this project, from wherever it is started, and has a core."""
    project = str(Path(__file__).resolve().parents[3])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [project, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def fetch(root: str, fingerprint: str) -> None:
    """Fetch what is missing. What cannot be fetched, or has no room, stays in S3 with a note.

    Args:
        root: of the set.
        fingerprint: of the set.

    Raises:
        InputError: the cache cannot be written, or the set cannot be opened.
    """
    with sources.locked(_folder() / f".{fingerprint}.lock"):
        # Not before it is this process's turn: of those that wait, each would hold the index.
        found = library.open_set(root)
        missing = _missing(found)
        needed = sum(each.stored.size for each in missing) + _SPARE_BYTES
        if (free := shutil.disk_usage(_folder()).free) < needed:
            _note(
                f"{found.root} is not kept on this node: {_folder()} has {byte_size(free)} free, "
                f"{byte_size(needed)} are needed; pictures are read from S3 in every epoch"
            )
            return
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(partial(_fetch_one, found.root), missing))


def _fetch_one(root: str, shard: _Shard) -> None:
    part = shard.path.with_name(f".{shard.path.name}.part")
    address = storage.join(root, shard.name)
    try:
        storage.filesystem(root).get_file(address, str(part))
        if sha256_of(part) != shard.stored.sha256:
            _note(f"{address} is not what was prepared: trainctl data verify {root} tells more")
            return
        part.replace(shard.path)
    except Exception as error:  # s3fs lets botocore's many exceptions through
        _note(f"{address} could not be fetched: {str(error) or type(error).__name__}")
    finally:
        part.unlink(missing_ok=True)


def _shards(found: PictureSet) -> list[_Shard]:
    if not storage.is_s3(found.root):
        return []
    files: Mapping[str, StoredFile] = found.index.files
    return [
        _Shard(
            name=name, stored=each, path=safe_join(_folder(), f"{each.sha256}.tar", what="shard")
        )
        for name, each in files.items()
        if name.endswith(".tar")
    ]


def _missing(found: PictureSet) -> list[_Shard]:
    return [each for each in _shards(found) if not each.path.exists()]


def _folder() -> Path:
    return download.cache_dir() / _FOLDER


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(root: str, fingerprint: str) -> int:
    """Fetch the set that is there, in no hurry: decoders come first."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(5)
    fetch(root, fingerprint)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
