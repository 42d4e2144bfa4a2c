"""Several optimizers, layers that come and go, and two looks at the loss, against loops written out."""

import copy
import functools
from functools import partial

import pytest
import torch
from problem import adamw, assert_refused, batches, begin, loss_fn, net, raw_adamw, run, sgd, step_of
from shared import bits, equal, mix
from torch import nn

import looplib as ll

both_steps = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
both_states = pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])


def by_rank(name, tensor):
    return "matrices" if tensor.ndim == 2 else "rest"


# partition


@both_states
@both_steps
def test_two_optimizers_have_the_bits_of_two_raw_ones(donate, bound):
    def lr(step):
        return 0.1 / (1 + step)

    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    one, two = (
        torch.optim.SGD(matrices, lr=1.0, momentum=0.9, fused=True),
        torch.optim.AdamW(rest, lr=1e-2, fused=True),
    )
    for at, x in enumerate(batches(30)):
        one.param_groups[0]["lr"] = lr(at)
        two.param_groups[0]["weight_decay"] = 0.01 * at
        model.zero_grad()
        loss_fn(model, x).backward()
        one.step()
        two.step()
    optimizer = ll.optim.partition(
        {"matrices": sgd(lr), "rest": adamw(weight_decay=lambda step: 0.01 * step)},
        by_rank,
    )
    state = run(net(), optimizer, batches(30), donate, bound)
    assert equal(state.params, model.named_parameters())
    assert equal(state.buffers, model.named_buffers())
    inner = state.opt_state["inner_states"]
    for name, p in model.named_parameters():
        kept, raw = (inner["matrices"], one) if p.ndim == 2 else (inner["rest"], two)
        assert equal(kept["state"][name], raw.state[p])


def split(**members):
    return ll.optim.partition(members, by_rank)


def labelled(**members):
    return ll.init_state(net(), split(**members))


REFUSED = [
    (ValueError, "0.weight 'matrices', rest, x", lambda: labelled(rest=adamw(), x=sgd())),
    (ValueError, "'x', 'y'", lambda: labelled(matrices=sgd(), x=sgd(), rest=adamw(), y=sgd())),
    (TypeError, "'rest' AdamW ll.optimizer", lambda: split(matrices=sgd(), rest=raw_adamw(net()))),
    (ValueError, "sam accumulate", lambda: ll.accumulate(ll.contrib.sam(ll.make_grad_fn(net(), loss_fn)))),
    *((ValueError, f"rho {rho}", lambda rho=rho: ll.contrib.sam(ll.make_grad_fn(net(), loss_fn), rho))
      for rho in (0, -1.0, float("nan"))),
]  # fmt: skip


def test_refusals_name_what_was_found_and_what_to_give():
    for case in REFUSED:
        assert_refused(*case)


@both_steps
def test_a_gradient_without_an_optimizer_leaves_the_state_as_it_was(donate):
    model = net()
    optimizer = ll.optim.partition({"matrices": sgd()}, by_rank)
    state = ll.init_state(model, optimizer, trainable=lambda name, tensor: tensor.ndim == 2)
    before = bits(state)
    step = step_of(model, optimizer, donate)
    with pytest.raises(ValueError, match=r"0\.bias has the label 'rest', and there are optimizers for matrices"):
        step(state, batches(1)[0])
    assert bits(state) == before
    good = ll.make_grad_fn(model, loss_fn, trainable=lambda name, tensor: tensor.ndim == 2)
    after, _ = ll.make_train_step(good, optimizer, donate=donate)(state, batches(1)[0])
    assert after.step == 1


@both_steps
def test_a_second_update_on_the_same_batch_that_is_skipped_moves_the_record_alone(donate):
    model = net()
    optimizer = ll.optim.apply_if_finite(sgd(), 3)
    first = step_of(model, optimizer, donate)
    second = ll.make_train_step(
        ll.make_grad_fn(model, lambda model, x: loss_fn(model, x * torch.inf)),
        optimizer,
        donate=donate,
        same_batch=True,
    )
    state, _ = first(ll.init_state(model, optimizer, epoch_length=3), batches(1)[0])
    before = ll.copy_state(state)
    state, _ = second(state, batches(1)[0])
    assert (state.step, state.batch, state.epoch, state.samples, state.batch_samples) == (1, 1, 0, 8, 8)
    assert (state.batch_steps, before.batch_steps) == (1, 1)
    assert bits((state.params, state.buffers)) == bits((before.params, before.buffers))
    assert state.opt_state["total_notfinite"] == 1


# layers that are frozen for some of the steps


@both_states
@both_steps
@pytest.mark.parametrize("make", ["adamw", "sgd"])
def test_frozen_layers_keep_their_bits_and_thaw_as_with_a_gradient_of_none(make, donate, bound):
    def frozen(name, step):
        return name[0] in "01" and (step < 7 or 12 <= step < 15)

    model = net()
    if make == "adamw":
        arguments = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    else:  # torch's fused SGD fails on momentum that some parameters have and others have not yet
        arguments = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[make]
    pure, raw = ll.optimizer(cls, **arguments), cls(model.parameters(), **arguments)
    own = net()
    head_step = step_of(own, pure, donate, trainable=lambda name, tensor: name[0] not in "01")
    whole_step = step_of(own, pure, donate)
    state = begin(own, pure, bound)
    for at, x in enumerate(batches(25)):
        raw.zero_grad()
        loss_fn(model, x).backward()
        for name, p in model.named_parameters():
            if frozen(name, at):
                p.grad = None
        raw.step()
        before = ll.copy_state(state)
        state, _ = (head_step if frozen("0.weight", at) else whole_step)(state, x)
        for name, p in model.named_parameters():
            moments = [s.opt_state["state"][name] for s in (before, state)]
            assert torch.equal(state.params[name], p)
            if frozen(name, at):
                assert torch.equal(state.params[name], before.params[name])
                assert bits(moments[0]) == bits(moments[1])
    assert equal(state.buffers, model.named_buffers())
    for name, p in model.named_parameters():
        assert equal(state.opt_state["state"][name], raw.state[p])


