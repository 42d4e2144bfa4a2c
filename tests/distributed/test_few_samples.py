"""Batches with fewer samples than ranks: each sample counts once, and the run ends with the weights of one process."""

import pytest
import torch
from ranks import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll


def mean_loss(model, batch):
    x, y = batch
    scores = model(x)
    return nn.functional.cross_entropy(scores, y), {"accuracy": ll.Mean((scores.argmax(1) == y).sum(), len(y))}


def train(engine, norm=False):
    """Three epochs of 9 samples in batches of 4, so that the last batch of each has one sample."""
    torch.manual_seed(0)
    # Of a single sample, batch norm takes statistics over a second dimension.
    normed = nn.Sequential(nn.Unflatten(1, (4, 3)), nn.BatchNorm1d(4), nn.Flatten())
    model = nn.Sequential(nn.Linear(3, 12), normed if norm else nn.Tanh(), nn.Linear(12, 3)).double()
    if engine == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    elif engine == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(3, generator=generator).double(), n % 3) for n in range(9)]
    loader = ll.make_loader(data, batch_size=4)
    grad_fn = ll.make_grad_fn(model, mean_loss)
    grad_fn = grad_fn if norm else ll.accumulate(grad_fn, 2)
    if engine == "reduce":
        grad_fn = ll.grads.reduce_gradients(grad_fn)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=1e-2)
    step = ll.make_train_step(grad_fn, optimizer, donate=engine != "reduce")
    state = ll.init_state(model, optimizer, epoch_length=len(loader))
    log = []
    while state.epoch < 3:
        for batch in loader(state):
            state, metrics = step(state, batch)
            log.append({**ll.compute(ll.distributed.reduce(metrics)), "samples": state.samples, "step": state.step})
    assert (state.samples, state.step) == (27, 9)
    weights = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state.params.items()}
    return log, weights, state.buffers


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


def microbatches_of_unequal_number():
    with ll.distributed.setup():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
        grad_fn = ll.accumulate(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()))
        step, state = ll.make_train_step(grad_fn, optimizer, donate=True), ll.init_state(model, optimizer)
        own = torch.randn(8, 3).split(4)[: ll.distributed.rank() + 1]
        state, _ = step(state, own)
        assert state.buffers["1.num_batches_tracked"] == len(own)
        print("as many as its own")


def test_a_pass_that_only_another_rank_needs_leaves_the_statistics_alone():
    assert launch(2, microbatches_of_unequal_number).count("as many as its own") == 2
