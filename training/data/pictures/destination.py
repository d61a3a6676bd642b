"""Destination of a prepared set, a folder or S3, where it is written and verified; from a laptop
too.

Nodes read S3 by ``training.system.storage``; a laptop has boto3 and no fsspec. Standard library
only, but for boto3 when it is S3.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from contract import faults
from contract.errors import InputError
from contract.runs import safe_join

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PART: Final = ".part"
_PLACES: Final = "give a folder, or s3://BUCKET/PREFIX"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Files by their names relative to a folder or prefix. It may be sent to other processes.

    All its methods raise InputError or UnreachableError where the disk or S3 fails.
    """

    uri: str
    profile: str | None = None
    """Of AWS; that of the environment where there is none."""
    region: str | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            InputError: it is neither a folder nor an address with a bucket.
        """
        if not self.uri or self.uri == "s3:" or ("://" in self.uri and not self._bucket):
            raise InputError(f"{self.uri!r} is no place for pictures: {_PLACES}")

    @property
    def in_s3(self) -> bool:
        return self.uri.startswith("s3://")

    def read(self, name: str) -> bytes | None:
        """All of a file; None where there is none."""
        with self._explained(name, "read"):
            if not self.in_s3:
                with suppress(FileNotFoundError):
                    return self._path(name).read_bytes()
                return None
            try:
                answer = self._s3.get_object(Bucket=self._bucket, Key=self._key(name))
            except self._s3.exceptions.NoSuchKey:
                return None
            return answer["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        """Write a file; it is there whole or not at all."""
        with self._explained(name, "written"):
            if self.in_s3:
                self._s3.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)
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
                self._s3.delete_object(Bucket=self._bucket, Key=self._key(name))
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
        except Exception as error:
            raise faults.explained(error, f"{self.uri}/{name} cannot be {what}") from None

    def _path(self, name: str) -> Path:
        return safe_join(Path(self.uri), name, what="file")

    @property
    def _bucket(self) -> str:
        return self.uri.removeprefix("s3://").partition("/")[0] if self.in_s3 else ""

    def _key(self, name: str) -> str:
        prefix = self.uri.removeprefix("s3://").partition("/")[2].strip("/")
        return f"{prefix}/{name}" if prefix else name

    @cached_property
    def _s3(self) -> "S3Client":
        import boto3

        session = boto3.Session(profile_name=self.profile, region_name=self.region)
        return session.client("s3")

    def __getstate__(self) -> dict[str, str | None]:
        return {"uri": self.uri, "profile": self.profile, "region": self.region}
