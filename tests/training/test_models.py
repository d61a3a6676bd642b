"""Proves that the model is transformers' ResNet18 to the bit and starts without transformers, that
leaving out dead taps changes no loss and no gradient, and that what is saved is a standard
ResNet18."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import ROOT
from training.models import classifiers as models
from training.models.resnet import ResNet18, ResNet18Config
from training.models.small import Small


def pair(size: int = 28) -> tuple[nn.Module, nn.Module]:
    """The same weights in full and cut to the live taps."""
    torch.manual_seed(0)
    full = ResNet18()
    torch.manual_seed(0)
    live = ResNet18()
    models.keep_live_taps(live, image_size=size)
    return full, live


def cut(model: nn.Module) -> dict[str, models.LiveConv2d]:
    """The convolutions without their dead taps, by the names of their weights."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, models.LiveConv2d)
    }


def loss_of(model: nn.Module, batch: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)
    return F.cross_entropy(model(pixels).logits, labels)


def transformers_resnet18() -> nn.Module:
    """The model that our ``config.json`` describes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    values = json.loads(ResNet18Config().to_json_string())
    model: nn.Module = ResNetForImageClassification(ResNetConfig.from_dict(values))
    return model


@pytest.mark.parametrize("size", [28, 64])
def test_logits_gradients_and_statistics_are_those_of_transformers_to_the_bit(size: int) -> None:
    found = []
    for build in (ResNet18, transformers_resnet18):
        torch.manual_seed(0)
        model = build()
        pixels = torch.randn(4, 1, size, size)
        trained = model.train()(pixels).logits
        F.cross_entropy(trained, torch.arange(4)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            evaluated = model.eval()(pixels).logits
        found.append([trained, evaluated, *gradients, *model.buffers()])
    ours, theirs = found
    assert len(ours) == len(theirs) == 2 + 62 + 3 * 20
    for our, their in zip(ours, theirs, strict=True):
        assert our is not None
        assert their is not None
        assert torch.equal(our, their)


def test_the_recipe_and_its_model_start_without_transformers_and_the_compiler() -> None:
    """Each of these modules costs every worker of every run 0.5 to 2 s of CPU."""
    program = """
import sys
import training.ddp.train
from training.models import classifiers as models
from training.models.resnet import ResNet18, ResNet18Config
from training.data import small_images

small_images.load("digits")
model = ResNet18()
models.keep_live_taps(model, image_size=28)
models.forward_flops(model, image_size=28)
heavy = {"transformers", "sympy", "torch._dynamo", "scipy", "sklearn", "pandas", "matplotlib"}
print(*sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_live_taps_have_the_same_loss_and_gradients_and_the_rest_of_the_gradient_is_zero() -> None:
    full, live = pair()
    assert len(cut(live)) == 4
    full_loss, live_loss = loss_of(full), loss_of(live)
    torch.testing.assert_close(full_loss, live_loss, atol=1e-5, rtol=0)
    full_loss.backward()
    live_loss.backward()
    expected = {name: p.grad for name, p in full.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in live.named_parameters() if p.grad is not None}
    found |= {name: module.whole(found[name]) for name, module in cut(live).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3)
    num_zero = sum(int((gradient == 0).sum()) for gradient in expected.values())
    # The dead taps, and a few thousand gradients that are zero by chance.
    assert 0.6216 < num_zero / 11_175_370 < 0.625


def counted_by_torch(model: nn.Module, size: int) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1, size, size))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("size", [8, 28, 32, 33, 64])
def test_forward_flops_are_those_that_torch_counts(size: int) -> None:
    model = ResNet18().eval()
    whole = models.forward_flops(model, image_size=size)
    assert whole == counted_by_torch(model, size)
    models.keep_live_taps(model, image_size=size)
    live = models.forward_flops(model, image_size=size)
    assert live == counted_by_torch(model, size)
    assert (live < whole) == bool(cut(model)) == (size <= 32)


def test_maps_of_one_channel_leave_the_small_network_in_the_order_that_is_fast() -> None:
    pixels = torch.zeros(2, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    model = Small()
    assert model.layers[0](pixels).stride(1) == 1
    assert model(pixels).logits.shape == (2, 10)
    assert models.num_parameters(model) == 279_104
