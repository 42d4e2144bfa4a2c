"""Facts about a gradient wrapper survive wrapping, and a check that cannot see them refuses."""

import functools

import pytest
import torch
from shared import mean_square as loss_fn
from torch import nn

import looplib as ll


def per_sample(model):
    return ll.contrib.make_per_sample_grad_fn(model, loss_fn)


def plain(grad_fn):
    def plain_grad_fn(state, batch, **request):
        return grad_fn(state, batch, **request)

    return plain_grad_fn


def doubled(grad_fn):
    @functools.wraps(grad_fn)  # copies all attributes
    def doubled_grad_fn(state, batch, **request):
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: 2 * grad for name, grad in out.grads.items()})

    return doubled_grad_fn


def marked(grad_fn):
    @ll.grads.wrapper(grad_fn)
    def marked_grad_fn(state, batch, **request):
        return grad_fn(state, batch, **request)

    return marked_grad_fn


THROUGH = {
    "accumulate": lambda g: ll.accumulate(g, size=2),
    "reduce_gradients": ll.grads.reduce_gradients,
    "both": lambda g: ll.grads.reduce_gradients(ll.accumulate(g, size=2)),
    "step_timer": lambda g: ll.log.step_timer().grad_fn(g),
}


@pytest.mark.parametrize("wrap", THROUGH.values(), ids=THROUGH)
def test_the_norm_is_seen_through_wrappers_that_keep_it(wrap):
    model = nn.Linear(3, 2)
    clip = wrap(ll.contrib.clip_per_sample(per_sample(model), 1.0))
    with pytest.raises(ValueError, match=r"clip_per_sample has max_norm=1\.0 and add_noise max_norm=0\.5"):
        ll.contrib.add_noise(clip, 0.5, 1.0)
    out = ll.contrib.add_noise(clip, 1.0, 0.0)(ll.init_state(model), torch.ones(4, 3))
    torch.testing.assert_close(out.grads, clip(ll.init_state(model), torch.ones(4, 3)).grads)


@pytest.mark.parametrize("wrap", [plain, doubled, marked], ids=["plain", "functools.wraps", "marked for its order"])
def test_a_wrapper_that_says_nothing_of_the_norm_is_refused(wrap):
    clip = wrap(ll.contrib.clip_per_sample(per_sample(nn.Linear(3, 2)), 1.0))
    for norm in (0.5, 1.0):
        with pytest.raises(ValueError, match=r"as far as it can see .*wrappers of your own around add_noise"):
            ll.contrib.add_noise(clip, norm, 1.0)


@pytest.mark.parametrize("around", ["accumulate", "reduce_gradients", "scale_loss"])
def test_a_wrong_order_is_refused_when_built_through_marked_wrappers(around):
    clipped = ll.clip_by_global_norm(ll.make_grad_fn(nn.Linear(3, 2), loss_fn), 1.0)
    wrap = {"accumulate": lambda g: ll.accumulate(g, 2)}.get(around) or getattr(ll.grads, around)
    mapped = ll.grads.map_batch(clipped, lambda state, batch: batch)
    for inner in (clipped, marked(marked(clipped)), mapped, ll.log.step_timer().grad_fn(clipped)):
        with pytest.raises(ValueError, match=f"clip_by_global_norm within {around} would act on"):
            wrap(inner)


def test_a_users_wrapper_of_a_whole_step_is_refused_for_a_microbatch():
    def signs(grad_fn):
        @ll.grads.wrapper(grad_fn, whole_step=True)
        def sign_grad_fn(state, batch, **request):
            out = grad_fn(state, batch, **request)
            return out._replace(grads={name: grad.sign() for name, grad in out.grads.items()})

        return sign_grad_fn

    model = nn.Linear(3, 2)
    grad_fn = signs(ll.accumulate(ll.make_grad_fn(model, loss_fn), 2))
    assert set(grad_fn(ll.init_state(model), torch.ones(4, 3)).grads["bias"].abs().tolist()) == {1.0}
    with pytest.raises(
        ValueError, match=r"signs within accumulate would act on each microbatch alone: put it around"
    ):
        ll.accumulate(signs(ll.make_grad_fn(model, loss_fn)), 2)
    with pytest.raises(ValueError, match="signs within accumulate"):  # hidden, so when it runs
        ll.accumulate(plain(grad_fn), 2)(ll.init_state(model), torch.ones(4, 3))


@pytest.mark.parametrize("nested", [False, True])
def test_a_wrapper_changes_the_gradients_of_its_own_microbatch_alone(nested):
    # Each microbatch's gradient was added into those before it, and what was there already doubled again; and where
    # functools.wraps had copied what accumulate knows of make_grad_fn, the wrapper was never called.
    model, x = nn.Linear(3, 2).double(), torch.randn(7, 3, dtype=torch.double)
    wrapped = doubled(ll.make_grad_fn(model, loss_fn))
    grad_fn = ll.accumulate(ll.accumulate(wrapped, size=2), size=3) if nested else ll.accumulate(wrapped, 3)
    found = grad_fn(ll.init_state(model), x).grads
    loss_fn(model, x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], 2 * parameter.grad, rtol=1e-12, atol=0)
