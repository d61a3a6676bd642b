"""Layouts of ImageNet as downloaded: folders, archives, archives of archives.

Nothing is unpacked. A tar file that is not compressed keeps its members in one piece, and so do
those inside of it: a picture is a place in a file. What counts is the path that it would have:
``.../train/<class>/<file>`` and ``.../val/<class>/<file>``, or a flat ``val/`` and a list of its
classes (``LOC_val_solution.csv``, or another file of lines).
Standard library only.
"""

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Final, NamedTuple

from contract.errors import InputError
from contract.runs import check_relative
from training.data.pictures.index import TRAIN, VAL, is_picture

Note = Callable[[int], None]
"""Is called with the number of pictures found so far."""

#: Archives of the public download, which are called otherwise than the folders they stand for.
_STANDS_FOR: Final = {"ILSVRC2012_img_train": TRAIN, "ILSVRC2012_img_val": VAL}
_COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_LISTS: Final = ("LOC_val_solution.csv", "val_annotations.txt", "val.txt", "val.csv")
#: Of a list: the picture, with or without its suffix, and then its class.
_LIST_LINE: Final = re.compile(r"\s*([^\s,]+)[\s,]+([^\s,]+)")
_NOTE_EVERY: Final = 10_000


class Found(NamedTuple):
    """A picture of the source."""

    class_name: str
    name: str
    """Of the file, without folders."""
    path: str
    """Of the file that holds it: itself or an archive."""
    offset: int
    size: int


class _Item(NamedTuple):
    parts: tuple[str, ...]
    path: str
    offset: int
    size: int


def find(source: Path, *, note: Note | None = None) -> dict[str, list[Found]]:
    """All pictures of both splits, sorted by class and then by name.

    Raises:
        InputError: there are none, something cannot be read, an archive is damaged or compressed,
            or the classes of the validation pictures are not known.
    """
    if not source.exists():
        raise InputError(f"{source} does not exist: give ImageNet's folder or archive")
    if source.is_file() and source.name.lower().endswith(_COMPRESSED):
        raise InputError(f"{source} is compressed: unpack it first; a .tar is read as it is")
    train: list[Found] = []
    val: list[_Item] = []
    lists: list[_Item] = []
    for item in _items(source):
        split, below = _split(item.parts)
        if not is_picture(item.parts[-1]):
            if item.parts[-1] in _LISTS:
                lists.append(item)
        elif split == TRAIN and len(below) > 1:
            train.append(_found(item, below[0]))
        elif split == VAL:
            val.append(item)
        if note and (len(train) + len(val)) % _NOTE_EVERY == 0:
            note(len(train) + len(val))
    if not train:
        raise InputError(
            f"{source} holds no training pictures: there must be train/<class>/*.JPEG, or "
            "ILSVRC2012_img_train.tar"
        )
    classes = {each.class_name for each in train}
    found = {TRAIN: train, VAL: _classified(val, classes, lists, source)}
    for split, each in found.items():
        each.sort()
        _check_twice(split, each)
    return found


def read(found: Found) -> bytes:
    """Bytes of a picture. Raises OSError."""
    with open(found.path, "rb") as file:
        file.seek(found.offset)
        return file.read(found.size)


def _items(source: Path) -> Iterator[_Item]:
    if source.is_file():
        yield from _members(source, (_stands_for(source.name),))
        return
    for folder, folders, names in os.walk(source, followlinks=True, onerror=_refuse):
        folders[:] = [each for each in folders if not each.startswith(".")]
        above = Path(folder).relative_to(source).parts
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith("."):
                continue
            if name.endswith(".tar"):
                yield from _members(Path(path), (*above, _stands_for(name)))
            else:
                yield _Item((*above, name), path, 0, _size(path))


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError as error:
        if os.path.islink(path):
            raise InputError(f"{path} is a link to nothing: remove it, or repair it") from None
        raise _unreadable(path, error) from None


def _refuse(error: OSError) -> None:
    raise _unreadable(error.filename, error) from None


def _unreadable(path: str | Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror or error}")


def _members(path: Path, above: tuple[str, ...]) -> Iterator[_Item]:
    try:
        with path.open("rb") as file:
            yield from _in_archive(file, 0, str(path), above)
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{path} is no whole tar archive ({error}): fetch it again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _in_archive(file: IO[bytes], start: int, path: str, above: tuple[str, ...]) -> Iterator[_Item]:
    """Files of an archive that begins at byte ``start`` of ``path``; ``file`` is at its begin."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            # It would keep all of them otherwise: a million.
            archive.members.clear()  # type: ignore[attr-defined]
            if not member.isreg():
                continue
            parts = (*above, *(part for part in member.name.split("/") if part != "."))
            offset = start + member.offset_data
            if member.name.endswith(".tar"):
                inner = archive.extractfile(member)
                assert inner is not None
                inside = (*parts[:-1], _stands_for(parts[-1]))
                yield from _in_archive(inner, offset, path, inside)
            else:
                yield _Item(parts, path, offset, member.size)


def _stands_for(name: str) -> str:
    stem = name.removesuffix(".tar")
    return _STANDS_FOR.get(stem, stem)


def _split(parts: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Which split a path belongs to, and what is below it; ("", ()) for neither."""
    for place, part in enumerate(parts[:-1]):
        if part in (TRAIN, VAL):
            return part, parts[place + 1 :]
    return "", ()


def _found(item: _Item, class_name: str) -> Found:
    name = item.parts[-1]
    check_relative(f"{class_name}/{name}", what="picture")
    return Found(class_name, name, item.path, item.offset, item.size)


def _classified(
    val: list[_Item], classes: set[str], lists: list[_Item], source: Path
) -> list[Found]:
    if not val:
        raise InputError(
            f"{source} holds no validation pictures: there must be val/*.JPEG, or "
            "ILSVRC2012_img_val.tar"
        )
    listed: dict[str, str] = {}
    found: list[Found] = []
    for item in val:
        class_name = _split(item.parts)[1][0]
        if class_name not in classes:
            listed = listed or _read_lists(lists)
            name = item.parts[-1]
            class_name = listed.get(name) or listed.get(name.rpartition(".")[0]) or ""
        if class_name not in classes:
            raise InputError(
                f"the class of {'/'.join(item.parts)} is not known: put the list of the validation "
                f"pictures beside train/ and val/ ({', '.join(_LISTS)}: a line for each, its name "
                "and its class)"
                if not class_name
                else f"the class of {'/'.join(item.parts)}, {class_name}, has no training pictures"
            )
        found.append(_found(item, class_name))
    return found


def _read_lists(lists: list[_Item]) -> dict[str, str]:
    """Name of a picture, with or without its suffix -> its class."""
    found: dict[str, str] = {}
    for item in lists:
        try:
            with open(item.path, "rb") as file:
                file.seek(item.offset)
                content = file.read(item.size)
        except OSError as error:
            raise _unreadable(item.path, error) from None
        for line in content.decode(errors="replace").splitlines():
            if match := _LIST_LINE.match(line):
                found[match[1].rpartition("/")[2]] = match[2]
    return found


def _check_twice(split: str, found: list[Found]) -> None:
    for before, after in pairwise(found):
        if before[:2] == after[:2]:
            raise InputError(
                f"{split}/{after.class_name}/{after.name} is there twice, in {before.path} and "
                f"{after.path}: remove one"
            )
