"""Several threads that draw: each gets the bits that it gets alone."""

import random
import sys
import threading

import numpy as np
import pytest
import torch
from shared import SGD, mean_square
from torch import nn

import looplib as ll


@pytest.fixture(autouse=True)
def switches():
    """Let Python change threads often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions):
    """The results of functions that run at the same time, each in a thread of its own."""
    results, barrier = [None] * len(functions), threading.Barrier(len(functions))

    def run(index, function):
        barrier.wait(60)
        results[index] = function()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def trained(seed, compiled=False, steps=40):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD)
    state, x = ll.init_state(model, SGD, seed=seed), torch.ones(16, 4)
    step(state, x)
    if compiled:
        step = ll.compile_step(step, backend="eager")
        step(state, x)

    def run():
        at = state
        for _ in range(steps):
            at, _ = step(at, x)
        return torch.cat([tensor.detach().flatten() for tensor in at.params.values()])

    return run


class Drawing(torch.utils.data.Dataset):
    """Samples that draw from each stream in several ways."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        torch_draws = [
            torch.rand(2),
            torch.randn(2),
            torch.randint(9, (2,)),
            torch.randperm(2),
            torch.empty(2).uniform_(),
        ]
        dropped = nn.functional.dropout(torch.ones(4))
        like = (
            torch.rand_like(torch.ones(2)),
            torch.bernoulli(torch.full((2,), 0.5)),
            torch.multinomial(torch.ones(3), 2),
        )
        others = torch.tensor([random.random(), np.random.random()])  # noqa: NPY002
        return torch.cat([tensor.double().flatten() for tensor in (*torch_draws, dropped, *like, others)])


def read(seed):
    loader = ll.make_loader(Drawing(), batch_size=8, seed=seed)

    def run():
        return torch.cat([torch.cat(list(loader(ll.TrainState(epoch=epoch)))) for epoch in range(3)])

    return run


def evaluated():
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    eval_step = ll.make_eval_step(model, lambda model, x: {"out": model(x).mean()})
    state = ll.init_state(model)
    return lambda: torch.tensor([ll.evaluate(eval_step, state, [x])["out"] for _ in range(50)])


@pytest.mark.parametrize("kinds", ["steps", "compiled", "a step and a loader", "loaders", "a step and evaluations"])
def test_threads_have_the_bits_that_each_has_alone(kinds):
    functions = {
        "steps": lambda: [trained(1), trained(2)],
        "compiled": lambda: [trained(1, compiled=True), trained(2)],
        "a step and a loader": lambda: [trained(1), read(2)],
        "loaders": lambda: [read(1), read(2)],
        "a step and evaluations": lambda: [trained(1), evaluated()],
    }[kinds]()
    alone = [function() for function in functions]
    state = torch.get_rng_state()
    for _ in range(3):
        for found, expected in zip(in_threads(*functions), alone, strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)
