"""The loss without logits is the loss, its gradients are the gradients, and it stores no logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from training.loop import losses
from training.loop.losses import IGNORE, STRAIGHT, Bend, linear_cross_entropy

WIDTH, VOCAB = 16, 101


def plain_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    bend: Bend = STRAIGHT,
) -> Tensor:
    """The same loss from stored logits."""
    logits = bend(F.linear(hidden, weight, bias).float())
    return F.cross_entropy(logits, labels, ignore_index=IGNORE)


def inputs(num: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num)
    hidden = torch.randn(num, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (num,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def checked(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **more: Any
) -> Tensor:
    """The loss, after a comparison of it and of its gradients with those of stored logits."""
    given = [each for each in (hidden, weight, bias) if each is not None]
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=8, **more)
    bend = {name: each for name, each in more.items() if name == "bend"}
    expected_loss = plain_cross_entropy(hidden, weight, labels, bias=bias, **bend)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    found, expected = (torch.autograd.grad(each * 3, given) for each in (loss, expected_loss))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    return loss


@pytest.mark.parametrize("num", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("ignored", [0, 1])
def test_loss_and_gradients_are_those_of_stored_logits(num: int, ignored: int) -> None:
    hidden, weight, labels = inputs(num + ignored)
    labels[:ignored] = IGNORE
    checked(hidden, weight, labels)


@pytest.mark.parametrize("bend", [STRAIGHT, Bend(scale=2.0, cap=5.0)])
def test_what_is_compiled_is_the_same_loss(bend: Bend, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[bool] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(True)
        return lookup_backend("aot_eager")(graph, given)

    torch._dynamo.reset()  # it would remember the shapes of other tests
    of_logits = torch.compile(losses._of_logits, backend=backend)
    monkeypatch.setattr(losses, "_compiled", lambda: of_logits)
    hidden, weight, labels = inputs(28)
    labels[3] = IGNORE
    checked(hidden, weight, labels, bend=bend, compiles=True)
    checked(hidden, weight, labels, bend=bend, compiles=True)
    # One for whole chunks and one for any other length.
    assert len(graphs) == 2


@pytest.mark.parametrize(
    "bend",
    [Bend(scale=0.25), Bend(cap=3.0), Bend(scale=2.0, cap=5.0)],
    ids=["scaled", "capped", "both"],
)
def test_a_bias_a_scale_and_a_cap_count_in_loss_and_gradients(bend: Bend) -> None:
    hidden, weight, labels = inputs(24)
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels[3] = IGNORE
    loss = checked(hidden, weight, labels, bias, bend=bend)
    plain = linear_cross_entropy(hidden, weight, labels, chunk_tokens=64)
    assert abs(plain.item() - loss.item()) > 0.01


@pytest.mark.parametrize("divisor", [0.0, 77.7])
def test_gradients_in_16_bits_are_rounded_once(divisor: float) -> None:
    hidden, weight, labels = inputs(200, torch.bfloat16)
    # Small logits, whose own rounding counts less. Rounded twice, it is 1.4 to 1.6 times as much.
    hidden = (hidden.detach() / 16).requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    (plain_cross_entropy(exact[0], exact[1], labels) * (200 / (divisor or 200))).backward()
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=64, divisor=divisor).backward()
    for found, truth in zip((hidden, weight), exact, strict=True):
        assert found.grad is not None
        assert truth.grad is not None
        error, rounded = (
            (each.double() - truth.grad).square().mean().sqrt()
            for each in (found.grad, truth.grad.bfloat16())
        )
        assert error < 1.33 * rounded


def test_no_tensor_of_the_size_of_the_logits_is_kept_for_backward() -> None:
    hidden, weight, labels = inputs(1024)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=64)
        assert max(kept) == 1024 * WIDTH
        plain_cross_entropy(hidden, weight, labels)
        assert max(kept) == 1024 * VOCAB


def test_where_no_label_counts_the_loss_is_zero_and_nothing_is_learned() -> None:
    hidden, weight, labels = inputs(8)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), chunk_tokens=8)
    assert loss.item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("num", [1, 7])
def test_shapes_that_do_not_fit_are_refused(num: int) -> None:
    hidden, weight, labels = inputs(8)
    with pytest.raises(ValueError, match=rf"hidden is \[8, 16\], labels \[{num}\]"):
        linear_cross_entropy(hidden, weight, labels[:num], chunk_tokens=8)


def test_in_bf16_it_is_as_close_to_the_truth_as_stored_logits_are() -> None:
    exact_hidden, exact_weight, labels = inputs(256, torch.float64)
    truth = plain_cross_entropy(exact_hidden, exact_weight, labels)
    hidden, weight, _ = inputs(256, torch.bfloat16)
    error = (linear_cross_entropy(hidden, weight, labels, chunk_tokens=64) - truth).abs()
    reference = (plain_cross_entropy(hidden, weight, labels) - truth).abs()
    assert error <= reference + 1e-3
