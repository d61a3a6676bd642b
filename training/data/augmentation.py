"""Views of pictures for a model: random crops in training, the middle of each in evaluation.

All of it is done on the device, and what is random is a function of the seed, the step and the
sample's number only, so it does not change with the number of workers. Resizing is two matrix
products per picture, whose rows hold the weights of a triangle filter: exact and without aliasing
at any ratio, and 3 % of the arithmetic of training ResNet50 (224 pixels of canvases of 600).
"""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from training.system.copies import to_device

#: Of ImageNet's training pictures scaled to 0..1, by color: what published models expect.
MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)

_RATIOS: Final = (3 / 4, 4 / 3)
#: Parts that are drawn for a picture, of which the first that fits is shown.
_TRIES: Final = 10
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """Which part of each picture is shown: of several, the first that fits it."""

    place: torch.Tensor
    """float32 ``[n, 2]``: where the part lies in what is left over, from 0 (top, left) to 1."""
    area: torch.Tensor
    """float32 ``[n, tries]``: of a part, over the picture's."""
    ratio: torch.Tensor
    """float32 ``[n, tries]``: width over height of a part, in pixels of the picture."""
    mirrored: torch.Tensor
    """bool ``[n]``."""


def random_boxes(samples: torch.Tensor, *, seed: int, step: int, least_area: float) -> Boxes:
    """Draw which part of each picture is shown at ``step``.

    The area is drawn evenly from ``least_area`` to 1, the ratio evenly in its logarithm from 3/4 to
    4/3, the place evenly, and every second picture is mirrored (arXiv 1409.4842, section 6). Area
    and ratio are drawn ten times, as in torchvision's ``RandomResizedCrop``.

    Args:
        samples: numbers of the pictures, int64 ``[n]`` on the host.

    Returns:
        Tensors on the host.
    """
    draws = _uniform(samples.numpy(), seed=seed, step=step, num=3 + 2 * _TRIES).astype(np.float32)
    areas, ratios = draws[:, 3 : 3 + _TRIES], draws[:, 3 + _TRIES :]
    low, high = (math.log(each) for each in _RATIOS)
    return Boxes(
        place=torch.from_numpy(draws[:, :2]),
        area=torch.from_numpy(least_area + (1 - least_area) * areas),
        ratio=torch.from_numpy(np.exp(low + (high - low) * ratios)),
        mirrored=torch.from_numpy(draws[:, 2] < 0.5),
    )


def random_views(
    pictures: torch.Tensor, extents: torch.Tensor, boxes: Boxes, *, size: int
) -> torch.Tensor:
    """Cut each picture's part out and resize it.

    Where no part fits a picture, its middle is shown, cut to the nearest ratio.

    Args:
        pictures: uint8 ``[n, canvas, canvas, 3]``.
        extents: int64 ``[n, 2]``, height and width of each picture within its canvas.
        boxes: on the host.
        size: pixels of a side of the result.

    Returns:
        float32 ``[n, 3, size, size]``, normalized; in channels_last on a GPU.
    """
    whole = extents.to(torch.float32)
    start, part = placed(boxes, whole)
    mirrored = to_device(boxes.mirrored, pictures.device)
    return _resized(pictures, start=start, part=part, whole=whole, mirrored=mirrored, size=size)


