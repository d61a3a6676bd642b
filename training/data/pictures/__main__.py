"""Prepares or verifies a set of pictures on a node: ``python -m training.data.pictures``.

A job can run it (docs/imagenet.md). On a laptop, ``trainctl data prepare`` and ``verify`` do the
same; there, a source in S3 has to be fetched first.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from contract import exits
from contract.errors import InputError
from contract.runs import safe_join
from contract.text import byte_size
from training.data import download
from training.data.pictures.destination import Destination
from training.data.pictures.index import ENCODINGS, FORMS, JPEG, PACKED
from training.data.pictures.prepare import DEFAULT_SIZE, Wish, prepare
from training.data.pictures.verify import verify
from training.system import storage

_THREADS: Final = 16


def fetched(source: str) -> Path:
    """The source on this node: itself, or a copy of what is in S3; files that are here stay.

    Raises:
        InputError: there is nothing, or it cannot be read.
    """
    if not storage.is_s3(source):
        return Path(source)
    root = source.rstrip("/")
    folder = download.cache_dir() / "sources" / hashlib.sha256(root.encode()).hexdigest()[:16]
    try:
        fs = storage.filesystem(root)
        sizes = {key: each["size"] for key, each in fs.find(root, detail=True).items()}
    except Exception as error:  # s3fs lets botocore's many exceptions through
        raise _unreadable(source, error) from None
    if not sizes:
        raise InputError(f"{source} does not exist: give the address of ImageNet's files")
    above = root.removeprefix("s3://").rpartition("/")[0] + "/"

    def fetch(key: str) -> None:
        target = safe_join(folder, key.removeprefix(above), what="key")
        if not target.exists() or target.stat().st_size != sizes[key]:
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(key, str(target))

    _say(f"fetching {byte_size(sum(sizes.values()))} from {source}")
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(fetch, [key for key in sizes if not key.endswith("/")]))
    except Exception as error:
        raise InputError(
            f"{_unreadable(source, error)}. Give the command again, it continues"
        ) from None
    return folder


def _unreadable(source: str, error: Exception) -> InputError:
    return InputError(f"{source} cannot be read: {str(error).rstrip('.') or type(error).__name__}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.data.pictures", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare", help="make a set of ImageNet's download")
    making.add_argument("source", metavar="SRC", help="folder, .tar or s3:// address")
    making.add_argument("--to", required=True, metavar="DST", help="folder or s3:// address")
    making.add_argument("--form", default=PACKED, help=", ".join(FORMS))
    making.add_argument("--size", type=int, default=DEFAULT_SIZE)
    making.add_argument("--encoding", default=JPEG, help=", ".join(ENCODINGS))
    making.add_argument("--processes", type=int, default=0)
    checking = commands.add_parser("verify", help="compare a set with its checksums")
    checking.add_argument("place", metavar="DST")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments(argv)
    try:
        if options.command == "verify":
            verdict = verify(Destination(uri=options.place.rstrip("/")))
            for each in verdict.wrong:
                _say(f"wrong: {each}")
            _say(f"{verdict.index.num_pictures:,} pictures, {len(verdict.wrong):,} wrong")
            return exits.FAILED if verdict.wrong else exits.OK
        wish = Wish(form=options.form, size=options.size, encoding=options.encoding)
        index = prepare(
            fetched(options.source),
            Destination(uri=options.to.rstrip("/")),
            wish,
            processes=options.processes,
            report=_Tenths(),
        )
    except InputError as error:
        _say(f"error: {error}")
        return exits.BAD_INPUT
    except KeyboardInterrupt:
        _say("interrupted; a preparation continues when its command is given again")
        return exits.INTERRUPTED
    for each in index.damaged:
        _say(f"left out: {each}")
    _say(f"{index.num_pictures:,} pictures of {len(index.classes):,} classes in {options.to}")
    return exits.OK


class _Tenths:
    """Prints how far it is, ten times."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        share = f": {10 * (10 * done // total)}% of {total:,} pictures" if total else ""
        if what + share != self._last:
            self._last = what + share
            _say(self._last)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
