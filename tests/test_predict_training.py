"""Predict steps in training mode, draws at one state, and the seeds of a step, beside plain torch."""

import pytest
import torch
from shared import bits
from torch import nn

import looplib as ll


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def forward(model, x):
    return model(x)


@pytest.mark.every_case
@pytest.mark.parametrize("transform", [lambda step: step, lambda s: ll.compile_step(s, backend="eager")])
@pytest.mark.parametrize("index", [None, 0, 7])
def test_outputs_are_those_of_training_mode_with_the_seed_of_the_state(index, transform):
    model, raw = net().eval(), net()
    state = ll.init_state(model, seed=5).replace(step=3)
    at = state if index is None else ll.state.fold_in(state, index)
    before, stream = bits(state), torch.get_rng_state()
    predict_step = transform(ll.make_predict_step(model, forward, training=True))
    out, again = predict_step(at, X), predict_step(at, X)
    assert torch.equal(torch.get_rng_state(), stream)
    torch.manual_seed(ll.debug.step_seed(at))
    with torch.no_grad():
        expected = raw.train()(X)
    assert torch.equal(out, expected)
    assert torch.equal(again, expected)
    assert not out.requires_grad
    assert bits(state) == before  # the statistics of batch norm stay, in the state and in the module
    assert not any(module.training for module in model.modules())


def test_draws_at_one_state_differ_by_their_index_and_from_those_of_the_train_step():
    model = nn.Dropout(0.5)
    sample = ll.make_predict_step(model, forward, training=True)
    state, ones = ll.TrainState(seed=1), torch.ones(64)
    drawn = [sample(at, ones) for at in (state, *(ll.state.fold_in(state, index) for index in range(20)))]
    assert len({tuple(each.tolist()) for each in drawn}) == 21
    assert torch.equal(sample(ll.state.fold_in(state, 3), ones), drawn[4])


def test_submodules_that_were_in_eval_mode_stay_so_and_eval_mode_is_the_default():
    model = net()
    model[2].eval()
    state = ll.init_state(model)
    out = ll.make_predict_step(model, forward, training=True)(state, X)
    raw = net().train()
    raw[2].eval()
    assert torch.equal(out, raw(X).detach())
    assert torch.equal(ll.make_predict_step(model, forward)(state, X), net().eval()(X).detach())


@pytest.mark.parametrize("microbatch", [0, 1])
def test_the_seed_of_a_step_gives_a_raw_loop_the_masks_of_each_microbatch(microbatch):
    model = net().double()

    def loss_fn(model, x):
        masks.append(model[2](torch.ones(16, dtype=torch.float64)))
        return model(x).square().mean()

    masks = []
    state = ll.init_state(model, seed=2).replace(step=9)
    ll.accumulate(ll.make_grad_fn(model, loss_fn), 2)(state, X.double())
    torch.manual_seed(ll.debug.step_seed(state, microbatch=microbatch))
    assert torch.equal(masks[microbatch], nn.Dropout(0.5)(torch.ones(16, dtype=torch.float64)))
