"""An opened set of pictures: a tree of class folders, or what ``prepare`` made of one.

A folder with an ``index.json`` is a prepared set. Any other is a tree in one of the layouts that
``layout`` knows, and is listed: quick on a disk, a minute for a million pictures in S3. Imports no
torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from contract.runs import check_relative
from store import storage
from training.data.pictures import layout
from training.data.pictures.index import (
    INDEX_FILE,
    JPEG,
    SPLITS,
    TRAIN,
    TREE,
    VAL,
    Entry,
    Index,
    fingerprint,
    table,
)

_NEWLINE: Final = ord("\n")


class Split:
    """The pictures of training or of validation, by number. Nothing is read but their lines."""

    def __init__(self, lines: bytes) -> None:
        """
        Args:
            lines: of the split's table.
        """
        self.lines = lines
        ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == _NEWLINE)
        self._ends: npt.NDArray[np.int64] = ends.astype(np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def entry(self, sample: int) -> Entry:
        """A sample by its number, from 0.

        Raises:
            InputError: its line is damaged.
        """
        start = 0 if sample == 0 else int(self._ends[sample - 1]) + 1
        return Entry.from_line(self.lines[start : int(self._ends[sample])].decode())

    def __iter__(self) -> Iterator[Entry]:
        return (self.entry(sample) for sample in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class PictureSet:
    """A set whose pictures can be read."""

    root: str
    """Folder or ``s3://`` address, without a slash at its end."""
    index: Index
    train: Split
    val: Split
    notes: tuple[str, ...] = ()
    """Notes on a tree: which pictures were held out, and which files are unused."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return self.index.classes

    @property
    def fingerprint(self) -> str:
        """Hash of names and labels; the same in each form of a set."""
        return self.index.fingerprint


def open_set(source: str) -> PictureSet:
    """Open a set in a folder (a disk, a host's volume, a mounted file system) or in S3.

    Raises:
        InputError: there is none, it is not complete, or its index is damaged.
        UnreachableError: the disk or S3 does not give the index.
    """
    root = source.rstrip("/")
    if not storage.is_s3(root) and not os.path.isdir(root):
        raise InputError(
            f"--data {source} is no folder: give one with a folder of pictures for each class, or "
            "the s3:// address of one"
        )
    with storage.reading(root):
        content = storage.read_bytes(storage.join(root, INDEX_FILE))
        if content is None:
            return _tree(root)
        tables = {split: storage.read_bytes(storage.join(root, table(split))) for split in SPLITS}
    index = Index.from_json(content, where=root)
    splits = {}
    for split, lines in tables.items():
        splits[split] = Split(lines or b"")
        if len(splits[split]) != index.counts.get(split):
            raise InputError(
                f"{root}/{table(split)} lists {len(splits[split]):,} pictures, {INDEX_FILE} says "
                f"{index.counts.get(split, 0):,}: prepare the set again"
            )
    return PictureSet(root=root, index=index, train=splits[TRAIN], val=splits[VAL])


def _tree(root: str) -> PictureSet:
    found = layout.arrange(
        _in_s3(root) if storage.is_s3(root) else layout.files(Path(root)),
        root,
        content=lambda item: storage.read_bytes(storage.join(root, *item.parts)) or b"",
    )
    label, splits = found.labels, {}
    for split, pictures in found.pictures.items():
        lines = []
        for each in pictures:
            entry = Entry(
                label=label[each.class_name],
                name=f"{each.class_name}/{each.name}",
                file=check_relative(each.path, what="picture"),
                size=each.size,
            )
            lines.append(entry.to_line() + "\n")
        splits[split] = Split("".join(lines).encode())
    index = Index(
        form=TREE,
        classes=tuple(label),
        counts={split: len(each) for split, each in found.pictures.items()},
        fingerprint=fingerprint(splits),
        files={},
        encoding=JPEG,
    )
    return PictureSet(
        root=root, index=index, train=splits[TRAIN], val=splits[VAL], notes=found.notes
    )


def _in_s3(root: str) -> Iterator[layout.Item]:
    for name, size in storage.find(root).items():
        if "/." not in f"/{name}":
            yield layout.Item(tuple(name.split("/")), name, size=size)
