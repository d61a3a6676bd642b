"""Layouts of pictures: class folders, ImageNet as downloaded, archives, archives of archives.

Nothing is unpacked. A tar file that is not compressed keeps its members in one piece, and so do
those inside of it: a picture is a place in a file. What counts is the path that it would have:
``.../train/<class>/...`` and ``.../val/<class>/...`` (or what others call the two), or a flat
``val/`` and its classes (``LOC_val_solution.csv``, another file of lines, an annotation in XML for
each picture, or ImageNet's development kit), or ``<class>/...`` without either. Where there are no
validation pictures, a tenth of each class is held out.
Standard library only, but for the development kit, which SciPy reads.
"""

import hashlib
import io
import os
import re
import shlex
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, pairwise
from pathlib import Path, PurePath
from typing import IO, Any, Final, NamedTuple, Self

from contract.errors import InputError
from contract.runs import check_relative
from contract.text import listed
from training.data.catalog import PICTURES
from training.data.pictures.index import TRAIN, VAL, is_picture

#: Archives of the public download and the split that each holds.
_STANDS_FOR: Final = {"ILSVRC2012_img_train": TRAIN, "ILSVRC2012_img_val": VAL}
_COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_LISTS: Final = ("LOC_val_solution.csv", "val_annotations.txt", "val.txt", "val.csv")
#: Line of a list: a picture, with or without its suffix, and then its class.
_LIST_LINE: Final = re.compile(r"\s*([^\s,]+)[\s,]+([^\s,]+)")
#: ImageNet's development kit, and the files in it that name the classes of validation pictures.
_KIT: Final = "ILSVRC2012_devkit_t12.tar.gz"
_KIT_FILES: Final = ("meta.mat", "ILSVRC2012_validation_ground_truth.txt")
#: Names of train/ and val/ elsewhere, in any case; of those that have class folders, the first.
_TRAINED: Final = (TRAIN, "training")
_EVALUATED: Final = (VAL, "validation", "valid", "eval", "dev", "test", "testing")
#: What follows the class in a picture's name, and the shell's words that sort such ones.
_NUMBER: Final = re.compile(r"[._-]?\d")
_SORT: Final = (
    'for f in *[0-9]*; do d=${f%%[0-9]*}; d=${d%[._-]}; mkdir -p "$d" && mv "$f" "$d"; done'
)
#: Names of folders that hold class folders and are no classes themselves.
_SPLITS: Final = re.compile(rf"(?:^|[^a-z])({'|'.join((*_TRAINED, *_EVALUATED))})(?:[^a-z]|$)")
#: In an annotation: the class of an object in the picture.
_OBJECT: Final = re.compile(rb"<name>\s*([^<]+?)\s*</name>")
#: One in N pictures of a class is held out: at least one, and never the only one.
_HELD_OUT_EVERY: Final = 10
#: Folders next to or around pictures that are no classes.
_NO_CLASSES: Final = frozenset(
    ("images", "image", "img", "imgs", "jpegimages", "labels", "masks", "mask", "annotations")
)


class FoundPicture(NamedTuple):
    """A picture of the source."""

    class_name: str
    name: str
    """Path of the picture, relative to its class folder."""
    path: str
    """Path of the file with the picture's bytes: the picture itself or an archive."""
    offset: int
    size: int


class Item(NamedTuple):
    """A file of the source, or an empty folder."""

    parts: tuple[str, ...]
    """Parts of its path; the last one is empty for an empty folder."""
    path: str
    """Path of the file with the item's bytes: the item itself or an archive."""
    offset: int = 0
    size: int = -1


class _Files(NamedTuple):
    """Files of a source by what they are."""

    pictures: dict[str, list[Item]]
    """Pictures by split; "" for none."""
    lists: list[Item]
    """Files that list the classes of the validation pictures."""
    annotations: dict[str, Item]
    """Annotations of validation pictures, by the pictures' names without suffix."""
    kit: dict[str, Item]
    """Files of ImageNet's development kit, by name."""
    others: list[Item]

    @classmethod
    def of(cls, items: Iterable[Item]) -> Self:
        found = cls({}, [], {}, {}, [])
        for item in items:
            split, _ = _split(item.parts)
            name = item.parts[-1]
            stem, _, suffix = name.rpartition(".")
            if is_picture(name):
                found.pictures.setdefault(split, []).append(item)
            elif split == VAL and suffix == "xml":
                found.annotations[stem] = item
            elif name in (_KIT, *_KIT_FILES):
                found.kit[name] = item
            else:
                (found.lists if name in _LISTS else found.others).append(item)
        return found


