"""What is saved of the files that a user's program wrote on a node: the list beside the objects.

``containers.program.files`` writes it last, after all objects that it names, so that a restore sees
a state that the node really had; ``trainctl download`` reads it. It lies in a bucket that every job
may write to, so each name is checked before it becomes a path.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Final, Self

from contract.errors import InputError
from contract.runs import check_relative

#: Name of the list below a node's prefix. No file has it: all lie in a folder below the prefix.
MANIFEST: Final = "manifest.json"
WORK: Final = "work"  # the folder in which the program runs
OUTPUT: Final = "output"  # the folder that $TRAIN_OUTPUT names

_VERSION: Final = 1
_WHAT: Final = "a node's list of saved files"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """One file of a node, or one symbolic link."""

    name: str
    """Relative path with slashes, whose first part is ``WORK`` or ``OUTPUT``."""
    size: int = 0
    """Bytes."""
    sha256: str = ""
    """Of its content, 64 hexadecimal digits; empty for a link."""
    mode: int = 0o644
    """Permission bits."""
    modified_ns: int = 0
    """Unix time in nanoseconds."""
    key: str = ""
    """Of its object, below the node's prefix; empty: the same as its name."""
    link: str = ""
    """Target of a symbolic link, relative to the link's own folder; empty for a file."""
    code: str = ""
    """SHA-256 that a file of this name had in the code; empty: the code has none."""

    @property
    def object(self) -> str:
        """Key of its object, below the node's prefix."""
        return self.key or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All saved files of a node."""

    generation: int
    """Raised by each start of the node: a writer of a lower one has been replaced."""
    writer: str
    """A name that no other writer has."""
    files: tuple[SavedFile, ...] = ()
    empty: tuple[str, ...] = ()
    """Folders that have nothing in them."""

    def to_json(self) -> str:
        """All fields, as ``from_json`` reads them; what has its default is left out of files."""
        plain = asdict(SavedFile(name=""))
        files = [
            {name: value for name, value in asdict(file).items() if value != plain[name]}
            for file in self.files
        ]
        return json.dumps(
            {
                "version": _VERSION,
                "generation": self.generation,
                "writer": self.writer,
                "files": files,
                "empty": [*self.empty],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a list.

        Raises:
            InputError: it is none, or names something that is no relative path of a file.
        """
        try:
            values = json.loads(text)
            if values["version"] != _VERSION:
                raise InputError(
                    f"{_WHAT} has version {values['version']!r}, and this version reads "
                    f"{_VERSION}: use the version of trainctl and of the images that wrote it"
                )
            manifest = cls(
                generation=int(values["generation"]),
                writer=str(values["writer"]),
                files=tuple(SavedFile(**each) for each in values["files"]),
                empty=tuple(str(each) for each in values["empty"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{_WHAT} cannot be read: {str(text[:100])!r}") from None
        for file in manifest.files:
            _check(file)
        for name in manifest.empty:
            check_relative(name, what=f"folder in {_WHAT}:")
        return manifest


def _check(file: SavedFile) -> None:
    """Raises InputError where an entry has a wrong type or names a place elsewhere."""
    numbers, texts = (file.size, file.mode, file.modified_ns), (file.name, file.key, file.link)
    if not all(type(each) is int for each in numbers) or not all(
        isinstance(each, str) for each in texts
    ):
        raise InputError(f"{_WHAT} has an entry that is none: {str(file)[:200]}")
    check_relative(file.name, what=f"file in {_WHAT}:")
    check_relative(file.object, what=f"object in {_WHAT}:")
    if "/" not in file.name:
        raise InputError(f"{_WHAT} names {file.name!r}, which lies in none of a node's folders")
    if not file.link and not re.fullmatch(r"[0-9a-f]{64}", str(file.sha256)):
        raise InputError(f"{_WHAT} has no SHA-256 of {file.name}")
    if file.link:
        check_link(file.name, file.link)


def check_link(name: str, target: str) -> str:
    """Return ``target`` if a symbolic link ``name`` with it stays below the link's first folder.

    Raises:
        InputError: it is absolute, or leads out.
    """
    depth = name.count("/") - 1  # folders between the link and its first folder
    for part in target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            break
    if target.startswith("/") or depth < 0 or re.search(r"[\\\x00-\x1f\x7f]", target):
        raise InputError(f"link {name!r} to {target!r} is refused: it leads out of its folder")
    return target
