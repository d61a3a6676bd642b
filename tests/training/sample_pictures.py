"""Pictures as JPEGs in ImageNet's layout: smooth, in colors and in grey, of many sizes."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

CLASSES: Final = tuple(f"n{10_000_000 + 1111 * number}" for number in range(10))
#: As in ImageNet, where names of validation pictures say nothing of their class.
VAL_LIST: Final = "LOC_val_solution.csv"


def write_tree(folder: Path, *, num_train: int, num_val: int) -> Path:
    """Write ``train/<class>/*.JPEG``, a flat ``val/`` and the list of its classes."""
    random = np.random.default_rng(0)
    for number in range(num_train):
        label = number % len(CLASSES)
        path = folder / "train" / CLASSES[label] / f"{CLASSES[label]}_{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_jpeg(picture(random), quality=int(random.integers(80, 96))))
    (folder / "val").mkdir(parents=True, exist_ok=True)
    lines = ["ImageId,PredictionString"]
    for number, label in enumerate(random.permutation(np.arange(num_val) % len(CLASSES)), start=1):
        name = f"ILSVRC2012_val_{number:08d}"
        content = as_jpeg(picture(random))
        (folder / "val" / f"{name}.JPEG").write_bytes(content)
        lines.append(f"{name},{CLASSES[label]} 1 2 3 4 ")
    (folder / VAL_LIST).write_text("\n".join(lines) + "\n")
    return folder


def picture(random: np.random.Generator) -> Image.Image:
    """A smooth picture; every other one is grey, as some of ImageNet's are."""
    width, height = (int(random.integers(90, most)) for most in (400, 300))
    small = Image.fromarray(random.integers(0, 256, (6, 5, 3), dtype=np.uint8))
    large = small.resize((width, height), Image.Resampling.BICUBIC)
    return large.convert("L") if width % 2 else large


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
