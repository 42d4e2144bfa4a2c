"""Merging against exact fractions, and windows of steps."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared import assert_each_refused

import looplib as ll

parts = st.lists(
    st.tuples(st.integers(-(2**40), 2**40), st.integers(1, 2**20), st.sampled_from([1, 3, 64])),
    min_size=1,
    max_size=200,
)


@given(parts=parts, tensors=st.booleans(), data=st.data())
def test_any_merge_order_and_any_window_give_the_exact_mean(parts, tensors, data):
    # Integers this small add without rounding in float64, so every order must give the same bits.
    make = (lambda t: torch.tensor(t, dtype=torch.float64)) if tensors else float
    records = [{"loss": ll.Mean(make(total), make(weight), n)} for total, weight, n in parts]
    exact = float(Fraction(sum(t * n for t, _, n in parts), sum(w * n for _, w, n in parts)))
    window = ll.Window()
    for step, record in enumerate(records):
        assert len(window) == step
        window = window.add(record)
        assert len(window.waiting) < 64
    while len(records) > 1:
        i = data.draw(st.integers(0, len(records) - 2))
        j = data.draw(st.integers(i + 2, len(records)))
        records[i:j] = [ll.metrics.merge(*records[i:j])]
    assert ll.compute(records[0])["loss"] == ll.compute(window.metrics())["loss"] == exact


@given(st.floats(width=32), st.integers(1, 1000))
def test_a_mean_that_is_alone_keeps_its_bits(value, count):
    record = {"loss": ll.Mean(torch.tensor(value), 1, count)}
    for found in map(ll.compute, (record, ll.metrics.merge(record), ll.Window().add(record).metrics())):
        assert found["loss"] == value or (found["loss"] != found["loss"] and value != value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_means_are_added_in_float64_and_members_of_a_stack_apart(dtype):
    one, other = ll.Mean(torch.tensor(2.0**24).to(dtype), torch.tensor(1)), ll.Mean(torch.tensor([1]).to(dtype), 2, 3)
    for merged in (
        one.merge(other),
        other.merge(one),
        one.merge(other._replace(times=1), *[other._replace(times=2)]),
    ):
        assert (merged.total.dtype, merged.total.item()) == (torch.float64, 2.0**24 + 3)
        assert float(merged.weight) == 7
    members = ll.Mean(torch.ones(3), 1).merge(ll.Mean(torch.tensor([1.0, 2.0, 3.0]), 1))
    assert torch.equal(members.compute(), torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("count", [3, 64, 150])
def test_a_window_has_the_mean_of_each_name_over_the_steps_that_have_it(count):
    window = ll.Window()
    for step in range(count):
        window = window.add({"loss": ll.Mean(step)} | ({"moved": ll.Mean(step)} if step % 3 == 1 else {}))
    moved = range(1, count, 3)
    assert ll.compute(window.metrics()) == {"loss": (count - 1) / 2, "moved": sum(moved) / len(moved)}


def test_windows_and_merges_ask_no_tensor_for_its_value():
    """On the meta device nothing has a value, so whatever asked for one would raise."""
    window = ll.Window()
    for _ in range(200):
        window = window.add({"loss": ll.Mean(torch.empty((), device="meta"), 3)})
    assert window.metrics()["loss"].total.device.type == "meta"
    assert (len(window), len(window.waiting), len(window.merged)) == (200, 200 % 64, 1)


def test_compute_prefixes_and_divides_by_zero_as_torch_does():
    assert ll.compute({"a": ll.Mean(1.0), "b": ll.Mean(torch.tensor(3), 2), "c": ll.Mean(7, 2)}, prefix="eval/") == {
        "eval/a": 1.0,
        "eval/b": 1.5,
        "eval/c": 3.5,
    }
    assert ll.compute({}) == {}
    large = {"n": ll.Mean(torch.tensor(2**24 + 1)), "x": ll.Mean(torch.tensor(0.5))}  # of two dtypes
    assert ll.compute(large) == {"n": 2**24 + 1, "x": 0.5}
    for empty in (ll.Mean(torch.tensor(0.0), torch.tensor(0)), ll.Mean(0.0, 0)):
        assert math.isnan(ll.compute({"empty": empty})["empty"])
    assert ll.compute({"empty": ll.Mean(-1, torch.tensor(0))})["empty"] == -math.inf


def scores(texts):
    return {"rouge1": 1.0}


def test_what_is_no_metric_and_other_names_are_refused():
    one, stack = {"a": ll.Mean(1.0)}, ll.Mean(torch.ones(3), 2)
    assert_each_refused(
        (lambda: ll.compute({"logits": torch.zeros(3)}), TypeError, "'logits' is a Tensor"),
        (lambda: ll.metrics.merge(one, {"b": ll.Mean(1.0)}), ValueError, r"\['a'\] and \['b'\]"),
        (lambda: ll.Window().metrics(), ValueError, "window is empty"),
        (lambda: ll.Window().add(one | {"lr": 0.1}).add(one | {"lr": 0.1}).metrics(), TypeError, "'lr'"),
        (lambda: ll.metrics.Corpus.of(len, {"x": ["a"]}), TypeError, "a dict"),
        (lambda: ll.compute({"rouge": ll.metrics.Corpus.of(scores, ["a"])}), TypeError, "'rouge'.*rouge1"),
        (lambda: ll.compute(ll.Window().add(one)), TypeError, "Window"),
        (lambda: ll.compute(ll.Mean(1.0)), TypeError, r"\.item\(\)"),
        (lambda: ll.compute((1, one)), TypeError, "tuple"),
        (lambda: ll.compute({"loss": stack}), ValueError, r"'loss' .*\(3,\).*compute_members.* weight"),
        (lambda: float(stack), ValueError, r"\(3,\).*compute_members.* weight"),
        (lambda: f"{stack:.3f}", ValueError, r"\(3,\).*compute_members"),
    )
    for use in (
        lambda m: m < 1.0,
        lambda m: 0 + m,
        lambda m: m / 2,
    ):
        with pytest.raises(TypeError, match=r"metrics\['loss'\]\.item\(\)"):
            use(ll.Mean(1.5, 2))


def test_a_mean_is_read_like_a_scalar_tensor():
    loss = ll.Mean(torch.tensor(1.5), 2)
    assert loss.item() == float(loss) == 0.75
    assert f"{loss:.3f}" == "0.750"
    assert f"{loss}" == str(loss) == "Mean(total=tensor(1.5000), weight=2, times=1)"
    assert np.mean([loss, ll.Mean(1.0, 4)]) == 0.5  # of two values, and not of six fields


def test_a_window_in_a_loop_of_ones_own_keeps_no_graph():
    """A loss that is added as it is would keep the graphs, and so the activations, of all steps."""
    weight, freed = torch.ones(2, requires_grad=True), []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = Freed()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Freed:
        def __del__(self):
            freed.append(self)

    window = ll.Window()
    for _ in range(70):
        loss = Noted.apply(weight).mean()
        records = {"loss": ll.Mean(loss, 1, times=3), "perplexity": ll.metrics.perplexity(ll.Mean(loss, 1))}
        window = window.add(records)
        loss.backward()
        del loss, records
    assert len(freed) == 70
    assert ll.compute(window.metrics()) == pytest.approx({"loss": 1.0, "perplexity": math.e})
    assert weight.grad.tolist() == [35.0, 35.0]
