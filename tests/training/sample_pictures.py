"""Real pictures as JPEGs in ImageNet's layout, made from images that come with scikit-learn: eight
classes of its digits, and cut-outs of its two photographs."""

import gzip
import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

CLASSES: Final = tuple(f"n{10_000_000 + 1111 * number}" for number in range(10))
#: As in ImageNet, where names of validation pictures say nothing of their class.
VAL_LIST: Final = "LOC_val_solution.csv"

# Found, not imported: that takes longer than making the pictures.
_PACKAGE = importlib.util.find_spec("sklearn")
assert _PACKAGE is not None
assert _PACKAGE.origin is not None
_DATASETS: Final = Path(_PACKAGE.origin).parent / "datasets"
Make = Callable[[np.random.Generator], Image.Image]


def write_tree(folder: Path, *, num_train: int, num_val: int) -> Path:
    """Write ``train/<class>/*.JPEG``, a flat ``val/`` and the list of its classes."""
    makers = [*_digits(), *(_cut_outs(name) for name in ("china.jpg", "flower.jpg"))]
    random = np.random.default_rng(0)
    for number in range(num_train):
        label = number % len(CLASSES)
        path = folder / "train" / CLASSES[label] / f"{CLASSES[label]}_{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_jpeg(makers[label](random), quality=int(random.integers(80, 96))))
    (folder / "val").mkdir(parents=True, exist_ok=True)
    lines = ["ImageId,PredictionString"]
    for number, label in enumerate(random.permutation(np.arange(num_val) % len(CLASSES)), start=1):
        name = f"ILSVRC2012_val_{number:08d}"
        content = as_jpeg(makers[label](random), quality=90)
        (folder / "val" / f"{name}.JPEG").write_bytes(content)
        lines.append(f"{name},{CLASSES[label]} 1 2 3 4 ")
    (folder / VAL_LIST).write_text("\n".join(lines) + "\n")
    return folder


def sort_val(folder: Path) -> Path:
    """Put the pictures of a flat ``val/`` into class folders, as most loaders want them."""
    for line in (folder / VAL_LIST).read_text().splitlines()[1:]:
        name, _, objects = line.partition(",")
        target = folder / "val" / objects.split()[0] / f"{name}.JPEG"
        target.parent.mkdir(exist_ok=True)
        (folder / "val" / f"{name}.JPEG").rename(target)
    return folder


def as_jpeg(image: Image.Image, *, quality: int = 90) -> bytes:
    """An image's bytes as a JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _digits() -> Iterator[Make]:
    with gzip.open(_DATASETS / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    images = (table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    for label in range(8):
        yield _enlarged(images[table[:, 64] == label])


def _enlarged(images: npt.NDArray[np.uint8]) -> Make:
    def make(random: np.random.Generator) -> Image.Image:
        image = Image.fromarray(images[random.integers(len(images))])
        size = (image.width * 12, image.height * (12 - int(random.integers(2))))
        return image.resize(size, Image.Resampling.BICUBIC)  # grey, as some of ImageNet's are

    return make


def _cut_outs(name: str) -> Make:
    photograph = Image.open(_DATASETS / "images" / name).convert("RGB")

    def make(random: np.random.Generator) -> Image.Image:
        width, height = (int(random.integers(120, most)) for most in (400, 300))
        left = int(random.integers(photograph.width - width))
        top = int(random.integers(photograph.height - height))
        return photograph.crop((left, top, left + width, top + height))

    return make


def damage(folder: Path, *, num: int) -> list[str]:
    """Damage ``num`` pictures of a folder in five ways; return their ``<class>/<file>``."""
    kinds: tuple[Callable[[bytes], bytes], ...] = (
        lambda _content: b"",
        lambda content: content[: len(content) // 2],  # broken off
        lambda content: b"<html>not found</html>" + content[:100],  # another file
        lambda content: content[:2] + bytes(len(content) - 2),  # its header is overwritten
        lambda content: bytes(len(content)),  # a hole in the disk
    )
    paths = sorted(folder.rglob("*.JPEG"))
    names = []
    for number in range(num):
        path = paths[number * len(paths) // num]
        path.write_bytes(kinds[number % len(kinds)](path.read_bytes()))
        names.append(path.relative_to(folder).as_posix())
    return names
