"""Proves that what a model sees of a picture depends only on seed, step and sample, that resizing
is exact, and that mixing pairs pictures alike on any number of workers."""

import math
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from training.data import augmentation

CANVAS = 96


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of different sizes in canvases, and their heights and widths."""
    random = np.random.default_rng(0)
    extents = torch.tensor([[96, 72], [50, 96], [31, 33]])
    canvases = torch.zeros(3, CANVAS, CANVAS, 3, dtype=torch.uint8)
    for canvas, (height, width) in zip(canvases, extents.tolist(), strict=True):
        small = Image.fromarray(random.integers(0, 256, (6, 5, 3), dtype=np.uint8))
        large = small.resize((width, height), Image.Resampling.BICUBIC)
        canvas[:height, :width] = torch.from_numpy(np.asarray(large).copy())
    return canvases, extents


def levels(views: torch.Tensor) -> torch.Tensor:
    """Normalized pictures as levels from 0 to 255, ``[..., height, width, 3]``."""
    mean, std = torch.tensor(augmentation.MEAN), torch.tensor(augmentation.STD)
    return (views.movedim(-3, -1) * std + mean) * 255


def assert_shown(
    view: torch.Tensor,
    canvas: torch.Tensor,
    extent: list[int],
    box: tuple[float, float, float, float],
) -> None:
    """A part of a picture is resized as Pillow does it, but for the whole levels to which that
    rounds twice."""
    (height, width), side = extent, view.shape[-1]
    picture = Image.fromarray(canvas[:height, :width].numpy())
    resized = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
    expected = torch.from_numpy(np.asarray(resized).astype(np.float32))
    assert (levels(view) - expected).abs().max() < 2


def test_a_picture_is_shown_alike_whatever_it_is_batched_with() -> None:
    numbers = torch.arange(1000, 1064)
    whole = augmentation.random_boxes(numbers, seed=1, step=7, least_area=0.25)
    part = augmentation.random_boxes(numbers[10:20], seed=1, step=7, least_area=0.25)
    for name in ("place", "area", "ratio", "mirrored"):
        assert torch.equal(getattr(whole, name)[10:20], getattr(part, name))
    for other in ({"seed": 2, "step": 7}, {"seed": 1, "step": 8}):
        boxes = augmentation.random_boxes(numbers, least_area=0.25, **other)
        assert not torch.equal(boxes.area, whole.area)


def torchvisions_part(height: int, width: int, random: Random) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part by the rule of ``RandomResizedCrop.get_params``
    (https://docs.pytorch.org/vision/stable/generated/torchvision.transforms.RandomResizedCrop.html)
    at its defaults."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        high, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, height - high), random.randint(0, width - wide), high, wide
    wide, high = width, height
    if width / height < 3 / 4:
        high = round(width / (3 / 4))
    elif width / height > 4 / 3:
        wide = round(height * (4 / 3))
    return (height - high) // 2, (width - wide) // 2, high, wide


@pytest.mark.parametrize("extent", [(375, 500), (500, 333), (64, 320), (2, 3)])
def test_parts_are_those_of_torchvision(extent: tuple[int, int]) -> None:
    num = 20_000
    boxes = augmentation.random_boxes(torch.arange(num), seed=0, step=0, least_area=0.08)
    assert boxes.mirrored.float().mean() == pytest.approx(0.5, abs=0.02)
    start, part = augmentation.placed(boxes, torch.tensor([extent]).float().expand(num, 2))
    ours = torch.cat([start, part], dim=1)
    random = Random(0)
    theirs = torch.tensor([torchvisions_part(*extent, random) for _ in range(num)]).float()
    if extent == (375, 500):
        share = theirs[:, 2].mul(theirs[:, 3]).mean() / 375 / 500
        assert share == pytest.approx(0.432, abs=0.005)
    for values in zip(
        (*ours.T, ours[:, 2] * ours[:, 3]), (*theirs.T, theirs[:, 2] * theirs[:, 3]), strict=True
    ):
        one, other = (each.sort().values for each in values)
        # Mean distance of equal ranks, a hundredth of the range at most.
        assert (one - other).abs().mean() <= 0.012 * max(other.max().item(), 1)


@pytest.mark.parametrize("size", [16, 40, 128])
@pytest.mark.parametrize("mirrored", [False, True], ids=["plain", "mirrored"])
def test_a_part_is_resized_as_pillow_does_it(size: int, mirrored: bool) -> None:
    canvases, extents = pictures()
    num = len(canvases)
    boxes = augmentation.Boxes(
        place=torch.tensor([[0.5, 0.25]]).expand(num, 2),
        area=torch.full((num, 1), 0.4),
        ratio=torch.full((num, 1), 1.2),
        mirrored=torch.full((num,), mirrored),
    )
    views = augmentation.random_views(canvases, extents, boxes, size=size)
    assert views.shape == (num, 3, size, size)
    assert views.is_contiguous()
    for canvas, extent, found in zip(canvases, extents.tolist(), views, strict=True):
        height, width = extent
        part_height = round((0.4 * height * width / 1.2) ** 0.5)
        part_width = round((0.4 * height * width * 1.2) ** 0.5)
        top = int(0.5 * (height - part_height + 1))
        left = int(0.25 * (width - part_width + 1))
        box = (left, top, left + part_width, top + part_height)
        assert_shown(found.flip(-1) if mirrored else found, canvas, extent, box)


def test_nothing_outside_of_a_picture_is_ever_shown() -> None:
    canvases = torch.zeros(64, CANVAS, CANVAS, 3, dtype=torch.uint8)
    extents = torch.randint(1, CANVAS + 1, (64, 2), generator=torch.Generator().manual_seed(0))
    for canvas, (height, width) in zip(canvases, extents.tolist(), strict=True):
        canvas[:height, :width] = 200
    boxes = augmentation.random_boxes(torch.arange(64), seed=0, step=0, least_area=0.08)
    random = augmentation.random_views(canvases, extents, boxes, size=48)
    middle = augmentation.middle_views(canvases, extents, size=48, share=0.875)
    found = levels(torch.cat([random, middle]))
    torch.testing.assert_close(found, torch.full_like(found, 200), atol=0.01, rtol=0)


def test_evaluation_sees_the_middle_of_each_picture() -> None:
    canvases, extents = pictures()
    found = augmentation.middle_views(canvases, extents, size=28, share=0.875)
    for canvas, extent, view in zip(canvases, extents.tolist(), found, strict=True):
        height, width = extent
        side = 0.875 * min(height, width)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        assert_shown(view, canvas, extent, box)
