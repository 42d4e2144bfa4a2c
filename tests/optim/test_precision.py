"""Loss scaling, autocast and master weights against torch's GradScaler and hand-written loops."""

import itertools
from functools import partial

import pytest
import torch
from problem import assert_refused
from shared import SGD, bits, both_steps, equal
from torch import nn
from torch.nn import functional as F

import looplib as ll

HALF = [torch.bfloat16, torch.float16]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches(count, size=8):
    """Every 23rd batch is so large that float16 overflows at any scale that is above 1."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        x, y = torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)
        made.append((x * 1e9 if index % 23 == 22 else x, y))
    return made


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) + model(x).square().mean()


def in_float16(model, batch):
    with torch.autocast("cpu", torch.float16):
        return loss_fn(model, batch)


def rate(step):
    return 1 / (1 + 0.05 * step)


SCALES = {"init_scale": 2.0**14, "growth_interval": 4}
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"momentum": 0.9}), "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1})}


def raw_loop(name, data):
    """The loop of torch's AMP pages; gives the model and, after each step, scale, tracker and what was skipped."""
    model = net()
    cls, hyperparameters = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), lr=1e-2, fused=True, **hyperparameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu", **SCALES)
    log = []
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(in_float16(model, (x, y))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < before
        if not skipped:
            scheduler.step()
        log.append((scaler.get_scale(), scaler._get_growth_tracker(), skipped))
    return model, log


def scaled_step(name, donate):
    model = net()
    grad_fn = ll.make_grad_fn(model, ll.autocast(loss_fn, torch.float16))
    cls, hyperparameters = OPTIMIZERS[name]
    optimizer = ll.chain(
        ll.optim.dynamic_loss_scale(**SCALES),
        ll.clip_by_global_norm(0.5),
        ll.optimizer(cls, lr=lambda step: 1e-2 * rate(step), **hyperparameters),
    )
    return ll.make_train_step(grad_fn, optimizer, donate=donate), ll.init_state(model, optimizer)


def scale_and_tracker(state):
    own = state.opt_state["dynamic_loss_scale"]
    return own["loss_scale"].item(), own["growth_tracker"].item()


@both_steps
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_with_overflows_have_the_bits_of_grad_scaler(name, donate):
    data = batches(200)
    model, log = raw_loop(name, data)
    scales = [scale for scale, _, _ in log]
    skips = sum(skipped for _, _, skipped in log)
    grown = sum(after > before for before, after in itertools.pairwise(scales))
    assert min(skips, grown) >= 15, (skips, grown)

    train_step, state = scaled_step(name, donate)
    ours = []
    for batch in data:
        used = state.opt_state["dynamic_loss_scale"]["loss_scale"].item()
        state, metrics = train_step(state, batch)
        assert ll.compute(metrics)["loss_scale"] == used
        ours.append((*scale_and_tracker(state), state.skipped))
    assert ours == log
    assert (state.step, state.batch) == (200 - skips, 200)
    assert equal(state.params, model.named_parameters())


@both_steps
def test_a_scale_that_cannot_be_the_cause_ends_the_run(donate):
    optimizer = ll.chain(ll.optim.dynamic_loss_scale(init_scale=4.0, min_scale=1.0), SGD)
    train_step = ll.make_train_step(ll.make_grad_fn(model := net(), loss_fn), optimizer, donate=donate)
    state, (x, y) = ll.init_state(model, optimizer), batches(1)[0]
    state, _ = train_step(state, (x, y))
    bad = (x * torch.nan, y)
    for scale in (2.0, 1.0):
        state, _ = train_step(state, bad)
        assert state.opt_state["dynamic_loss_scale"]["loss_scale"] == scale
    kept = ll.copy_state(state)
    message = (
        r"not finite at step 1 though the loss scale is down to 1\.0 \(min_scale=1\.0\).*lower the learning rate"
    )
    with pytest.raises(ll.optim.NonFiniteGradientsError, match=message):
        train_step(state, bad)
    assert bits((state.params, state.opt_state)) == bits((kept.params, kept.opt_state))
    state, _ = train_step(state, (x, y))
    assert state.step == 2


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_autocast_has_the_bits_of_the_raw_loop(dtype, enabled):
    def metric_fn(model, batch):
        return {"loss": loss_fn(model, batch), "logits": ll.Mean(model(batch[0]).sum(), 48)}

    batch, raw, model = batches(1, size=16)[0], net(), net()
    cast = partial(ll.autocast, dtype=dtype, enabled=enabled)
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        loss, logits = loss_fn(raw, batch), raw(batch[0])
        want = {"loss": loss.item(), "logits": (logits.sum() / 48).item()}
    loss.backward()
    state = ll.init_state(model)
    out = ll.make_grad_fn(model, cast(loss_fn))(state, batch)
    assert ll.compute(out.metrics)["loss"] == loss.item()
    assert equal(out.grads, {name: p.grad for name, p in raw.named_parameters()})
    assert all(grad.dtype is torch.float32 for grad in out.grads.values())
    assert equal(ll.make_grad_fn(model, loss_fn)(state, batch).grads, out.grads) is not enabled
    assert ll.compute(ll.make_eval_step(model, cast(metric_fn))(state, batch)) == want
    predicted = ll.make_predict_step(model, cast(lambda model, batch: model(batch[0])))(state, batch)
    assert predicted.dtype is logits.dtype is (dtype if enabled else torch.float32)
    assert torch.equal(predicted, logits)
    assert not torch.is_autocast_enabled("cpu")


def test_clipping_by_value_hides_no_overflow():
    optimizer = ll.chain(ll.optim.clip_by_value(0.5), ll.optim.dynamic_loss_scale(2.0**10), SGD)
    grad_fn = ll.make_grad_fn(model := net(), ll.autocast(loss_fn, torch.float16))
    state, _ = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), batches(23)[22])
    assert state.skipped
    assert state.opt_state["dynamic_loss_scale"]["loss_scale"] == 2.0**9


# Refusals

SCALE = ll.optim.dynamic_loss_scale


def scaled_without(as_dict):
    """Gradients of a scaled loss, for an optimizer that does not divide them by the scale."""
    model = net()
    grad_fn, state, scale = ll.make_grad_fn(model, loss_fn), ll.init_state(model, SGD), torch.tensor(8.0)
    out = grad_fn(state, batches(1)[0], scale=scale)
    return ll.apply_gradients(SGD, state, out.grads, scale=scale) if as_dict else ll.apply_gradients(SGD, state, out)


REFUSED = [
    *((ValueError, f"{key}={value}", lambda key=key, value=value: SCALE(**{key: value})) for key, value in [
        ("growth_factor", 1.0), ("backoff_factor", 1.0), ("backoff_factor", 0.0), ("growth_interval", 0),
        ("growth_interval", 1.5), ("init_scale", float("inf")),
        ("min_scale", 0.0), ("init_scale", 1e-5),
    ]),
    (ValueError, "ll.optim.dynamic_loss_scale", lambda: scaled_without(False)),
    (ValueError, "ll.optim.dynamic_loss_scale", lambda: scaled_without(True)),
    *((ValueError, str(dtype), lambda dtype=dtype: ll.autocast(loss_fn, dtype)) for dtype in (torch.float64, torch.int8)),
    (ValueError, "float32 enabled=False", lambda: ll.autocast(loss_fn, torch.float32)),
]  # fmt: skip


def test_refusals_name_what_was_found_and_what_to_give():
    for case in REFUSED:
        assert_refused(*case)
