"""What a pass through a sharded language model keeps for its backward pass: arithmetic only.

Counted operation by operation, without the attention matrix, which flash attention does not store.
Standard library only. A test compares it with torch's memory tracker.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from training.models.model_shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes per token. One block at a time is computed again in the backward pass: this is over
    before that of the next one, and begins when the logits are gone."""

    outside: float
    """Kept by what follows the blocks, until their backward passes: what the last norm keeps, its
    output twice, for the loss, and the gradient of that."""
    kept: float
    """By each block."""
    within: float
    """Besides in one block while it has its backward pass: what is computed again, and gradients.
    """

    @classmethod
    def of(cls, shape: ModelShape, recompute: str, *, autocast: bool) -> Self:
        """Those of a model.

        Args:
            recompute: what is computed again: ``none``, ``selective`` or ``full``.
            autocast: weights are fp32, and what is multiplied is cast, as a single worker does it;
                without it they are bf16.
        """
        whole = _whole(shape, autocast=autocast)
        # A product of experts is not cast: they compute in fp32, and so does what is added to it.
        given = (4.0 if autocast and shape.experts else 2.0) * shape.hidden
        kept = {"none": whole, "selective": _products(shape, given=given), "full": given}[recompute]
        return cls(
            outside=(14.0 if _is_gated(shape) else 8.0) * shape.hidden,
            kept=kept,
            within=whole - kept + _gradients(shape, autocast=autocast),
        )


def _whole(shape: ModelShape, *, autocast: bool) -> float:
    """What a block keeps of which nothing is computed again. At least that of a GPT (34 per unit of
    width, after arXiv 2205.05198), but for mixtures."""
    outputs = _per_block(shape, (each.number * each.outputs for each in shape.matrices))
    widest = _widest(shape)
    # Inputs of all matrices, each once, and outputs, but for those that are added at the end.
    added = 2 if widest else 1
    found = 2.0 * (2 * shape.hidden + shape.attention + widest)
    found += 2 * (outputs - added * shape.hidden)
    # A gated block keeps its gate before and after the function, and has an RMSNorm, which
    # computes in fp32; others have a LayerNorm, which keeps its input.
    found += (2 * widest + 12 * shape.hidden) if _is_gated(shape) else 8 * shape.hidden
    found += 6 * shape.normed + shape.written_out * widest
    if autocast:
        found += _cast_again(shape)
    experts = shape.experts
    if experts is None:
        return max(34.0 * shape.hidden, found)
    # What an expert is given and gives; the gate before and after its function, what it is
    # multiplied by, and the product.
    numbers = 2 * shape.hidden + (4 if experts.is_gated else 2) * experts.width
    return found + (4.0 if autocast else 2.0) * experts.chosen * numbers


def _products(shape: ModelShape, *, given: float) -> float:
    """What a block keeps where products and attention are not computed again, but those of experts
    are. At least that of a GPT, but for mixtures."""
    outputs = _per_block(shape, (each.number * each.outputs for each in shape.matrices))
    kept = 2 * (outputs + shape.attention) + given
    return kept if shape.experts else max(22.0 * shape.hidden, kept)


def _gradients(shape: ModelShape, *, autocast: bool) -> float:
    """Gradients in a block where they are widest: two of its output, and those that go through its
    last matrices, or those of what experts gave while they are put back in order."""
    wide = 2.0 * _widest(shape) * (2 if _is_gated(shape) else 1)
    if experts := shape.experts:
        through = max(experts.width * (2 if experts.is_gated else 1), 2 * shape.hidden)
        wide = max(wide, (4.0 if autocast else 2.0) * experts.chosen * through)
    return 4.0 * shape.hidden + wide


def _cast_again(shape: ModelShape) -> float:
    """What a block keeps besides under autocast, which casts what a norm gives to bf16 for each
    matrix by itself: for more than the two that a GPT has."""
    reading = _per_block(
        shape, (each.number for each in shape.matrices if each.inputs == shape.hidden)
    )
    if shape.attention == shape.hidden:
        reading -= 1  # of what attention gives
    again = 2.0 * shape.hidden * max(0.0, reading - 2)
    if shape.experts is not None:
        # What chooses them casts it too, and norms keep fp32, which goes from block to block.
        again += 6.0 * shape.hidden
    return again


def _widest(shape: ModelShape) -> int:
    """Inputs of the last matrix of a block; 0 where experts are in its place."""
    inputs = {each.inputs for each in shape.matrices}
    if shape.experts is not None:
        inputs -= {shape.hidden, shape.attention}
    return max(inputs, default=0)


def _is_gated(shape: ModelShape) -> bool:
    widest = _widest(shape)
    halves = _per_block(
        shape,
        (
            each.number * each.outputs / widest
            for each in shape.matrices
            if each.outputs in (widest, 2 * widest)
        ),
    )
    return shape.experts is not None or halves >= 2


def _per_block(shape: ModelShape, numbers: Iterable[float]) -> float:
    return sum(numbers) / shape.layers
