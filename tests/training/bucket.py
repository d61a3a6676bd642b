"""A bucket in memory under ``training.system.storage``, whose requests can crash, fail or stall."""

import io
import itertools
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
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
    """What ``storage`` and torch ask of s3fs; objects by key."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, bytes] = {}
        self._tags: dict[str, str] = {}
        self.written: dict[str, float] = {}
        """When each object was, in Unix time."""
        self.clock = clock
        self._number = itertools.count()
        self.is_quick = False
        """Whether the last request was to be given up soon."""
        self.num_writes = 0
        self.crash_at: int | None = None
        """The write before which the process is gone, counted from 1."""

    def write(self, key: str, effect: Callable[[], None], *, removes: bool) -> None:
        """Make a request that changes ``key``."""
        del key, removes
        self.num_writes += 1
        if self.crash_at is not None and self.num_writes >= self.crash_at:
            raise CrashError
        effect()

    def read(self) -> None:
        """Make a request that changes nothing."""

    def put(
        self, key: str, content: bytes | None, *, is_new: bool = False, tag: str | None = None
    ) -> None:
        """Change an object; None removes it. With ``tag``, only one that has it."""

        def effect() -> None:
            if content is None:
                self.objects.pop(key, None)
                return
            if is_new and key in self.objects:
                raise OSError("it exists") from _ExistsError()
            if tag and self._tags[key] != tag:
                raise OSError("it has changed") from _ExistsError()
            self.objects[key], self.written[key] = content, self.clock()
            self._tags[key] = str(next(self._number))

        self.write(key, effect, removes=content is None)

    def exists(self, uri: str) -> bool:
        self.read()
        return _key(uri) in self.objects or any(self._below(uri))

    def cat_file(self, uri: str) -> bytes:
        self.read()
        if _key(uri) not in self.objects:
            raise FileNotFoundError(uri)
        return self.objects[_key(uri)]

    def call_s3(self, method: str, **place: str) -> dict[str, Any]:
        assert method == "head_object"
        self.read()
        key, now = f"{place['Bucket']}/{place['Key']}", self.clock()
        if key not in self.objects:
            raise FileNotFoundError(key)
        written = self.written[key]
        headers = {"date": format_datetime(datetime.fromtimestamp(now, UTC), usegmt=True)}
        found = datetime.fromtimestamp(int(written), UTC)
        return {
            "LastModified": found,
            "ETag": self._tags[key],
            "ResponseMetadata": {"HTTPHeaders": headers},
        }

    def pipe_file(
        self,
        uri: str,
        content: bytes,
        mode: str = "overwrite",
        chunksize: int = 0,
        IfMatch: str | None = None,  # noqa: N803
    ) -> None:
        del chunksize
        self.put(_key(uri), bytes(content), is_new=mode == "create", tag=IfMatch)

    def ls(self, uri: str, *, detail: bool) -> list[dict[str, Any]]:
        assert detail
        self.read()
        found: dict[str, Any] = {}
        for key in self._below(uri):
            name, slash, _ = key.removeprefix(f"{_key(uri)}/").partition("/")
            found[f"{_key(uri)}/{name}"] = (
                {"type": "directory", "size": 0}
                if slash
                else {"type": "file", "size": len(self.objects[key])}
            )
        if not found:
            raise FileNotFoundError(uri)
        return [{"name": name, **entry} for name, entry in found.items()]

    def find(self, uri: str) -> list[str]:
        self.read()
        return sorted(self._below(uri))

    def open(self, uri: str, mode: str) -> io.BytesIO:
        return io.BytesIO(self.cat_file(uri)) if mode == "rb" else _Upload(self, _key(uri))

    def makedirs(self, uri: str, *, exist_ok: bool) -> None:
        """Nothing: S3 has no folders."""

    def rename(self, uri: str, target: str) -> None:
        self.cp_file(uri, target)
        self.rm_file(uri)

    def put_file(self, local: str, uri: str, callback: object = None) -> None:
        del callback
        self.put(_key(uri), Path(local).read_bytes())

    def get_file(self, uri: str, local: str) -> None:
        Path(local).write_bytes(self.cat_file(uri))

    def cp_file(self, uri: str, target: str) -> None:
        self.put(_key(target), self.cat_file(uri))

    def rm_file(self, uri: str) -> None:
        self.put(_key(uri), None)

    def rm(self, uri: str, *, recursive: bool = False) -> None:
        for key in [*self._below(uri)] if recursive else [_key(uri)]:
            self.put(key, None)  # one by one: a batch may break off

    def _below(self, uri: str) -> Iterator[str]:
        return (key for key in [*self.objects] if key.startswith(f"{_key(uri)}/"))


class _Upload(io.BytesIO):
    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket, self._at = bucket, key

    def close(self) -> None:
        content = b"" if self.closed else self.getvalue()
        if not self.closed:
            super().close()
            self._bucket.put(self._at, content)


def _key(uri: str) -> str:
    return uri.removeprefix("s3://").rstrip("/")


def install(monkeypatch: pytest.MonkeyPatch, bucket: Bucket | None = None) -> Bucket:
    """The bucket that every ``s3://`` address of the test is in."""
    made, on_disk = bucket or Bucket(), storage.filesystem

    def filesystem(uri: str, *, quick: bool = False) -> Any:
        made.is_quick = quick
        return made if storage.is_s3(uri) else on_disk(uri, quick=quick)

    monkeypatch.setattr(storage, "filesystem", filesystem)
    return made
