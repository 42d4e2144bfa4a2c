"""Updates that are made or not: wrappers of a user's own, against a raw loop with an `if` in it."""

import dataclasses

import pytest
import torch
from shared import make_train_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import looplib as ll

QUICK = {"backend": "eager"}
LIMIT = 0.6


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) * (3.0 if at % 3 == 1 else 0.5) for at in range(count)]


def loss_fn(model, x):
    return (model(x) - x[:, :2]).square().mean()


def adamw():
    return ll.optimizer(torch.optim.AdamW, lr=1e-2)


# What a user writes


def skip_large(optimizer, limit):
    """No update where a gradient has an element above the limit: decides before."""

    def update(grads, opt_state, params, step, *, when=True, **extra):
        largest = torch.stack([grad.abs().max() for grad in grads.values()]).max()
        return optimizer.update(grads, opt_state, params, step, when=when & (largest < limit), **extra)

    return dataclasses.replace(optimizer, update=update)


def choose_small(optimizer, limit):
    """The same, which chooses afterwards."""

    def update(grads, opt_state, params, step):
        new, new_state, applied = optimizer.update(grads, opt_state, params, step)
        small = torch.stack([grad.abs().max() for grad in grads.values()]).max() < limit
        where = ll.optim.where
        return where(small, new, params), where(small, new_state, opt_state), applied & small

    return dataclasses.replace(optimizer, update=update)


def count_applied(optimizer):
    """A record beside the optimizer's, which moves with it."""

    def init(params, **extra):
        return {"inner": optimizer.init(params, **extra), "count": torch.tensor(0)}

    def update(grads, opt_state, params, step, **extra):
        new, inner, applied = optimizer.update(grads, opt_state["inner"], params, step, **extra)
        count = ll.optim.where(applied, opt_state["count"] + 1, opt_state["count"])
        return new, {"inner": inner, "count": count}, applied

    return ll.types.Optimizer(init, update)


def raw_loop(data, limit=LIMIT):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # the kernel that looplib takes
    made = []
    for x in data:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        made.append(max(p.grad.abs().max() for p in model.parameters()) < limit)
        if made[-1]:
            optimizer.step()
    return model, made


WAYS = {
    "pure": lambda step: step(),
    "donated": lambda step: step(donate=True),
    "compiled": lambda step: step(compile=QUICK),
    "compiled, donated": lambda step: step(compile=QUICK, donate=True),
}


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", [skip_large, choose_small])
def test_a_wrapper_of_a_users_own_is_an_if_in_a_raw_loop(wrapper, way, bound):
    data = batches(12)
    raw, made = raw_loop(data)
    assert 3 <= sum(made) <= 9
    model = net()
    optimizer = count_applied(wrapper(adamw(), LIMIT))
    grad_fn = ll.make_grad_fn(model, loss_fn)
    step = WAYS[way](lambda **options: make_train_step(grad_fn, optimizer, **options))
    state = ll.init_state(model, optimizer)
    state = state if bound else ll.copy_state(state)
    for at, x in enumerate(data):
        state, _ = step(state, x)
        assert state.skipped is not made[at]
        assert state.step == state.opt_state["count"] == sum(made[: at + 1])
    for name, tensor in raw.named_parameters():
        torch.testing.assert_close(state.params[name], tensor, rtol=1e-5, atol=1e-7)
        if way in ("pure", "donated"):
            assert torch.equal(state.params[name], tensor)
    if bound and way == "donated" and wrapper is skip_large:
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), raw.parameters(), strict=True))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("wrapper", [skip_large, choose_small])
def test_each_member_of_a_stack_decides_for_itself(wrapper, donate):
    data = batches(12)
    model = net()
    optimizer = count_applied(wrapper(adamw(), LIMIT))
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    stack = ll.transforms.stack_states([ll.init_state(model, optimizer, seed=seed) for seed in range(3)])
    scales = [0.1, 1.0, 10.0]  # own batches: one member never skips, one does at times, one does most often
    mapped = ll.vmap_step(step, own_batches=True)
    for x in data:
        stack, _ = mapped(stack, torch.stack([scale * x for scale in scales]))
    counts = []
    for number, scale in enumerate(scales):
        raw, made = raw_loop([scale * x for x in data])
        counts.append(sum(made))
        for name, tensor in raw.named_parameters():
            torch.testing.assert_close(stack.params[name][number], tensor, rtol=1e-4, atol=1e-6)
    assert stack.opt_state["count"].tolist() == counts
    assert counts[0] == len(data)
    assert len(set(counts)) == 3


