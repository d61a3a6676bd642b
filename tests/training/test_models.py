"""Proves that leaving out dead taps changes no loss and no gradient, and that what is saved is a
standard ResNet18."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from training import checkpoints, models


def pair() -> tuple[nn.Module, nn.Module, dict[str, tuple[models.Window, int]]]:
    """The same weights in full and cut to the live taps."""
    torch.manual_seed(0)
    full = models.resnet18()
    torch.manual_seed(0)
    live = models.resnet18()
    return full, live, models.keep_live_taps(live, image_size=28)


def loss_of(model: nn.Module, batch: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)
    return F.cross_entropy(model(pixels).logits, labels)


def test_resnet18_has_the_parameters_of_the_standard_one() -> None:
    assert models.num_parameters(models.resnet18()) == 11_175_370


def test_live_taps_have_the_same_loss_and_gradients_and_the_rest_of_the_gradient_is_zero() -> None:
    full, live, cut = pair()
    full_loss, live_loss = loss_of(full), loss_of(live)
    torch.testing.assert_close(full_loss, live_loss, atol=1e-5, rtol=0)
    full_loss.backward()
    live_loss.backward()
    expected = {name: p.grad for name, p in full.named_parameters() if p.grad is not None}
    found = models.full_state(
        {name: p.grad for name, p in live.named_parameters() if p.grad is not None}, cut
    )
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3)
    num_zero = sum(int((gradient == 0).sum()) for gradient in expected.values())
    # The dead taps, and a few thousand gradients that are zero by chance.
    assert 0.6216 < num_zero / 11_175_370 < 0.625


def test_three_fifths_of_the_weights_are_left_out() -> None:
    _, live, cut = pair()
    assert models.num_parameters(live) == 4_228_554
    assert len(cut) == 4
    assert all("stages.3" in name for name in cut)


@pytest.mark.parametrize(("size", "num_cut"), [(28, 4), (32, 4), (64, 0), (224, 0)])
def test_taps_are_cut_only_where_the_image_size_makes_them_dead(size: int, num_cut: int) -> None:
    torch.manual_seed(0)
    full = models.resnet18().eval()
    torch.manual_seed(0)
    live = models.resnet18()
    assert len(models.keep_live_taps(live, image_size=size)) == num_cut
    pixels = torch.randn(2, 1, size, size)
    with torch.no_grad():
        torch.testing.assert_close(
            live.eval()(pixels).logits, full(pixels).logits, atol=1e-4, rtol=1e-4
        )


def test_cutting_does_not_touch_running_statistics_or_the_mode() -> None:
    _, live, _ = pair()
    assert live.training
    means = [b for name, b in live.named_buffers() if name.endswith("running_mean")]
    assert means
    assert not any(mean.any() for mean in means)


def test_a_state_goes_to_full_and_back_unchanged() -> None:
    _, live, cut = pair()
    state = live.state_dict()
    full = models.full_state(state, cut)
    assert sum(t.numel() for n, t in full.items() if "weight" in n or "bias" in n) == 11_175_370
    back = models.live_state(full, cut)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_a_saved_model_loads_with_from_pretrained_and_answers_the_same(tmp_path: Path) -> None:
    from transformers import ResNetForImageClassification

    _, live, cut = pair()
    optimizer = torch.optim.AdamW(live.parameters())
    snapshot = checkpoints.take_snapshot(
        live, optimizer, cut=cut, position=checkpoints.Position(), config={}, data=""
    )
    checkpoints.write_model(snapshot, tmp_path)
    loaded = ResNetForImageClassification.from_pretrained(tmp_path)
    pixels = torch.randn(4, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.train(False)(pixels).logits, live.eval()(pixels).logits, atol=1e-5, rtol=1e-5
        )


def test_forward_flops_are_those_of_one_image() -> None:
    full, live, _ = pair()
    # 2 operations per multiply-add of every convolution and the classifier, by hand.
    stem = 2 * 49 * 64 * 14 * 14
    stage1 = 2 * 4 * 9 * 64 * 64 * 7 * 7
    stage2 = 2 * 16 * (9 * 64 * 128 + 3 * 9 * 128 * 128 + 64 * 128)
    stage3 = 2 * 4 * (9 * 128 * 256 + 3 * 9 * 256 * 256 + 128 * 256)
    shortcut = 2 * 256 * 512
    stage4_full = 2 * (9 * 256 * 512 + 3 * 9 * 512 * 512) + shortcut
    stage4_live = 2 * (4 * 256 * 512 + 3 * 512 * 512) + shortcut
    rest = stem + stage1 + stage2 + stage3 + 2 * 512 * 10
    assert models.forward_flops(full, image_size=28) == rest + stage4_full
    assert models.forward_flops(live, image_size=28) == rest + stage4_live
