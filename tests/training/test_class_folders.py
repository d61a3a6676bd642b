"""Pictures as torchvision's ImageFolder has them, ``<class>/*.jpg`` without train/ and val/: a
tenth of each class is held out, the same everywhere; what else there is is named, or refused."""

import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from contract.errors import InputError
from tests.published import layouts
from tests.published.table import arranged
from tests.training.sample_pictures import as_jpeg
from training.data.pictures import layout, library
from training.data.pictures.layout import Item

#: As a camera calls them; ImageFolder's own suffixes, upper and lower case.
SUFFIXES = ("jpg", "JPG", "jpeg", "png")


def pictures(folder: Path, **classes: int) -> Path:
    for label, (name, num) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for number in range(num):
            suffix = SUFFIXES[number % len(SUFFIXES)]
            color = (255 * label, 10 * number % 256, 80)
            content = as_jpeg(Image.new("RGB", (64, 48), color))
            (folder / name / f"IMG_{number:04d}.{suffix}").write_bytes(content)
    return folder


def splits(source: str) -> tuple[list[str], list[str], str]:
    """The names of both splits of an opened set, and its fingerprint."""
    found = library.open_set(source)
    return [each.name for each in found.train], [each.name for each in found.val], found.fingerprint


def test_a_tenth_of_each_class_is_held_out_by_its_name(tmp_path: Path) -> None:
    source = pictures(tmp_path / "pics", cats=60, dogs=25, owls=2)
    found = library.open_set(str(source))
    train, val, _ = splits(str(source))
    assert [sum(each.startswith(name) for each in val) for name in found.classes] == [6, 2, 1]
    assert len({*train, *val}) == len(train) + len(val) == 87
    # Not the first ones, which a camera took on the first day: as many of each half, about.
    halves = [int(name[9:13]) < 30 for name in val if name.startswith("cats")]
    assert 0 < sum(halves) < 6
    # Of names only: neither the order of a listing nor the place matters.
    items = [*layout.files(source)]
    turned = layout.arrange(reversed(items), "elsewhere", content=lambda _: b"").pictures
    assert [f"{each.class_name}/{each.name}" for each in turned["val"]] == val
    # A run that resumes where a picture was added is refused, and most others stay where they were.
    (source / "cats" / "new.jpg").write_bytes(b"")
    assert len({*val} & {*splits(str(source))[1]}) >= 8


def test_what_is_not_used_is_named_and_what_is_nested_is_used(tmp_path: Path) -> None:
    source = pictures(tmp_path, cats=3, dogs=3, owls=1)
    nested = source / "cats" / "2026" / "may"
    nested.mkdir(parents=True)
    for name in ("a.jpg", "IMG_0000.jpg"):  # one of the name is elsewhere in the class
        (nested / name).write_bytes(b"")
    for name in ("cover.png", "cats/notes.txt", "dogs/IMG_7.HEIC", ".DS_Store", "dogs/._a.jpg"):
        (source / name).write_bytes(b"")
    (source / "cows").mkdir()
    found = library.open_set(str(source))
    assert found.classes == ("cats", "dogs", "owls")
    notes = " ".join(found.notes)
    named = ("owls", "cover.png", "cats/notes.txt", "cows/", "dogs/IMG_7.HEIC")
    assert [each in notes for each in named] == [True] * len(named)
    names = {each.name for split in (found.train, found.val) for each in split}
    assert {"cats/2026/may/a.jpg", "cats/2026/may/IMG_0000.jpg", "cats/IMG_0000.jpg"} <= names
    assert all((source / each.file).exists() for each in found.train)


@pytest.mark.parametrize("planted", ["", "0.jpg", "0.txt"])
@pytest.mark.parametrize("each", layouts.LAYOUTS.values(), ids=layouts.LAYOUTS)
def test_each_published_layout_is_found_whole_or_refused(
    each: layouts.Layout, planted: str
) -> None:
    """And a file beside its folders, which belongs to no class, is named."""
    more = [os.path.join(os.path.commonpath([*each.paths()]), planted)] if planted else []
    try:
        arrangement = arranged(each, *more)
    except InputError as error:
        found, notes = str(error), planted
        assert each.found in found or planted == "0.jpg"
    else:
        notes = "\n".join(arrangement.notes)
        train, val = (Counter(one.class_name for one in of) for of in arrangement.pictures.values())
        found = ", ".join(f"{name} {train[name]}+{val[name]}" for name in arrangement.labels)
        assert found == each.found
        assert each.named in notes or planted
    assert planted in notes


def test_a_class_without_validation_pictures_is_named() -> None:
    files = [f"train/{name}/1.jpg" for name in ("birds", "cats", "dogs")]
    items = [Item(tuple(each.split("/")), each) for each in (*files, "val/cats/2.jpg")]
    found = layout.arrange(items, "it", content=lambda _: b"")
    assert found.notes == ("trained but not evaluated: birds, dogs",)
    called = [(name, f"{number}.jpg") for name in ("test", "cats") for number in (1, 2)]
    split = layout.arrange(
        [Item(each, "/".join(each)) for each in called], "it", content=lambda _: b""
    )
    assert {each.class_name for each in split.pictures["train"]} == {"test", "cats"}
    with pytest.raises(InputError, match=r"val/owls/3\.jpg is not known \(train/ has no"):
        layout.arrange([*items, Item(("val", "owls", "3.jpg"), "")], "it", content=lambda _: b"")
