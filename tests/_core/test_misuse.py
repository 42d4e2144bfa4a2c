"""The switch of warnings for misuse: when off, steps look at nothing and return the same bits."""

import gc
import sys
import warnings
import weakref

import pytest
import torch
from shared import bits
from torch import nn

import looplib as ll
from looplib._core import misuse


@pytest.fixture
def off():
    ll.debug.warn_of_misuse(False)
    yield
    ll.debug.warn_of_misuse(True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def summed(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def mistakes(donate):
    """A run with one mistake of each kind: what it computes, and the warnings."""
    model, sgd = net(), ll.optimizer(torch.optim.SGD, lr=0.01)
    step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, summed), 2), sgd, donate=donate)
    start = ll.init_state(model, sgd, seed=1)
    data = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=data), torch.randint(0, 3, (8,), generator=data)) for _ in range(12)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, metrics = step(start, batches[0])
        if not donate:
            for batch in batches:  # a loop without `state =`
                step(start, batch)
            model(batches[0][0])  # a module that has been left behind
        model[2].eval()  # a layer that goes into eval mode later
        model[0].weight.requires_grad_(False)  # a flag that changes after make_grad_fn
        state, metrics = step(state, batches[1])
    return bits((state.params, state.buffers, state.opt_state)), ll.compute(metrics), [str(w.message) for w in caught]


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_without_warnings_every_bit_is_the_same(donate):
    *wanted, told = mistakes(donate)
    ll.debug.warn_of_misuse(False)
    try:
        *found, silent = mistakes(donate)
    finally:
        ll.debug.warn_of_misuse(True)
    assert found == wanted
    words = ["is a sum over the samples", "went into eval mode", "requires_grad of 0.weight changed"]
    words += ["the same state 10 times", "still has the weights of before training"] * (not donate)
    assert all(any(word in message for message in told) for word in words), told
    assert not silent


@pytest.mark.usefixtures("off")
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_off_it_costs_nothing(donate):
    """The only function of the file that a step calls is the one that asks whether it is on."""
    model, sgd = net(), ll.optimizer(torch.optim.SGD, lr=0.01)
    step = ll.make_train_step(ll.make_grad_fn(model, summed), sgd, donate=donate)
    batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
    state, _ = step(ll.init_state(model, sgd), batch)
    assert called_by(lambda: step(state, batch)) == ([] if donate else ["see"])


def called_by(function):
    """Names of the functions of the file that it calls."""
    called = []

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_filename == misuse.__file__:
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def test_off_optimizers_of_torchs_have_no_hook():
    other = torch.optim.SGD(net().parameters())
    other.param_groups[0]["params"][0].grad = torch.ones(6, 4)
    grad_fn = ll.make_grad_fn(net(), summed)
    ll.make_train_step(grad_fn, ll.optimizer(torch.optim.SGD, lr=0.01))
    assert "_look_at_optimizer" in called_by(other.step)
    ll.debug.warn_of_misuse(False)
    try:
        assert called_by(other.step) == []
        ll.make_train_step(grad_fn, ll.optimizer(torch.optim.SGD, lr=0.01))
        assert called_by(other.step) == []
    finally:
        ll.debug.warn_of_misuse(True)
    assert "_look_at_optimizer" in called_by(other.step)


def test_it_holds_no_tensor():
    model, sgd = net(), ll.optimizer(torch.optim.SGD, lr=0.01)
    step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, summed), 2), sgd)
    batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, _ = step(ll.init_state(model, sgd), batch)
        state, _ = step(state, batch)
    tensors = [
        weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers(), *state.params.values(), *batch)
    ]
    del model, sgd, step, batch, state
    gc.collect()
    assert not [ref for ref in tensors if ref() is not None]


def test_the_switch_takes_a_bool():
    with pytest.raises(TypeError, match="give True or False"):
        ll.debug.warn_of_misuse("off")
