"""Proves that data is read whole or refused with a reason, and that the batch of a step depends
on the step and the seed alone."""

import gzip
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.errors import InputError, UnreachableError
from store.cache import CACHE_VARIABLE
from tests.conftest import ROOT
from tests.training.mirror import Mirror, served
from training.data import download, small_images
from training.data.catalog import IDX_FILES
from training.data.small_images import BatchOrder, DeviceImages
from training.ddp import inputs
from training.ddp.settings import DdpConfig

CPU = torch.device("cpu")


def idx_gz(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def write_images(folder: Path, num_train: int = 40, num_test: int = 10, size: int = 28) -> Path:
    """A small data set in FashionMNIST's format."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, num in (("train", num_train), ("t10k", num_test)):
        pixels = random.integers(0, 256, (num, size, size))
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(idx_gz(pixels))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(idx_gz(np.arange(num) % 10))
    return folder


# ---- reading -------------------------------------------------------------------------------


def test_a_folder_of_idx_files_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = small_images.load(str(write_images(tmp_path)))
    expected = np.random.default_rng(0).integers(0, 256, (40, 28, 28))
    np.testing.assert_array_equal(found.train_images, expected)
    np.testing.assert_array_equal(found.test_labels, np.arange(10))
    assert found.mean == pytest.approx(expected.mean() / 255)
    assert found.std == pytest.approx(expected.std() / 255)


def test_digits_are_there_without_network_and_every_fifth_is_held_out() -> None:
    from sklearn.datasets import load_digits

    found = small_images.load("digits")
    assert (len(found.train_images), len(found.test_images)) == (1438, 359)
    held_out = np.arange(1797) % 5 == 4
    np.testing.assert_array_equal(found.test_labels, load_digits().target[held_out])
    assert found.train_images.shape[1:] == (28, 28)


#: A number in ``IDX_FILES``, what it holds instead, and a part of the reason.
DAMAGES = {
    "truncated": (0, gzip.compress(b"")[:-1], "truncated or not a gzip file"),
    "other type": (
        1,
        gzip.compress(b"\x00\x00\x0d\x01" + bytes(8)),
        "not an IDX file of unsigned bytes",
    ),
    "size": (0, idx_gz(np.zeros((40, 32, 32))), "32 x 32 pixels.*28 x 28"),
    "label": (1, idx_gz(np.arange(40) % 12), "the label 11"),
    "fewer labels": (1, idx_gz(np.arange(39) % 10), "39 labels for the 40 images"),
    "missing": (3, None, f"has no {IDX_FILES[3]}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_is_refused_with_the_file_and_the_reason(tmp_path: Path, damage: str) -> None:
    number, content, words = DAMAGES[damage]
    file = write_images(tmp_path) / IDX_FILES[number]
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(InputError, match=words) as found:
        small_images.load(str(tmp_path))
    assert str(tmp_path) in str(found.value)


# ---- fetching ------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, type[Mirror]]]:
    folder = write_images(tmp_path / "mirror")
    with served({f"/{each.name}": each.read_bytes() for each in folder.iterdir()}) as found:
        yield found


def test_a_mirror_is_asked_once_per_file_however_many_workers_load(
    mirror: tuple[str, type[Mirror]], cache: Path
) -> None:
    url, handler = mirror
    with ThreadPoolExecutor(3) as pool:  # a lock keeps threads apart as it does processes
        fingerprints = [each.fingerprint for each in pool.map(small_images.load, [url] * 3)]
    assert len(set(fingerprints)) == 1
    assert sorted(handler.asked) == sorted((f"/{name}", "") for name in IDX_FILES)
    assert small_images.load(url + "/").fingerprint == fingerprints[0]
    assert len(handler.asked) == len(IDX_FILES)
    left_over = [path.name for path in cache.rglob("*") if path.is_file()]
    assert sorted(left_over) == sorted([".lock", *IDX_FILES])


def test_a_download_that_fails_or_is_damaged_is_forgotten_and_tried_anew(
    mirror: tuple[str, type[Mirror]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_PAUSES_S", (0.0, 0.0))
    url, handler = mirror
    name = f"/{IDX_FILES[0]}"
    handler.break_off_after = [1000] * 3
    with pytest.raises(UnreachableError, match=r"broke off|could not be fetched"):
        small_images.load(url)
    good, handler.files[name] = handler.files[name], handler.files[name][:-100]
    with pytest.raises(InputError, match="truncated"):
        small_images.load(url)
    assert not list(cache.rglob(IDX_FILES[0]))
    assert not list(cache.rglob("*.part"))
    handler.files[name] = good
    assert len(small_images.load(url).train_images) == 40
    # Always from the beginning: the file may have changed, and nothing tells.
    assert [each for each in handler.asked if each[0] == name] == [(name, "")] * 5


def test_a_folder_of_pictures_is_another_recipes(tmp_path: Path) -> None:
    """Also one without folders of classes, once it is sorted as the refusal says."""
    for name in ("cat.1.JPG", "cat.2.JPG", "dog-1.JPG", "dog-2.JPG"):
        (tmp_path / name).touch()
    folder = DdpConfig(recipe="ddp", run="r", storage="/", num_workers=1, data=str(tmp_path))
    with pytest.raises(InputError, match="Sort them by their names: ") as flat:
        inputs.look_at(folder)
    subprocess.run(["sh", "-c", str(flat.value).partition("names: ")[2]], check=True)
    with pytest.raises(InputError) as sorted_:
        inputs.look_at(folder)
    advised = f"trainctl run imagenet {inputs.A_FEW_PICTURES} "
    assert str(sorted_.value).endswith(f"{advised}--data {tmp_path}")
    assert advised in (ROOT / "Makefile").read_text(), "test_makefile tries it"


def test_a_cache_whose_lock_cannot_be_opened_is_named(cache: Path) -> None:
    # A folder in the way of the lock: root, as whom containers run, may write everywhere.
    (cache / "mnist" / ".lock").mkdir(parents=True)
    with pytest.raises(InputError, match=f"cannot be written .*{CACHE_VARIABLE}"):
        small_images.load("mnist")


# ---- batches -------------------------------------------------------------------------------


def test_each_epoch_has_each_image_once_in_an_order_of_seed_and_epoch_only() -> None:
    # The last but one ends in 6 images, which join the batch before them.
    for num, batch, steps, smallest in (
        (1438, 64, 23, 30),
        (1030, 64, 16, 64),
        (1000, 999, 1, 999),
    ):
        orders = [BatchOrder(num_images=num, global_batch=batch, seed=seed) for seed in (3, 4, 3)]
        assert (orders[0].steps_per_epoch, orders[0].smallest_batch) == (steps, smallest)
        first = [order.indices(step) for order in orders[:2] for step in (0, steps)]
        assert len({tuple(each.tolist()) for each in first}) == 4
        for epoch in (1, 0):  # of a run that resumes there, too
            seen = [orders[0].indices(epoch * steps + i) for i in range(steps)]
            assert torch.equal(torch.cat(seen).sort().values, torch.arange(num))
            assert min(map(len, seen)) >= smallest
            assert torch.equal(orders[2].indices(epoch * steps), first[epoch])


def test_batches_are_normalised_and_mirrored_as_drawn(tmp_path: Path) -> None:
    image_set = small_images.load(str(write_images(tmp_path)))
    chosen, is_mirrored = torch.tensor([3, 1, 17]), torch.tensor([True, False, True])
    split = DeviceImages(image_set, CPU)
    plain, labels = split.batch(chosen)
    expected = [
        (torch.tensor(image_set.train_images[i]).float() / 255 - image_set.mean) / image_set.std
        for i in chosen
    ]
    torch.testing.assert_close(plain, torch.stack(expected).unsqueeze(1), atol=1e-5, rtol=1e-5)
    assert labels.tolist() == [3, 1, 7]
    found, _ = split.batch(chosen, mirrored=is_mirrored)
    assert torch.equal(found, torch.stack([plain[0].flip(-1), plain[1], plain[2].flip(-1)]))


def test_images_are_mirrored_by_seed_and_step() -> None:
    draws = [
        small_images.mirrored(seed=seed, step=step, num=64)
        for seed, step in [(0, 5), (0, 5), (1, 5), (0, 6)]
    ]
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(draw.tolist()) for draw in draws}) == 3
    assert all(16 < draw.sum() < 48 for draw in draws)