def placed(boxes: Boxes, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Place and size of each picture's part in whole pixels, as torchvision's ``RandomResizedCrop``
    finds them.

    Args:
        boxes: on the host.
        whole: float32 ``[n, 2]``, height and width of each picture.

    Returns:
        Two of ``[n, 2]``, in pixels from the top and the left.
    """
    area, ratio, place = (
        to_device(each, whole.device) for each in (boxes.area, boxes.ratio, boxes.place)
    )
    pixels = area * whole.prod(dim=1, keepdim=True)
    wanted = torch.stack([(pixels / ratio).sqrt(), (pixels * ratio).sqrt()], dim=2).round()
    fits = ((wanted > 0) & (wanted <= whole[:, None])).all(dim=2)
    first = fits.int().argmax(dim=1)
    part = wanted.gather(1, first[:, None, None].expand(-1, 1, 2)).squeeze(1)
    start = torch.minimum((place * (whole - part + 1)).floor(), whole - part)
    # None fits: the picture is far from square, or has few pixels.
    low, high = _RATIOS
    height, width = whole.unbind(dim=1)
    limits = torch.stack([(width / low).round(), (height * high).round()], dim=1)
    middle = torch.minimum(whole, limits)
    is_fit = fits.any(dim=1, keepdim=True)
    return (
        torch.where(is_fit, start, ((whole - middle) / 2).floor()),
        torch.where(is_fit, part, middle),
    )


def middle_views(
    pictures: torch.Tensor, extents: torch.Tensor, *, size: int, share: float
) -> torch.Tensor:
    """Resize the square in the middle of each picture whose side is ``share`` of the shorter one.

    Arguments and result are those of ``random_views``.
    """
    whole = extents.to(torch.float32)
    part = (share * whole.amin(dim=1, keepdim=True)).expand(-1, 2)
    start = (whole - part) / 2
    mirrored = torch.zeros(len(pictures), dtype=torch.bool, device=pictures.device)
    return _resized(pictures, start=start, part=part, whole=whole, mirrored=mirrored, size=size)


def _resized(
    pictures: torch.Tensor,
    *,
    start: torch.Tensor,
    part: torch.Tensor,
    whole: torch.Tensor,
    mirrored: torch.Tensor,
    size: int,
) -> torch.Tensor:
    num, canvas = pictures.shape[:2]
    rows = _filter(start[:, 0], part[:, 0], whole[:, 0], canvas=canvas, size=size)
    columns = _filter(start[:, 1], part[:, 1], whole[:, 1], canvas=canvas, size=size)
    columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
    values = pictures.to(torch.float32).view(num, canvas, canvas * 3)
    values = torch.bmm(rows, values).view(num, size, canvas, 3)
    values = values.transpose(1, 2).reshape(num, canvas, size * 3)
    values = torch.bmm(columns, values).view(num, size, size, 3)  # columns, rows, colors
    scale, offset = _normalization(pictures.device)
    normalized = torch.addcmul(offset, values, scale).permute(0, 3, 2, 1)
    layout = torch.channels_last if normalized.is_cuda else torch.contiguous_format
    return normalized.contiguous(memory_format=layout)


@functools.cache
def _normalization(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor and summand that normalize levels from 0 to 255, float32 ``[3]`` each. Kept on the
    device: to send them with each batch would let the host wait for the GPU."""
    scale = torch.tensor([1 / (255 * std) for std in STD])
    offset = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)])
    return scale.to(device), offset.to(device)


def _filter(
    start: torch.Tensor, part: torch.Tensor, whole: torch.Tensor, *, canvas: int, size: int
) -> torch.Tensor:
    """Weights that resize ``part`` pixels from ``start`` on to ``size``: float32 ``[n, size,
    canvas]``, whose rows sum to 1 and are 0 outside of the picture."""
    device = start.device
    ratio = (part / size)[:, None]
    centers = start[:, None] + (torch.arange(size, device=device) + 0.5) * ratio
    reach = ratio.clamp(min=1)  # enlarging interpolates between neighbors, shrinking averages
    pixels = torch.arange(canvas, device=device) + 0.5
    distance = (pixels - centers[:, :, None]).abs()
    weights = (1 - distance / reach[:, :, None]).clamp(min=0)
    weights = weights * (pixels < whole[:, None])[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _uniform(samples: npt.NDArray[np.int64], *, seed: int, step: int, num: int) -> Floats:
    """``num`` numbers from 0 to 1 for each sample, float64 ``[n, num]``.

    A hash of seed, step, sample and column, so that no generator has to be moved to its place: the
    finalizer of SplitMix64 over a key that SHA-256 makes of seed and step.
    """
    key = hashlib.sha256(f"boxes:{seed}:{step}".encode()).digest()[:8]
    counters = samples.astype(np.uint64)[:, None] * np.uint64(num) + np.arange(num, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = (counters * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        state += np.uint64(int.from_bytes(key, "big"))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    result: Floats = (state >> np.uint64(11)).astype(np.float64) / 2**53
    return result
