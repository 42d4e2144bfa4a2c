"""Smoothed lines of a plot."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples

from looplib.log._plots import smoothed


@given(
    values=st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), min_size=1, max_size=20),
    keep=st.floats(0, 0.99),
)
@settings(max_examples=examples(100), deadline=None)
def test_smoothing_is_the_weighted_mean_of_the_past(values, keep):
    averages = smoothed(values, keep)
    for index, average in enumerate(averages):
        past = [value for value in values[: index + 1] if not math.isnan(value)]
        weights = [keep ** (len(past) - 1 - k) for k in range(len(past))]
        if math.isnan(values[index]):
            assert math.isnan(average)
        else:
            exact = math.fsum(w * v for w, v in zip(weights, past, strict=True)) / math.fsum(weights)
            assert average == pytest.approx(exact, abs=1e-9)
