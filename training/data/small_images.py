"""Small grey images that live on the device, and the batch of each step.

The whole set is kept as unsigned bytes where the model is (47 MB for FashionMNIST) and is
mirrored and normalized there in a handful of tensor operations per batch: no image is
ever touched by Python. Use a streaming loader instead for sets that do not fit on the device.
"""

import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from contract.errors import InputError
from training.data import DIGITS, catalog, idx, sources
from training.data.catalog import IDX_FILES
from training.data.download import Report
from training.system.copies import to_device

IMAGE_SIZE: Final = 28
NUM_CLASSES: Final = 10

FASHION: Final = catalog.ALL[0]
DIGIT_CLASSES: Final = tuple("0123456789")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A training and a test split of grey images on the host.

    Images are uint8 ``[num, 28, 28]``, labels uint8 ``[num]`` below ``NUM_CLASSES``.
    """

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes
    class_names: tuple[str, ...]
    fingerprint: str
    """Hash of all four arrays: a resumed run must see the same images."""
    mean: float
    """Mean of the training pixels, scaled to 0..1."""
    std: float


def load(source: str, *, report: Report | None = None) -> ImageSet:
    """Read a data set: ``digits``, one of ``training.data.catalog``, or IDX-gz files from a folder,
    HTTP(S) or S3.

    Args:
        report: Called while a data set of the catalog is downloaded.

    Raises:
        InputError: Files are missing or damaged, images have another size, or labels another range.
    """
    if source == DIGITS:
        return _digits()
    paths = sources.local_files(source, IDX_FILES, report=report)
    contents = []
    for path in paths:
        try:
            contents.append(idx.decompress(path))
        except InputError:
            sources.discard(source, [path.name])
            raise
    arrays = [idx.parse(content, str(path)) for content, path in zip(contents, paths, strict=True)]
    train_images, train_labels, test_images, test_labels = arrays
    _check_split(train_images, train_labels, str(paths[0]), str(paths[1]))
    _check_split(test_images, test_labels, str(paths[2]), str(paths[3]))
    classes = _class_names(contents[1])
    return _image_set(train_images, train_labels, test_images, test_labels, classes)


def _class_names(train_labels: bytes) -> tuple[str, ...]:
    """Names of the published data set that these labels are of; FashionMNIST's if of none."""
    digest = hashlib.sha256(train_labels).hexdigest()
    published = (each for each in catalog.ALL if digest in each.files.values())
    return next(published, FASHION).class_names


