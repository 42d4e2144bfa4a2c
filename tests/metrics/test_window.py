"""A window between two logs: exact, and without a question to the device."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looplib.metrics import Mean, Window, compute


@given(
    some=st.lists(st.tuples(st.fractions(), st.fractions(), st.integers(1, 4)), min_size=1, max_size=10),
    steps=st.integers(1, 300),
)
def test_a_window_is_the_sum_of_its_steps(some, steps):
    parts = [some[step % len(some)] for step in range(steps)]
    window = Window()
    for total, weight, times in parts:
        earlier = window
        window = window.add({"loss": Mean(total, weight, times=times), "n": Mean(1)})
        assert len(window) == len(earlier) + 1
    assert len(window) == len(parts)
    loss = window.metrics()["loss"]
    assert loss.total * loss.times == sum((total * times for total, _, times in parts), Fraction(0))
    assert loss.weight * loss.times == sum((weight * times for _, weight, times in parts), Fraction(0))
    assert window.metrics()["n"].compute() == (1 if len(parts) == 1 else 1.0)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 9)), min_size=1, max_size=150))
def test_a_window_of_tensors_is_the_mean_of_all_in_float64(parts):
    window = Window()
    for total, weight in parts:
        window = window.add({"loss": Mean(torch.tensor(total), weight)})
    totals, weights = zip(*parts, strict=True)
    expected = math.fsum(totals) / sum(weights)
    got = compute(window.metrics(), prefix="train/")["train/loss"]
    assert got == pytest.approx(expected, rel=1e-6 if len(parts) == 1 else 1e-12, abs=1e-9)


def test_a_window_asks_no_tensor_for_its_value():
    """On the meta device nothing has a value, so whatever asked for one would raise."""
    window = Window()
    for _ in range(200):
        window = window.add({"loss": Mean(torch.empty((), device="meta"), 3)})
        assert len(window.waiting) < 64
    assert window.metrics()["loss"].total.device.type == "meta"


def test_an_empty_window_and_other_names_are_refused():
    with pytest.raises(ValueError, match="the window is empty; add the metrics"):
        Window().metrics()
    with pytest.raises(ValueError, match=r"found \['a'\] and \['b'\]"):
        Window().add({"a": Mean(1.0)}).add({"b": Mean(1.0)}).metrics()


def test_a_window_itself_is_not_computed():
    with pytest.raises(
        TypeError, match=r"compute takes a dict of metrics, and found a Window: give window.metrics\(\)"
    ):
        compute(Window().add({"loss": Mean(1.0)}))
    with pytest.raises(TypeError, match=r"and found a Mean: give all of them, ll\.compute\(metrics\)"):
        compute(Mean(1.0))
