"""Steps that are not made: as if the batch had not been, and on two ranks that decide alike."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import WAYS, adamw, batches, net, step_of
from ranks import launch
from shared import bits, both_steps, make_train_step
from torch import nn

import looplib as ll


def loss_fn(model, batch):
    x, factor = batch
    return (model(x) - 1).square().mean() * factor


# apply_if_finite


@both_steps
@given(bad=st.sets(st.integers(0, 11), max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(donate, bad):
    inner = adamw(lr=ll.schedules.linear(0.1, total=20))
    safe = ll.optim.apply_if_finite(inner, max_consecutive=12)
    model, plain = net(), net()
    step, plain_step = step_of(model, safe, donate, loss_fn), step_of(plain, inner, loss_fn=loss_fn)
    state, reference = ll.init_state(model, safe, epoch_length=5), ll.init_state(plain, inner)
    in_a_row = 0
    for at, x in enumerate(batches(12)):
        state, _ = step(state, (x, math.inf if at in bad else 1.0))
        in_a_row = in_a_row + 1 if at in bad else 0
        if at not in bad:
            reference, _ = plain_step(reference, (x, 1.0))
        assert state.skipped == (at in bad)
        assert state.opt_state["notfinite_count"] == in_a_row
    assert bits((state.params, state.buffers)) == bits((reference.params, reference.buffers))
    assert bits(state.opt_state["inner_state"]) == bits(reference.opt_state)
    assert state.step == reference.step == 12 - len(bad)
    assert state.opt_state["total_notfinite"] == len(bad)
    assert (state.epoch, state.batch, state.samples) == (2, 2, 12 * 8)


@both_steps
def test_too_many_in_a_row_give_up_loudly_with_the_state_intact(donate):
    safe, model, (x,) = ll.optim.apply_if_finite(adamw(), max_consecutive=2), net(), batches(1)
    step, state = step_of(model, safe, donate, loss_fn), ll.init_state(model, safe)
    for factor in (math.nan, math.nan, 1.0, math.nan, math.nan):
        state, _ = step(state, (x, factor))
    before = bits(state)
    with pytest.raises(
        ll.optim.NonFiniteGradientsError, match=r"3 times in a row \(max_consecutive=2\), at step 1 .*0\.weight"
    ):
        step(state, (x, math.nan))
    assert bits(state) == before
    state, _ = step(state, (x, 1.0))
    assert state.step == 2


def test_five_skips_in_a_row_are_accepted_by_default():
    safe, model, (x,) = ll.optim.apply_if_finite(adamw()), net(), batches(1)
    step, state = ll.make_train_step(ll.make_grad_fn(model, loss_fn), safe), ll.init_state(model, safe)
    for _ in range(5):
        state, _ = step(state, (x, math.nan))
    with pytest.raises(ll.optim.NonFiniteGradientsError, match="6 times in a row"):
        step(state, (x, math.nan))


def test_the_loss_scale_has_torchs_defaults_and_may_grow_at_every_step():
    torchs, settings = (
        torch.amp.GradScaler("cpu"),
        ll.optim.dynamic_loss_scale(adamw()).description["dynamic_loss_scale"],
    )
    assert settings["growth_interval"] == torchs.get_growth_interval()
    assert settings["growth_factor"] == torchs.get_growth_factor()
    assert settings["backoff_factor"] == torchs.get_backoff_factor()
    assert ll.optim.dynamic_loss_scale(adamw(), growth_interval=1).description != settings
    with pytest.raises(ValueError, match="growth_interval=0"):
        ll.optim.dynamic_loss_scale(adamw(), growth_interval=0)


def test_the_count_of_skips_to_accept_is_a_count():
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match=f"max_consecutive is {wrong}"):
            ll.optim.apply_if_finite(adamw(), wrong)


# Several ranks


def ranks_loss(model, batch):
    return (model(batch[0]) - 1).square().mean() * batch[1]


def run_on_a_rank(optimizer, wrap, factors):
    rank = ll.distributed.rank()
    torch.manual_seed(rank)  # models and batches of their own
    model = nn.Linear(3, 1)
    grad_fn = wrap(ll.make_grad_fn(model, ranks_loss))
    state, skips, losses, error = ll.init_state(model, optimizer), [], [], None
    for at in range(16):
        batch = torch.randn(4 - 2 * rank, 3), factors.get((rank, at), 1.0)
        step = ll.make_train_step(grad_fn, optimizer, donate=at % 2 == 0)
        try:
            state, metrics = step(state, batch)
        except ll.optim.NonFiniteGradientsError as raised:
            error = at, str(raised)
            break
        skips += [at] if state.skipped else []
        losses.append(ll.compute(metrics)["loss"])
    record = {key: value for key, value in state.opt_state.items() if key != "inner_state"}
    return {"skips": skips, "step": state.step, "losses": losses, "record": record, "error": error}


def on_two_ranks(folder):
    optimizer, inf = ll.optimizer(torch.optim.SGD, lr=0.01), math.inf
    factors = {(0, 8): inf, (1, 10): 1e6, (1, 12): inf, (0, 14): math.nan}
    finite = partial(ll.optim.apply_if_finite, optimizer)
    once = {(1, 5): inf, (0, 6): inf}

    def plain(grad_fn):
        return grad_fn

    with ll.distributed.setup():
        ends = {
            "apply_if_finite": run_on_a_rank(finite(3), plain, factors),
            "dynamic_loss_scale": run_on_a_rank(
                ll.optim.dynamic_loss_scale(optimizer, 2.0**10), ll.grads.scale_loss, factors
            ),
            "gives_up": run_on_a_rank(finite(1), plain, once),
        }
        torch.save(ends, f"{folder}/{ll.distributed.rank()}.pt")


@pytest.mark.slow
def test_ranks_skip_together_what_one_of_them_has_to(tmp_path):
    launch(2, on_two_ranks, str(tmp_path))
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in ("apply_if_finite", "dynamic_loss_scale"):
        assert zero[name]["skips"] == one[name]["skips"] == [8, 12, 14], name
        assert zero[name]["step"] == one[name]["step"] == 13
        assert bits(zero[name]["record"]) == bits(one[name]["record"])
        assert zero[name]["losses"] != one[name]["losses"]
    assert zero["apply_if_finite"]["record"]["total_notfinite"] == 3
    assert zero["dynamic_loss_scale"]["record"]["loss_scale"] == 2.0**7
    for rank, ends in enumerate((zero, one)):
        assert ends["gives_up"]["skips"] == [5]
        at, message = ends["gives_up"]["error"]
        where = "in 2 of 2 parameters: weight, bias." if rank == 0 else "on another rank."
        assert (at, where in message) == (6, True), message


@pytest.mark.parametrize("way", WAYS)
def test_parameters_without_elements_are_finite(way):
    model, optimizer = nn.ParameterList([torch.empty(3, 0)]), ll.optim.apply_if_finite(adamw(), max_consecutive=0)
    step = make_train_step(ll.make_grad_fn(model, lambda model, x: (x @ model[0]).sum()), optimizer, **WAYS[way])
    state, _ = step(ll.init_state(model, optimizer), torch.ones(2, 3))
    assert (state.step, state.skipped) == (1, False)