def _digits() -> ImageSet:
    """scikit-learn's 1,797 digits (8x8, from the UCI repository), enlarged to 28x28; every fifth
    image is for testing. They come with the package, so a machine without network has them.

    Its file is read directly: importing scikit-learn takes longer than all the rest of loading.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    # One image a line: 64 values from 0 to 16, then the digit.
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    small = torch.from_numpy(table[:, :64].copy()).view(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(
        small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False
    )
    images = large.round().clamp(0, 255).to(torch.uint8).squeeze(1).numpy()
    labels = table[:, 64].astype(np.uint8)
    test = np.arange(len(images)) % 5 == 4
    return _image_set(images[~test], labels[~test], images[test], labels[test], DIGIT_CLASSES)


def _check_split(images: Bytes, labels: Bytes, images_name: str, labels_name: str) -> None:
    if images.ndim != 3 or images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE):
        shape = " x ".join(map(str, images.shape[1:])) or "no"
        raise InputError(
            f"{images_name} holds images of {shape} pixels: this recipe trains on "
            f"{IMAGE_SIZE} x {IMAGE_SIZE}; resize them first"
        )
    if labels.ndim != 1 or len(labels) != len(images):
        raise InputError(
            f"{labels_name} holds {len(labels):,} labels for the {len(images):,} images of "
            f"{images_name}: the files do not belong together"
        )
    if not len(images):
        raise InputError(f"{images_name} holds no images")
    if labels.max() >= NUM_CLASSES:
        raise InputError(
            f"{labels_name} holds the label {labels.max()}: labels must be 0 to {NUM_CLASSES - 1}"
        )


def _image_set(
    train_images: Bytes,
    train_labels: Bytes,
    test_images: Bytes,
    test_labels: Bytes,
    class_names: tuple[str, ...],
) -> ImageSet:
    digest = hashlib.sha256()
    for array in (train_images, train_labels, test_images, test_labels):
        digest.update(array.tobytes())
    # From the histogram: exact, and no float copy of the whole set. In parts, because numpy makes
    # 64-bit integers of what it counts.
    parts = np.array_split(train_images.reshape(-1), 500)
    counts = np.sum([np.bincount(each, minlength=256) for each in parts], axis=0)
    values = np.arange(256) / 255
    mean = float((counts * values).sum() / counts.sum())
    variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
    return ImageSet(
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        class_names=class_names,
        fingerprint=digest.hexdigest()[:16],
        mean=mean,
        std=max(variance**0.5, 1e-6),
    )


class BatchOrder:
    """Which training images make up the batch of each step.

    The batch of step N depends only on N, the seed and the global batch, so a run resumes
    in the middle of an epoch and on any number of workers. Every image appears once per epoch.
    """

    def __init__(self, *, num_images: int, global_batch: int, seed: int) -> None:
        self.num_images = num_images
        self.global_batch = min(global_batch, num_images)
        self.seed = seed
        # The last batch of an epoch is smaller, not dropped. One of less than a quarter joins the
        # batch before it: batch normalisation is meaningless over a handful of images.
        full, rest = divmod(num_images, self.global_batch)
        has_rest = rest >= max(1, self.global_batch / 4)
        self.steps_per_epoch = full + has_rest
        self.smallest_batch = rest if has_rest else self.global_batch
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> torch.Tensor:
        """Indices of the training images of ``step`` (counted from 0), int64 ``[batch]``."""
        epoch, i = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = _generator(self.seed, epoch, stream=0)
            self._order = torch.randperm(self.num_images, generator=generator)
            self._epoch = epoch
        start = i * self.global_batch
        last = i == self.steps_per_epoch - 1
        return self._order[start : self.num_images if last else start + self.global_batch]


def shard_bounds(num: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """First and one-past-last position of ``rank``'s part of ``num`` items; parts differ by one."""
    return num * rank // world_size, num * (rank + 1) // world_size


class DeviceImages:
    """One split on the device, and the normalised batches cut from it."""

    def __init__(self, image_set: ImageSet, device: torch.device, *, is_test: bool = False) -> None:
        """Copy the training or the test split to ``device``."""
        pixels, labels = image_set.train_images, image_set.train_labels
        if is_test:
            pixels, labels = image_set.test_images, image_set.test_labels
        # torch.tensor copies: the arrays may be read-only views of a file.
        self._pixels = torch.tensor(pixels).to(device)
        self._labels = torch.tensor(labels).to(device=device, dtype=torch.int64)
        self._scale = 1 / (255 * image_set.std)
        self._offset = torch.tensor(-image_set.mean / image_set.std, device=device)
        self._device = device

    def __len__(self) -> int:
        return len(self._labels)

    def batch(
        self, indices: torch.Tensor, *, mirrored: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, float32 ``[n, 1, 28, 28]``, normalized, and labels, int64 ``[n]``.

        Args:
            indices: int64 ``[n]``.
            mirrored: bool ``[n]``, the images that are mirrored; None: none of them.
        """
        indices = to_device(indices, self._device)
        pixels = self._pixels.index_select(0, indices)
        if mirrored is not None:
            is_mirrored = to_device(mirrored, self._device)[:, None, None]
            pixels = torch.where(is_mirrored, pixels.flip(-1), pixels)
        # Conversion, scale and offset in one pass over the bytes.
        scaled = torch.add(self._offset, pixels, alpha=self._scale)
        return scaled.unsqueeze(1), self._labels.index_select(0, indices)


def mirrored(*, seed: int, step: int, num: int) -> torch.Tensor:
    """Draw the images of ``step`` that are mirrored: bool ``[num]``.

    Drawn for the global batch and then cut by rank, so they too are independent of the number of
    workers.
    """
    generator = _generator(seed, step, stream=1)
    # Accuracies in docs/benchmarks.md were measured with these numbers drawn first.
    torch.randint(0, 1, (2, num), generator=generator)
    return torch.rand(num, generator=generator) < 0.5


def _generator(seed: int, index: int, *, stream: int) -> torch.Generator:
    """A generator of its own for each (seed, index, stream), by hashing, not by adding: nearby
    seeds must not share streams."""
    key = hashlib.sha256(f"{stream}:{seed}:{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
