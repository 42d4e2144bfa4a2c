"""Facts about a gradient function survive wrapping, and functions that need whole batches refuse parts of them."""

import functools

import pytest
import torch
from ranks import launch
from shared import mean_square as loss_fn
from shared import one_report
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


@pytest.mark.parametrize("wrap", [plain, doubled], ids=["plain", "functools.wraps"])
def test_a_wrapper_that_says_nothing_of_the_norm_is_refused(wrap):
    clip = wrap(ll.contrib.clip_per_sample(per_sample(nn.Linear(3, 2)), 1.0))
    seen = r"\(clip_per_sample, make_per_sample_grad_fn\)" if wrap is doubled else r"\(plain_grad_fn\)"
    for norm in (0.5, 1.0):
        with pytest.raises(ValueError, match=rf"as far as it can see {seen}.*wrappers of your own around add_noise"):
            ll.contrib.add_noise(clip, norm, 1.0)


def length_of_x(batch):
    return len(batch["x"])


def test_accumulate_counts_as_the_function_that_a_wrapper_says_it_wraps():
    model = nn.Linear(3, 2).double()
    grad_fn = ll.make_grad_fn(model, lambda model, batch: loss_fn(model, batch["x"]), count_samples=length_of_x)
    state, x = ll.init_state(model), torch.randn(5, 3, dtype=torch.double)
    pieces = [{"x": part, "pairs": torch.zeros(7, 2)} for part in x.split(2)]  # whose entries disagree
    whole = grad_fn(state, {"x": x}).grads
    for inner, factor in ((doubled(grad_fn), 2), (doubled(doubled(grad_fn)), 4)):
        found = ll.accumulate(inner)(state, pieces).grads
        expected = {name: factor * grad for name, grad in whole.items()}
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"batch\['x'\] has 2, batch\['pairs'\] has 7"):
        ll.accumulate(plain(grad_fn))(state, pieces)
    counted = ll.accumulate(plain(grad_fn), count_samples=length_of_x)
    torch.testing.assert_close(counted(state, pieces).grads, whole, rtol=1e-12, atol=0)


def contrastive(model):
    return ll.contrib.make_contrastive_grad_fn(
        model, lambda model, x: model(x), lambda rows: (rows @ rows.T).square().mean(), microbatches=2
    )


def noise(model):
    return ll.contrib.add_noise(ll.contrib.clip_per_sample(per_sample(model), 1.0), 1.0, 1.0)


def sharp(model):
    return ll.contrib.sam(ll.make_grad_fn(model, loss_fn))


def signs(grad_fn):
    """A wrapper of a user's own that needs whole batches."""

    def sign_grad_fn(state, batch, **request):
        if request.get("part") is not None:
            raise ValueError("signs within accumulate or reduce_gradients would act on each part alone")
        out = grad_fn(state, batch, **request)
        return out._replace(grads={name: grad.sign() for name, grad in out.grads.items()})

    return sign_grad_fn


def own(model):
    return signs(ll.accumulate(ll.make_grad_fn(model, loss_fn), 2))


OF_WHOLE_BATCHES = {
    "sam": sharp,
    "add_noise": noise,
    "make_contrastive_grad_fn": contrastive,
    "make_per_sample_grad_fn": per_sample,
    "signs": own,
}
HIDDEN = {
    "as it is": lambda g: g,
    "plain": plain,
    "functools.wraps": doubled,
    "map_batch": lambda g: ll.grads.map_batch(g, lambda state, batch: batch),
    "step_timer": lambda g: ll.log.step_timer().grad_fn(g),
    "accumulate": lambda g: ll.accumulate(g, 2),
    "reduce_gradients": ll.grads.reduce_gradients,  # in one process, where it returns the gradients as they are
}


@one_report
@pytest.mark.parametrize("wrap", HIDDEN)
@pytest.mark.parametrize("name", OF_WHOLE_BATCHES)
def test_what_has_a_meaning_for_whole_batches_alone_is_refused_within_accumulate(name, wrap):
    model = nn.Linear(3, 2)
    inner = OF_WHOLE_BATCHES[name](model)
    state, x = ll.init_state(model), torch.randn(4, 3)
    grads = inner(state, x).grads  # of a whole batch
    if name == "signs":
        assert set(grads["bias"].abs().tolist()) == {1.0}
    within = ll.accumulate(HIDDEN[wrap](inner), 2)
    with pytest.raises(ValueError, match=f"{name} within accumulate or reduce_gradients would act on each part"):
        within(state, x, donate=True)


def on_two_ranks():
    with ll.distributed.setup():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        state, x = ll.init_state(model), torch.randn(4, 3)
        for name, make in OF_WHOLE_BATCHES.items():
            for wrap in (plain, lambda g: ll.accumulate(g, 2), lambda g: g):
                grad_fn = ll.grads.reduce_gradients(wrap(make(model)))
                with pytest.raises(ValueError, match=f"{name} within accumulate or reduce_gradients would act on"):
                    grad_fn(state, x)
        reduced = ll.grads.reduce_gradients(ll.make_grad_fn(model, loss_fn))
        for twice in (
            ll.accumulate(reduced, 2),
            ll.accumulate(plain(reduced), 2),
            ll.grads.reduce_gradients(reduced),
        ):
            with pytest.raises(ValueError, match=r"put it around, reduce_gradients\(accumulate\(grad_fn"):
                twice(state, x)

        def deaf(state, batch, **request):
            return reduced(state, batch)

        with pytest.raises(TypeError, match=r"reduce_gradients got gradients without the weight .*hands .* on"):
            ll.grads.reduce_gradients(deaf)(state, x)
        print("refused on", ll.distributed.rank())


def test_wrappers_of_whole_batches_are_refused_within_reduce_gradients():
    assert launch(2, on_two_ranks).count("refused on") == 2


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
