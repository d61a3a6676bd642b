"""Bytes of a set's pictures: from a folder, from this node's cache of its shards, or from S3.

Decoder processes read them. What is in S3 is asked for many pictures at a time. While
``shard_cache`` fetches whole shards, each that is there is read from the disk instead.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from training import storage
from training.data.pictures.index import Entry
from training.data.pictures.picture import DamagedError

#: Shards are kept open; trees are not.
_MOST_OPEN: Final = 512

_SHORT: Final = "its file ends before it does"


class UnreachableError(Exception):
    """Where a set lies does not answer; the message has the store's words."""


class Files:
    """Reads pictures of one set."""

    def __init__(self, root: str, *, cached: Mapping[str, Path]) -> None:
        """
        Args:
            root: of the set.
            cached: shard -> where it will be on this node once it is fetched; for S3.
        """
        self._root = root
        self._cached = cached
        self._open: dict[Path, int] = {}
        self._s3: Any = storage.filesystem(root) if storage.is_s3(root) else None

    def read(self, entries: Sequence[Entry]) -> list[bytes | DamagedError]:
        """Bytes of each picture, or why there are none.

        Raises:
            UnreachableError: the store does not answer.
        """
        found: list[bytes | DamagedError | None] = [self._local(each) for each in entries]
        missing = [place for place, each in enumerate(found) if each is None]
        if missing:
            answers = self._fetched([entries[place] for place in missing])
            for place, answer in zip(missing, answers, strict=True):
                found[place] = answer
        return [each for each in found if each is not None]

    def _local(self, entry: Entry) -> bytes | DamagedError | None:
        """None: it has to be fetched."""
        try:
            if self._s3 is None:
                path = Path(self._root, entry.file)  # its line was checked to stay below
                if entry.size < 0:
                    return path.read_bytes()
            else:
                cached = self._cached.get(entry.file)
                if cached is None or (cached not in self._open and not cached.exists()):
                    return None
                path = cached
            content = os.pread(self._handle(path), entry.size, entry.offset)
        except OSError as error:
            return DamagedError(f"it cannot be read: {error.strerror or error}")
        return content if len(content) == entry.size else DamagedError(_SHORT)

    def _handle(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def _fetched(self, entries: Sequence[Entry]) -> list[bytes | DamagedError]:
        paths = [storage.join(self._root, each.file) for each in entries]
        starts = [each.offset if each.size >= 0 else None for each in entries]
        ends = [each.offset + each.size if each.size >= 0 else None for each in entries]
        answers = self._s3.cat_ranges(paths, starts, ends, on_error="return")
        return [_checked(answer, each) for answer, each in zip(answers, entries, strict=True)]

    def close(self) -> None:
        for handle in self._open.values():
            with suppress(OSError):
                os.close(handle)
        self._open.clear()


def _checked(answer: bytes | Exception, entry: Entry) -> bytes | DamagedError:
    """
    Raises:
        UnreachableError: the store does not answer; that says nothing about the picture.
    """
    if isinstance(answer, FileNotFoundError):
        return DamagedError("there is no such object")
    if isinstance(answer, Exception):
        why = str(answer) or type(answer).__name__
        raise UnreachableError(f"{entry.file} cannot be fetched: {why}")
    return answer if entry.size in (-1, len(answer)) else DamagedError(_SHORT)
