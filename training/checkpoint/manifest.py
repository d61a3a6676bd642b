"""The manifest of a checkpoint: its files, with their sizes and checksums.

It comes from storage that others can write to, so nothing in it is taken on trust.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from contract.errors import InputError
from contract.runs import MANIFEST_FILE, check_relative

#: Manifest in S3 of a checkpoint without one: there can be no other any more.
CLOSED: Final = b"closed"


class DamagedError(Exception):
    """A checkpoint that must not be used; the message names the fault."""


@dataclass(frozen=True, slots=True)
class File:
    """Expected size and checksum of a file."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A checkpoint's files by name."""

    files: Mapping[str, File]

    def to_json(self) -> bytes:
        files = {
            name: {"bytes": file.size, "sha256": file.sha256}
            for name, file in sorted(self.files.items())
        }
        return json.dumps({"files": files}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes | None) -> Self:
        """
        Args:
            content: None where there is no such file.

        Raises:
            DamagedError: it is missing, cannot be read, or names a file outside its folder.
        """
        if content in (None, CLOSED):
            raise DamagedError(f"{MANIFEST_FILE} is missing: its upload was cut off")
        try:
            values: Any = json.loads(content)
            files = {name: _file(entry) for name, entry in values["files"].items()}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise DamagedError(f"{MANIFEST_FILE} cannot be read") from None
        try:
            for name in files:
                check_relative(name, what=f"{MANIFEST_FILE}: name")
        except InputError as error:
            raise DamagedError(str(error)) from None
        return cls(files=files)


def _file(entry: Any) -> File:
    size, sha256 = entry["bytes"], entry["sha256"]
    if not isinstance(size, int) or not isinstance(sha256, str):
        raise TypeError(f"{entry} is no size and checksum")
    return File(size, sha256)
