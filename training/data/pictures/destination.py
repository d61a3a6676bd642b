"""Destination of a prepared set, a folder or S3, where it is written and verified; from a laptop
too, which has boto3 and no fsspec.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from contract import faults
from contract.errors import InputError
from contract.runs import safe_join
from store.bucket import Bucket

_PART: Final = ".part"
_PLACES: Final = "give a folder, or s3://BUCKET/PREFIX"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Files by their names relative to a folder or prefix. It may be sent to other processes.

    All its methods raise InputError or UnreachableError where the disk or S3 fails.
    """

    uri: str

    def __post_init__(self) -> None:
        """
        Raises:
            InputError: it is neither a folder nor an address with a bucket.
        """
        has_bucket = re.match("s3://[^/]", self.uri)
        if self.uri in ("", "s3:") or ("://" in self.uri and not has_bucket):
            raise InputError(f"{self.uri!r} is no place for pictures: {_PLACES}")

    @property
    def in_s3(self) -> bool:
        return self.uri.startswith("s3://")

    def read(self, name: str) -> bytes | None:
        """All of a file; None where there is none."""
        with self._explained(name, "read"):
            if self.in_s3:
                return self._bucket.get(name)
            with suppress(FileNotFoundError):
                return self._path(name).read_bytes()
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file; it is there whole or not at all."""
        with self._explained(name, "written"):
            if self.in_s3:
                self._bucket.put(name, content)
                return
            target = self._path(name)
            part = target.with_name(f".{target.name}{_PART}")
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(target)

    def remove(self, name: str) -> None:
        """Remove a file, and its folder where that is empty then."""
        with self._explained(name, "removed"):
            if self.in_s3:
                self._bucket.delete([name])
                return
            path = self._path(name)
            path.unlink(missing_ok=True)
            with suppress(OSError):
                path.parent.rmdir()

    @contextmanager
    def _explained(self, name: str, what: str) -> Iterator[None]:
        """Errors of the disk and of S3 in a user's words."""
        try:
            yield
        except (NotADirectoryError, FileExistsError):
            raise InputError(f"{self.uri} is not a folder: {_PLACES}") from None
        except Exception as error:  # s3fs lets many through
            raise faults.explained(error, f"{self.uri}/{name} cannot be {what}") from None

    def _path(self, name: str) -> Path:
        return safe_join(Path(self.uri), name, what="file")

    @cached_property
    def _bucket(self) -> Bucket:
        import boto3

        return Bucket(self.uri, boto3.client("s3"))

    def __getstate__(self) -> dict[str, str]:
        return {"uri": self.uri}
