"""Pieces against the whole: in float64, by a raw loop of backward calls."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import adamw, sgd
from shared import Opaque, both_steps, equal, mean_square, mix, saved_at_most
from shared import classify as mean_loss
from torch import nn

import looplib as ll


def mlp(dtype=torch.double):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def token_loss(model, batch):
    """Labels of -100 count nothing; a batch may have none that count."""
    x, y = batch
    total = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=-100, reduction="sum")
    return ll.Mean(total, (y != -100).sum())


def close(found, expected):
    # A sum of at most some hundred terms in another order: 1e-13 of the largest, in float64.
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-13)


@given(
    n=st.integers(1, 24),
    cut=st.integers(1, 26),
    by=st.sampled_from(["microbatches", "size"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_pieces_of_examples_give_the_gradient_of_the_whole(n, cut, by, seed):
    model, generator = mlp(), torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.double)
    y = torch.randint(0, 3, (n,), generator=generator)
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_loss)
    whole = grad_fn(state, (x, y))
    pieces = ll.accumulate(grad_fn, **{by: cut})(state, (x, y))
    close(pieces.grads, whole.grads)
    assert pieces.samples == n
    assert pieces.weight is None
    assert ll.compute(pieces.metrics)["loss"] == pytest.approx(ll.compute(whole.metrics)["loss"], rel=1e-14)


@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_ragged_pieces_weigh_by_their_tokens(data, seed):
    model, generator = mlp(), torch.Generator().manual_seed(seed)
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=6))
    pieces = []
    for rows, length in shapes:
        x = torch.randn(rows, length, 5, generator=generator, dtype=torch.double)
        y = torch.randint(0, 3, (rows, length), generator=generator)
        share = data.draw(st.sampled_from([1.1, 0.9, 0.3, 0.0]))
        y[torch.rand(rows, length, generator=generator) < share] = -100
        pieces.append((x, y))
    y[0, 0] = 1  # the last one has a token
    flat = torch.cat([x.flatten(0, 1) for x, _ in pieces]), torch.cat([y.flatten() for _, y in pieces])
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, token_loss)
    whole = grad_fn(state, flat)
    found = ll.accumulate(grad_fn)(state, pieces)
    close(found.grads, whole.grads)
    assert ll.compute(found.metrics)["loss"] == pytest.approx(ll.compute(whole.metrics)["loss"], rel=1e-14)
    assert found.samples == sum(len(x) for x, _ in pieces)
    nested = ll.accumulate(ll.accumulate(grad_fn, size=2))(state, pieces)
    close(nested.grads, whole.grads)


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 3))


@both_steps
@pytest.mark.parametrize("bound", [False, True])
def test_batch_norm_and_dropout_are_those_of_a_raw_loop_over_the_pieces(donate, bound):
    torch.manual_seed(0)
    model, raw = net(), net()
    raw.load_state_dict(model.state_dict())
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer = sgd()
    train_step = ll.make_train_step(
        ll.accumulate(ll.make_grad_fn(model, mean_loss), microbatches=3), optimizer, donate=donate
    )
    state = ll.init_state(model, optimizer, seed=3)
    state = state if bound else ll.copy_state(state)
    for step in range(5):
        x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
        for index, (piece, labels) in enumerate(zip(x.split(3), y.split(3), strict=True)):
            torch.manual_seed(mix(3, step, 0, index))
            (mean_loss(raw, (piece, labels)) * (len(piece) / 8)).backward()
        raw_optimizer.step()
        raw_optimizer.zero_grad()
        state, _ = train_step(state, (x, y))
    assert equal(state.params, raw.named_parameters())
    assert equal(state.buffers, raw.named_buffers())


@both_steps
def test_pieces_in_one_call_have_the_bits_of_a_call_for_each(donate):
    torch.manual_seed(0)
    model = net()
    optimizer = adamw(0.1)
    grad_fn = ll.make_grad_fn(model, lambda model, batch: (mean_loss(model, batch), {"rows": Count(len(batch[0]))}))

    def plain(state, batch, request):
        return grad_fn(state, batch, **request)

    def run(grad_fn):
        step, out = ll.make_train_step(grad_fn, optimizer, donate=donate), []
        state = ll.copy_state(start)
        for batch in batches:
            state, metrics = step(state, batch)
            out.append(ll.compute(metrics))
        return state, out

    start = ll.init_state(model, optimizer)
    batches = [(torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in (9, 9, 8)]
    (one, logs), (other, others) = run(ll.accumulate(grad_fn, 3)), run(ll.accumulate(plain, 3))
    assert logs == others
    assert equal(one.params, other.params)
    assert equal(one.buffers, other.buffers)


def test_the_wrapped_function_is_called_once_for_each_piece_and_told_which():
    model, parts = mlp(), []
    grad_fn = ll.make_grad_fn(model, mean_loss)

    def watched(state, batch, request=None):
        parts.append((request.index, len(batch[0])))
        return grad_fn(state, batch, **request)

    batch = torch.randn(10, 5, dtype=torch.double), torch.randint(0, 3, (10,))
    ll.accumulate(watched, microbatches=4)(ll.init_state(model), batch)
    assert parts == [(0, 3), (1, 3), (2, 2), (3, 2)]
    parts.clear()
    ll.accumulate(ll.accumulate(watched, size=2), size=4)(ll.init_state(model), batch)
    assert [n for _, n in parts] == [2, 2, 2, 2, 2]
    assert len({index for index, _ in parts}) == 5


def test_memory_is_that_of_one_piece():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10)])
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, mean_square)
    x = torch.randn(8000, 8)
    whole = saved_at_most(lambda: grad_fn(state, x))
    pieces = saved_at_most(lambda: ll.accumulate(grad_fn, microbatches=8)(state, x))
    assert pieces < whole / 8 + 10_000  # the weights are saved too


class Count(collections.namedtuple("Count", "n")):
    def merge(self, other):
        return Count(self.n + other.n)

    def compute(self):
        return self.n


def test_metrics_of_all_kinds_merge():
    model = mlp()

    def loss_fn(model, batch):
        x, y = batch
        logits = model(x)
        right = (logits.argmax(-1) == y).sum()
        loss = nn.functional.cross_entropy(logits, y)
        return loss, {"accuracy": ll.Mean(right, len(y)), "rows": Count(len(y)), "mean": x.mean(), "two": 2.0}

    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, loss_fn)
    batch = torch.randn(10, 5, dtype=torch.double), torch.randint(0, 3, (10,))
    whole = ll.compute(grad_fn(state, batch).metrics)
    pieces = ll.compute(ll.accumulate(grad_fn, size=3)(state, batch).metrics)
    assert pieces == pytest.approx(whole, rel=1e-14)
    assert pieces["rows"] == 10
    assert pieces["accuracy"] == whole["accuracy"]


def test_a_parameter_may_be_reached_by_some_pieces_alone():
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    def loss_fn(model, batch):
        return model["a" if batch[0, 0] > 0 else "b"](batch).mean()

    state, grad_fn = ll.init_state(model), ll.accumulate(ll.make_grad_fn(model, loss_fn))
    ones = torch.ones(3, 2)
    assert grad_fn(state, [ones, -ones]).grads.keys() == state.params.keys()
    with pytest.raises(ValueError, match=r"no gradient reached b.weight, b.bias"):
        grad_fn(state, [ones, ones])
    unused = ll.accumulate(ll.make_grad_fn(model, loss_fn, allow_unused=True))
    assert unused(state, [ones, ones]).grads.keys() == {"a.weight", "a.bias"}


def test_adding_up_in_float32_what_bfloat16_would_lose():
    model = nn.Linear(4, 1).bfloat16()
    state, grad_fn = ll.init_state(model), ll.make_grad_fn(model, lambda model, x: model(x).sum() / len(x))
    x = torch.randn(512, 4).bfloat16() + 1
    exact = x.double().mean(0)

    @ll.grads.wrapper(grad_fn)
    def widened(state, batch, request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad.float() for name, grad in out.grads.items()})

    wide = ll.accumulate(widened, size=1)(state, x).grads["weight"]
    narrow = ll.accumulate(grad_fn, size=1)(state, x).grads["weight"]
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().max() < 1e-5 < (narrow - exact).abs().max()


def test_what_cannot_be_cut_is_named():
    model = mlp()
    grad_fn = ll.make_grad_fn(model, mean_loss)
    state = ll.init_state(model)
    batch = {"x": torch.zeros(8, 5), "edges": torch.zeros(2, 7)}
    with pytest.raises(ValueError, match=r"batch\['x'\] has 8, batch\['edges'\] has 2\. .*count_samples="):
        ll.accumulate(grad_fn, microbatches=2)(state, batch)
    counted = ll.make_grad_fn(model, mean_loss, count_samples=lambda batch: len(batch["x"]))
    with pytest.raises(ValueError, match=r"batch\['edges'\] has shape \(2, 7\), and the batch 8 samples.*as a list"):
        ll.accumulate(counted, microbatches=2)(state, batch)
    with pytest.raises(ValueError, match=r"batch\['x'\] has 8, batch\['rows'\] has 3"):
        ll.accumulate(grad_fn, size=2)(state, {"x": torch.zeros(8, 5), "rows": np.zeros(3)})
    counted = ll.make_grad_fn(model, mean_loss, count_samples=len)
    for wrapped in (ll.accumulate(counted, size=3), ll.accumulate(counted, 2)):
        with pytest.raises(TypeError, match=r"cannot count the samples in a Opaque: .*count_samples="):
            ll.accumulate(grad_fn, 2)(state, Opaque(torch.zeros(5, 5)))
        with pytest.raises(ValueError, match=r"a Opaque of 5 samples cannot be cut: its parts would have 5, 5\."):
            wrapped(state, Opaque(torch.zeros(5, 5)))
    with pytest.raises(TypeError, match="takes a list of pieces; this batch is a Tensor"):
        ll.accumulate(grad_fn)(state, torch.zeros(8, 5))
    with pytest.raises(ValueError, match="empty list"):
        ll.accumulate(grad_fn)(state, [])


def test_arguments_and_orders_that_make_no_sense_are_refused():
    model = mlp()
    grad_fn = ll.make_grad_fn(model, mean_loss)
    with pytest.raises(ValueError, match="give microbatches=2 or size=3, not both"):
        ll.accumulate(grad_fn, 2, size=3)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number"):
            ll.accumulate(grad_fn, wrong)
        with pytest.raises(ValueError, match="whole number"):
            ll.accumulate(grad_fn, size=wrong)
    with pytest.raises(ValueError, match=r"put it around, scale_loss\(accumulate\(grad_fn"):
        ll.accumulate(grad_fn)

    with pytest.raises(ValueError, match="no samples"):
        ll.accumulate(grad_fn, 2)(
            ll.init_state(model), (torch.zeros(0, 5, dtype=torch.double), torch.zeros(0).long())
        )

    def deaf(state, batch, request=None):
        return grad_fn(state, batch)

    batch = torch.randn(4, 5, dtype=torch.double), torch.randint(0, 3, (4,))
    with pytest.raises(TypeError, match=r"deaf gave no weight.*hands its `request` on"):
        ll.accumulate(deaf, 2)(ll.init_state(model), batch)
