"""Global random streams and objects with a state of their own: a run that is resumed ends in the same bits."""

import random

import numpy as np
import pytest
import torch
from shared import bits, mean_square
from torch import nn

import looplib as ll


class Environment:
    """An environment with a position, an array and a stream of its own."""

    def __init__(self):
        self.position, self.map, self.words = 0, np.arange(4, dtype=np.float32), torch.zeros(3)

    def step(self):
        self.position += 1
        self.map[self.position % 4] += self.position
        self.words += self.position
        return torch.from_numpy(self.map.copy())

    def state_dict(self):
        return {"position": self.position, "map": self.map, "words": self.words, "name": "a"}

    def load_state_dict(self, state):
        assert isinstance(state["map"], np.ndarray)
        self.position, self.map, self.words = state["position"], state["map"].copy(), state["words"].clone()


def train(state, step, environment, count):
    """A loop that draws from all three global streams, as one that is written by hand may do."""
    for _ in range(count):
        x = environment.step() + torch.rand(4) + random.random() + np.random.rand() + random.gauss(0, 1)  # noqa: NPY002
        state, _ = step(state, x.float())
    return state


def run():
    torch.manual_seed(0)
    model, optimizer = nn.Linear(4, 1), ll.optimizer(torch.optim.SGD, lr=0.01)
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), optimizer)
    environment = Environment()
    return ll.init_state(model, optimizer, extra=ll.checkpoint.capture(environment=environment)), step, environment


def test_a_resumed_run_draws_and_ends_as_one_that_was_not_interrupted(tmp_path):
    state, step, environment = run()
    state = train(state, step, environment, 3)
    state = state.replace(extra=ll.checkpoint.capture(environment=environment))
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    ended = train(state, step, environment, 4)
    random.seed(9), np.random.seed(9)  # noqa: NPY002
    state, step, environment = run()
    state = ckpt.restore(state, quiet=True)
    ll.checkpoint.reinstate(state.extra, environment=environment)
    assert bits(train(state, step, environment, 4).params) == bits(ended.params)
    assert environment.position == 7


def test_what_was_captured_returns_to_the_same_objects():
    environment = Environment()
    captured = ll.checkpoint.capture(environment=environment)
    before = bits(captured)
    environment.step(), torch.rand(3), random.random()
    assert bits(captured) == before
    with pytest.raises(ValueError, match=r"environment.*other"):
        ll.checkpoint.reinstate(captured, other=environment)
    captured["streams"]["torch"] *= 3
    with pytest.raises(ValueError, match=r"environment.*3 devices.*1 devices"):
        ll.checkpoint.reinstate(captured, environment=environment)
    with pytest.raises(ValueError, match=r"captured .*capture"):
        ll.checkpoint.reinstate({})
    with pytest.raises(AttributeError, match="state_dict"):
        ll.checkpoint.capture(a=3)
    with pytest.raises(TypeError, match=r"'opt' is an? SGD.*ckpt.save"):
        ll.checkpoint.capture(opt=torch.optim.SGD([torch.ones(1)]))