class Arranged(NamedTuple):
    """The pictures of a source."""

    pictures: dict[str, list[FoundPicture]]
    """Pictures of each split, sorted by class and then by name."""
    notes: tuple[str, ...]
    """A sentence each about what was held out and what is not used."""

    @property
    def labels(self) -> dict[str, int]:
        """Number of each class, in the order of their names."""
        names = sorted(_classes(self.pictures[TRAIN]))
        return {name: number for number, name in enumerate(names)}


def find(source: Path) -> Arranged:
    """All pictures of a folder or an archive.

    Raises:
        InputError: an archive is damaged or compressed; or as ``arrange``.
        OSError: something cannot be read.
    """
    if not source.exists():
        raise InputError(f"{source} does not exist: give the folder or archive of the pictures")
    if source.is_file() and source.name.lower().endswith(_COMPRESSED):
        raise InputError(f"{source} is compressed: unpack it first; a .tar is read as it is")
    return arrange(_items(source), str(source), content=read)


def arrange(
    items: Iterable[Item],
    source: str,
    *,
    content: Callable[[Item], bytes],
) -> Arranged:
    """Sort the files of a source into splits and classes.

    Args:
        items: in any order.
        source: its name in errors.
        content: reads a file.

    Raises:
        InputError: there are no pictures, or their classes are not known.
    """
    pictures, lists, annotations, kit, others = _Files.of(items)
    if labels := [each for each in others if each.parts[-1].endswith(".cls")]:
        raise InputError(
            f"{source} has its classes in files beside the pictures ({'/'.join(labels[0].parts)}), "
            "as WebDataset has them, which are not read: sort the pictures into class folders"
        )

    # Splits and classes by the names of folders
    train = _trained(pictures)
    classes = _classes(train)
    evaluated, val = _evaluated(pictures, classes)
    loose = [*chain.from_iterable(pictures.values())]
    if not train:
        train, loose = _by_folder(loose, val, others, source)
        classes = _classes(train)
    elif len(classes) < 2:
        raise _unsorted(source, [*loose, *val])
    if classes <= _NO_CLASSES:
        raise InputError(
            f"{source} has its pictures in {listed(sorted(classes))}, as sets for detection or "
            "segmentation have, which are not trained on: sort the pictures into class folders"
        )

    # Classes of validation pictures that no folder names
    known = _listed(lists, classes, content, others)
    if known or annotations or classes.issuperset(map(_folder, val)):
        others += kit.values()
    elif kit:
        known = _of_kit(kit, source, content)
    found = {TRAIN: train, VAL: _classified(val, classes, known, annotations, content)}
    for split, each in found.items():
        each.sort()
        _check_twice(split, each)

    # What the user should know of the result
    notes = [] if val else _hold_out(found, source)
    if val and (missing := classes - _classes(found[VAL])):
        notes.append(f"trained but not evaluated: {listed(sorted(missing))}")
    if evaluated != VAL:
        notes.append(f"evaluated on the pictures in {evaluated}/")
    notes += _unused(loose, "outside of the class folders")
    notes += _unused([*others, *annotations.values()], f"other than {', '.join(PICTURES)}")
    return Arranged(found, tuple(notes))


def _classes(pictures: Iterable[FoundPicture]) -> set[str]:
    return {each.class_name for each in pictures}


def _trained(pictures: dict[str, list[Item]]) -> list[FoundPicture]:
    """Take the training pictures out of ``pictures``: those in the class folders of the first split
    that has some. The others of that split then belong to none."""
    found: list[FoundPicture] = []
    splits = (name for name in _TRAINED if any(map(_folder, pictures.get(name, []))))
    inside = pictures.pop(next(splits, "none"), [])
    while inside:  # a million of them are not kept twice
        item = inside.pop()
        if _folder(item):
            found.append(_found(item, *_split(item.parts)[1]))
        else:
            pictures.setdefault("", []).append(item)
    return found


def _evaluated(pictures: dict[str, list[Item]], classes: set[str]) -> tuple[str, list[Item]]:
    """Take the validation pictures out of ``pictures``: those of ``val``, or else of the first
    split that has folders of these classes. Return the name of the split, too."""
    for name in _EVALUATED:
        inside = pictures.get(name, [])
        if (inside and name == VAL) or not classes.isdisjoint(map(_folder, inside)):
            return name, pictures.pop(name)
    return VAL, []


def _unused(items: list[Item], what: str) -> list[str]:
    names = sorted("/".join(each.parts) for each in items)
    return [f"not used: {len(names):,} {what} ({listed(names, most=3)})"] if names else []


