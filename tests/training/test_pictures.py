"""Batches of pictures: each step's global batch is the same on any number of ranks, through each
form of a set and after a resume; damaged pictures are left out, and a decoder that is killed ends
the reading with a sentence."""

import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from contract.errors import InputError
from store import storage
from tests.training import sample_pictures
from training.data.pictures import decode as decoding
from training.data.pictures import library, mirror
from training.data.pictures.batches import (
    PictureBatch,
    PictureReader,
    ReadingError,
    rank_part,
    rank_plan,
)
from training.data.pictures.decode import decode, draw, pixels
from training.data.pictures.destination import Destination
from training.data.pictures.index import FORMS, JPEG, RAW, Entry, StoredFile
from training.data.pictures.library import PictureSet
from training.data.pictures.picture import DamagedPictureError, fitted
from training.data.pictures.prepare import Wish, prepare
from training.data.small_images import BatchOrder

CPU = torch.device("cpu")
#: No picture has more on its shorter side: packing does not shrink them, so all forms have equal
#: pixels.
SIZE = 300
GLOBAL_BATCH = 16


class Sets(NamedTuple):
    """One set in each form."""

    tree: Path
    """As it is downloaded."""
    prepared: dict[str, PictureSet]


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    folder = tmp_path_factory.mktemp("sets")
    tree = sample_pictures.write_tree(folder / "source", num_train=44, num_val=13)
    prepared = {}
    for form in FORMS:
        # Raw, because a second JPEG is another picture.
        wish = Wish(form=form, size=SIZE, encoding=RAW if form == "packed" else "jpeg")
        to = Destination(uri=str(folder / form))
        prepare(tree, to, wish, processes=1, shard_bytes=1_000_000)
        prepared[form] = library.open_set(to.uri)
    return Sets(tree, prepared)


class Kept(NamedTuple):
    pictures: torch.Tensor
    extents: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor


def kept(batch: PictureBatch) -> Kept:
    """A batch that outlives the next one."""
    return Kept(batch.pictures.clone(), batch.extents, batch.labels, batch.samples)


def plan(
    found: PictureSet, steps: Iterable[int], *, rank: int = 0, world_size: int = 1
) -> Iterator[torch.Tensor]:
    """The samples of a rank in each step."""
    order = BatchOrder(num_images=len(found.train), global_batch=GLOBAL_BATCH, seed=3)
    return rank_plan(order, steps=steps, rank=rank, world_size=world_size)


def read(
    found: PictureSet, steps: Iterable[int], *, world_size: int = 1, decoders: int = 1
) -> list[Kept]:
    """The global batch of each step, put together from all ranks."""
    steps = [*steps]
    parts: list[list[Kept]] = [[] for _ in steps]
    for rank in range(world_size):
        planned = plan(found, steps, rank=rank, world_size=world_size)
        with reader(found, decoders=decoders) as opened:
            for batches, batch in zip(parts, opened.batches(planned), strict=True):
                batches.append(kept(batch))
    return [Kept(*map(torch.cat, zip(*batches, strict=True))) for batches in parts]


def reader(found: PictureSet, *, decoders: int = 1) -> PictureReader:
    return PictureReader(
        found, found.train, size=SIZE, batch=GLOBAL_BATCH, device=CPU, decoders=decoders
    )


def assert_same(first: list[Kept], second: list[Kept]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))


def assert_alike(first: list[Kept], second: list[Kept]) -> None:
    """The same pictures; where one was decoded by Pillow, as in ``prepare``, it may round and
    upsample colors differently."""
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one[1:], other[1:]))
        assert (one.pictures.float() - other.pictures.float()).abs().mean() < 2


@pytest.fixture
def tree(sets: Sets, tmp_path: Path) -> Path:
    """A copy of the set as it is downloaded, with its validation pictures in class folders."""
    return sample_pictures.sort_val(shutil.copytree(sets.tree, tmp_path / "tree"))


@pytest.fixture(scope="session")
def two_epochs(sets: Sets) -> list[Kept]:
    """Every step of the first two epochs on one rank, from the shards."""
    return read(sets.prepared["shards"], range(6))


@pytest.fixture(scope="session")
def packed_epochs(sets: Sets) -> list[Kept]:
    """The same of the packed pictures."""
    return read(sets.prepared["packed"], range(6))


