"""Cross-entropy of a language model without ever storing its logits.

The logits of a batch are its largest tensor by far: 4,096 tokens of a vocabulary of 50,000 are
0.8 GB in fp32, and as much again for their gradient. Here they exist for a few hundred tokens at a
time, and the gradients are made on the way, so that backward has nothing to recompute.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: Labels that do not count, as in ``torch.nn.functional.cross_entropy``.
IGNORE: Final = -100

#: Tokens whose logits exist at the same time.
CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Bend:
    """What a model does with the products of its output embedding before they are its logits:
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
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Mean cross-entropy of ``bend(hidden @ weight.T + bias)`` against ``labels``, in fp32.

    Args:
        hidden: ``[num_tokens, width]``, what the last layer gives.
        weight: ``[vocab, width]``, the output embedding.
        labels: ``[num_tokens]``, ids below ``vocab``, or ``IGNORE`` where nothing is to be learned.
        bias: ``[vocab]``, of the output embedding, where it has one.
        chunk_tokens: more is faster up to a point, and takes ``chunk_tokens * vocab`` numbers.

    Returns:
        A scalar, differentiable in ``hidden``, ``weight`` and ``bias``; 0 where no label counts.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(f"hidden is {[*hidden.shape]}, labels {[*labels.shape]}")
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, bend, chunk_tokens
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
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        counted = labels != IGNORE
        num = counted.sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over all chunks: bf16 would lose what each adds.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if needs_bias else None
        for first in range(0, len(labels), chunk):
            part = slice(first, first + chunk)
            counts = counted[part, None]
            targets = labels[part].clamp(min=0)[:, None]
            logits = F.linear(hidden[part], weight, bias).float()
            slope = None
            if bend.cap:
                share = logits.mul_(bend.scale / bend.cap).tanh_()
                slope = (1 - share.square()).mul_(bend.scale)
                logits = share.mul_(bend.cap)
            elif bend.scale != 1.0:
                logits.mul_(bend.scale)
            log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
            total += ((log_sum - logits.gather(1, targets)) * counts).sum()
            if grad_hidden is None and grad_weight is None and grad_bias is None:
                continue
            # The logits become their own gradient, in place.
            gradient = logits.sub_(log_sum).exp_()
            gradient.scatter_add_(1, targets, torch.full_like(log_sum, -1.0))
            gradient.mul_(counts * (bend.scale / num) if slope is None else counts / num)
            if slope is not None:
                gradient.mul_(slope)
            if grad_hidden is not None:
                torch.mm(gradient.to(weight.dtype), weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(gradient.t(), hidden[part].float())
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
        )
        return total / num

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        (scale,) = above
        gradients = (None if each is None else each * scale for each in ctx.saved_tensors)
        return (*gradients, None, None, None)


def plain_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    bend: Bend = STRAIGHT,
) -> Tensor:
    """The same loss from stored logits; to compare with."""
    logits = bend(F.linear(hidden, weight, bias).float())
    return F.cross_entropy(logits, labels, ignore_index=IGNORE)
