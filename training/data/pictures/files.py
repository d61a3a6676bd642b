"""Bytes of a set's pictures: from a folder, from this node's cache of its shards, or from S3.

Decoder processes read them. What is in S3 is asked for many pictures at a time, until
``shard_cache`` has brought its shard to the disk.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from training.data.pictures.index import Entry
from training.data.pictures.picture import DamagedError
from training.system import storage
from training.system.storage import UnreachableError

#: Shards are kept open; files of trees are not.
_MOST_OPEN: Final = 512

_SHORT: Final = "its file ends before it does"

Content = bytes | memoryview | DamagedError
"""Bytes of a picture, or why there are none."""


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
        self._open: dict[str, int] = {}
        self._buffer = bytearray()
        self._is_in_s3 = storage.is_s3(root)

    def read(self, entries: Sequence[Entry]) -> Iterator[Content]:
        """Bytes of each picture, in their order; each is valid until the next is asked for.

        Raises:
            UnreachableError: the store does not answer.
        """
        paths = [self._path(each) for each in entries]
        fetched = self._fetched(
            [each for each, path in zip(entries, paths, strict=True) if path is None]
        )
        for each, path in zip(entries, paths, strict=True):
            yield next(fetched) if path is None else self._local(path, each)

    def _path(self, entry: Entry) -> str | None:
        """Where a picture is on this node; None: in S3."""
        if not self._is_in_s3:
            return f"{self._root}/{entry.file}"  # its line was checked to stay below
        cached = self._cached.get(entry.file)
        if cached is None or (str(cached) not in self._open and not cached.exists()):
            return None
        return str(cached)

    def _local(self, path: str, entry: Entry) -> Content:
        try:
            if not path.endswith(".tar"):
                with open(path, "rb") as file:
                    whole = file.read()
                return whole if entry.size in (-1, len(whole)) else DamagedError(_SHORT)
            # Always the same memory: fresh pages would take longer than reading.
            if len(self._buffer) < entry.size:
                self._buffer = bytearray(entry.size)
            content = memoryview(self._buffer)[: entry.size]
            num = os.preadv(self._handle(path), [content], entry.offset)
        except OSError as error:
            return DamagedError(f"it cannot be read: {error.strerror or error}")
        return content if num == entry.size else DamagedError(_SHORT)

    def _handle(self, path: str) -> int:
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def _fetched(self, entries: Sequence[Entry]) -> Iterator[Content]:
        if not entries:
            return
        paths = [storage.join(self._root, each.file) for each in entries]
        starts = [each.offset if each.size >= 0 else None for each in entries]
        ends = [each.offset + each.size if each.size >= 0 else None for each in entries]
        # Only now: its modules take longer to import than all others, and a host that has kept the
        # shards of another job asks for nothing.
        s3: Any = storage.filesystem(self._root)
        answers = s3.cat_ranges(paths, starts, ends, on_error="return")
        for answer, each in zip(answers, entries, strict=True):
            yield _checked(answer, each)


def _checked(answer: bytes | Exception, entry: Entry) -> Content:
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
