"""Cross-entropy of a language model without ever storing its logits.

The logits of a batch are its largest tensor by far: 4,096 tokens of a vocabulary of 50,000 are
0.8 GB in fp32, and as much again for their gradient. Here they exist for one chunk of tokens at a
time, and the gradients are made on the way, so that backward has nothing to recompute.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: Labels that do not count, as in ``torch.nn.functional.cross_entropy``.
IGNORE: Final = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Bend:
    """Scaling and soft cap that a model applies to the output of its last matrix to get its logits:
    ``cap * tanh(scale * z / cap)``, or ``scale * z`` without a cap."""

    scale: float = 1.0
    cap: float = 0.0
    """No logit is larger than this; 0: there is no limit."""

    def __call__(self, products: Tensor) -> Tensor:
        """The logits, in the type of ``products``."""
        if self.cap:
            return torch.tanh(products * (self.scale / self.cap)) * self.cap
        return products if self.scale == 1.0 else products * self.scale


STRAIGHT: Final = Bend()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    bend: Bend = STRAIGHT,
    chunk_tokens: int,
    divisor: float = 0.0,
    compiles: bool = False,
) -> Tensor:
    """Mean cross-entropy of ``bend(hidden @ weight.T + bias)`` against ``labels``, in fp32.

    Args:
        hidden: ``[num_tokens, width]``, what the last layer gives.
        weight: ``[vocab, width]``, the output embedding.
        labels: ``[num_tokens]``, ids below ``vocab``, or ``IGNORE`` where nothing is to be learned.
        bias: ``[vocab]``, of the output embedding, where it has one.
        chunk_tokens: more is faster up to a point, and takes ``chunk_tokens * vocab`` numbers.
        divisor: divide the sum by this, and not by the number of labels that count. To weight the
            mean afterwards would round 16-bit gradients a second time.
        compiles: compile what happens between the matrix products: half the time of a GPU, and half
            the memory of a chunk.

    Returns:
        A scalar, differentiable in ``hidden``, ``weight`` and ``bias``; 0 where no label counts.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(f"hidden is {[*hidden.shape]}, labels {[*labels.shape]}")
    if not torch.is_grad_enabled():  # else a weight that is a parameter would get its gradient
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, bend, chunk_tokens, divisor, compiles
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and all gradients in one pass over the tokens.

    With products ``y = h W' + b``, logits ``z = bend(y)`` and probabilities ``p = softmax(z)``, the
    gradient of the mean loss in ``z`` is ``(p - onehot(label)) / n``, and in ``y`` that times the
    slope of the bend: ``scale``, times ``1 - (z / cap)^2`` where there is a cap. Those in ``h`` and
    ``W`` are one product each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        bend: Bend,
        chunk: int,
        divisor: float,
        compiles: bool,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_any = needs_hidden or needs_weight or needs_bias
        of_logits = _compiled() if compiles else _of_logits
        counted = labels != IGNORE
        num = divisor or counted.sum().clamp(min=1)
        # What all gradients are multiplied by, in the end: not in each pass over logits.
        factor = (1.0 if bend.cap else bend.scale) / num
        learned = hidden * counted[:, None]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over all chunks: bf16 would lose what each adds.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if needs_bias else None
        for first in range(0, len(labels), chunk):
            part = slice(first, first + chunk)
            targets = labels[part].clamp(min=0)[:, None]
            # The products have no name here, which would keep them beside what is made of them.
            found, gradient = of_logits(
                F.linear(hidden[part], weight, bias), targets, counted[part], bend, needs_any
            )
            total += found
            if gradient is None:
                continue
            if grad_hidden is not None:  # rounded once, after all that it is multiplied by
                product = torch.zeros_like(hidden[part], dtype=torch.float32)
                _add_product(product, gradient, weight)
                grad_hidden[part] = product.mul_(counted[part, None] * factor)
            if grad_weight is not None:
                _add_product(grad_weight, gradient.t(), learned[part])
            if grad_bias is not None:
                grad_bias += (gradient * counted[part, None]).sum(0, dtype=torch.float32)
            del gradient  # before the next logits
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.mul_(factor).to(weight.dtype),
            None if grad_bias is None else grad_bias.mul_(factor).to(weight.dtype),
        )
        return total / num

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        (scale,) = above
        gradients = (None if each is None else each * scale for each in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


def _of_logits(
    products: Tensor, targets: Tensor, counted: Tensor, bend: Bend, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of a chunk, and ``softmax(z) - onehot(target)`` times the slope of the bend.

    Args:
        products: ``[num_tokens, vocab]``; overwritten where they are in fp32.
        targets: ``[num_tokens, 1]``.
        counted: ``[num_tokens]``, where the loss counts; the gradient is of all.
    """
    dtype, products = products.dtype, products.float()
    slope = None
    if bend.cap:
        bent = products.mul_(bend.scale / bend.cap).tanh_()
        slope = (1 - bent.square()).mul_(bend.scale)
        products = bent.mul_(bend.cap)
    elif bend.scale != 1.0:
        products.mul_(bend.scale)
    log_likely = torch.log_softmax(products, dim=1)
    del products
    at_target = log_likely.gather(1, targets)
    total = -(at_target * counted[:, None]).sum()
    if not needs_gradient:
        return total, None
    # Computed in fp32: near 0 where a model is sure, which 16 bits would lose if they held the
    # probability.
    at_target = at_target.expm1()
    if slope is not None:
        return total, log_likely.exp_().scatter_(1, targets, at_target).mul_(slope).to(dtype)
    if dtype == log_likely.dtype:
        likely = log_likely.exp_()
    else:
        likely = torch.exp(log_likely, out=torch.empty_like(log_likely, dtype=dtype))
    return total, likely.scatter_(1, targets, at_target.to(dtype))


@functools.cache
def _compiled() -> Any:
    return torch.compile(_of_logits)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, with a ``total`` in fp32, whose sum is never in 16 bits."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.float(), right.float())
