"""Cross-entropy of a language model without ever storing its logits.

The logits of a batch are its largest tensor by far: 4,096 tokens of a vocabulary of 50,000 are
0.8 GB in fp32, and as much again for their gradient. Here they exist for a few hundred tokens at a
time, and the gradients are made on the way, so that backward has nothing to recompute.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

#: Labels that do not count, as in ``torch.nn.functional.cross_entropy``.
IGNORE: Final = -100
#: Tokens whose logits exist at the same time.
CHUNK_TOKENS: Final = 512


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``labels``, in fp32.

    Args:
        hidden: ``[num_tokens, width]``, what the last layer gives.
        weight: ``[vocab, width]``, the output embedding.
        labels: ``[num_tokens]``, ids below ``vocab``, or ``IGNORE`` where nothing is to be learned.
        chunk_tokens: more is faster up to a point, and takes ``chunk_tokens * vocab`` numbers.

    Returns:
        A scalar, differentiable in ``hidden`` and ``weight``; 0 where no label counts.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(f"hidden is {[*hidden.shape]}, labels {[*labels.shape]}")
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk_tokens
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over the tokens.

    With logits ``z = h W'`` and probabilities ``p = softmax(z)``, the gradient of the mean loss in
    ``z`` is ``(p - onehot(label)) / n``, from which those in ``h`` and ``W`` are one product each.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        counted = labels != IGNORE
        num = counted.sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over all chunks: bf16 would lose what each adds.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for first in range(0, len(labels), chunk):
            part = slice(first, first + chunk)
            counts = counted[part, None]
            targets = labels[part].clamp(min=0)[:, None]
            logits = (hidden[part] @ weight.t()).float()
            log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
            total += ((log_sum - logits.gather(1, targets)) * counts).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # The logits become their own gradient, in place.
            gradient = logits.sub_(log_sum).exp_()
            gradient.scatter_add_(1, targets, torch.full_like(log_sum, -1.0))
            gradient.mul_(counts / num)
            if grad_hidden is not None:
                torch.mm(gradient.to(weight.dtype), weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(gradient.t(), hidden[part].float())
        ctx.save_for_backward(
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return total / num

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        (scale,) = above
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_weight is None else grad_weight * scale,
            None,
            None,
        )


def plain_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same loss from stored logits; to compare with."""
    return F.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=IGNORE)
