"""Sharpness-aware minimization against its two passes by hand."""

import copy
import functools
from functools import partial

import pytest
import torch
from problem import assert_refused, batches, begin, loss_fn, net, run, sgd, step_of
from shared import bits, both_states, both_steps, mix
from torch import nn

import looplib as ll


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
    def end(*wraps, before=()):
        model = net(torch.float64, nn.LayerNorm)
        return run(
            model,
            ll.chain(*before, sgd()),
            batches(6, torch.float64),
            donate,
            wrap=lambda grad_fn: functools.reduce(lambda fn, wrap: wrap(fn), wraps, grad_fn),
        ).params

    clip = (ll.clip_by_global_norm(0.1),)
    pieces, whole, plain = (
        end(partial(ll.accumulate, microbatches=4), ll.contrib.sam, before=clip),
        end(ll.contrib.sam, before=clip),
        end(before=clip),
    )
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(whole["0.weight"], plain["0.weight"], rtol=1e-6)
    # Under a loss scale the direction, and so the gradient, is the same: powers of two are exact.
    scaled = end(ll.contrib.sam, before=(ll.optim.dynamic_loss_scale(),))
    torch.testing.assert_close(scaled, end(ll.contrib.sam), rtol=1e-9, atol=1e-12)


def test_what_sam_cannot_be_is_refused():
    def sharp(rho=0.05):
        return ll.contrib.sam(ll.make_grad_fn(net(), loss_fn), rho)

    state, x = ll.init_state(net()), batches(1)[0]
    assert_refused(ValueError, "sam accumulate", lambda: ll.accumulate(sharp(), 2)(state, x))
    for rho in (0, -1.0):
        assert_refused(ValueError, f"rho {rho}", lambda rho=rho: sharp(rho))


class Clamped(nn.Module):
    """A layer that bounds its weight in each forward pass, with batch norm after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(3, 4).double(), nn.BatchNorm1d(4).double()

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.2, 0.2)
        return self.norm(self.layer(x))


def test_a_forward_pass_writes_its_parameter_in_both_passes():
    raw, model, rho = Clamped(), Clamped(), 0.3
    theirs, optimizer = torch.optim.SGD(raw.parameters(), lr=0.5), ll.optimizer(torch.optim.SGD, lr=0.5)
    loss_fn = lambda model, x: (model(x) - 1).square().mean() + model.layer.weight.sum()  # noqa: E731
    train_step = ll.make_train_step(ll.contrib.sam(ll.make_grad_fn(model, loss_fn), rho), optimizer, donate=True)
    state = ll.init_state(model, optimizer)
    for x in torch.randn(5, 8, 3).double():
        theirs.zero_grad()
        loss_fn(raw, x).backward()
        statistics = {name: buffer.clone() for name, buffer in raw.named_buffers()}
        weights = [p.detach().clone() for p in raw.parameters()]
        scale = rho / (nn.utils.get_total_norm([p.grad for p in raw.parameters()]) + 1e-12)
        with torch.no_grad():
            for p in raw.parameters():
                p += scale * p.grad
        theirs.zero_grad()
        loss_fn(raw, x).backward()
        with torch.no_grad():
            for p, weight in zip(raw.parameters(), weights, strict=True):
                p.copy_(weight)
            for name, buffer in raw.named_buffers():
                buffer.copy_(statistics[name])
        theirs.step()
        state, _ = train_step(state, x)
        torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(state.buffers), dict(raw.named_buffers()), rtol=1e-12, atol=1e-12)
        assert model.norm.running_mean is state.buffers["norm.running_mean"]


def test_a_skipped_step_of_a_bound_state_does_not_say_that_the_module_is_untrained(recwarn):
    model, optimizer = net(), ll.chain(ll.skip_nonfinite(), ll.optimizer(torch.optim.SGD, lr=0.5))
    sharp = ll.contrib.sam(ll.make_grad_fn(model, lambda model, x: loss_fn(model, x) * torch.nan))
    state, _ = ll.make_train_step(sharp, optimizer, donate=True)(ll.init_state(model, optimizer), batches(1)[0])
    model.state_dict()
    assert state.skipped
    assert not [str(warning.message) for warning in recwarn]
