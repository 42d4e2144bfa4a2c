"""Marks of states: they name the chains that still write, and no others."""

import dataclasses
import threading

import pytest
import torch
from torch import nn, testing
from torch.utils._pytree import tree_leaves

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
    """The dropped marks are of no use: a later read of what was taken over is refused by the table of owners."""
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


# What `extra` keeps


def kept(which, state):
    return {
        "parameters": lambda: {"start": state.params},
        "a view of one": lambda: [state.params["0.weight"].detach().view(-1)[:2]],
        "moments": lambda: state.opt_state["state"],
        "statistics": lambda: (state.buffers["1.running_mean"],),
    }[which]()


def with_batch_norm(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = ll.optimizer(torch.optim.Adam, lr=0.1)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).exp().mean()), optimizer, **options)
    return ll.init_state(model, optimizer), step, torch.randn(6, 4)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("which", ["parameters", "a view of one", "moments", "statistics"])
def test_a_donated_step_refuses_to_write_what_extra_keeps(which, started):
    state, step, batch = with_batch_norm(donate=True)
    if started:
        state, _ = step(state, batch)
    before = ll.copy_state(state)
    sharing = state.replace(extra=kept(which, state))
    with pytest.raises(ValueError, match=r"extra\[.* shares memory with .* donate=True writes in place.*copy_state"):
        step(sharing, batch)
    testing.assert_close(tree_leaves(sharing), tree_leaves(before.replace(extra=kept(which, before))), rtol=0, atol=0)
    state, _ = step(sharing.replace(extra=kept(which, ll.copy_state(state))), batch)  # as the message says
    values = tree_leaves(ll.copy_state(state).extra)
    state, _ = step(state, batch)
    testing.assert_close(tree_leaves(state.extra), values, rtol=0, atol=0)
    testing.assert_close(values, tree_leaves(kept(which, before)), rtol=0, atol=0)


def test_a_compiled_donated_step_refuses_to_write_what_extra_keeps():
    state, step, batch = with_batch_norm(donate=True)
    with pytest.raises(ValueError, match=r"extra\['start'\]\['0.weight'\] shares memory with params\['0.weight'\]"):
        ll.compile_step(step, backend="eager")(state.replace(extra={"start": state.params}), batch)


def test_extra_may_share_what_no_step_writes():
    state, step, batch = with_batch_norm(donate=True)
    pure = with_batch_norm()[1]
    start = state.params["0.weight"].clone()
    kept, _ = pure(state.replace(extra={"start": state.params}), batch)  # new tensors
    for _ in range(2):
        kept, _ = step(kept, batch)
    assert torch.equal(kept.extra["start"]["0.weight"], start)
