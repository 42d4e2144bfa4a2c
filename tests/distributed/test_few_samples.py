"""Batches with fewer samples than ranks: each sample counts once, and the run ends with the weights of one process."""

import pytest
import torch
from problem import adamw
from ranks import in_engine, launch, whole
from shared import SGD, mean_square
from torch import nn

import looplib as ll


def mean_loss(model, batch):
    x, y = batch
    scores = model(x)
    return nn.functional.cross_entropy(scores, y), {"accuracy": ll.Mean((scores.argmax(1) == y).sum(), len(y))}


def weighted_loss(model, batch):
    """A loss whose weights are no counts of samples."""
    x, y = batch
    weights = y + 0.5
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return ll.Mean((losses * weights).sum(), weights.sum())


def parallel(engine, norm=False):
    torch.manual_seed(0)
    # Of a single sample, batch norm takes statistics over a second dimension.
    normed = nn.Sequential(nn.Unflatten(1, (4, 3)), nn.BatchNorm1d(4), nn.Flatten())
    model = nn.Sequential(nn.Linear(3, 12), normed if norm else nn.Tanh(), nn.Linear(12, 3)).double()
    return in_engine(model, engine, broadcast_buffers=False)


def train(engine, norm=False):
    """Three epochs of 9 samples in batches of 4, so that the last batch of each has one sample."""
    model = parallel(engine, norm)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(3, generator=generator).double(), n % 3) for n in range(9)]
    loader = ll.make_loader(data, batch_size=4)
    grad_fn = ll.make_grad_fn(model, mean_loss)
    grad_fn = grad_fn if norm else ll.accumulate(grad_fn, 2)
    if engine == "reduce":
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    optimizer = adamw()
    step = ll.make_train_step(grad_fn, optimizer, donate=engine != "reduce")
    state = ll.init_state(model, optimizer, loader=loader)
    log = []
    while state.epoch < 3:
        for batch in loader(state):
            state, metrics = step(state, batch)
            log.append({**ll.compute(ll.distributed.reduce(metrics)), "samples": state.samples, "step": state.step})
    assert (state.samples, state.step) == (27, 9)
    return log, whole(state.params), state.buffers


def as_one_process():
    with ll.distributed.setup(timeout=60):
        alone = ll.distributed.rank_zero_only(train)
        expected = alone("none")
        for engine in ("ddp", "fsdp", "reduce"):
            log, weights, _ = train(engine)
            if expected is not None:
                for one, many in zip(expected[0], log, strict=True):
                    assert many == pytest.approx(one, rel=1e-10), (engine, one, many)
                torch.testing.assert_close(weights, expected[1], rtol=1e-10, atol=1e-12)
        *_, buffers = train("ddp", norm=True)
        assert all(torch.isfinite(tensor).all() for tensor in buffers.values())
        # Rank 1 has samples in two of the three batches of each epoch; the others change nothing.
        assert buffers["1.1.num_batches_tracked"] == (6 if ll.distributed.rank() else 9)


def test_a_last_batch_of_one_sample_trains_two_ranks_as_one_process():
    launch(2, as_one_process)


def an_empty_microbatch_first():
    with ll.distributed.setup(timeout=60):
        rank, x, y = ll.distributed.rank(), torch.linspace(-2, 2, 27).double().view(9, 3), torch.arange(9) % 3
        pieces = [*zip(x.split([2, 3, 0, 4]), y.split([2, 3, 0, 4]), strict=True)][2 * rank : 2 * rank + 2]
        for loss_fn in (mean_loss, weighted_loss):
            single = parallel("none")
            losses = nn.functional.cross_entropy(single(x), y, reduction="none")
            weights = y + 0.5 if loss_fn is weighted_loss else torch.ones(9)
            ((losses * weights).sum() / weights.sum()).backward()
            expected = {name: parameter.grad for name, parameter in single.named_parameters()}
            for engine in ("ddp", "reduce"):
                model = parallel(engine)
                grad_fn = ll.accumulate(ll.make_grad_fn(model, loss_fn))
                grad_fn = ll.grads.reduce_gradients(grad_fn) if engine == "reduce" else grad_fn
                out = grad_fn(ll.init_state(model), pieces, donate=True)
                assert out.samples == 9
                torch.testing.assert_close(out.grads, expected, rtol=1e-12, atol=1e-12)


def test_a_rank_may_begin_with_an_empty_microbatch():
    launch(2, an_empty_microbatch_first)


def microbatches_of_unequal_number():
    with ll.distributed.setup():
        model = in_engine(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "fsdp")
        grad_fn = ll.accumulate(ll.make_grad_fn(model, mean_square))
        step, state = ll.make_train_step(grad_fn, SGD, donate=True), ll.init_state(model, SGD)
        own = torch.randn(8, 3).split(4)[: ll.distributed.rank() + 1]
        state, _ = step(state, own)
        assert state.buffers["1.num_batches_tracked"] == len(own)


def test_a_pass_that_only_another_rank_needs_leaves_the_statistics_alone():
    launch(2, microbatches_of_unequal_number)
