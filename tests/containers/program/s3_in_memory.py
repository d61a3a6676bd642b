"""S3 in memory, as far as a node's files need it: it stands at the edge of AWS.

That the real calls do the same is shown against the emulator in ``test_files_in_s3.py``.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from botocore.exceptions import ClientError, EndpointConnectionError


def refused(code: str, status: int) -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "Operation")


class S3:
    """One bucket; notes each key that is written, in this order."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written: list[str] = []
        self.is_down = False
        self.trouble: Exception = EndpointConnectionError(endpoint_url="s3")
        """What is raised while it is down."""
        self.calls_left: int | None = None
        """So many calls are answered, and none after them."""
        self.calls_until_up: int | None = None
        """So many calls are not answered, and all after them."""
        self.on_upload: Callable[[str], object] = lambda _key: None
        """Called before the content of an object is read."""
        self.on_download: Callable[[str], object] = lambda _key: None
        """Called before a part of an object is handed over."""

    def _check(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            self.is_down = self.calls_left < 0
        if self.calls_until_up is not None:
            self.calls_until_up -= 1
            self.is_down = self.calls_until_up >= 0
        if self.is_down:
            raise self.trouble

    def _put(self, key: str, content: bytes) -> None:
        self.objects[key] = content
        self.written.append(key)

    def _tag(self, key: str) -> str:
        return hashlib.md5(self.objects[key]).hexdigest()

    def get_object(self, *, Bucket: str, Key: str) -> Any:  # noqa: N803, ARG002
        self._check()
        if Key not in self.objects:
            raise refused("NoSuchKey", 404)
        content = self.objects[Key]
        return {"ETag": self._tag(Key), "Body": SimpleNamespace(read=lambda: content)}

    def put_object(self, *, Key: str, Body: bytes, **given: Any) -> Any:  # noqa: N803
        self._check()
        is_there = Key in self.objects
        if "IfNoneMatch" in given and is_there:
            raise refused("PreconditionFailed", 412)
        if "IfMatch" in given and not (is_there and self._tag(Key) == given["IfMatch"]):
            raise refused("PreconditionFailed", 412)
        self._put(Key, Body)
        return {"ETag": self._tag(Key)}

    def upload_fileobj(
        self,
        file: BinaryIO,
        _bucket: str,
        key: str,
        Callback: Callable[[int], None],  # noqa: N803
        Config: Any,  # noqa: N803, ARG002
    ) -> None:
        self._check()
        self.on_upload(key)
        content = file.read()
        Callback(len(content))
        file.close()  # as boto3 does after an upload in one request
        self._put(key, content)

    def download_file(
        self,
        _bucket: str,
        key: str,
        target: str,
        Callback: Callable[[int], None],  # noqa: N803
        Config: Any,  # noqa: N803, ARG002
    ) -> None:
        self._check()
        if key not in self.objects:
            raise refused("404", 404)
        self.on_download(key)
        Callback(len(self.objects[key]))
        Path(target).write_bytes(self.objects[key])

    def delete_objects(self, *, Delete: Any, **_: Any) -> None:  # noqa: N803
        self._check()
        for each in Delete["Objects"]:
            self.objects.pop(each["Key"], None)

    def get_paginator(self, _operation: str) -> Any:
        def paginate(*, Prefix: str, **_: Any) -> Any:  # noqa: N803
            self._check()
            return [{"Contents": [{"Key": key} for key in self.objects if key.startswith(Prefix)]}]

        return SimpleNamespace(paginate=paginate)
