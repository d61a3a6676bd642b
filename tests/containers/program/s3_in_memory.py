"""S3 in memory, as far as a node's files need it: it stands at the edge of AWS.

That the real calls do the same is shown against the emulator in ``test_files_in_s3.py``.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from botocore.exceptions import ClientError, EndpointConnectionError

from contract import files, runs
from contract.files import FileList, Mark


def refused(code: str, status: int) -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "Operation")


class S3:
    """One bucket."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_down = False
        self.trouble: Exception = EndpointConnectionError(endpoint_url="s3")
        """What is raised while it is down."""
        self.calls_until_up: int | None = None
        """So many calls are not answered, and all after them."""
        self.on_upload: Callable[[str, bytes], object] = lambda _key, _content: None
        """Called before an object below ``objects/`` is written."""
        self.on_download: Callable[[str], object] = lambda _key: None
        """Called before such an object is handed over."""

    def _check(self) -> None:
        if self.calls_until_up is not None:
            self.calls_until_up -= 1
            self.is_down = self.calls_until_up >= 0
        if self.is_down:
            raise self.trouble

    def get_object(self, *, Bucket: str, Key: str) -> Any:  # noqa: N803, ARG002
        self._check()
        if Key not in self.objects:
            raise refused("NoSuchKey", 404)
        if files.OBJECTS in Key:
            self.on_download(Key)
        content = self.objects[Key]
        return {"Body": SimpleNamespace(read=lambda: content)}

    def put_object(self, *, Key: str, Body: bytes, **given: Any) -> Any:  # noqa: N803
        self._check()
        if "IfNoneMatch" in given and Key in self.objects:
            raise refused("PreconditionFailed", 412)
        if files.OBJECTS in Key:
            self.on_upload(Key, Body)
        self.objects[Key] = Body
        return {}

    def delete_objects(self, *, Delete: Any, **_: Any) -> None:  # noqa: N803
        self._check()
        for each in Delete["Objects"]:
            self.objects.pop(each["Key"], None)

    def get_paginator(self, _operation: str) -> Any:
        def paginate(*, Prefix: str, **_: Any) -> Any:  # noqa: N803
            self._check()
            keys = [key for key in [*self.objects] if key.startswith(Prefix)]
            return [{"Contents": [{"Key": key} for key in keys]}]

        return SimpleNamespace(paginate=paginate)


def list_of(s3: S3, run: str, node: int = 0) -> FileList:
    """The list of a node that was written last, or that its newest start restores."""
    prefix = runs.output_prefix(run)
    keys = [key.removeprefix(prefix) for key in [*s3.objects]]
    for start in reversed(files.start_numbers(keys)):
        own = [mark for mark in Mark.of(keys) if (mark.start, mark.node) == (start, node)]
        if own:
            mark = files.newest_by_node(own)[node]
            return FileList.from_json(s3.objects[prefix + s3.objects[prefix + mark.key].decode()])
        if base := s3.objects.get(prefix + files.base_key(start)):
            key = files.base_from_json(base).get(node)
            return FileList.from_json(s3.objects[prefix + key]) if key else FileList()
    return FileList()


def saved_in(s3: S3, run: str) -> dict[str, str]:
    """What is saved of node 0, according to that list."""
    prefix = runs.output_prefix(run)
    return {
        file.name: b"".join(s3.objects[prefix + key] for key in file.pieces).decode()
        for file in list_of(s3, run).files
        if not file.link
    }
