"""Counts in metric and loss functions: refused as plain values, which would be averaged, and two ways to write them."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import looplib as ll


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(100, 4, generator=generator), torch.randint(0, 3, (100,), generator=generator)


def batches():
    x, y = data()
    return [*zip(x.split(32), y.split(32), strict=True)]


def hits(model, batch):
    x, y = batch
    return (model(x).argmax(1) == y).sum()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (hits, r"'correct' is an integer tensor \(torch.int64\)"),
        (lambda model, batch: hits(model, batch).int()[None], r"an integer tensor \(torch.int32\)"),
        (lambda model, batch: hits(model, batch).item(), r"the integer \d+"),
    ],
)
def test_counts_are_refused_by_name_with_what_to_write(count, words):
    model = nn.Linear(4, 3)
    state = ll.init_state(model)
    eval_step = ll.make_eval_step(model, lambda model, batch: {"correct": count(model, batch)})
    message = rf"{words}.*ll\.Mean\(total, weight\).*ll\.metrics\.Reading\(ll\.Mean\(correct\).*float\(correct\)"
    with pytest.raises(TypeError, match=message):
        ll.evaluate(eval_step, state, batches())

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]), {"correct": count(model, batch)}

    with pytest.raises(TypeError, match=message):
        ll.accumulate(ll.make_grad_fn(model, loss_fn), 3)(state, data())
    with pytest.raises(TypeError, match=message):
        ll.evaluate(ll.make_eval_step(model, loss_fn), state, batches())


def test_what_the_refusal_says_counts_and_averages_right():
    model = nn.Linear(4, 3)
    state = ll.init_state(model)
    expected = hits(model, data()).item()

    def metrics(model, batch):
        correct = hits(model, batch)
        total = operator.attrgetter("total")
        return {"share": ll.Mean(correct, len(batch[1])), "number": ll.metrics.Reading(ll.Mean(correct), total)}

    values = ll.evaluate(ll.make_eval_step(model, metrics), state, batches())
    assert values == {"share": expected / 100, "number": expected}

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]), metrics(model, batch)

    window = ll.Window()
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn), 3)
    for batch in batches():
        window = window.add(grad_fn(state, batch).metrics)
    assert ll.compute(window.metrics())["number"] == expected


def test_true_and_false_are_averaged():
    model = nn.Linear(4, 3)
    eval_step = ll.make_eval_step(model, lambda model, x: {"finite": model(x).isfinite().all(), "long": len(x) > 3})
    assert ll.evaluate(eval_step, ll.init_state(model), torch.randn(8, 4).split(4)) == {"finite": 1.0, "long": 1.0}
