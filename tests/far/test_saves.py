"""Saves in the background from a device: files have the state as it was at the call."""

import pytest
import torch
from torch import nn

import looplib as ll
from far.device import far


@pytest.fixture
def run():
    """A function for some steps of a run on the far device, which starts at step 2."""
    with far() as device:

        def start(donate):
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
            optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().sum())
            step = ll.make_train_step(grad_fn, optimizer, donate=donate)
            x = torch.randn(5, 3).to(device)

            def train(state, steps):
                for _ in range(steps):
                    state, _ = step(state, x)
                return state

            return train, train(ll.init_state(model, optimizer), 2)

        yield start


def on_host(state):
    trees = state.params, state.buffers, state.opt_state
    return [leaf.detach().cpu().clone() for leaf in torch.utils._pytree.tree_leaves(trees)]


@pytest.mark.parametrize("steps", [3, 0])
@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
def test_a_save_in_the_background_has_the_state_at_its_call(run, tmp_path, donate, steps):
    train, state = run(donate)
    ckpt = ll.checkpoint_io(tmp_path, asynchronous=True)
    expected = on_host(state)
    ckpt.save(state)
    state = train(state, steps)  # overwrites the tensors of a donated state
    ckpt.wait()
    found = on_host(ckpt.restore(ll.copy_state(state)))
    assert len(found) == len(expected) == 4 + 3 + 4
    assert all(map(torch.equal, found, expected))
