"""Curves of a run: fields of its events as arrays, shortened and smoothed for drawing."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from training.record.events import Evaluation, RankTimes, Step
from training.record.fields import number
from training.record.reader import figure

Floats = npt.NDArray[np.float64]
Record = Step | RankTimes | Evaluation

MAX_POINTS: Final = 1500  # of a curve; more cannot be told apart on a screen


def column(records: Iterable[Record], key: str) -> Floats:
    """One field, or one measure, of all records; NaN where it is missing or not finite."""
    return array(figure(record, key) for record in records)


def array(values: Iterable[float | None]) -> Floats:
    """Numbers as an array, NaN where one is missing or not finite."""
    finite = (number(value) for value in values)
    return np.array([math.nan if value is None else value for value in finite], dtype=np.float64)


def curve(records: Sequence[Record], x: str, y: str) -> tuple[Floats, Floats]:
    """Two fields of the records that have both."""
    xs, ys = column(records, x), column(records, y)
    both = np.isfinite(xs) & np.isfinite(ys)
    return xs[both], ys[both]


def bucket_means(values: Floats, num_buckets: int = MAX_POINTS) -> Floats:
    """Means of consecutive values, so that at most ``num_buckets`` are left."""
    if len(values) <= num_buckets:
        return values
    edges = np.linspace(0, len(values), num_buckets + 1).astype(np.intp)
    sums = np.add.reduceat(values, edges[:-1])
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def smooth(values: Floats) -> Floats:
    """Centred weighted mean over about a twentieth of the curve."""
    if len(values) < 8:
        return values
    kernel = np.hanning(2 * max(1, len(values) // 40) + 3)
    # The divisor is what is left of the kernel at the two ends.
    weights = np.convolve(np.ones_like(values), kernel, "same")
    return np.asarray(np.convolve(values, kernel, "same") / weights, dtype=np.float64)


def mean(values: Floats) -> float:
    """Mean of what is there; 0 when nothing is."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else 0.0