def test_an_epoch_has_each_sample_once_with_its_own_pixels(
    sets: Sets, two_epochs: list[Kept]
) -> None:
    found = sets.prepared["shards"]
    for epoch in (two_epochs[:3], two_epochs[3:]):
        samples = torch.cat([each.samples for each in epoch])
        assert sorted(samples.tolist()) == list(range(44))
    assert not torch.equal(two_epochs[0].samples, two_epochs[3].samples)
    for batch in two_epochs[:3]:
        for picture, (height, width), label, sample in zip(*batch, strict=True):
            entry = found.train.entry(int(sample))
            with Image.open(sets.tree / "train" / entry.name) as image:
                expected = np.asarray(image.convert("RGB")).astype(int)
            assert expected.shape[:2] == (height, width) == (entry.height, entry.width)
            # Two decoders may round differently, and upsample colors differently.
            difference = np.abs(picture[:height, :width].numpy().astype(int) - expected)
            assert difference.mean() < 2
            assert not picture[height:].any()
            assert not picture[:, width:].any()
            assert found.classes[label] == entry.name.split("/")[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_step_has_the_same_batch_on_any_number_of_ranks_in_each_form(
    sets: Sets, two_epochs: list[Kept], packed_epochs: list[Kept], form: str, world_size: int
) -> None:
    found = sets.prepared[form]
    assert found.fingerprint == sets.prepared["shards"].fingerprint
    steps = read(found, range(6), world_size=world_size, decoders=4 - world_size)
    assert_same(steps, packed_epochs if form == "packed" else two_epochs)
    assert_alike(steps, two_epochs)


def test_validation_reads_each_picture_once_over_all_ranks(sets: Sets) -> None:
    found = sets.prepared["packed"]
    seen: list[int] = []
    for rank in range(3):
        with PictureReader(found, found.val, size=64, batch=4, device=CPU, decoders=1) as opened:
            for batch in opened.batches(rank_part(13, batch=4, rank=rank, world_size=3)):
                assert batch.pictures.shape == (len(batch.samples), 96, 96, 3)
                assert int(batch.extents.amin(dim=1).max()) == 64, "what is larger is shrunk"
                assert 64 < int(batch.extents.max()) <= 96
                seen += batch.samples.tolist()
    assert seen == list(range(13))


def test_damaged_pictures_are_left_out_and_listed(
    sets: Sets, tree: Path, two_epochs: list[Kept]
) -> None:
    whole_set = library.open_set(str(tree))
    assert whole_set.fingerprint == sets.prepared["packed"].fingerprint
    damaged = sample_pictures.damage(tree / "train", num=10)
    found = library.open_set(str(tree))
    num_found = 0
    with reader(found, decoders=2) as opened:
        for batch, whole in zip(opened.batches(plan(found, range(6))), two_epochs, strict=True):
            is_there = torch.isin(whole.samples, batch.samples)
            assert torch.equal(batch.samples, whole.samples[is_there])
            assert torch.equal(batch.pictures, whole.pictures[is_there])
            assert torch.equal(batch.labels, whole.labels[is_there])
            assert len(batch.pictures) == len(batch.extents)
            num_found += len(batch.samples)
        assert sorted(opened.damaged) == sorted(damaged)
        assert all(opened.damaged.values())
    assert num_found == 68


def test_a_killed_decoder_ends_the_reading_with_its_picture_and_nothing_is_left(
    sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not issubclass(ReadingError, InputError), "else the run would not be restarted"
    found = sets.prepared["shards"]
    name = found.train.entry(30).name
    usual = decoding.pixels

    def pixels(content: bytes, entry: Entry, **named: Any) -> decoding.Pixels:
        if entry.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(content, entry, **named)

    monkeypatch.setattr(decoding, "pixels", pixels)  # before the decoders are forked
    with pytest.raises(ReadingError, match=name):
        read(found, range(3), decoders=2)
    children = [each.name() for each in psutil.Process().children()]
    assert "pt_data_worker" not in children


def test_a_damaged_line_of_the_index_is_the_users_to_fix(sets: Sets) -> None:
    found = sets.prepared["shards"]
    split = library.Split(found.train.lines.replace(b"train-", b"../train-", 1))
    with (
        PictureReader(found, split, size=SIZE, batch=4, device=CPU, decoders=1) as opened,
        pytest.raises(InputError),
    ):
        next(opened.batches([torch.arange(4)]))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_pictures_that_are_not_rgb_become_it(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 30), (200, 100, 50)).convert(mode)
    path = tmp_path / f"one.{'jpg' if mode in ('L', 'CMYK') else 'png'}"
    image.save(path)
    found = decode(path.read_bytes(), size=64)
    assert found.shape == (30, 40, 3)
    expected = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert np.abs(found.astype(int) - expected).max() <= 2


def test_a_picture_of_a_phone_is_turned_as_transformers_turns_it(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    file, exif = tmp_path / "a.png", Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.linear_gradient("L").save(file, exif=exif)
    assert fitted(file.read_bytes()) == load_image(str(file))
    Image.new("RGB", (8, 5)).save(file, exif=b"Exif\0\0strange")
    assert fitted(file.read_bytes()).size == (8, 5)


def test_large_pictures_are_shrunk_and_keep_their_shape() -> None:
    image = Image.radial_gradient("L").resize((1000, 500)).convert("RGB")
    found = decode(sample_pictures.as_jpeg(image, quality=95), size=200)
    assert found.shape == (200, 400, 3)
    expected = np.asarray(image.resize((400, 200), Image.Resampling.BOX)).astype(int)
    assert np.abs(found.astype(int) - expected).mean() < 3


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_middle_of_a_picture_fills_the_corner_of_a_black_canvas(mode: str) -> None:
    entry = Entry(label=0, name="a/b", file="train-00000.tar")
    for shape, (width, height) in {
        (30, 20): (30, 20),
        (640, 64): (96, 64),  # a panorama
        (128, 2560): (64, 96),
    }.items():
        image = Image.radial_gradient("L").resize(shape).convert(mode)
        content = sample_pictures.as_jpeg(image, quality=95)
        canvas = np.full((96, 96, 3), 7, np.uint8)
        assert draw(content, entry, canvas, size=64, encoding=JPEG) == (height, width)
        whole = decode(content, size=64)
        top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
        expected = np.zeros_like(canvas)
        expected[:height, :width] = whole[top : top + height, left : left + width]
        assert np.array_equal(canvas, expected)
        with pytest.raises(DamagedPictureError):
            draw(content[:300], entry, canvas, size=64, encoding=JPEG)


def test_shards_on_this_disk_are_not_asked_for_and_others_need_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "filesystem", pytest.fail)
    files = {"train-00000.tar": StoredFile(size=7, sha256="")}
    (tmp_path / "train-00000.tar").write_bytes(b"picture")
    mirror.fetch("s3://bucket/set", files, tmp_path)
    files["train-00001.tar"] = StoredFile(size=10**18, sha256="")
    with pytest.raises(InputError, match=r"s3://bucket/set does not fit .*TB are needed"):
        mirror.fetch("s3://bucket/set", files, tmp_path)


def test_raw_pixels_that_are_not_all_there_are_damaged() -> None:
    entry = Entry(label=0, name="a/b", file="train-00000.tar", height=4, width=5)
    assert pixels(bytes(60), entry, size=8, encoding=RAW).shape == (4, 5, 3)
    with pytest.raises(DamagedPictureError, match="59 bytes"):
        pixels(bytes(59), entry, size=8, encoding=RAW)


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ("train/a", "two classes"),
        ("train/a train/b", "none to evaluate on"),
        ("train/a train/b val/c", "val/c"),
        ("train/a\tb train/b val/a\tb", "is refused"),
    ],
    ids=["one class", "no val", "other classes", "odd name"],
)
def test_a_folder_that_is_no_set_is_refused(tmp_path: Path, folders: str, words: str) -> None:
    for name in folders.split(" "):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jpg").write_bytes(b"")
    with pytest.raises(InputError, match=words):
        library.open_set(str(tmp_path))
    with pytest.raises(InputError, match="is no folder"):
        library.open_set(str(tmp_path / "nothing"))


