"""Index of a set of pictures: its files, and the place of each picture in them.

``index.json`` describes the set, and is written last. Beside it, ``train.tsv`` and ``val.tsv`` have
a line for each picture, in the order of the samples' numbers: a line is found by its offset and
read when its picture is, so that a million of them need no memory of their own.
Standard library only, because laptops prepare sets too.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Self

from contract.errors import InputError
from contract.runs import check_relative
from contract.typed_json import from_json, loads
from training.data.catalog import PICTURES

INDEX_FILE: Final = "index.json"
FORMAT: Final = 3
TRAIN: Final = "train"
VAL: Final = "val"
SPLITS: Final = (TRAIN, VAL)

TREE: Final = "tree"
SHARDS: Final = "shards"
PACKED: Final = "packed"
#: What ``prepare`` makes; a tree is read as it is.
FORMS: Final = (SHARDS, PACKED)

JPEG: Final = "jpeg"
RAW: Final = "raw"
ENCODINGS: Final = (JPEG, RAW)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One picture: a line of a split's table."""

    label: int
    """Number of its class."""
    name: str
    """``<class>/<file>``, the same in all forms of a set."""
    file: str
    """Path of a file, relative to the set's folder: a shard, or the picture's own file."""
    offset: int = 0
    """Offset of its first byte in ``file``."""
    size: int = -1
    """Bytes; -1: all of the file."""
    height: int = 0
    """Pixels, as stored; 0 where the set was not prepared."""
    width: int = 0

    def to_line(self) -> str:
        values = (self.label, self.file, self.offset, self.size, self.height, self.width)
        return "\t".join([*map(str, values), self.name])

    @classmethod
    def from_line(cls, line: str) -> Self:
        """
        Raises:
            InputError: it is no line of a table, or names a file outside the set.
        """
        try:
            label, file, offset, size, height, width, name = line.rstrip("\n").split("\t")
            return cls(
                label=int(label),
                name=name,
                file=check_relative(file, what="file"),
                offset=int(offset),
                size=int(size),
                height=int(height),
                width=int(width),
            )
        except ValueError:
            raise InputError(
                f"the index of the pictures is damaged: {line[:80]!r} is no line of it; prepare "
                "the set again"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a set beside its index."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Description of a prepared set: ``index.json``."""

    form: str
    """``tree``, ``shards`` or ``packed``."""
    classes: tuple[str, ...]
    """Names, in the order of their labels."""
    counts: Mapping[str, int]
    """Split -> number of its pictures."""
    fingerprint: str
    """Hash of the names and labels, by the function ``fingerprint``."""
    files: Mapping[str, StoredFile]
    """All files of the set but this one; none of a tree."""
    size: int = 0
    """Maximum length of the shorter side of packed pictures, in pixels; 0: original size."""
    encoding: str = JPEG
    """Encoding of packed pictures."""
    damaged: tuple[str, ...] = ()
    """``<split>/<class>/<file>: why``, of what was left out."""
    made_by: str = ""
    """Name of what was asked for: the same pictures and settings have the same."""
    format: int = FORMAT

    @property
    def num_pictures(self) -> int:
        """Number of pictures in all splits together."""
        return sum(self.counts.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str, *, where: str) -> Self:
        """
        Args:
            where: the set's address, for errors.

        Raises:
            InputError: it is no index, or of another version of this project.
        """
        try:
            values = loads(text, what=INDEX_FILE)
            version = values.get("format")
            if version == FORMAT:
                found = from_json(cls, values, what=INDEX_FILE)
                for name in found.files:
                    check_relative(name, what="file")
                return found
        except InputError:
            raise InputError(
                f"{where}/{INDEX_FILE} is no index of pictures: prepare the set again"
            ) from None
        raise InputError(
            f"{where}/{INDEX_FILE} has format {version}, this version reads {FORMAT}: prepare the "
            "set again, in another place"
        )


def fingerprint(splits: Mapping[str, Iterable[Entry]]) -> str:
    """Hash of a set's names and labels, in order: a resumed run must see the same pictures.

    It is the same for a tree and for what is prepared from it.
    """
    digest = hashlib.sha256()
    for split in SPLITS:
        for entry in splits[split]:
            digest.update(f"{split}\t{entry.label}\t{entry.name}\n".encode())
    return digest.hexdigest()[:16]


def table(split: str) -> str:
    """Name of a split's table."""
    return f"{split}.tsv"


def is_picture(name: str) -> bool:
    """True if a file of a tree counts as a picture; hidden files do not."""
    last = name.rsplit("/", 1)[-1]
    return last.lower().endswith(PICTURES) and not last.startswith(".")
