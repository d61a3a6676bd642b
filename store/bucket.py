"""Objects in S3 by key, with boto3: for nodes and laptops.

``store.storage`` has the same for what trains, with s3fs, in S3 or on a disk. Errors are boto3's;
``contract.faults`` tells whose they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from contract import faults

_MISSING: Final = ("NoSuchKey", "404")
#: Objects that one request can remove.
_AT_ONCE: Final = 1000
#: Key in an object's metadata.
_SHA256: Final = "sha256"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """An object, as S3 lists it."""

    key: str
    size: int
    """In bytes."""
    modified: datetime


class Bucket:
    """Objects below ``uri``, ``s3://BUCKET`` or ``s3://BUCKET/PREFIX``, by their keys there.

    S3 checks what arrives by boto3's own checksum.
    """

    def __init__(self, uri: str, client: Any) -> None:
        """
        Args:
            client: of S3, with the caller's retries and timeouts.
        """
        assert uri.startswith("s3://"), uri
        self.uri, self.client = uri.rstrip("/"), client
        self.name, _, prefix = self.uri.removeprefix("s3://").partition("/")
        assert self.name, uri
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": self._prefix + key}

    def put(self, key: str, content: bytes, **condition: str) -> None:
        """Write an object."""
        self.client.put_object(**self._at(key), Body=content, **condition)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written."""
        try:
            self.put(key, content, IfNoneMatch="*")
        except Exception as error:
            if not faults.is_taken(error):
                raise
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """Content of an object; None if there is none."""
        try:
            answer = self.client.get_object(**self._at(key))
        except Exception as error:
            if faults.code_of(error) in _MISSING:
                return None
            raise
        return bytes(answer["Body"].read())

    def keys(self, prefix: str) -> list[str]:
        """Keys that begin with ``prefix``."""
        return [each.key for each in self.stored(prefix)]

    def stored(self, prefix: str) -> list[Stored]:
        """All objects whose keys begin with ``prefix``."""
        return self._listed(prefix)[0]

    def listed(self, folder: str) -> tuple[list[Stored], list[str]]:
        """The objects directly in a folder, which ends in a slash, and the names of its folders."""
        return self._listed(folder, Delimiter="/")

    def _listed(self, prefix: str, **options: str) -> tuple[list[Stored], list[str]]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=self._prefix + prefix, **options
        )
        found: list[Stored] = []
        folders: list[str] = []
        for page in pages:
            for each in page.get("Contents", []):
                key = each["Key"].removeprefix(self._prefix)
                found.append(Stored(key=key, size=each["Size"], modified=each["LastModified"]))
            below = [each["Prefix"] for each in page.get("CommonPrefixes", [])]
            folders += [each.removeprefix(self._prefix + prefix).rstrip("/") for each in below]
        return found, folders

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; nothing happens where there is none."""
        for start in range(0, len(keys), _AT_ONCE):
            listed = [{"Key": self._prefix + key} for key in keys[start : start + _AT_ONCE]]
            wanted = {"Objects": listed, "Quiet": True}
            answer = self.client.delete_objects(Bucket=self.name, Delete=wanted)
            # The request succeeds although S3 has refused some of them.
            for each in answer.get("Errors", []):
                raise self.client.exceptions.ClientError({"Error": each}, "DeleteObjects")

    def upload(
        self,
        file: Path,
        key: str,
        *,
        sha256: str = "",
        report: Callable[[int], None] | None = None,
    ) -> str:
        """Put a file into the bucket, in parts; return its address.

        Args:
            sha256: of the file, kept with the object for ``sha256``.
            report: called with the bytes of each part that was sent.
        """
        self.client.upload_file(
            str(file),
            self.name,
            self._prefix + key,
            ExtraArgs={"Metadata": {_SHA256: sha256}} if sha256 else None,
            Callback=report,
        )
        return f"{self.uri}/{key}"

    def sha256(self, key: str) -> str:
        """The SHA-256 that an object was uploaded with; empty where that is not known."""
        answer = self.client.head_object(**self._at(key))
        return str(answer["Metadata"].get(_SHA256, ""))

    def download(self, key: str, file: Path) -> None:
        """Fetch an object, in parts."""
        self.client.download_file(self.name, self._prefix + key, str(file))