def test_an_index_that_does_not_fit_its_tables_is_refused(sets: Sets, tmp_path: Path) -> None:
    root = shutil.copytree(sets.prepared["packed"].root, tmp_path / "set")
    table = root / "train.tsv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="lists 43 pictures"):
        library.open_set(str(root))
    (root / "index.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="format 99"):
        library.open_set(str(root))


def test_a_set_that_is_damaged_as_a_whole_ends_the_reading(tree: Path) -> None:
    sample_pictures.damage(tree / "train", num=44)
    found = library.open_set(str(tree))
    with reader(found) as opened, pytest.raises(InputError):
        for _ in opened.batches(plan(found, range(10))):
            pass


def test_a_reader_serves_one_plan_after_another_and_may_stop_early(sets: Sets) -> None:
    found = sets.prepared["shards"]
    with reader(found) as opened:
        for start in (0, 20):
            batches = opened.batches(torch.arange(start, start + 20).split(4))
            first = next(batches)
            assert first.samples.tolist() == list(range(start, start + 4))
            batches.close()
        (only,) = opened.batches([torch.arange(3)])
        assert only.samples.tolist() == [0, 1, 2]


def test_sixteen_bits_of_grey_become_eight(tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.uint16)[None] * 257
    Image.fromarray(levels).save(tmp_path / "one.png")
    found = decode((tmp_path / "one.png").read_bytes(), size=64)
    assert found[0, :, 0].tolist() == [*range(256)]
