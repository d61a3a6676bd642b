"""Prepare a set of pictures: ``python -m training.data.pictures SRC --to DST``.

On a laptop, or in a job (docs/imagenet.md).
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from contract import exits, faults
from contract.errors import InputError
from store import cache, storage
from training.data.pictures import mirror
from training.data.pictures.destination import Destination
from training.data.pictures.index import ENCODINGS, FORMS, JPEG, PACKED, StoredFile
from training.data.pictures.prepare import DEFAULT_SIZE, Wish, prepare, say


def fetched(source: str) -> Path:
    """The source on this node: itself, or a copy of what is in S3; files that are here stay.

    Raises:
        InputError: there is nothing, or it does not fit.
        UnreachableError: S3 does not answer.
    """
    if not storage.is_s3(source):
        return Path(source)
    root = source.rstrip("/")
    with storage.reading(root):
        found = storage.find(root)
    # Names begin with the last part of the address, because the source may be a single archive.
    above, _, last = root.rpartition("/")
    files = {
        last if f"s3://{name}" == root else f"{last}/{name}": StoredFile(size=size, sha256="")
        for name, size in found.items()
    }
    if not files:
        raise InputError(f"{source} does not exist: give the address of ImageNet's files")
    folder = cache.cache_dir() / "sources" / hashlib.sha256(root.encode()).hexdigest()[:16]
    mirror.fetch(above, files, folder)
    return folder


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.data.pictures", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("source", metavar="SRC", help="folder, .tar or s3:// address")
    parser.add_argument("--to", required=True, metavar="DST", help="folder or s3:// address")
    parser.add_argument("--form", default=PACKED, help=", ".join(FORMS))
    parser.add_argument("--size", type=int, default=DEFAULT_SIZE)
    parser.add_argument("--encoding", default=JPEG, help=", ".join(ENCODINGS))
    parser.add_argument("--processes", type=int, default=0)
    return parser.parse_args(argv)


@faults.command(interrupted="interrupted; a preparation continues when its command is given again")
def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    wish = Wish(form=options.form, size=options.size, encoding=options.encoding)
    index = prepare(
        fetched(options.source),
        Destination(uri=options.to.rstrip("/")),
        wish,
        processes=options.processes,
    )
    for each in index.damaged:
        say(f"left out: {each}")
    say(f"{index.num_pictures:,} pictures of {len(index.classes):,} classes in {options.to}")
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
