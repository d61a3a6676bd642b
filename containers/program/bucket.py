"""A node's part of the bucket: its objects, and the list that is written last.

Only ``containers.program.files`` uses it, which decides what is saved and when.
"""

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from containers.host.machine import Clock
from contract.errors import InputError
from contract.runs import MANIFEST, Manifest, SavedFile, safe_join

#: Uploads and downloads at a time: many small files wait for answers and not for the network.
PARALLEL: Final = 8
_PART_BYTES: Final = 32 * 2**20  # 10,000 parts, the most of an object, are 312 GiB
_BLOCK: Final = 2**20
#: What the calls below raise when the bucket does not answer, or refuses.
ERRORS: Final = (BotoCoreError, ClientError, OSError)


class ReplacedError(Exception):
    """Another writer has taken over this node's files: a later start of the same node."""


class OutOfTimeError(CancelledError):
    """There is no time left for the rest.

    Of this kind, because botocore takes any other error in the middle of a request for one of the
    network, and tries again.
    """


class Deadline:
    """When a copy must have ended; it may be set while the copy is being made."""

    def __init__(self, clock: Clock = time) -> None:
        self._clock = clock
        self.at: float | None = None
        """By the clock's ``monotonic()``; None: it may take as long as it needs."""

    def bring_forward(self, within_s: float) -> None:
        """Set it to so many seconds from now, unless it comes before that already."""
        new = self._clock.monotonic() + within_s
        self.at = new if self.at is None else min(self.at, new)

    def is_over(self, by_s: float = 0) -> bool:
        """Whether it came at least ``by_s`` seconds ago."""
        return self.at is not None and self._clock.monotonic() > self.at + by_s

    def leaves(self, seconds: float) -> bool:
        """Whether more than so many seconds are left."""
        return self.at is None or self.at - self._clock.monotonic() > seconds

    def check(self, _num_bytes: int = 0) -> None:
        """Raises OutOfTimeError when it has come."""
        if self.is_over():
            raise OutOfTimeError


class NodeBucket:
    """Objects below one node's prefix."""

    def __init__(self, address: str, client: Any = None) -> None:
        """Args:
        address: ``s3://BUCKET/PREFIX`` of the node.
        client: of S3; boto3's by default.
        """
        parts = urlsplit(address)
        assert parts.scheme == "s3", address
        assert parts.netloc, address
        self.address = address.rstrip("/")
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/") + "/"
        self._client = client or _client()
        self._tag = ""

    def manifest(self) -> Manifest | None:
        """The list as it is now; None when nothing has been saved.

        Raises:
            InputError: it cannot be read.
        """
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + MANIFEST)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                self._tag = ""
                return None
            raise
        self._tag = answer["ETag"]
        return Manifest.from_json(answer["Body"].read())

    def commit(self, manifest: Manifest) -> None:
        """Write the list, unless another writer has done so since it was last read or written.

        Raises:
            ReplacedError: another writer has.
        """
        # S3 compares and writes in one step, so that of two writers one learns that it is late.
        only_if = {"IfMatch": self._tag} if self._tag else {"IfNoneMatch": "*"}
        try:
            answer = self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + MANIFEST,
                Body=manifest.to_json().encode(),
                ContentType="application/json",
                **only_if,
            )
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            # 409: both at the same moment. A retry of a request that did arrive ends here too.
            if status not in (409, 412):
                raise
            found = self.manifest()
            if found is None or found.writer != manifest.writer:
                raise ReplacedError from None
            if found != manifest:
                self.commit(manifest)
            return
        self._tag = answer["ETag"]

    def upload(self, key: str, content: BinaryIO, deadline: Deadline) -> None:
        """Write an object. Raises OutOfTimeError when it takes too long."""
        deadline.check()
        try:
            self._client.upload_fileobj(
                _KeptOpen(content),
                self._bucket,
                self._prefix + key,
                Callback=deadline.check,
                Config=_transfers(),
            )
        except ERRORS:
            deadline.check()  # botocore takes what the callback raises for an error of the network
            raise

    def list(self, folder: str) -> list[str]:
        """Keys of the objects in a folder below the prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{folder}/"
        )
        found = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return [key.removeprefix(self._prefix) for key in found]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; nothing happens where there is none."""
        for start in range(0, len(keys), 1000):  # as many as S3 takes at a time
            listed = [{"Key": self._prefix + key} for key in keys[start : start + 1000]]
            self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": listed, "Quiet": True}
            )

    def download(self, file: SavedFile, folder: Path, target: Path, deadline: Deadline) -> bool:
        """Fetch a file of the list to ``target``; return whether it is the one that was saved.

        Args:
            folder: for the time until it is whole; on the same disk.

        Raises:
            OutOfTimeError: the deadline has come before.
        """
        from boto3.exceptions import RetriesExceededError  # imports all of boto3: half a second

        deadline.check()
        part = safe_join(folder, hashlib.sha256(file.name.encode()).hexdigest())
        try:
            key = self._prefix + file.object
            self._client.download_file(
                self._bucket, key, str(part), Callback=deadline.check, Config=_transfers()
            )
            with part.open("rb") as content:
                if digest(content, deadline=deadline) != file.sha256:
                    return False
            part.chmod(file.mode & 0o777 | 0o600)  # this node must be able to replace it
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                return False
            raise
        except RetriesExceededError as error:
            deadline.check()
            raise ConnectionError(str(error)) from None
        except ERRORS:
            deadline.check()  # as in ``upload``
            raise
        finally:
            part.unlink(missing_ok=True)
        return True


class _KeptOpen:
    """A file for boto3, which closes what it has uploaded in one request."""

    def __init__(self, content: BinaryIO) -> None:
        self.read, self.seek, self.tell = content.read, content.seek, content.tell

    def close(self) -> None:
        """Leave it open: who opened it looks at it once more."""


def digest(content: BinaryIO, *, size: int | None = None, deadline: Deadline | None = None) -> str:
    """SHA-256 of what can be read, or of its first ``size`` bytes.

    Raises:
        OutOfTimeError: the deadline has come before.
    """
    found = hashlib.sha256()
    left = size
    while block := content.read(_BLOCK if left is None else min(_BLOCK, left)):
        found.update(block)
        if deadline is not None:
            deadline.check()
        if left is not None:
            left -= len(block)
    return found.hexdigest()


def write(storage: str, key: str, text: str, client: Any = None) -> None:
    """Write an object of the bucket ``storage``, ``s3://BUCKET``."""
    bucket = urlsplit(storage).netloc
    (client or _client()).put_object(Bucket=bucket, Key=key, Body=text.encode())


def is_temporary(error: Exception) -> bool:
    """Whether an error may pass by itself: S3 is unreachable, overloaded or broken.

    It does not where S3 refuses a request, such as for a right that is missing, nor where the
    node's own disk is full.
    """
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return not 400 <= status < 500 or status in (408, 429)
    return not isinstance(error, OSError) or isinstance(error, (ConnectionError, TimeoutError))


def explained(error: Exception) -> str:
    """An error of the bucket in one line."""
    if isinstance(error, InputError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _transfers() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=4
    )


def _client() -> Any:
    import boto3
    from botocore.config import Config

    # Short, because what waits for it may have seconds left; what fails is tried again anyway.
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=5,
        read_timeout=20,
        max_pool_connections=4 * PARALLEL,
    )
    return boto3.client("s3", config=config)
