"""Smoothed curves."""

from __future__ import annotations

import math
from collections.abc import Iterable


def smoothed(values: Iterable[float], keep: float) -> list[float]:
    """Exponential moving average at each value, bias-corrected as in Adam. NaN values are left out.

    >>> smoothed([1.0, 2.0], 0.5)  # (0.5 * 1) / 0.5, (0.25 * 1 + 0.5 * 2) / 0.75
    [1.0, 1.6666666666666667]
    """
    total = weight = 0.0
    averages = []
    for value in values:
        if not math.isnan(value):
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        averages.append(math.nan if math.isnan(value) else total / weight)
    return averages
