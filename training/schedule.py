"""Courses of the learning rate: they depend only on the step, so nothing of them needs saving."""

import math


def warmup_cosine(
    step: int, total_steps: int, *, peak: float, warmup_fraction: float, floor: float = 0.0
) -> float:
    """Learning rate of ``step`` (counted from 0): a linear rise to ``peak``, then half a cosine to
    ``floor``.

    With a floor of 0 it is the one-cycle policy of Smith and Topin (arXiv 1708.07120) without its
    momentum cycle.
    """
    done = (step + 0.5) / total_steps
    if done < warmup_fraction:
        return peak * done / warmup_fraction
    left = 0.5 * (1 + math.cos(math.pi * (done - warmup_fraction) / (1 - warmup_fraction)))
    return floor + (peak - floor) * left
