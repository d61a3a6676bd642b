"""An opened set of pictures: a tree of class folders, or what ``prepare`` made of one.

A folder with an ``index.json`` is a prepared set. Any other must be a tree in ImageNet's layout,
``train/<class>/*.jpg`` and ``val/<class>/*.jpg``, and is listed: quick on a disk, a minute for a
million pictures in S3. Imports no torch.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from contract.errors import InputError
from contract.runs import check_relative
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
    is_picture,
    table,
)
from training.system import storage

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

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return self.index.classes

    @property
    def fingerprint(self) -> str:
        """Of names and labels; the same in each form of a set."""
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
            f"--data {source} is no folder: give one with train/ and val/, or the s3:// address of "
            "a set that trainctl data prepare has made"
        )
    with storage.given(root):
        content = storage.read_bytes(storage.join(root, INDEX_FILE))
        if content is None:
            return _tree(root)
        tables = {split: storage.read_bytes(storage.join(root, table(split))) for split in SPLITS}
    index = Index.from_json(content, where=root)
    splits = {}
    for split, lines in tables.items():
        if lines is None:
            raise InputError(f"{root} has no {table(split)}: prepare the set again")
        splits[split] = Split(lines)
        if len(splits[split]) != index.counts.get(split):
            raise InputError(
                f"{root}/{table(split)} lists {len(splits[split]):,} pictures, {INDEX_FILE} says "
                f"{index.counts.get(split, 0):,}: prepare the set again"
            )
    return PictureSet(root=root, index=index, train=splits[TRAIN], val=splits[VAL])


def _tree(root: str) -> PictureSet:
    names = {split: _listed(root, split) for split in SPLITS}
    found = {split: {name.split("/")[0] for name in names[split]} for split in SPLITS}
    if not names[TRAIN]:
        raise InputError(
            f"{root} holds no pictures: there must be train/<class>/*.jpg and val/<class>/*.jpg, "
            f"or an {INDEX_FILE} of a prepared set"
        )
    if strangers := sorted(found[VAL] - found[TRAIN]):
        raise InputError(
            f"{root}/val has the class {strangers[0]}, which train/ lacks: folders must have the "
            "same names in both (trainctl data prepare imagenet sorts a flat val/)"
        )
    if not names[VAL]:
        raise InputError(
            f"{root}/val has no class folders with pictures: trainctl data prepare imagenet sorts "
            "a flat val/ by its list"
        )
    classes = tuple(sorted(found[TRAIN]))
    label = {name: number for number, name in enumerate(classes)}
    splits = {}
    for split in SPLITS:
        lines = []
        for name, size in names[split].items():
            file = check_relative(f"{split}/{name}", what="picture")
            entry = Entry(label=label[name.split("/")[0]], name=name, file=file, size=size)
            lines.append(entry.to_line() + "\n")
        splits[split] = Split("".join(lines).encode())
    index = Index(
        form=TREE,
        classes=classes,
        counts={split: len(names[split]) for split in SPLITS},
        fingerprint=fingerprint(splits),
        files={},
        encoding=JPEG,
    )
    return PictureSet(root=root, index=index, train=splits[TRAIN], val=splits[VAL])


def _listed(root: str, split: str) -> Mapping[str, int]:
    """``<class>/<file>`` of all pictures of a split, sorted by class and then by name, and their
    bytes where these are known for nothing: in S3; else -1."""
    folder = storage.join(root, split)
    if storage.is_s3(root):
        start = folder.removeprefix("s3://") + "/"
        objects = storage.filesystem(root).find(folder, detail=True)
        sizes = {key.removeprefix(start): int(each["size"]) for key, each in objects.items()}
    else:
        classes = [each for each in _scanned(folder) if each.is_dir()]
        sizes = {
            f"{each.name}/{picture.name}": -1 for each in classes for picture in _scanned(each.path)
        }
    kept = [name for name in sizes if name.count("/") == 1 and is_picture(name)]
    return {name: sizes[name] for name in sorted(kept, key=lambda name: tuple(name.split("/")))}


def _scanned(folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return [each for each in entries if not each.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror or error}") from None
