"""Marks of states: they name the chains that still write, and no others."""

import dataclasses
import threading

import pytest
import torch
from torch import nn

import looplib as ll
from looplib._core import ownership
from looplib.types import COUNTS, FIELDS, TREES


def made(count=2, **options):
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(count)]
    grad_fn = ll.make_grad_fn(models[0], lambda model, x: model(x).square().mean())
    return models, optimizer, ll.make_train_step(grad_fn, optimizer, **options)


def test_the_fields_are_those_of_the_record():
    assert tuple(field.name for field in dataclasses.fields(ll.TrainState)) == FIELDS
    assert set(TREES) | set(COUNTS) == set(FIELDS)
    assert not set(TREES) & set(COUNTS)
    assert all(type(getattr(ll.TrainState(), name)) in (int, type(None)) for name in COUNTS)


def test_binding_again_and_again_leaves_no_marks_behind():
    (one, other), optimizer, _ = made()
    state, lengths = ll.init_state(one, optimizer), []
    for _ in range(5):
        kept = state
        state = ll.bind(one, ll.bind(other, state))
        lengths.append(len(state._mark.seen))
        with pytest.raises(ll.DonatedStateError, match=r"ll.bind\(model, state\) has written over"):
            _ = kept.params
    assert lengths == [1] * 5


def test_states_that_are_changed_and_stepped_in_turn_keep_their_marks_short():
    (model, _), optimizer, step = made(donate=True)
    state, lengths, x = ll.init_state(model, optimizer), [], torch.randn(4, 3)
    for _ in range(6):
        fresh = {name: tensor.detach().clone().requires_grad_() for name, tensor in state.params.items()}
        before = state
        state, _ = step(state.replace(params=fresh), x)
        lengths.append(len(state._mark.seen))
        with pytest.raises(ll.DonatedStateError, match="opt_state of the state at step"):
            _ = before.opt_state
    assert lengths[2:] == lengths[2:3] * 4


def test_a_chain_that_is_dropped_is_one_that_can_write_no_more():
    """The dropped marks are of no use: who still reads what was taken over finds out by the table of owners."""
    (model, other), optimizer, step = made(donate=True)
    x = torch.randn(4, 3)
    state, _ = step(ll.init_state(model, optimizer), x)
    chain = state._mark.lane
    assert chain.storages
    shared = ll.TrainState(params=state.params)
    ll.bind(model, ll.init_state(other, optimizer))  # takes the parameters and buffers over
    for spent in (state, shared):
        with pytest.raises(ll.DonatedStateError, match=r"ll.bind"):
            _ = spent.params


def test_writes_of_another_thread_are_not_ours():
    before = ownership.writes.count

    def other_run():
        (model, _), optimizer, step = made(donate=True)
        step(ll.init_state(model, optimizer), torch.randn(4, 3))
        counts.append(ownership.writes.count)

    counts = []
    thread = threading.Thread(target=other_run)
    thread.start()
    thread.join()
    assert ownership.writes.count == before
    assert counts == [1]
