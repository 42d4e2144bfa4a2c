"""Merging against exact fractions."""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import looplib as ll

parts = st.lists(
    st.tuples(st.integers(-(2**40), 2**40), st.integers(1, 2**20), st.integers(1, 64)), min_size=1, max_size=20
)


@given(parts=parts, data=st.data())
def test_any_merge_order_gives_the_exact_mean(parts, data):
    # Integers this small add without rounding in float64, so every order must give the same bits.
    records = [{"loss": ll.Mean(torch.tensor(t, dtype=torch.float64), torch.tensor(w), n)} for t, w, n in parts]
    while len(records) > 1:
        i = data.draw(st.integers(0, len(records) - 2))
        records[i : i + 2] = [ll.merge(records[i], records[i + 1])]
    exact = Fraction(sum(t * n for t, _, n in parts), sum(w * n for _, w, n in parts))
    assert ll.compute(records[0])["loss"] == float(exact)


@given(st.floats(width=32), st.integers(1, 1000))
def test_a_mean_that_is_alone_keeps_its_bits(value, count):
    found = ll.compute({"loss": ll.Mean(torch.tensor(value), 1, count)})["loss"]
    assert found == value or (found != found and value != value)


def test_float32_totals_do_not_lose_what_is_added_late():
    record = {"loss": ll.Mean(torch.tensor(2.0**24), 1)}
    for _ in range(3):
        record = ll.merge(record, {"loss": ll.Mean(torch.tensor(1.0), 1)})
    assert ll.compute(record)["loss"] == (2**24 + 3) / 4


def test_compute_prefixes_and_refuses():
    assert ll.compute({"a": ll.Mean(1.0), "b": ll.Mean(torch.tensor(3), 2)}, prefix="eval/") == {
        "eval/a": 1.0,
        "eval/b": 1.5,
    }
    assert ll.compute({}) == {}
    assert ll.compute({"empty": ll.Mean(torch.tensor(0.0), torch.tensor(0))})["empty"] != 0
    with pytest.raises(TypeError, match=r"'logits' is a Tensor, not a metric"):
        ll.compute({"logits": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"same names: found \['a'\] and \['b'\]"):
        ll.merge({"a": ll.Mean(1.0)}, {"b": ll.Mean(1.0)})


def test_without_any_weight_a_number_computes_to_nan_or_infinity():
    assert math.isnan(ll.compute({"empty": ll.Mean(0.0, 0)})["empty"])
    assert ll.compute({"empty": ll.Mean(-1, torch.tensor(0))})["empty"] == -math.inf


class Collected(NamedTuple):
    """Counts what its merges copy."""

    items: tuple[int, ...]
    copied = [0]  # noqa: RUF012

    def merge(self, other):
        self.copied[0] += len(self.items) + len(other.items)
        return Collected(self.items + other.items)

    def compute(self):
        return sum(self.items)


@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000, 1023, 1025])
@pytest.mark.parametrize("how", ["merge", "evaluate"])
def test_what_collects_is_copied_n_log_n_times(n, how):
    records = [{"rows": Collected((i,)), "loss": ll.Mean(float(i), 1)} for i in range(n)]
    Collected.copied[0] = 0
    if how == "merge":
        merged = ll.merge(*records)
        assert merged["rows"].items == tuple(range(n))  # in the order of the batches
        found = ll.compute(merged)
    else:
        found = ll.evaluate(lambda state, batch: batch, ll.init_state(torch.nn.Linear(1, 1)), records)
    assert found == {"rows": sum(range(n)), "loss": pytest.approx((n - 1) / 2)}
    assert Collected.copied[0] <= n * (math.log2(n) + 2)


def test_a_mean_is_read_like_a_scalar_tensor():
    loss = ll.Mean(torch.tensor(1.5), 2)
    assert loss.item() == float(loss) == 0.75
    assert f"{loss:.3f}" == "0.750"
    assert f"{loss}" == str(loss) == "Mean(total=tensor(1.5000), weight=2, times=1)"
    assert np.mean([loss, ll.Mean(1.0, 4)]) == 0.5  # of two values, and not of six fields


@pytest.mark.parametrize(
    "use", [lambda m: m < 1.0, lambda m: m >= m, lambda m: 0 + m, lambda m: m + m, lambda m: m * 2, lambda m: m / 2]
)
def test_a_mean_is_not_compared_or_added_field_by_field(use):
    with pytest.raises(TypeError, match=r"not a number: metrics\['loss'\]\.item\(\) gives its value"):
        use(ll.Mean(1.5, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_two_means_are_added_in_float64_and_whole_members_apart(dtype):
    one, other = ll.Mean(torch.tensor(2.0**24).to(dtype), torch.tensor(1)), ll.Mean(torch.tensor(1).to(dtype), 2)
    for merged in (one.merge(other), other.merge(one)):
        assert (merged.total.dtype, merged.total.item()) == (torch.float64, 2.0**24 + 1)
        assert float(merged.weight) == 3
    members = ll.Mean(torch.ones(3), 1).merge(ll.Mean(torch.tensor([1.0, 2.0, 3.0]), 1))
    assert torch.equal(members.compute(), torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("use", [float, lambda mean: mean.item(), lambda mean: f"{mean:.3f}"])
def test_a_mean_of_a_stack_is_not_read_as_one_number(use):
    with pytest.raises(ValueError, match=r"shape \(3,\), and not one value: .*compute_members\(metrics\)"):
        use(ll.Mean(torch.ones(3), 2))
