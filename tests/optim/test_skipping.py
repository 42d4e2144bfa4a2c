"""Steps that are not made: against a plain-Python reference, and on two ranks that decide alike."""

import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from problem import WAYS, adamw, batches, begin, net, step_of
from ranks import launch
from shared import bits, make_train_step
from torch import nn

import looplib as ll

both_steps = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
both_states = pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])


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
    with pytest.raises(ll.optim.NonFiniteGradientsError, match=r"3 .*max_consecutive=2.* step 1 .*0\.weight"):
        step(state, (x, math.nan))
    assert bits(state) == before
    state, _ = step(state, (x, 1.0))
    assert state.step == 2


# skip_spikes


def reference(losses, window, sigmas, max_consecutive):
    """For each loss: whether it is skipped, skips in a row and in all, and the window; "error" where it gives up."""
    recent, row, total = [], 0, 0
    for loss in losses:
        finite = math.isfinite(loss)
        spike = not finite
        if finite and len(recent) >= max(2, window // 2):
            limit = statistics.fmean(recent) + sigmas * statistics.stdev(recent)
            assume(abs(loss - limit) > 1e-9 * max(1, abs(limit)) or loss == recent[0] == recent[-1] == limit)
            spike = loss > limit
        if not finite and row >= max_consecutive:
            yield "error"
            return
        row, total = (row + 1, total + 1) if spike else (0, total)
        recent = (recent + [loss] * finite)[-window:]
        yield spike, row, total, sorted(recent)


losses = st.lists(
    st.one_of(
        st.integers(0, 4).map(float),
        st.floats(0.9, 1.1),
        st.floats(-1e6, 1e6),
        st.sampled_from([math.nan, math.inf, -math.inf]),
    ),
    max_size=40,
)


@example([0.0, 2.0, 2.2, 2.9], 4, 1.0, 0, False)  # a sample's deviation: 2.2 is below the limit, 2.9 above
@given(losses, st.integers(2, 9), st.sampled_from([0.5, 1.0, 3.0, 6.0]), st.integers(0, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_skip_spikes_equals_the_reference(losses, window, sigmas, max_consecutive, tensors):
    optimizer = ll.optim.skip_spikes(
        ll.optimizer(torch.optim.SGD, lr=1.0), window=window, sigmas=sigmas, max_consecutive=max_consecutive
    )
    params, step = {"w": torch.zeros(1)}, 0
    opt_state = optimizer.init(params)
    expected = list(reference(losses, window, sigmas, max_consecutive))
    for loss, now in zip(losses, expected, strict=False):
        record = ll.Mean(torch.tensor(loss * 2, dtype=torch.float64), 2, times=4) if tensors else ll.Mean(loss)
        before = bits((params, opt_state))

        def update(params=params, opt_state=opt_state, step=step, record=record):
            return optimizer.update({"w": torch.ones(1)}, opt_state, params, step, metrics={"loss": record})

        if now == "error":
            with pytest.raises(
                ll.optim.NonFiniteGradientsError, match=rf"'loss' was a spike .* is {loss} at step {step}"
            ):
                update()
            assert bits((params, opt_state)) == before
            return
        new, record, applied = update()
        assert bits((params, opt_state)) == before
        recent = record["recent"][~record["recent"].isnan()].sort().values.tolist()
        row, total = record["spikes_in_a_row"].item(), record["total_spikes"].item()
        assert (new is params, row, total, recent) == now
        assert applied is (new is not params)
        step += applied
        params, opt_state = new, record
    assert params["w"].item() == -step


@both_states
@both_steps
@pytest.mark.parametrize("monitor", ["loss", "grad_norm"])
def test_a_spike_changes_nothing_but_the_record(monitor, donate, bound):
    clip, inner = partial(ll.clip_by_global_norm, max_norm=1.0), ll.ema(adamw())
    optimizer = ll.optim.skip_spikes(inner, window=8, sigmas=4.0, monitor=monitor)
    model = net()
    step, plain_step = step_of(model, optimizer, donate, loss_fn, clip), step_of(net(), inner, False, loss_fn, clip)
    state, plain = begin(model, optimizer, bound, epoch_length=7), ll.init_state(net(), inner)
    factors, recent, skips = {3: math.nan, 9: 1e4, 14: math.inf, 15: 1e5, 19: -math.inf}, [], []
    for at, x in enumerate(batches(24)):
        state, metrics = step(state, (x, factors.get(at, 1.0)))
        value = ll.compute(metrics)[monitor]
        recent += [value] if math.isfinite(value) else []
        if state.skipped:
            skips.append(at)
        else:
            plain, _ = plain_step(plain, (x, 1.0))
        assert (state.batch, state.epoch, state.samples) == ((at + 1) % 7, (at + 1) // 7, 8 * (at + 1))
        assert bits((state.params, state.buffers)) == bits((plain.params, plain.buffers))
        assert bits(state.opt_state["inner_state"]) == bits(plain.opt_state)
    assert skips == sorted(factors)
    record = state.opt_state
    assert sorted(record["recent"].tolist()) == sorted(recent[-8:])
    assert (record["seen"].item(), record["total_spikes"].item()) == (len(recent), len(skips))


def test_the_messages_of_skip_spikes():
    for name, value in (("window", 1), ("sigmas", 0.0), ("sigmas", math.nan), ("max_consecutive", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            ll.optim.skip_spikes(adamw(), **{name: value})
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match=f"max_consecutive is {wrong}"):
            ll.optim.apply_if_finite(adamw(), wrong)
    model = net()
    optimizer = ll.optim.skip_spikes(adamw(), monitor="grad_norm", max_consecutive=1)
    state = ll.init_state(model, optimizer)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    with pytest.raises(ValueError, match=r"'grad_norm'.*loss\."):
        ll.make_train_step(grad_fn, optimizer)(state, (batches(1)[0], 1.0))
    with pytest.raises(ValueError, match="none"):
        optimizer.update({}, state.opt_state, state.params, 0)
    for donate in (False, True):
        step = ll.make_train_step(ll.clip_by_global_norm(grad_fn, 1.0), optimizer, donate=donate)
        now, _ = step(ll.copy_state(state), (batches(1)[0], math.nan))
        before = bits(now)
        with pytest.raises(ll.optim.NonFiniteGradientsError, match="'grad_norm'"):
            step(now, (batches(1)[0], math.nan))
        assert bits(now) == before


class Last:
    """A metric that is no mean."""

    def __init__(self, value):
        self.value = value

    def merge(self, other):
        return other

    def compute(self):
        return self.value


def test_another_metric_than_a_mean_can_be_watched():
    optimizer = ll.optim.skip_spikes(adamw(), window=4, monitor="last")
    params = {"w": torch.zeros(1)}
    opt_state, kept = optimizer.init(params), []
    for value in (1.0, 1.1, 50.0, 1.0):
        new, opt_state, _ = optimizer.update(
            {"w": torch.ones(1)}, opt_state, params, 0, metrics={"last": Last(value)}
        )
        kept.append(new is params)
    assert kept == [False, False, True, False]


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
    spikes = partial(ll.optim.skip_spikes, optimizer, window=6, sigmas=20.0)
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
            "skip_spikes": run_on_a_rank(spikes(), plain, factors),
            "gives_up": run_on_a_rank(finite(1), plain, once),
            "spikes_give_up": run_on_a_rank(ll.optim.skip_spikes(optimizer, max_consecutive=1), plain, once),
        }
        torch.save(ends, f"{folder}/{ll.distributed.rank()}.pt")


@pytest.mark.slow
def test_ranks_skip_together_what_one_of_them_has_to(tmp_path):
    launch(2, on_two_ranks, str(tmp_path))
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in ("apply_if_finite", "dynamic_loss_scale", "skip_spikes"):
        expected = [8, 10, 12, 14] if name == "skip_spikes" else [8, 12, 14]
        assert zero[name]["skips"] == one[name]["skips"] == expected, name
        assert zero[name]["step"] == one[name]["step"] == 16 - len(expected)
        assert bits(zero[name]["record"]) == bits(one[name]["record"])
        assert zero[name]["losses"] != one[name]["losses"]
    assert zero["apply_if_finite"]["record"]["total_notfinite"] == 3
    assert zero["dynamic_loss_scale"]["record"]["loss_scale"] == 2.0**7
    # The loss watched is that of the examples of both: four on one rank, two on the other.
    both = [
        (4 * a + 2 * b) / 6 for a, b in zip(zero["skip_spikes"]["losses"], one["skip_spikes"]["losses"], strict=True)
    ]
    recent = zero["skip_spikes"]["record"]["recent"].sort().values
    expected = sorted([loss for loss in both if math.isfinite(loss)][-6:])
    torch.testing.assert_close(recent, torch.tensor(expected, dtype=torch.float64))
    for rank, ends in enumerate((zero, one)):
        assert ends["gives_up"]["skips"] == ends["spikes_give_up"]["skips"] == [5]
        at, message = ends["gives_up"]["error"]
        where = "in 2 of 2 parameters: weight, bias." if rank == 0 else "on another rank."
        assert (at, where in message) == (6, True), message
        assert ends["spikes_give_up"]["error"][0] == 6
        assert "'loss' was a spike 2 times in a row (max_consecutive=1)" in ends["spikes_give_up"]["error"][1]


@pytest.mark.parametrize("way", WAYS)
def test_parameters_without_elements_are_finite(way):
    model, optimizer = nn.ParameterList([torch.empty(3, 0)]), ll.optim.apply_if_finite(adamw(), max_consecutive=0)
    step = make_train_step(ll.make_grad_fn(model, lambda model, x: (x @ model[0]).sum()), optimizer, **WAYS[way])
    state, _ = step(ll.init_state(model, optimizer), torch.ones(2, 3))
    assert (state.step, state.skipped) == (1, False)
