"""Sums over weights: batches without any, and losses that do not say what they weigh."""

import warnings

import pytest
import torch
from shared import SGD, both_steps, mean_square
from torch import nn
from torch.nn import functional as F

import looplib as ll


def ragged(seed=0, rows=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, 4, generator=generator, dtype=torch.double)
    labels = torch.randint(0, 3, (rows, 5), generator=generator)
    return {"x": x, "labels": labels.masked_fill(torch.arange(5) >= torch.arange(1, rows + 1)[:, None], -100)}


def plain_loss(model, batch):  # what transformers' output.loss is
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def exact_loss(model, batch):
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return ll.Mean(total, (batch["labels"] != -100).sum())


@pytest.mark.parametrize("weight", ["int tensor", "float tensor", "number", "times"])
@both_steps
def test_a_batch_without_any_weight_gives_the_same_whole_and_in_microbatches(weight, donate):
    model = nn.Linear(4, 3).double()
    batch = {"x": torch.randn(6, 5, 4).double(), "labels": torch.full((6, 5), -100)}

    def loss_fn(model, batch):
        total, count, _ = exact_loss(model, batch)
        one = {"int tensor": count, "float tensor": count.float(), "number": count.item(), "times": count}[weight]
        return ll.Mean(total, one, 3 if weight == "times" else 1)

    grad_fn = ll.make_grad_fn(model, loss_fn)
    for wrap in (lambda g: g, lambda g: ll.accumulate(g, 1), lambda g: ll.accumulate(g, 4)):
        state = ll.copy_state(ll.init_state(model, SGD))
        assert all((grad == 0).all() for grad in wrap(grad_fn)(state, batch).grads.values())
        before = ll.copy_state(state)
        state, metrics = ll.make_train_step(wrap(grad_fn), SGD, donate=donate)(state, batch)
        assert all(torch.equal(tensor, state.params[name]) for name, tensor in before.params.items())
        assert torch.tensor(ll.compute(metrics)["loss"]).isnan()  # 0 / 0, as cross_entropy's own mean


def test_a_weight_of_zero_counts_as_one_whatever_the_total():
    model = nn.Linear(4, 3).double()
    x = torch.randn(6, 4).double()
    for times in (1, 3):
        grad_fn = ll.make_grad_fn(
            model, lambda model, x, times=times: ll.Mean(model(x).sum(), torch.tensor(0.0), times)
        )
        state = ll.init_state(model)
        whole, pieces = grad_fn(state, x).grads, ll.accumulate(grad_fn, 4)(state, x).grads
        torch.testing.assert_close(whole, pieces, rtol=1e-12, atol=0)


@pytest.mark.parametrize("keys", [("x", "labels"), (0, 1)])
def test_a_plain_scalar_with_ignored_labels_is_warned_of_once_under_accumulate(keys):
    model = nn.Linear(4, 3).double()
    batch = ragged()
    if keys == (0, 1):
        batch = (batch["x"], batch["labels"])
    grad_fn = ll.accumulate(
        ll.make_grad_fn(model, lambda model, b: plain_loss(model, {"x": b[keys[0]], "labels": b[keys[1]]})), 3
    )
    state = ll.init_state(model)
    with pytest.warns(
        UserWarning, match=r"labels of -100 \(batch.*\) .*ll\.Mean\(total, weight\).*next_token_loss"
    ) as caught:
        grad_fn(state, batch)
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            grad_fn(state, batch)


def test_ignored_labels_that_come_later_are_found_and_others_are_not():
    model, state = nn.Linear(4, 3).double(), None
    state, clean = ll.init_state(model), {**ragged(), "labels": torch.ones(6, 5, dtype=torch.long)}
    grad_fn = ll.accumulate(ll.make_grad_fn(model, plain_loss), 2)
    for _ in range(8):
        grad_fn(state, clean)
    with pytest.warns(UserWarning, match="labels of -100"):
        [grad_fn(state, ragged()) for _ in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ll.make_grad_fn(model, plain_loss)(state, ragged())  # whole, where a plain mean is right
        ll.accumulate(ll.make_grad_fn(model, exact_loss), 2)(state, ragged())
        of_floats = ll.make_grad_fn(model, mean_square)
        ll.accumulate(of_floats, 2)(state, torch.full((4, 4), -100.0).double())