def _by_folder(
    pictures: list[Item], val: list[Item], others: list[Item], source: str
) -> tuple[list[FoundPicture], list[Item]]:
    """Pictures without ``train/<class>/``: those in class folders, and the others."""
    # Of parts, not of characters: folders around all class folders.
    depth = len(os.path.commonprefix([each.parts[:-1] for each in pictures]))  # noqa: RUF071
    found = [_found(each, *each.parts[depth:]) for each in pictures if len(each.parts) > depth + 1]
    names = _classes(found)
    # What is directly in train/ or val/ is sorted by no folder.
    is_flat = val or any(TRAIN in each.parts[:-1] for each in pictures)
    if is_flat or len(names) < 2:
        raise _unsorted(source, [*pictures, *others])
    splits = {each for each in names if _SPLITS.search(each.lower())}
    if splits < names:  # unless no folder sorts the pictures
        splits &= _classes(each for each in found if "/" in each.name)
    if splits:
        raise InputError(
            f"{source} has folders of classes in {listed(sorted(splits))}: call the one to train "
            f"on {TRAIN}, and the one to evaluate on {VAL} (links do)"
        )
    return found, [each for each in pictures if len(each.parts) <= depth + 1]


def _unsorted(source: str, items: list[Item]) -> InputError:
    """Refusal of a source without classes, with the kinds of files that it has."""
    kinds = sorted({PurePath(each.parts[-1]).suffix.lower() or each.parts[-1] for each in items})
    there = f"; it has files of {listed(kinds)}" if any(kinds) else ""
    # As Kaggle has them: cat.1.jpg, dog.2.jpg.
    words = {_NUMBER.split(each.parts[0])[0] for each in items if len(each.parts) == 1}
    if len(words) > 1 and "" not in words:
        there += f". Sort them by their names: cd {shlex.quote(source)} && {_SORT}"
    return InputError(
        f"{source} holds no training pictures of two classes or more: there must be <class>/*.jpg, "
        f"or train/<class>/*.jpg and val/<class>/*.jpg, or ILSVRC2012_img_train.tar{there}"
    )


