"""Ranks that differ: told at the first step, and whenever their tensors are compared."""

import contextlib

import pytest
import torch
from ranks import launch
from shared import mean_square
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

SGD = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
DATA = torch.arange(64.0)


def adamw(lr=0.1):
    return ll.optimizer(torch.optim.AdamW, lr=lr)


def loader(seed=0, **options):
    return ll.make_loader(DATA, batch_size=8, seed=seed, **options)


def first_step(
    optimizer=SGD,
    wrap=lambda grad_fn: grad_fn,
    engine=DistributedDataParallel,
    outputs=2,
    loaders=(),
    declared=True,
    **at,
):
    """The first step of a run, of which one rank has other parts."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, outputs)
    model = engine(model) if engine else model
    grad_fn = ll.make_grad_fn(model, mean_square)
    grad_fn = wrap(grad_fn if engine else ll.grads.reduce_gradients(grad_fn))
    step = ll.make_train_step(grad_fn, optimizer, donate=engine is not None)
    known = loaders if declared and loaders else None
    state = ll.init_state(model, optimizer, loader=known, epoch_length=8).replace(**at)
    batch = torch.ones(3, 8)
    for batches in zip(*(loader(state) for loader in loaders), strict=True):
        batch = torch.cat(batches).expand(8, -1).T.contiguous()
        break
    return step(state, batch)


# What rank 0 and rank 1 have, and the lines of the error.
DIFFERENT = [
    (
        {"outputs": 2, "engine": None},
        {"outputs": 3, "engine": None},
        ["weight is float32 (2, 8)", "bias"],
    ),
    ({"seed": 0}, {"seed": 1}, ["state.seed is 0"]),
    ({"optimizer": adamw(0.1)}, {"optimizer": adamw(0.2)}, ["the optimizer's AdamW lr is 0.1"]),
    (
        {"optimizer": adamw()},
        {"optimizer": ll.optimizer(torch.optim.RMSprop, lr=0.1)},
        [
            "the optimizer's AdamW class is torch.optim.adamw.AdamW on rank 0, not given",
            "the optimizer's AdamW lr is 0.1 on rank 0, not given",
            "the optimizer's RMSprop class is not given on rank 0, torch.optim.rmsprop.RMSprop",
            "the optimizer's RMSprop lr is not given on rank 0, 0.1",
        ],
    ),
    (
        {"optimizer": ll.chain(SGD, ll.ema(0.9))},
        {"optimizer": ll.chain(SGD, ll.ema(0.8))},
        ["the optimizer's ema decay is 0.9"],
    ),
    (
        {"optimizer": ll.chain(ll.clip_by_global_norm(1.0), SGD)},
        {"optimizer": ll.chain(ll.clip_by_global_norm(2.0), SGD)},
        ["the optimizer's clip_by_global_norm max_norm is 1.0"],
    ),
    ({"loaders": [loader(0)]}, {"loaders": [loader(1)]}, ["loader 1's seed is 0"]),
    ({"loaders": [loader(5), loader(0)]}, {"loaders": [loader(5), loader(1)]}, ["loader 2's seed is 0"]),
    ({"loaders": [loader()]}, {"loaders": [loader(order=ll.data.sequential())]}, ["loader 1's order is shuffled()"]),
]
# A rank with less memory may cut its batch into more microbatches, and each rank may choose its own batches.
ALIKE = [
    ({}, {"wrap": lambda grad_fn: ll.accumulate(grad_fn, 2)}),
    ({"loaders": [loader()]}, {"loaders": [loader()]}),
    ({"loaders": [loader(0, divide=False)]}, {"loaders": [loader(1, divide=False)]}),
]


def first_steps():
    with ll.distributed.setup(timeout=60):
        rank = ll.distributed.rank()
        for *parts, lines in DIFFERENT:
            with pytest.raises(ValueError, match="the ranks do not run the same program:\n") as error:
                first_step(**parts[rank])
            found = str(error.value).split("\n  ")[1:]
            assert all("on rank 0" in line and line.endswith("on rank 1") for line in found)
            assert all(any(line.startswith(start) for line in found) for start in lines), (lines, found)
            assert len(found) == len(lines) or "nothing" in found[-1], found
        for parts in ALIKE:
            first_step(**parts[rank])
        said = pytest.warns(UserWarning, match="does not know its loader, so the ranks do not compare.*loader=loader")
        with contextlib.nullcontext() if rank else said:
            first_step(loaders=[loader()], declared=False)


def test_ranks_that_differ_are_told_at_the_first_step():
    launch(2, first_steps)


def compared():
    def check(model, error=None):
        if error is None:
            return ll.distributed.check_replicas(ll.init_state(model, SGD))
        with pytest.raises(ValueError, match=rf"^the ranks hold different values:\n  {error} is [^\n]*$"):
            ll.distributed.check_replicas(ll.init_state(model, SGD))

    with ll.distributed.setup(timeout=60):
        first = ll.distributed.rank() == 0
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        check(model)
        with torch.no_grad():
            model.module.bias.view(torch.int32)[1] ^= not first  # one flipped bit
        check(model, "params/bias")

        # The copies of each shard are compared, and the shards are not compared with each other.
        for shape, names in ((2, 1), ("copies", "shards")), ((2,), ("shards",)):
            torch.manual_seed(0)
            model = torch.nn.Linear(2, 4)
            fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
            check(model)
            model.weight.to_local().data[0, 0] += not first
            check(model, r"params/weight \(shard 0\)" if "copies" in names else None)


def test_tensors_of_ranks_are_compared_whenever_it_is_asked_for():
    launch(2, compared)


def test_a_spent_state_is_refused_in_one_process_too():
    model = torch.nn.Linear(2, 1)
    before = ll.init_state(model, SGD)
    ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD, donate=True)(before, torch.ones(3, 2))
    with pytest.raises(ll.DonatedStateError):
        ll.distributed.check_replicas(before)