class Reads(TorchDispatchMode):
    """Counts how often the host asks for the value of a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: ll.optim.apply_if_finite(inner, 3),
        lambda inner: ll.optim.dynamic_loss_scale(ll.ema(ll.optim.apply_if_finite(inner, 3))),
        lambda inner: skip_large(ll.optim.apply_if_finite(ll.optim.skip_spikes(inner), 3), 1e3),
        lambda inner: ll.optim.dynamic_loss_scale(ll.contrib.lookahead(skip_large(ll.optim.skip_spikes(inner), 1e3))),
    ],
    ids=["one", "two around an average", "three", "three around lookahead"],
)
def test_conditional_updates_cost_one_read_together(wrap, donate):
    def reads(optimizer):
        model = net()
        step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
        state = ll.init_state(model, optimizer)
        for x in batches(3):
            state, _ = step(state, x)
        with Reads() as counter:
            step(state, batches(4)[3])
        return counter.count

    # The average and lookahead count their updates on tensors of the host, which they read.
    plain = reads(ll.ema(adamw())) if "ema" in wrap.__code__.co_names else reads(adamw())
    plain = reads(ll.contrib.lookahead(adamw())) if "lookahead" in wrap.__code__.co_names else plain
    assert reads(wrap(adamw())) == plain + 1


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_wrapper_that_knows_nothing_of_when_skips_with_the_others(donate):
    def doubled(optimizer):
        def update(*args, **extra):
            return optimizer.update(*args, **extra)

        def init(params):
            return optimizer.init(params)

        return ll.types.Optimizer(init, update)

    data = batches(12)
    raw, made = raw_loop(data)
    model, optimizer = net(), skip_large(doubled(adamw()), LIMIT)
    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, donate=donate)
    state = ll.init_state(model, optimizer)
    for x in data:
        state, _ = step(state, x)
    assert state.step == sum(made)
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"compile": QUICK}], ids=str)
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda new, state: (new, state), r"update returned 2 values; .* \(params, opt_state, applied\)"),
        (lambda new, state: new, r"update returned a dict; .* \(params, opt_state, applied\)"),
        (lambda new, state: (new, state, None), r"returned None as its third value.* give True, False, or a 0-dim"),
        (lambda new, state: (new, state, torch.ones(2) > 0), r"torch.bool tensor of shape \(2,\) as its third"),
        (lambda new, state: (new, state, torch.tensor(1.0)), r"float32 tensor of shape \(\) as its third"),
    ],
)
def test_an_update_that_does_not_say_whether_it_was_applied_is_refused(returned, message, options):
    plain = adamw()

    def update(grads, opt_state, params, step):
        return returned(*plain.update(grads, opt_state, params, step)[:2])

    model, optimizer = net(), ll.types.Optimizer(plain.init, update)
    step = make_train_step(ll.make_grad_fn(model, loss_fn), optimizer, **options)
    state = ll.init_state(model, optimizer)
    before = ll.copy_state(state)
    with pytest.raises(TypeError, match=message):
        step(state, batches(1)[0])
    assert all(torch.equal(state.params[name], tensor) for name, tensor in before.params.items())


def test_a_choice_after_a_donated_update_is_refused_at_the_first_step():
    inner = adamw()

    def update(grads, opt_state, params, step, **extra):  # which hands on donate=True
        new, new_state, applied = inner.update(grads, opt_state, params, step, **extra)
        good = torch.tensor(True)
        return ll.optim.where(good, new, params), ll.optim.where(good, new_state, opt_state), applied & good

    model, optimizer = net(), ll.types.Optimizer(inner.init, update)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    state, _ = ll.make_train_step(grad_fn, optimizer)(ll.init_state(model, optimizer), batches(1)[0])
    assert state.step == 1
    with pytest.raises(RuntimeError, match=r"applied=tensor\(True\) afterwards.*when=flag & when"):
        ll.make_train_step(grad_fn, optimizer, donate=True)(state, batches(1)[0])


def test_where_takes_trees_of_one_kind():
    new, old = (
        {"a": torch.ones(2), "b": [torch.tensor(1)], "c": 3},
        {"a": torch.zeros(2), "b": [torch.tensor(0)], "c": 3},
    )
    for flag in (True, torch.tensor(True)):
        chosen = ll.optim.where(flag, new, old)
        assert (chosen["a"].tolist(), chosen["b"][0].item(), chosen["c"]) == ([1.0, 1.0], 1, 3)
    for flag in (False, torch.tensor(False)):
        chosen = ll.optim.where(flag, new, old)
        assert (chosen["a"].tolist(), chosen["b"][0].item(), chosen["c"]) == ([0.0, 0.0], 0, 3)
    with pytest.raises(ValueError, match=r"keeps the shapes and dtypes"):
        ll.optim.where(torch.tensor(True), torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match=r"keeps the shapes and dtypes"):
        ll.optim.where(torch.tensor(True), torch.ones(2), torch.ones(2).double())
    weight = nn.Parameter(torch.ones(2))
    assert ll.optim.where(torch.tensor(True), weight, torch.zeros(2)).requires_grad
