"""S3 in memory under ``store.storage``, as s3fs shows it; its process can crash."""

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from store import storage
from tests.aws.s3 import NAME, S3, WRITES, Effect

RUN = f"s3://{NAME}/runs/r"
"""Address of a run in it."""


class CrashError(BaseException):
    """The process is gone."""


class Bucket(S3):
    """What ``storage`` and torch ask of s3fs."""

    page = 1000

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self.is_quick = False
        """Whether the last request was to be given up soon."""
        self.num_writes = 0
        self.crash_at: int | None = None
        """The write before which the process is gone, counted from 1."""

    def request(self, operation: str, key: str, effect: Effect, content: bytes = b"") -> Any:
        self.num_writes += operation in WRITES
        if operation in WRITES and self.num_writes >= (self.crash_at or float("inf")):
            raise CrashError
        try:
            return super().request(operation, key, effect, content)
        except ClientError as error:
            raise translate_boto_error(error) from error

    def exists(self, uri: str) -> bool:
        key = _key(uri)
        there = lambda: key in self.objects or any(self._below(uri))  # noqa: E731
        return bool(self.request("head_object", key, there))

    def cat_file(self, uri: str) -> bytes:
        return bytes(self.get_object(Bucket=NAME, Key=_key(uri))["Body"].read())

    def call_s3(self, method: str, **place: str) -> Any:
        return getattr(self, method)(**place)

    def pipe_file(
        self,
        uri: str,
        content: bytes,
        mode: str = "overwrite",
        chunksize: int = 0,
        **condition: str,
    ) -> None:
        del chunksize
        condition |= {"IfNoneMatch": "*"} if mode == "create" else {}
        self.put_object(Bucket=NAME, Key=_key(uri), Body=content, **condition)

    def ls(self, uri: str, *, detail: bool) -> list[dict[str, Any]]:
        assert detail
        found = self.list_objects_v2(Bucket=NAME, Prefix=f"{_key(uri)}/", Delimiter="/")
        if not found:
            raise FileNotFoundError(uri)
        folders = [each["Prefix"] for each in found.get("CommonPrefixes", [])]
        kinds = [{"name": f"{NAME}/{each}", "type": "directory", "size": 0} for each in folders]
        return kinds + [
            {"name": f"{NAME}/{each['Key']}", "type": "file", "size": each["Size"]}
            for each in found.get("Contents", [])
        ]

    def find(self, uri: str, *, detail: bool) -> dict[str, dict[str, int]]:
        assert detail
        found = self.request("list_objects_v2", _key(uri), lambda: sorted(self._below(uri)))
        return {f"{NAME}/{key}": {"size": len(self.objects[key])} for key in found}

    def open(self, uri: str, mode: str) -> io.BytesIO:
        return io.BytesIO(self.cat_file(uri)) if mode == "rb" else _Upload(self, uri)

    def makedirs(self, uri: str, *, exist_ok: bool) -> None:
        """Nothing: S3 has no folders."""

    def rename(self, uri: str, target: str) -> None:
        self.cp_file(uri, target)
        self.rm_file(uri)

    def put_file(self, local: str, uri: str, callback: object = None) -> None:
        del callback
        self.pipe_file(uri, Path(local).read_bytes())

    def get_file(self, uri: str, local: str) -> None:
        Path(local).write_bytes(self.cat_file(uri))

    def cp_file(self, uri: str, target: str) -> None:
        self.pipe_file(target, self.cat_file(uri))

    def rm_file(self, uri: str) -> None:
        self.delete_object(Bucket=NAME, Key=_key(uri))

    def rm(self, uri: str, *, recursive: bool = False) -> None:
        for key in [*self._below(uri)] if recursive else [_key(uri)]:
            self.delete_object(Bucket=NAME, Key=key)  # one by one: a batch may break off

    def _below(self, uri: str) -> Iterator[str]:
        return (key for key in [*self.objects] if key.startswith(f"{_key(uri)}/"))


class _Upload(io.BytesIO):
    def __init__(self, bucket: Bucket, uri: str) -> None:
        super().__init__()
        self._bucket, self._uri = bucket, uri

    def close(self) -> None:
        content = b"" if self.closed else self.getvalue()
        if not self.closed:
            super().close()
            self._bucket.pipe_file(self._uri, content)


def _key(uri: str) -> str:
    return uri.removeprefix("s3://").removeprefix(f"{NAME}/").rstrip("/")


def install(monkeypatch: pytest.MonkeyPatch, bucket: Bucket | None = None) -> Bucket:
    """The bucket that every ``s3://`` address of the test is in."""
    made, on_disk = bucket or Bucket(), storage.filesystem

    def filesystem(uri: str, *, quick: bool = False) -> Any:
        made.is_quick = quick
        return made if storage.is_s3(uri) else on_disk(uri, quick=quick)

    monkeypatch.setattr(storage, "filesystem", filesystem)
    return made
