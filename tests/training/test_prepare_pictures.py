"""Preparing ImageNet: every layout it comes in becomes the same set, also after an interruption;
what is damaged is listed."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat  # type: ignore[import-untyped]

from contract import exits
from contract.errors import InputError
from tests.conftest import ROOT
from tests.training import sample_pictures
from training.data.pictures import layout, library
from training.data.pictures.destination import Destination
from training.data.pictures.index import Index
from training.data.pictures.prepare import Wish, prepare

SHARD_BYTES = 200_000


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 + 20 pictures in ImageNet's layout, ``val/`` flat."""
    return sample_pictures.write_tree(tmp_path_factory.mktemp("tree"), num_train=80, num_val=20)


def made(source: Path, to: Path, **wish: object) -> Index:
    return prepare(
        source,
        Destination(uri=str(to)),
        Wish(**wish),  # type: ignore[arg-type]
        processes=2,
        shard_bytes=SHARD_BYTES,
    )


def contents(folder: Path) -> dict[str, str]:
    """Name of each file -> its checksum."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def pack(file: Path, members: Iterable[Path]) -> Path:
    """An archive of files under their names."""
    with tarfile.open(file, "w") as archive:
        for each in sorted(members):
            archive.add(each, each.name)
    return file


def test_folders_and_archives_and_an_archive_of_archives_hold_the_same_pictures(
    tree: Path, tmp_path: Path
) -> None:
    archives = tmp_path / "download"  # the two of the public one: of archives by class, and flat
    archives.mkdir()
    classes = (
        pack(tmp_path / f"{each.name}.tar", each.iterdir()) for each in (tree / "train").iterdir()
    )
    pack(archives / "ILSVRC2012_img_train.tar", classes)
    pack(archives / "ILSVRC2012_img_val.tar", (tree / "val").iterdir())
    shutil.copy(tree / sample_pictures.VAL_LIST, archives)
    whole = pack(tmp_path / "ILSVRC2012.tar", [archives])
    of_tree, *others = (
        {
            split: [(each.class_name, each.name, layout.read(each)) for each in found]
            for split, found in layout.find(source).pictures.items()
        }
        for source in (tree, archives, whole)
    )
    assert {split: len(each) for split, each in of_tree.items()} == {"train": 80, "val": 20}
    assert {each[0] for each in of_tree["val"]} == set(sample_pictures.CLASSES)
    assert others == [of_tree, of_tree]


# --- image-net.org's own archives -----------------------------------------------------------------
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
KIT = "ILSVRC2012_devkit_t12"
#: As torchvision's datasets/imagenet.py reads it, and the readme.txt of the development kit has it:
#: a class that stands for others has ``num_children`` and a number above those of all leaves.
SYNSETS = [
    ("ILSVRC2012_ID", "f8"),
    *((name, "O") for name in ("WNID", "words", "gloss")),
    *(("num_children", "f8"), ("children", "O"), ("wordnet_height", "f8")),
    ("num_train_images", "f8"),
]
#: ImageNet's classes are not numbered in the order of their names.
NUMBERED = sample_pictures.CLASSES[::-1]


def kit(folder: Path, numbers: list[int]) -> Path:
    """The development kit whose ground truth has these numbers, and then that of any class."""
    data = folder / KIT / "data"
    data.mkdir(parents=True)
    lines = [*map(str, numbers), *["1"] * (50_000 - len(numbers))]
    (data / TRUTH).write_text("\n".join(lines) + "\n")
    leaves = [
        (number, name, f"words of {name}", "what it is", 0, np.zeros((0, 0)), 0, 1300)
        for number, name in enumerate(NUMBERED, 1)
    ]
    above = (11, "n00001740", "entity", "all there is", 10, np.arange(1.0, 11), 18, 0)
    savemat(data / "meta.mat", {"synsets": np.array([*leaves, above], SYNSETS).reshape(-1, 1)})
    (folder / KIT / "readme.txt").write_text("the development kit")
    return folder / KIT


@pytest.fixture(scope="session")
def truth(tree: Path) -> list[int]:
    """Numbers of the classes of the validation pictures, in their order."""
    lines = (tree / sample_pictures.VAL_LIST).read_text().splitlines()[1:]
    return [NUMBERED.index(line.split(",")[1].split()[0]) + 1 for line in sorted(lines)]


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_development_kit_tells_the_classes_of_validation_pictures(
    tree: Path, truth: list[int], tmp_path: Path, is_packed: bool
) -> None:
    download = tmp_path / "download"
    train = download / "ILSVRC2012_img_train"
    train.mkdir(parents=True)
    for each in (tree / "train").iterdir():
        pack(train / f"{each.name}.tar", each.iterdir())
    if is_packed:
        pack(download / "ILSVRC2012_img_train.tar", train.iterdir())
        shutil.rmtree(train)
        pack(download / "ILSVRC2012_img_val.tar", (tree / "val").iterdir())
        with tarfile.open(download / f"{KIT}.tar.gz", "w:gz") as archive:
            archive.add(kit(tmp_path, truth), KIT)
    else:
        (download / "ILSVRC2012_img_val").symlink_to(tree / "val")
        kit(download, truth)
    found, expected = layout.find(download), layout.find(tree)
    for split in ("train", "val"):
        names = [(each.class_name, each.name) for each in found.pictures[split]]
        assert names == [(each.class_name, each.name) for each in expected.pictures[split]]
    assert [KIT in each for each in found.notes] == [True] * (not is_packed)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: (data / TRUTH).write_text("1\n2\n"), "50,000 "),
        (lambda data: (data / TRUTH).write_text("11\n" * 50_000), "meta.mat"),
        (lambda data: (data / TRUTH).unlink(), f"'{TRUTH}'"),
        (lambda data: (data / "meta.mat").write_text("html"), ""),
    ],
    ids=["too-few", "above-others", "no-truth", "another-file"],
)
def test_a_development_kit_that_cannot_be_used_is_refused_with_what_to_give(
    tree: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(tree / split)
    damage(kit(tmp_path, [1]) / "data")
    with pytest.raises(InputError) as refused:
        layout.find(tmp_path)
    assert said in str(refused.value)
    assert f"{KIT}.tar.gz" in str(refused.value)


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_packing_shrinks_the_shorter_side_and_keeps_all_of_a_picture(
    tmp_path: Path, encoding: str
) -> None:
    shapes = {"landscape": (400, 300), "panorama": (2000, 200), "small": (300, 50)}
    for split in ("train", "val"):
        for name, shape in shapes.items():
            path = tmp_path / "tree" / split / name / "a.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample_pictures.as_jpeg(Image.new("RGB", shape)))
    made(tmp_path / "tree", tmp_path / "set", form="packed", size=150, encoding=encoding)
    entries = library.open_set(str(tmp_path / "set")).train
    found = {each.name: (each.width, each.height) for each in entries}
    assert found == {
        "landscape/a.jpg": (200, 150),
        "panorama/a.jpg": (1500, 150),
        "small/a.jpg": (300, 50),
    }


def test_a_preparation_that_was_killed_continues_and_ends_with_the_same_bytes(
    tree: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    index = made(tree, whole, form="packed", size=64, encoding="raw")
    script = (
        "import sys; from pathlib import Path\n"
        "from training.data.pictures.destination import Destination\n"
        "from training.data.pictures.prepare import Wish, prepare\n"
        "if __name__ == '__main__':\n"
        "    wish = Wish(form='packed', size=64, encoding='raw')\n"
        f"    prepare(Path({str(tree)!r}), Destination(uri={str(killed)!r}), wish,\n"
        f"            processes=2, shard_bytes={SHARD_BYTES})\n"
    )
    (tmp_path / "again.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "again.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    while process.poll() is None and not list(killed.glob("*.tar")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shards = {path.name: path.stat().st_mtime_ns for path in killed.glob("*.tar")}
    assert made(tree, killed, form="packed", size=64, encoding="raw") == index
    assert contents(killed) == contents(whole)
    marked = [name for name, when in shards.items() if (killed / name).stat().st_mtime_ns == when]
    assert len(marked) >= len(shards) - 2, "at most those that two processes were at are repeated"


def test_what_is_damaged_is_left_out_and_listed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    sample_pictures.write_tree(source, num_train=40, num_val=10)
    damaged = sample_pictures.damage(source / "train", num=10)
    for form in ("shards", "packed"):
        index = made(source, tmp_path / form, form=form, size=64)
        assert index.counts == {"train": 30, "val": 10}
        assert {each.partition(": ")[0] for each in index.damaged} == {
            f"train/{name}" for name in damaged
        }


def test_another_set_or_something_else_is_not_written_over(tree: Path, tmp_path: Path) -> None:
    shard = tmp_path / "train-00000.tar"
    shard.write_text("a year of work")
    with pytest.raises(InputError, match=r"holds train-00000\.tar of something else: give --to an"):
        made(tree, tmp_path, form="packed", size=64)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a year of work"]
    shard.unlink()
    index = made(tree, tmp_path, form="packed", size=64)
    before = contents(tmp_path)
    assert made(tree, tmp_path, form="packed", size=64) == index
    with pytest.raises(InputError, match="another set"):
        made(tree, tmp_path, form="packed", size=96)
    assert contents(tmp_path) == before


def test_a_wish_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(InputError, match="shards, packed"):
        Wish(form="zip")
    with pytest.raises(InputError, match="jpeg, raw"):
        Wish(encoding="png")
    with pytest.raises(InputError, match="32 to 2048"):
        Wish(size=8)
    with pytest.raises(InputError, match="packed"):
        Wish(form="shards", encoding="raw")


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    for name in ("imagenet.tar", "imagenet.zip"):
        (tmp_path / name).write_bytes(b"no archive" * 100)
    (tmp_path / "link" / "train").mkdir(parents=True)
    (tmp_path / "link" / "train" / "one.JPEG").symlink_to(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    for name, words in {
        "nothing": "does not exist",
        "empty": "no training pictures",
        "imagenet.tar": "no whole tar archive",
        "imagenet.zip": "unpack it first",
        "link": r"one\.JPEG is a link to nothing",
    }.items():
        with pytest.raises(InputError, match=words):
            layout.find(tmp_path / name)


def test_what_cannot_be_written_ends_the_preparation_which_may_be_continued(
    tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "val-00000.tar").mkdir()
    with pytest.raises(InputError, match=r"val-00000\.tar"):
        made(tree, tmp_path, form="packed", size=64)
    (tmp_path / "val-00000.tar").rmdir()
    assert made(tree, tmp_path, form="packed", size=64).counts == {"train": 80, "val": 20}
    for uri in ("", "s3:", "s3:///x", "gs://bucket/x"):
        with pytest.raises(InputError, match=r"give a folder, or s3://BUCKET/PREFIX"):
            Destination(uri=uri)


def test_ctrl_c_ends_a_preparation_with_a_sentence(tmp_path: Path) -> None:
    source = sample_pictures.write_tree(tmp_path / "source", num_train=10, num_val=10)
    slow = source / "train" / sample_pictures.CLASSES[0] / "slow.JPEG"
    os.mkfifo(slow)  # to open it takes as long as its other end is closed
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "training.data.pictures", str(source)),
            *("--to", str(tmp_path / "set"), "--size", "64", "--processes", "2"),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("packing"):
            break
    time.sleep(0.2)  # its own processes are starting
    os.killpg(process.pid, signal.SIGINT)
    while process.poll() is None:
        with suppress(OSError):  # no process waits there
            os.close(os.open(slow, os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(0.02)
    said = process.stderr.read()
    process.stderr.close()
    assert process.returncode == exits.INTERRUPTED
    assert said.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in said
