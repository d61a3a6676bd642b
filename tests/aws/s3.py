"""The one S3 of all tests: a bucket in memory that answers as S3 does, and its faults.

boto3's clients call it directly; ``tests/training/bucket.py`` lets s3fs's callers do so. Each rule
names its source; real clients meet an emulator in ``test_files_in_s3.py`` and ``test_storage.py``.
"""

import hashlib
import io
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from botocore.exceptions import ClientError, EndpointConnectionError

from contract import files
from tests.aws.calls import Paged, refused

Effect = Callable[[], Any]

NAME: Final = "bucket"
WRITES: Final = ("put_object", "delete_object", "delete_objects")


class S3(Paged):
    """One bucket."""

    exceptions = SimpleNamespace(ClientError=ClientError)
    page = 3
    """Entries of a page of a list: S3 may return fewer than the 1,000 that it is asked for
    (ListObjectsV2, MaxKeys)."""
    kept: frozenset[str] = frozenset()
    """Keys that may not be removed."""
    may_list = True
    """Without ``s3:ListBucket`` an object that is missing is forbidden (GetObject)."""
    is_down = False
    trouble: Exception = EndpointConnectionError(endpoint_url="s3")
    """What is raised while it is down."""
    calls_until_up: int | None = None
    """So many calls are not answered, and all after them."""
    on_upload: Callable[[str, bytes], object] = lambda *_: None
    """Called before a piece of a file is written."""
    on_download: Callable[[str], object] = lambda *_: None
    """Called before a piece is read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, datetime] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.clock = clock

    def request(self, operation: str, key: str, effect: Effect, content: bytes = b"") -> Any:
        """Make a request. An override decides whether it fails, and before or after ``effect``."""
        if self.calls_until_up is not None:
            self.calls_until_up -= 1
            self.is_down = self.calls_until_up >= 0
        if self.is_down:
            raise self.trouble
        if files.OBJECTS in key and operation == "put_object":
            self.on_upload(key, content)
        if files.OBJECTS in key and operation == "get_object":
            self.on_download(key)
        return effect()

    def _found(self, key: str, missing: str) -> Any:
        """What is answered of an object beside its content."""
        if key not in self.objects:
            raise refused(missing if self.may_list else "AccessDenied")
        date = format_datetime(datetime.fromtimestamp(self.clock(), UTC), usegmt=True)
        return self._listed(key) | {
            "Metadata": self.metadata.get(key, {}),
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
        }

    def _listed(self, key: str) -> dict[str, Any]:
        """What a list has of an object."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        # The tag of what is sent in one request is its MD5 (API reference of S3, "Object").
        tag = hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()
        return {
            "ETag": f'"{tag}"',
            "LastModified": self.modified.get(key, now).replace(microsecond=0),
            "Size": len(self.objects[key]),
        }

    # --- requests of boto3
    def get_object(self, Bucket: str, Key: str) -> Any:  # noqa: N803
        assert Bucket == NAME
        effect = lambda: self._found(Key, "NoSuchKey") | {"Body": io.BytesIO(self.objects[Key])}  # noqa: E731
        return self.request("get_object", Key, effect)

    def head_object(self, Bucket: str, Key: str) -> Any:  # noqa: N803
        """Without a body, an error has no code but its status (HeadObject)."""
        assert Bucket == NAME
        return self.request("head_object", Key, lambda: self._found(Key, "404"))

    def list_objects_v2(self, **given: str) -> Any:
        """In the order of the keys' bytes; a part of the answer that is empty is missing."""
        assert given["Bucket"] == NAME
        prefix, delimiter = given.get("Prefix", ""), given.get("Delimiter", "")

        def effect() -> Any:
            folders = {}
            for key in sorted(self.objects):
                if key.startswith(prefix):
                    name = key.removeprefix(prefix)
                    name, mark, _ = name.partition(delimiter) if delimiter else (name, "", "")
                    folders[prefix + name + mark] = bool(mark)
            left = [each for each in folders if each > given.get("ContinuationToken", "")]
            page = left[: self.page]
            answer: dict[str, Any] = {
                "Contents": [{"Key": e, **self._listed(e)} for e in page if not folders[e]],
                "CommonPrefixes": [{"Prefix": each} for each in page if folders[each]],
                "NextContinuationToken": page[-1] if left != page else "",
                "IsTruncated": left != page,
            }
            return {name: each for name, each in answer.items() if each}

        return self.request("list_objects_v2", prefix, effect)

    def put_object(self, Bucket: str, Key: str, Body: bytes, **given: Any) -> Any:  # noqa: N803
        assert Bucket == NAME

        def effect() -> Any:
            # User guide of S3, "How to prevent object overwrites with conditional writes".
            tag = given.get("IfMatch")
            is_other = tag and self._found(Key, "NoSuchKey")["ETag"] != tag
            if is_other or ("IfNoneMatch" in given and Key in self.objects):
                raise refused("PreconditionFailed", "PutObject")
            self.objects[Key] = bytes(Body)
            self.modified[Key] = datetime.fromtimestamp(self.clock(), UTC)
            self.metadata[Key] = given.get("Metadata", {})
            return {}

        return self.request("put_object", Key, effect, Body)

    def delete_object(self, Bucket: str, Key: str) -> Any:  # noqa: N803
        """Of one that is missing, too (DeleteObject)."""
        assert Bucket == NAME
        return self.request("delete_object", Key, lambda: self.objects.pop(Key, None))

    def delete_objects(self, Bucket: str, Delete: Any) -> Any:  # noqa: N803
        keys = [each["Key"] for each in Delete["Objects"]]
        assert Bucket == NAME
        assert len(keys) in range(1, 1001)

        def effect() -> Any:
            """What is refused is listed in an answer that succeeds (DeleteObjects)."""
            for key in {*keys} - self.kept:
                self.objects.pop(key, None)
            errors = [{"Key": key, "Code": "AccessDenied"} for key in keys if key in self.kept]
            return {"Errors": errors} if errors else {}

        return self.request("delete_objects", keys[0], effect)

    # --- transfers of boto3
    def download_file(self, bucket: str, key: str, file: str) -> None:
        """It asks for the size first."""
        self.head_object(bucket, key)
        Path(file).write_bytes(self.get_object(bucket, key)["Body"].read())

    def upload_file(
        self,
        file: str,
        bucket: str,
        key: str,
        ExtraArgs: Any = None,  # noqa: N803
        Callback: Callable[[int], object] | None = None,  # noqa: N803
    ) -> None:
        content = Path(file).read_bytes()
        self.put_object(bucket, key, content, **(ExtraArgs or {}))
        (Callback or bool)(len(content))