# sam


def sharp_pass(model, x, rho, adaptive, seed):
    """Gradients in `.grad` at the worst point nearby, by the two passes of the paper; buffers of the first."""

    def backward():
        model.zero_grad()
        torch.manual_seed(seed)
        loss = loss_fn(model, x)
        loss.backward()
        return loss.item()

    loss, before = backward(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        units = {p: p.abs() if adaptive else torch.ones_like(p) for p in model.parameters()}
        norm = torch.stack([(unit * p.grad).square().sum() for p, unit in units.items()]).sum().sqrt()
        for p, unit in units.items():
            p.add_(unit.square() * p.grad, alpha=rho / norm.item())
    backward()
    model.load_state_dict(before)
    return loss


@both_states
@both_steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rho", "adaptive"), [(0.05, False), (0.5, True)])
def test_sam_equals_the_two_passes_by_hand(rho, adaptive, dtype, donate, bound):
    model, own, optimizer = net(dtype, dropout=0.3), net(dtype, dropout=0.3), sgd()
    raw = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = step_of(own, optimizer, donate, wrap=lambda grad_fn: ll.contrib.sam(grad_fn, rho, adaptive=adaptive))
    state = begin(own, optimizer, bound)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-11}
    for at, x in enumerate(batches(12, dtype)):
        loss = sharp_pass(model, x, rho, adaptive, seed=mix(0, at, 0, 0))
        raw.step()
        state, metrics = step(state, x)
        torch.testing.assert_close(ll.compute(metrics)["loss"], loss, **close)
    torch.testing.assert_close(dict(state.params), dict(model.named_parameters()), **close)
    torch.testing.assert_close(dict(state.buffers), dict(model.named_buffers()), **close)
    assert state.buffers["1.num_batches_tracked"] == 12
    plain = run(net(dtype, dropout=0.3), sgd(), batches(12, dtype))
    assert not torch.allclose(plain.params["0.weight"], state.params["0.weight"], **close)


def test_sam_is_pure_draws_one_mask_in_both_passes_and_has_the_buffers_of_the_first():
    model, masks = net(dropout=0.5), []
    model[3].register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    grad_fn, x = ll.make_grad_fn(model, loss_fn), batches(1)[0]
    state = ll.copy_state(ll.init_state(model, sgd()))
    before, module = bits(state), bits(dict(model.state_dict()))
    plain, *outs = (fn(state, x) for fn in (grad_fn, ll.contrib.sam(grad_fn), ll.contrib.sam(grad_fn)))
    assert 0 < masks[0].float().mean() < 1
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert bits(outs[0].grads) == bits(outs[1].grads) != bits(plain.grads)
    assert all(bits(out.buffers) == bits(plain.buffers) for out in outs)
    assert ll.compute(outs[0].metrics) == ll.compute(plain.metrics)
    assert (bits(state), bits(dict(model.state_dict()))) == (before, module)
    assert all(p.grad is None for p in model.parameters())


@both_steps
def test_sam_goes_around_accumulate_and_inside_clipping_and_a_loss_scale(donate):
    def end(wrap, optimizer=sgd):
        model = net(torch.float64, nn.LayerNorm)
        return run(model, optimizer(), batches(6, torch.float64), donate, wrap=wrap).params

    def clipped(*wraps):
        return lambda grad_fn: ll.clip_by_global_norm(
            functools.reduce(lambda fn, wrap: wrap(fn), wraps, grad_fn), 0.1
        )

    pieces, whole, plain = (
        end(clipped(partial(ll.accumulate, microbatches=4), ll.contrib.sam)),
        end(clipped(ll.contrib.sam)),
        end(clipped()),
    )
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(whole["0.weight"], plain["0.weight"], rtol=1e-6)
    # Under a loss scale the direction, and so the gradient, is the same: powers of two are exact.
    scaled = end(
        lambda grad_fn: ll.grads.scale_loss(ll.contrib.sam(grad_fn)), lambda: ll.optim.dynamic_loss_scale(sgd())
    )
    torch.testing.assert_close(scaled, end(ll.contrib.sam), rtol=1e-9, atol=1e-12)


@both_steps
def test_a_part_that_gives_up_leaves_the_whole_state_as_it_was(donate):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = ll.optim.partition(
        {"0": sgd(), "1": ll.optim.apply_if_finite(sgd(), 0)}, lambda name, tensor: name[0]
    )

    def overflow(model, x):
        return model[0](x).sum() + model[1](model[0](x).detach()).sum() * torch.inf

    step = ll.make_train_step(ll.make_grad_fn(model, overflow), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    kept = ll.copy_state(state)
    with pytest.raises(ll.optim.NonFiniteGradientsError, match=r"1\.weight"):
        step(state, torch.ones(2, 3))
    assert bits((state.params, state.opt_state)) == bits((kept.params, kept.opt_state))
