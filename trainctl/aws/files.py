"""The deployment's bucket."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from contract.runs import RUNS_PREFIX, RunPaths, safe_join
from trainctl.aws.clients import Clients, unless

#: Requests to remove objects at a time.
_AT_ONCE: Final = 8
#: Key in an object's metadata.
_SHA256: Final = "sha256"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """An object, as the bucket lists it."""

    key: str
    size: int
    """In bytes."""
    modified: datetime


def json_object(text: str | bytes | None) -> dict[str, object]:
    """A JSON object, of a run's record or an answer of AWS; empty where there is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Bucket:
    """Objects of the bucket, by key."""

    def __init__(self, clients: Clients, *, name: str) -> None:
        self._clients, self.name = clients, name

    @property
    def uri(self) -> str:
        return f"s3://{self.name}"

    def run(self, run: str) -> RunPaths:
        """Addresses of a run's files."""
        return RunPaths.of(f"{self.uri}/{RUNS_PREFIX}", run)

    def holds(self, uri: str) -> bool:
        """True if an address is in this bucket."""
        return f"{uri}/".startswith(f"{self.uri}/")

    def key(self, uri: str) -> str:
        """The key of an address in this bucket."""
        assert self.holds(uri), uri
        return uri.removeprefix(f"{self.uri}/")

    def read(self, key: str) -> bytes | None:
        """An object; None when it is not there."""
        with unless("NoSuchKey", "404"):
            return self._clients.s3.get_object(Bucket=self.name, Key=key)["Body"].read()
        return None

    def read_of_run(self, run: str, name: str) -> bytes | None:
        """A file directly in a run's folder; None when it is not there."""
        return self.read(self.key(self.run(run).file(name)))

    def write(self, key: str, content: bytes) -> None:
        """Write an object."""
        self._clients.s3.put_object(Bucket=self.name, Key=key, Body=content)

    def upload(
        self,
        file: Path,
        key: str,
        *,
        sha256: str = "",
        report: Callable[[int], None] | None = None,
    ) -> str:
        """Put a file into the bucket; return its address.

        Args:
            sha256: of the file, kept with the object for ``sha256``.
            report: called with the bytes of each part that was sent.
        """
        self._clients.s3.upload_file(
            str(file),
            self.name,
            key,
            ExtraArgs={"Metadata": {_SHA256: sha256}} if sha256 else None,
            Callback=report,
        )
        return f"{self.uri}/{key}"

    def sha256(self, key: str) -> str:
        """The SHA-256 that an object was uploaded with; empty where that is not known."""
        answer = self._clients.s3.head_object(Bucket=self.name, Key=key)
        return answer["Metadata"].get(_SHA256, "")

    def sizes(self, prefix: str) -> dict[str, int]:
        """Keys of all objects below a prefix, and their bytes."""
        return {each.key: each.size for each in self.stored(prefix)}

    def stored(self, prefix: str) -> list[Stored]:
        """All objects below a prefix."""
        return self._listed(prefix)[0]

    def listed(self, prefix: str) -> tuple[list[Stored], list[str]]:
        """The objects directly below a prefix, which ends in a slash, and the names of the folders
        there."""
        return self._listed(prefix, Delimiter="/")

    def _listed(self, prefix: str, **options: Any) -> tuple[list[Stored], list[str]]:
        listing = self._clients.s3.get_paginator("list_objects_v2")
        found: list[Stored] = []
        folders: list[str] = []
        for page in listing.paginate(Bucket=self.name, Prefix=prefix, **options):
            for each in page.get("Contents", []):
                one = Stored(key=each["Key"], size=each["Size"], modified=each["LastModified"])
                found.append(one)
            prefixes = [each["Prefix"] for each in page.get("CommonPrefixes", [])]
            folders += [each.removeprefix(prefix).rstrip("/") for each in prefixes]
        return found, folders

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there count as removed."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            delete = self._clients.s3.delete_object
            list(pool.map(lambda key: delete(Bucket=self.name, Key=key), keys))

    def download(self, key: str, file: Path) -> None:
        """Fetch an object."""
        self._clients.s3.download_file(self.name, key, str(file))

    def placed(self, prefix: str, folder: Path) -> dict[Path, Stored]:
        """The objects below ``prefix``, which ends in a slash, by the files of ``folder`` that they
        would be.

        Raises:
            InputError: a key names a place outside ``folder``: any job may write into the bucket.
        """
        what = f"object of {self.uri}/{prefix}"
        # A key that ends in a slash is the empty object that consoles make for a folder.
        return {
            safe_join(folder, each.key.removeprefix(prefix), what=what): each
            for each in self.stored(prefix)
            if not each.key.endswith("/")
        }


class EmptyBucket(Bucket):
    """The bucket of a deployment that has not been made."""

    def __init__(self) -> None:
        self.name = "BUCKET"

    def holds(self, _uri: str) -> bool:
        """Any address may be in it."""
        return True

    def read(self, _key: str) -> None:
        """Nothing is there."""

    def sizes(self, _prefix: str) -> dict[str, int]:
        return {}
