"""A bucket in memory under ``training.system.storage``, whose writes can crash, fail or stall."""

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from training.system import storage

RUN = "s3://bucket/runs/r"
"""Address of a run in it."""


class CrashError(BaseException):
    """The process is gone."""


class _ExistsError(Exception):
    def __init__(self) -> None:
        self.response = {"Error": {"Code": "PreconditionFailed"}}


class Bucket:
    """What ``storage`` asks of s3fs; objects by key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.num_writes = 0
        self.crash_at: int | None = None
        """The write before which the process is gone, counted from 1."""
        self.share_failing = 0.0
        """Of the writes, chosen by ``random``."""
        self.random = random.Random(0)
        self.before_write: Callable[[int], None] = lambda _number: None
        """Called with the number of each write."""

    def _write(self) -> None:
        self.num_writes += 1
        if self.crash_at is not None and self.num_writes >= self.crash_at:
            raise CrashError
        if self.random.random() < self.share_failing:
            raise OSError(errno.EBUSY, "Please reduce your request rate.")
        self.before_write(self.num_writes)

    def exists(self, uri: str) -> bool:
        return _key(uri) in self.objects or any(self._below(uri))

    def cat_file(self, uri: str) -> bytes:
        if _key(uri) not in self.objects:
            raise FileNotFoundError(uri)
        return self.objects[_key(uri)]

    def pipe_file(self, uri: str, content: bytes, mode: str = "overwrite") -> None:
        self._write()
        if mode == "create" and _key(uri) in self.objects:
            raise OSError("it exists") from _ExistsError()
        self.objects[_key(uri)] = bytes(content)

    def ls(self, uri: str, *, detail: bool) -> list[dict[str, Any]]:
        assert detail
        found = {}
        for key in self._below(uri):
            name, slash, _ = key.removeprefix(f"{_key(uri)}/").partition("/")
            found[f"{_key(uri)}/{name}"] = "directory" if slash else "file"
        if not found:
            raise FileNotFoundError(uri)
        return [{"name": name, "type": kind} for name, kind in found.items()]

    def find(self, uri: str) -> list[str]:
        return sorted(self._below(uri))

    def put_file(self, local: str, uri: str, callback: object = None) -> None:
        del callback
        self._write()
        self.objects[_key(uri)] = Path(local).read_bytes()

    def get_file(self, uri: str, local: str) -> None:
        Path(local).write_bytes(self.cat_file(uri))

    def cp_file(self, uri: str, target: str) -> None:
        self._write()
        self.objects[_key(target)] = self.cat_file(uri)

    def rm_file(self, uri: str) -> None:
        self._write()
        self.objects.pop(_key(uri), None)

    def rm(self, uri: str, *, recursive: bool) -> None:
        assert recursive
        for key in [*self._below(uri)]:  # one by one: a batch may break off
            self._write()
            self.objects.pop(key)

    def _below(self, uri: str) -> Iterator[str]:
        return (key for key in self.objects if key.startswith(f"{_key(uri)}/"))


def _key(uri: str) -> str:
    return uri.removeprefix("s3://").rstrip("/")


def install(monkeypatch: pytest.MonkeyPatch, bucket: Bucket | None = None) -> Bucket:
    """The bucket that every ``s3://`` address of the test is in."""
    made, on_disk = bucket or Bucket(), storage.filesystem

    def filesystem(uri: str, *, quick: bool = False) -> Any:
        return made if storage.is_s3(uri) else on_disk(uri, quick=quick)

    monkeypatch.setattr(storage, "filesystem", filesystem)
    return made
