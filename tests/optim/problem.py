"""A small problem for tests of optimizers: batches, a loss, and a run of a train step."""

import torch

import looplib as ll


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator).to(dtype) for _ in range(count)]


def loss_fn(model, x):
    return (model(x) - 1).square().mean()


def begin(model, optimizer, bound=True, **arguments):
    state = ll.init_state(model, optimizer, **arguments)
    return state if bound else ll.copy_state(state)


def run(model, optimizer, data, donate=False, bound=True, wrap=lambda grad_fn: grad_fn):
    step = ll.make_train_step(wrap(ll.make_grad_fn(model, loss_fn)), optimizer, donate=donate)
    state = begin(model, optimizer, bound)
    for batch in data:
        state, _ = step(state, batch)
    return state
