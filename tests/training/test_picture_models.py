"""Proves that the models for pictures are the published ones, by parameters and arithmetic, and
that they and the average of their weights train as they should."""

from typing import Any

import pytest
import torch
from torch import nn

from training.models import classifiers, picture_models, picture_shapes
from training.models.average import WeightAverage

CLASSES = tuple(f"class {number}" for number in range(1000))


def described(name: str) -> nn.Module:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return picture_models.build(name, classes=CLASSES)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50", 25_557_032),
        ("efficientnet-b0", 5_288_548),
        ("efficientnet-b7", 66_347_960),
    ],
    ids=picture_shapes.NAMES,
)
def test_a_model_has_the_parameters_of_the_published_one(name: str, parameters: int) -> None:
    assert classifiers.num_parameters(described(name)) == parameters


@pytest.mark.parametrize(
    ("name", "size", "multiply_adds"),
    [("resnet50", 224, 4.1e9), ("efficientnet-b0", 224, 0.39e9), ("efficientnet-b7", 600, 37e9)],
    ids=["resnet50", "b0", "b7"],
)
def test_its_arithmetic_is_that_of_the_papers(name: str, size: int, multiply_adds: float) -> None:
    flops = classifiers.forward_flops(described(name), image_size=size)
    assert flops / 2 == pytest.approx(multiply_adds, rel=0.03)


def test_statistics_are_averaged_over_many_batches() -> None:
    """transformers' default would keep 1 % of what was there before each batch."""
    momenta = [
        module.momentum
        for module in described("efficientnet-b0").modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    assert len(momenta) > 40
    assert max(momentum or 1.0 for momentum in momenta) <= 0.1


def test_a_resnet_begins_as_its_shortcuts_and_learns_in_all_blocks() -> None:
    torch.manual_seed(0)
    model = picture_models.build("resnet50", classes=CLASSES[:10])
    scales = [p for p in model.parameters() if p.ndim == 1 and not p.any() and len(p) >= 256]
    assert len([p for p in scales if p.requires_grad]) >= 16
    model(torch.randn(2, 3, 64, 64)).logits.sum().backward()
    blocks: list[Any] = [
        module for module in model.modules() if type(module).__name__ == "ResNetBottleNeckLayer"
    ]
    last = [block.layer[-1].normalization.weight.grad for block in blocks]
    assert len(last) == 16
    assert all(gradient.abs().sum() > 0 for gradient in last)


@pytest.mark.parametrize("name", ["resnet50", "efficientnet-b0"])
def test_an_untrained_model_tells_pictures_apart_and_its_first_layer_can_learn(name: str) -> None:
    """With transformers' own first weights an EfficientNet's answers differ by 1e-11."""
    torch.manual_seed(0)
    model = picture_models.build(name, classes=CLASSES[:10])
    generator = torch.Generator().manual_seed(1)
    logits = model(torch.randn(8, 3, 64, 64, generator=generator)).logits
    assert logits.std(dim=0).mean() > 0.1
    logits.square().sum().backward()
    first = next(model.parameters()).grad
    assert first is not None
    assert first.norm() > 1e-2


def test_the_average_is_the_one_of_the_formula_and_its_buffers_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    average = WeightAverage(model, decay=0.5)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(30):
        for value in model.state_dict().values():
            value.add_(1)
        average.update(model, num_updates=number)
        decay = min(0.5, (1 + number) / (10 + number))
        for name, value in model.state_dict().items():
            kept = decay if value.is_floating_point() else 0.0
            expected[name] = (kept * expected[name] + (1 - kept) * value).to(value.dtype)
    for name, value in average.state.items():
        torch.testing.assert_close(value, expected[name])
    assert average.state["1.num_batches_tracked"] == 30
    assert [tensor.shape for tensor in average.buffers(model)] == [(3,), (3,), ()]


@pytest.mark.parametrize("name", picture_shapes.SHAPES)
def test_no_map_loses_a_row_at_the_size_that_a_model_was_made_for(name: str) -> None:
    model: Any = described(name)
    size = picture_shapes.image_size(name)
    with torch.no_grad():
        maps = model.eval().efficientnet.encoder(
            model.efficientnet.embeddings(torch.zeros(1, 3, size, size, device="meta"))
        )
    assert maps.last_hidden_state.shape[-1] == -(-size // 32)
