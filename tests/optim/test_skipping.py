"""Steps that are not made: as if the batch had not been, and on two ranks that decide alike."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import WAYS, adamw, batches, net, step_of
from ranks import launch
from shared import SGD, bits, both_steps, examples, make_train_step
from torch import nn

import looplib as ll


def loss_fn(model, batch):
    x, factor = batch
    return (model(x) - 1).square().mean() * factor


# skip_nonfinite


@both_steps
@given(bad=st.sets(st.integers(0, 11), max_size=6))
@settings(max_examples=examples(20), deadline=None)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(donate, bad):
    inner = adamw(lr=ll.schedules.linear(0.1, total=20))
    safe = ll.chain(ll.skip_nonfinite(max_consecutive=12), inner)
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
        assert state.opt_state["skip_nonfinite"]["notfinite_count"] == in_a_row
    assert bits((state.params, state.buffers)) == bits((reference.params, reference.buffers))
    assert bits(state.opt_state["AdamW"]) == bits(reference.opt_state["AdamW"])
    assert state.step == reference.step == 12 - len(bad)
    assert state.opt_state["skip_nonfinite"]["total_notfinite"] == len(bad)
    assert (state.epoch, state.batch, state.samples) == (2, 2, 12 * 8)


@both_steps
def test_too_many_in_a_row_give_up_loudly_with_the_state_intact(donate):
    safe, model, (x,) = ll.chain(ll.skip_nonfinite(max_consecutive=2), adamw()), net(), batches(1)
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


def test_the_loss_scale_has_torchs_defaults_and_may_grow_at_every_step():
    torchs = torch.amp.GradScaler("cpu")
    settings = ll.chain(ll.optim.dynamic_loss_scale(), adamw()).description["dynamic_loss_scale"]
    assert settings["growth_interval"] == torchs.get_growth_interval()
    assert settings["growth_factor"] == torchs.get_growth_factor()
    assert settings["backoff_factor"] == torchs.get_backoff_factor()
    ll.chain(ll.optim.dynamic_loss_scale(growth_interval=1), adamw())


def test_the_count_of_skips_to_accept_is_a_count_and_by_default_five():
    assert ll.chain(ll.skip_nonfinite(), adamw()).description["skip_nonfinite"]["max_consecutive"] == 5
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match=f"max_consecutive is {wrong}"):
            ll.chain(ll.skip_nonfinite(wrong), adamw())


# Several ranks


def run_on_a_rank(optimizer, factors):
    """The skipped steps, the last state, and the step of an error with its message."""
    rank = ll.distributed.rank()
    torch.manual_seed(rank)  # models and batches of their own
    model = nn.Linear(3, 1)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    state, skips = ll.init_state(model, optimizer), []
    for at in range(16):
        batch = torch.randn(4 - 2 * rank, 3), factors.get((rank, at), 1.0)
        step = ll.make_train_step(grad_fn, optimizer, donate=at % 2 == 0)
        try:
            state, _ = step(state, batch)
        except ll.optim.NonFiniteGradientsError as error:
            return skips, state, (at, str(error))
        skips += [at] if state.skipped else []
    return skips, state, None


def on_two_ranks():
    optimizer, inf = ll.optimizer(torch.optim.SGD, lr=0.01), math.inf
    factors = {(0, 8): inf, (1, 10): 1e6, (1, 12): inf, (0, 14): math.nan}
    with ll.distributed.setup():
        for judge, record in (
            (ll.skip_nonfinite(3), {"skip_nonfinite": {"notfinite_count": 0, "total_notfinite": 3}}),
            (
                ll.optim.dynamic_loss_scale(2.0**10),
                {"dynamic_loss_scale": {"loss_scale": 2.0**7, "growth_tracker": 1}},
            ),
        ):
            skips, state, _ = run_on_a_rank(ll.chain(judge, optimizer), factors)
            assert (skips, state.step) == ([8, 12, 14], 13)
            assert {name: own for name, own in state.opt_state.items() if name != "SGD"} == record
        once = ll.chain(ll.skip_nonfinite(1), optimizer)
        skips, _, (at, message) = run_on_a_rank(once, {(1, 5): inf, (0, 6): inf})
        where = "on another rank," if ll.distributed.rank() else "in 2 of 2 parameters: weight, bias."
        assert (skips, at, where in message) == ([5], 6, True), message


@pytest.mark.slow
def test_ranks_skip_together_what_one_of_them_has_to():
    launch(2, on_two_ranks)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_without_elements_are_finite(way):
    model, optimizer = nn.ParameterList([torch.empty(3, 0)]), ll.chain(ll.skip_nonfinite(max_consecutive=0), adamw())
    step = make_train_step(ll.make_grad_fn(model, lambda model, x: (x @ model[0]).sum()), optimizer, **WAYS[way])
    state, _ = step(ll.init_state(model, optimizer), torch.ones(2, 3))
    assert (state.step, state.skipped) == (1, False)


def test_without_any_element_the_flag_lies_where_the_gradients_do():
    sgd = ll.chain(ll.skip_nonfinite(), SGD)
    params = {"empty": torch.ones(0, device="meta")}
    out = sgd.transform(params, sgd.init(params), params, 0)
    assert out.apply.device.type == "meta"


# What a window says of skipped steps


def with_bad_gradients(model, batch):
    """The loss stays finite, and the gradient is NaN, as after an overflow."""
    x, bad = batch
    out = model(x)
    loss = (out - 1).square().mean()
    return loss + (0 * out.sum()).sqrt() if bad else loss


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["pure", "donated", "graph", "partition"])
def test_the_norms_of_skipped_updates_are_not_in_the_mean_of_a_window(form):
    clipped = ll.chain(ll.skip_nonfinite(), ll.clip_by_global_norm(0.5), SGD)
    name = "grad_norm"
    if form == "partition":
        clipped, name = ll.optim.partition({"all": clipped}, lambda name, tensor: "all"), "grad_norm/all"
    model, raw, window, norms, losses = net(), net(), ll.Window(), [], []
    step = make_train_step(ll.make_grad_fn(model, with_bad_gradients), clipped, donate=form == "donated")
    step = ll.compile_step(step, backend="eager") if form == "graph" else step
    state, sgd = ll.init_state(model, clipped), torch.optim.SGD(raw.parameters(), lr=0.1)
    for number, x in enumerate(batches(6)):
        bad = number % 3 == 1
        state, metrics = step(state, (x, bad))
        assert state.skipped == bad
        assert math.isnan(ll.compute(metrics)[name]) == bad
        window = window.add(metrics)
        sgd.zero_grad()
        loss = with_bad_gradients(raw, (x, False))
        losses.append(loss.item())
        if not bad:
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(raw.parameters(), 0.5).item())
            sgd.step()
    values = ll.compute(window.metrics())
    assert values[name] == pytest.approx(sum(norms) / len(norms), rel=1e-6)
    assert values["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@both_steps
def test_a_loss_that_is_not_finite_is_in_the_mean_of_its_window(donate):
    safe, model = ll.chain(ll.skip_nonfinite(), ll.clip_by_global_norm(0.5), SGD), net()
    step, state = step_of(model, safe, donate, loss_fn), ll.init_state(model, safe)
    window = ll.Window()
    for factor, x in zip((1.0, math.nan, 1.0), batches(3), strict=True):
        state, metrics = step(state, (x, factor))
        window = window.add(metrics)
    values = ll.compute(window.metrics())
    assert math.isnan(values["loss"])
    assert math.isfinite(values["grad_norm"])