def _hold_out(found: dict[str, list[FoundPicture]], source: str) -> list[str]:
    """Move a tenth of each class from the training pictures to those for evaluation: those whose
    names have the smallest hashes, so that neither order nor machine matters."""
    total = len(found[TRAIN])
    train: list[FoundPicture] = []
    names: list[str] = []
    single: list[str] = []
    for name, group in groupby(found[TRAIN], key=lambda each: each.class_name):
        pictures = sorted(group, key=_hash)
        num = min(len(pictures) - 1, max(1, len(pictures) // _HELD_OUT_EVERY))
        found[VAL] += pictures[:num]
        train += pictures[num:]
        (names if num else single).append(name)
    if not names:
        raise InputError(
            f"{source} has one picture of each class, and none to evaluate on: give more pictures"
        )
    found[TRAIN] = sorted(train)
    found[VAL].sort()
    held_out = f"held out {len(found[VAL]):,} of {total:,} pictures for evaluation, of"
    alone = f"; trained but not evaluated, with one picture: {listed(single)}" if single else ""
    return [f"{held_out} {listed(names)}{alone}"]


def _hash(found: FoundPicture) -> bytes:
    return hashlib.sha256(f"{found.class_name}/{found.name}".encode()).digest()


def read(found: FoundPicture | Item) -> bytes:
    """Bytes of a file. Raises OSError."""
    with open(found.path, "rb") as file:
        file.seek(found.offset)
        return file.read(found.size)


def files(source: Path) -> Iterator[Item]:
    """The files of a folder but hidden ones, by their paths below it and without their sizes."""
    for folder, folders, names in os.walk(source, followlinks=True, onerror=_refuse):
        folders[:] = [each for each in folders if not each.startswith(".")]
        above = Path(folder).relative_to(source).parts
        shown = [each for each in names if not each.startswith(".")]
        for name in shown or ([] if folders else [""]):
            parts = (*above, name)
            yield Item(parts, "/".join(parts))


def _items(source: Path) -> Iterator[Item]:
    if source.is_file():
        yield from _members(source, (source.stem,))
        return
    for item in files(source):
        *above, name = item.parts
        path = source.joinpath(*above, name)
        if name.endswith(".tar"):
            yield from _members(path, (*above, path.stem))
        else:
            yield item._replace(path=str(path), size=_size(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        if path.is_symlink():
            raise InputError(f"{path} is a link to nothing: remove it, or repair it") from None
        raise


def _refuse(error: OSError) -> None:
    raise error


def _members(path: Path, above: tuple[str, ...]) -> Iterator[Item]:
    try:
        with path.open("rb") as file:
            yield from _in_archive(file, 0, str(path), above)
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{path} is no whole tar archive ({error}): fetch it again") from None


def _in_archive(file: IO[bytes], start: int, path: str, above: tuple[str, ...]) -> Iterator[Item]:
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
                inside = (*parts[:-1], PurePath(parts[-1]).stem)
                yield from _in_archive(inner, offset, path, inside)
            else:
                yield Item(parts, path, offset, member.size)


def _split(parts: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Which split a path belongs to, and what is below it; ("", ()) for none."""
    folders = [_STANDS_FOR.get(part, part.lower()) for part in parts[:-1]]
    for names in ((TRAIN, VAL), (*_TRAINED, *_EVALUATED)):
        for place, part in enumerate(folders):
            if part in names:
                return part, parts[place + 1 :]
    return "", ()


def _folder(item: Item) -> str:
    """Folder of a file below that of its split; empty for none."""
    below = _split(item.parts)[1]
    return below[0] if len(below) > 1 else ""


def _found(item: Item, class_name: str, *below: str) -> FoundPicture:
    name = "/".join(below)
    check_relative(f"{class_name}/{name}", what="picture")
    return FoundPicture(class_name, name, item.path, item.offset, item.size)


def _classified(
    val: list[Item],
    classes: set[str],
    listed: dict[str, str],
    annotations: dict[str, Item],
    content: Callable[[Item], bytes],
) -> list[FoundPicture]:
    found: list[FoundPicture] = []
    for item in val:
        class_name, *below = _split(item.parts)[1]
        if class_name not in classes:
            name = item.parts[-1]
            stem = name.rpartition(".")[0]
            below = [name]
            class_name = listed.get(name) or listed.get(stem) or ""
            if not class_name and (annotation := annotations.pop(stem, None)):
                objects = {each.decode() for each in _OBJECT.findall(content(annotation))}
                class_name = ", ".join(sorted(objects))
        if class_name not in classes:
            lacks = f" (train/ has no folder {folder!r})" if (folder := _folder(item)) else ""
            raise InputError(
                f"the class of {'/'.join(item.parts)} is not known{lacks}: put it into a folder "
                "that is named like one in train/, or the list of the validation pictures beside "
                f"train/ and val/ ({', '.join(_LISTS)}: a line for each, its name and its class), "
                f"or its annotation in XML into val/, or ImageNet's {_KIT} beside them"
                if not class_name
                else f"the class of {'/'.join(item.parts)}, {class_name}, has no training pictures"
            )
        found.append(_found(item, class_name, *below))
    return found


def _listed(
    lists: list[Item], classes: set[str], content: Callable[[Item], bytes], others: list[Item]
) -> dict[str, str]:
    """Name of a picture, with or without its suffix -> its class.

    A list counts if most of its lines name a class; the others join ``others``. ImageNet's own
    ``ImageSets/CLS-LOC/val.txt`` has running numbers there.
    """
    found: dict[str, str] = {}
    for item in sorted(lists, key=lambda each: _LISTS.index(each.parts[-1])):
        lines = content(item).decode(errors="replace").splitlines()
        matches = [match for line in lines if (match := _LIST_LINE.match(line))]
        own = {each[1].rpartition("/")[2]: each[2] for each in matches if each[2] in classes}
        if 2 * len(own) > len(matches):
            found = own | found
        else:
            others.append(item)
    return found


def _of_kit(kit: dict[str, Item], source: str, content: Callable[[Item], bytes]) -> dict[str, str]:
    """Name of each of ImageNet's validation pictures, without its suffix -> its class.

    As torchvision's ``datasets/imagenet.py`` reads the development kit: line N is the class of
    picture N, and classes that have others below them have numbers too.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]  # comes with scikit-learn

    files: list[Any]
    try:
        if _KIT in kit:
            archive = tarfile.open(fileobj=io.BytesIO(content(kit[_KIT])))  # noqa: SIM115
            folder = "ILSVRC2012_devkit_t12/data"
            files = [archive.extractfile(f"{folder}/{name}") for name in _KIT_FILES]
        else:
            files = [io.BytesIO(content(kit[name])) for name in _KIT_FILES]
        meta, truth = files
        synsets = loadmat(meta, squeeze_me=True)["synsets"]
        leaves = [each for each in synsets if not each["num_children"]]
        names = {int(each["ILSVRC2012_ID"]): str(each["WNID"]) for each in leaves}
        found = [names.get(int(number), "") for number in truth.read().split()]
        if len(found) != 50_000 or not all(found):
            raise ValueError("50,000 pictures must have classes of meta.mat")
    except Exception as error:  # SciPy's are of many kinds
        why = f"without {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"{source}: ImageNet's development kit cannot be used ({why}): give {_KIT}, or "
            f"{listed(_KIT_FILES)} of it"
        ) from None
    return {f"ILSVRC2012_val_{number:08}": name for number, name in enumerate(found, 1)}


def _check_twice(split: str, found: list[FoundPicture]) -> None:
    for before, after in pairwise(found):
        if before[:2] == after[:2]:
            raise InputError(
                f"{split}/{after.class_name}/{after.name} is there twice, in {before.path} and "
                f"{after.path}: remove one"
            )
