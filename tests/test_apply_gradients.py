"""`apply_gradients`: updates from gradients of any origin, beside raw loops and train steps."""

import copy
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import examples, one_report
from torch import nn
from torch.func import functional_call

import looplib as ll

both = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
BATCHES = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)]


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def same(one, other):
    for name in ("params", "buffers"):
        mine, others = getattr(one, name), getattr(other, name)
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[key], others[key]) for key in mine), name
    leaves = [torch.utils._pytree.tree_leaves(state.opt_state) for state in (one, other)]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*leaves, strict=True))
    return True


def counts(state):
    return state.step, state.epoch, state.batch, state.samples, state.batch_samples, state.batch_steps, state.no_batch


# A train step is its gradient function and this


@both
@pytest.mark.parametrize("wrapped", ["plain", "skipping, averaging and accumulating"])
def test_a_train_step_is_its_gradient_function_and_apply_gradients(wrapped, donate):
    states = []
    for by_hand in (False, True):
        model = net()
        optimizer = ll.optimizer(torch.optim.AdamW, lr=lambda step: 0.01 / (step + 1))
        grad_fn = ll.make_grad_fn(model, loss_fn)
        if wrapped != "plain":
            optimizer = ll.chain(
                ll.skip_nonfinite(), ll.clip_by_global_norm(1.0), optimizer, ll.ema(0.9, buffers=True)
            )
            grad_fn = ll.accumulate(grad_fn, 2)
        step = ll.make_train_step(grad_fn, optimizer, donate=donate)
        state = ll.init_state(model, optimizer, epoch_length=4)
        for number, (x, y) in enumerate(BATCHES):
            if wrapped != "plain" and number == 2:
                x = x * torch.nan
            if by_hand:
                gradients = grad_fn(state, (x, y), donate=donate)
                state, metrics = ll.apply_gradients(optimizer, state, gradients, donate=donate, samples=len(x))
            else:
                state, metrics = step(state, (x, y))
            assert state.skipped == (wrapped != "plain" and number == 2)
        assert metrics.keys() == ({"loss"} if wrapped == "plain" else {"loss", "grad_norm"})
        states.append(state)
    assert same(*states)
    assert counts(states[0]) == counts(states[1])


# Gradients of any origin, beside a raw loop


@both
def test_gradients_of_torch_func_have_the_bits_of_a_raw_loop(donate):
    def loss_of(params, buffers, batch):
        out = functional_call(model, {**params, **buffers}, batch[0])
        return nn.functional.cross_entropy(out, batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    raw = copy.deepcopy(model)
    reference = torch.optim.AdamW(raw.parameters(), lr=0.01, fused=True)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.01, fused=True)
    state = ll.init_state(model, optimizer)
    for batch in BATCHES:
        grads = torch.func.grad(loss_of)(dict(state.params), state.buffers, batch)
        state, metrics = ll.apply_gradients(optimizer, state, grads, donate=donate)
        assert metrics == {}
        reference.zero_grad()
        loss_fn(raw, batch).backward()
        reference.step()
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())
    if donate:
        assert all(state.params[name] is tensor for name, tensor in model.named_parameters())


@both
def test_a_parameter_without_a_gradient_is_left_as_it_is(donate):
    model, raw = nn.Linear(2, 1), nn.Linear(2, 1)
    raw.load_state_dict(model.state_dict())
    reference = torch.optim.AdamW(raw.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = ll.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    state = ll.init_state(model, optimizer)
    for grads in ({"weight": torch.ones(1, 2)}, {"weight": torch.ones(1, 2), "bias": None}, {"bias": torch.ones(1)}):
        state, _ = ll.apply_gradients(optimizer, state, grads, donate=donate)
        reference.zero_grad()
        for name, grad in grads.items():
            getattr(raw, name).grad = grad
        reference.step()
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())


def test_buffers_of_a_forward_pass_of_ones_own_are_taken_over():
    model = net()
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    kept = ll.copy_state(ll.init_state(model, optimizer))
    grads = {name: torch.ones_like(tensor) for name, tensor in kept.params.items()}
    mean = torch.full((5,), 7.0)
    state, _ = ll.apply_gradients(optimizer, kept, grads, buffers={"1.running_mean": mean})
    mean.zero_()  # the caller's own tensor, which a state does not share
    assert torch.equal(state.buffers["1.running_mean"], torch.full((5,), 7.0))
    assert torch.equal(state.buffers["1.running_var"], kept.buffers["1.running_var"])
    bound = ll.init_state(model, optimizer)
    state, _ = ll.apply_gradients(
        optimizer, bound, grads, buffers={"1.running_mean": torch.full((5,), 3.0)}, donate=True
    )
    assert state.buffers["1.running_mean"] is model[1].running_mean  # the module follows
    assert torch.equal(model[1].running_mean, torch.full((5,), 3.0))


@pytest.mark.parametrize("make", ["params", "moments"])
def test_gradients_that_share_memory_with_the_state_are_copied_first(make):
    """Decay by hand: the gradient is the weight itself, which AdamW scales before it reads the gradient."""
    torch.manual_seed(0)
    params, opt = nn.Linear(3, 2), ll.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5, foreach=True)
    state = ll.init_state(params, opt)
    state, _ = ll.apply_gradients(opt, state, {name: torch.randn_like(t) for name, t in state.params.items()})
    state = ll.copy_state(state)

    def grads_of(state):
        if make == "params":
            return dict(state.params)
        return {name: entries["exp_avg"] for name, entries in state.opt_state["AdamW"]["state"].items()}

    expected, _ = ll.apply_gradients(opt, state, {name: grad.clone() for name, grad in grads_of(state).items()})
    own = ll.copy_state(state)
    found, _ = ll.apply_gradients(opt, own, grads_of(own), donate=True)
    assert same(found, expected)


def test_lbfgs_is_given_evaluate():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = nn.Linear(3, 1)
    raw = copy.deepcopy(model)
    reference = torch.optim.LBFGS(raw.parameters(), lr=0.5)
    optimizer = ll.optimizer(torch.optim.LBFGS, lr=0.5)
    state = ll.init_state(model, optimizer)

    def value_and_grads(params):
        grads, value = torch.func.grad_and_value(
            lambda params: nn.functional.mse_loss(functional_call(model, params, x), y)
        )({name: tensor.detach() for name, tensor in params.items()})
        return value, grads

    def closure():
        reference.zero_grad()
        loss = nn.functional.mse_loss(raw(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        _, grads = value_and_grads(state.params)
        state, _ = ll.apply_gradients(optimizer, state, grads, evaluate=value_and_grads)
        reference.step(closure)
    for name, tensor in raw.named_parameters():
        torch.testing.assert_close(
            state.params[name], tensor, rtol=1e-5, atol=1e-6
        )  # torch.func adds in another order


# Purity, skips, donation


def reporting(optimizer, values):
    """The optimizer, with updates that report these plain values, one after another."""

    def update_(grads, opt_state, params, step):
        return params, opt_state, {"share": torch.tensor(next(values))}

    return ll.chain(optimizer, ll.optim.part("shares", update_=update_))


@both
@pytest.mark.parametrize("made_by", ["a gradient function", "hand"])
def test_plain_values_that_an_update_reports_are_averaged(made_by, donate):
    model = net()
    optimizer = reporting(ll.optimizer(torch.optim.SGD, lr=0.1), iter([1.0, 4.0]))
    state, grad_fn = ll.init_state(model, optimizer), ll.make_grad_fn(model, loss_fn)
    merged = None
    for batch in BATCHES[:2]:
        gradients = grad_fn(state, batch)
        if made_by == "hand":
            gradients = gradients.grads
        state, metrics = ll.apply_gradients(optimizer, state, gradients, donate=donate)
        merged = metrics if merged is None else ll.metrics.merge(merged, metrics)
    assert ll.compute(merged)["share"] == 2.5
    assert state.samples == 0


def test_a_pure_update_changes_nothing_that_it_is_given():
    model = net()
    optimizer = ll.chain(ll.optimizer(torch.optim.AdamW, lr=0.1), ll.ema())
    state = ll.init_state(model, optimizer)
    kept = ll.copy_state(state)
    grads = {name: torch.randn_like(tensor) for name, tensor in state.params.items()}
    before = {name: grad.clone() for name, grad in grads.items()}
    new, _ = ll.apply_gradients(optimizer, state, grads)
    assert same(state, kept)
    assert all(torch.equal(grads[name], before[name]) for name in grads)
    assert not any(tensor.requires_grad and tensor.grad_fn for tensor in new.params.values())
    memories = [
        {tensor.data_ptr() for tensor in torch.utils._pytree.tree_leaves((each.params, each.opt_state))}
        for each in (state, new)
    ]
    assert memories[0].isdisjoint(memories[1])


@both
@pytest.mark.parametrize("given", ["a gradient function", "hand"])
def test_gradients_that_are_clipped_or_divided_by_a_scale_are_copies(given, donate):
    model, raw = nn.Linear(2, 1), nn.Linear(2, 1)
    raw.load_state_dict(model.state_dict())
    optimizer = ll.chain(
        ll.optim.dynamic_loss_scale(8.0), ll.clip_by_global_norm(0.1), ll.optimizer(torch.optim.SGD, lr=0.1)
    )
    state, x = ll.init_state(model, optimizer), torch.randn(4, 2)
    scale = optimizer.loss_scale(state.opt_state)
    out = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())(state, x, scale=scale)
    kept = {name: grad.clone() for name, grad in out.grads.items()}
    if given == "hand":
        state, _ = ll.apply_gradients(optimizer, state, out.grads, donate=donate, scale=scale.item())
    else:
        state, _ = ll.apply_gradients(optimizer, state, out, donate=donate)
    assert all(torch.equal(out.grads[name], grad) for name, grad in kept.items())
    raw(x).square().mean().backward()
    for name, param in raw.named_parameters():
        torch.testing.assert_close(kept[name], 8 * param.grad)
    nn.utils.clip_grad_norm_(raw.parameters(), 0.1)
    torch.optim.SGD(raw.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()), check_dtype=False)


@both
def test_a_skipped_update_leaves_everything_and_counts_the_skip(donate):
    model = net()
    optimizer = ll.chain(ll.skip_nonfinite(), ll.optimizer(torch.optim.AdamW, lr=0.1))
    state = ll.init_state(model, optimizer)
    kept = ll.copy_state(state)
    gradients = ll.make_grad_fn(model, loss_fn)(state, (BATCHES[0][0] * torch.inf, BATCHES[0][1]), donate=donate)
    new, _ = ll.apply_gradients(optimizer, state, gradients, donate=donate)
    assert (new.step, new.skipped) == (0, True)
    assert new.opt_state["skip_nonfinite"]["total_notfinite"] == 1
    for name in ("params", "buffers"):
        assert all(torch.equal(getattr(new, name)[key], tensor) for key, tensor in getattr(kept, name).items())
    assert state.step == 0  # a skipped donated step gives up nothing
    assert state.params


def test_a_failed_gradient_function_called_by_hand_puts_its_buffers_back():
    model = net()

    def failing(model, batch):
        loss_fn(model, batch)
        raise ArithmeticError("of the user's own")

    state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1))
    with pytest.raises(ArithmeticError):
        ll.make_grad_fn(model, failing)(state, BATCHES[0], donate=True)
    assert torch.equal(model[1].running_mean, torch.zeros(5))
    assert model[1].num_batches_tracked == 0


def test_a_donated_state_is_spent_and_one_that_was_refused_is_not():
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, optimizer)
    with pytest.raises(ValueError, match="bias"):
        ll.apply_gradients(optimizer, state, {"bias": torch.ones(2)}, donate=True)
    new, _ = ll.apply_gradients(optimizer, state, {"bias": torch.ones(1)}, donate=True)
    with pytest.raises(ll.DonatedStateError, match="step 1"):
        ll.apply_gradients(optimizer, state, {"bias": torch.ones(1)})
    assert new.step == 1


def acting(optimizer, act):
    """The optimizer, which does something when it has written half of the parameters."""

    def update_(grads, opt_state, params, step, **info):
        params["bias"].add_(1.0)
        act()
        return optimizer.update_(grads, opt_state, params, step, **info)[:2]

    return ll.optim.part("acts", init=optimizer.init, transform=optimizer.transform, update_=update_, role="weights")


def test_a_failing_write_spends_a_donated_state():
    model = nn.Linear(2, 1)
    optimizer = acting(ll.optimizer(torch.optim.SGD, lr=0.1), lambda: 1 / 0)
    state = ll.init_state(model, optimizer)
    grads = {name: torch.ones_like(tensor) for name, tensor in state.params.items()}
    with pytest.raises(ZeroDivisionError):
        ll.apply_gradients(optimizer, state, grads, donate=True)
    with pytest.raises(ll.DonatedStateError, match="failed"):
        ll.apply_gradients(optimizer, state, grads)


def test_ctrl_c_during_the_write_arrives_when_the_state_is_complete():
    model = nn.Linear(2, 1)
    optimizer = acting(ll.optimizer(torch.optim.SGD, lr=0.1), lambda: signal.raise_signal(signal.SIGINT))
    state = ll.init_state(model, optimizer)
    grads = {name: torch.ones_like(tensor) for name, tensor in state.params.items()}
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        state, _ = ll.apply_gradients(optimizer, state, grads, donate=True)
        while True:  # until the signal comes
            pass
    assert state.step == 1
    assert state.params


# Counts and predicates


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(["batch", "event", "same batch", "consumes"]), max_size=30), st.integers(2, 4))
def test_counts_follow_from_the_kinds_of_updates(kinds, length):
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, optimizer, epoch_length=length)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x).square().mean()), optimizer)
    grads = {"bias": torch.ones(1)}
    updates = batches = 0
    ask_steps, ask_epoch, ask_samples = ll.every_n_steps(1), ll.at_epoch_end(), ll.predicates.every_n_samples(5)
    for kind in kinds:
        if kind == "batch":
            state, _ = step(state, torch.ones(5, 2))
        elif kind == "event":
            state, _ = ll.apply_gradients(optimizer, state, grads)
        elif kind == "same batch":
            state, _ = ll.apply_gradients(optimizer, state, grads, same_batch=True)
        else:
            state, _ = ll.apply_gradients(optimizer, state, grads, samples=5)
        updates, batches = updates + 1, batches + (kind in ("batch", "consumes"))
        assert (state.step, state.epoch, state.batch) == (updates, *divmod(batches, length))
        assert state.samples == 5 * batches
        assert ask_steps(state)
        if kind == "event":
            assert not ask_epoch(state)
            assert not ask_samples(state)
        elif kind != "same batch":
            assert ask_epoch(state) == (batches % length == 0)
            assert ask_samples(state)


def test_events_do_not_hide_the_end_of_a_rollout():
    """Reinforcement learning: several updates for each rollout, which `end_epoch` ends."""
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state, at_end, fired = ll.init_state(model, optimizer), ll.at_epoch_end(), []
    for _ in range(3):
        for _ in range(2):
            state, _ = ll.apply_gradients(optimizer, state, {"bias": torch.ones(1)})
            fired.append(at_end(state))
        state = ll.state.end_epoch(state)
        fired.append(at_end(state))
    assert fired == [False, False, True] * 3


@pytest.mark.parametrize("look", ["next epoch", "save"])
@pytest.mark.parametrize("consumes", [False, True])
def test_a_loader_that_ends_at_an_unmoved_position_says_so(consumes, look, tmp_path, recwarn):
    model, optimizer = nn.Linear(1, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    loader = ll.make_loader(torch.ones(12, 1), batch_size=4)
    state = ll.init_state(model, optimizer, loader=loader)
    for batch in loader(state):
        state, _ = ll.apply_gradients(
            optimizer, state, {"bias": torch.ones(1)}, samples=len(batch) if consumes else None
        )
    if look == "save":
        ll.checkpoint_io(tmp_path).save(state)
    else:
        loader(state)
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == (not consumes)
    assert consumes or "samples=len(batch)" in messages[0]


def test_the_new_count_is_saved_and_restored(tmp_path):
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state, _ = ll.apply_gradients(optimizer, ll.init_state(model, optimizer), {"bias": torch.ones(1)})
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    assert ckpt.restore(ll.init_state(nn.Linear(2, 1), optimizer)).no_batch


# Refusals


SPOILED = [
    ({}, "no gradients"),
    ({"bias": None}, "no gradients"),
    ({"nothing": torch.ones(1)}, "no such parameter"),
    ({"module.bias": torch.ones(1)}, "write 'bias'"),
    ({"bias": torch.ones(2)}, r"shape \(2,\).*shape \(1,\)"),
    ({"bias": torch.ones(1, dtype=torch.float64)}, "float64.*float32"),
    ({"bias": torch.ones(1, device="meta")}, "on meta.*on cpu"),
]


@one_report
@pytest.mark.parametrize(("grads", "message"), SPOILED)
@both
def test_gradients_that_do_not_fit_are_refused(grads, message, donate):
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, optimizer)
    with pytest.raises(ValueError, match=message):
        ll.apply_gradients(optimizer, state, grads, donate=donate)
    assert state.params


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": torch.ones(1)}, "gradients are a Tensor"),
        ({"gradients": ({"bias": torch.ones(1)}, 0.5)}, "gradients first"),
        ({"gradients": {"bias": 1.0}}, "the gradient of bias is a float"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)},
            "apply_gradients got, in place of an optimizer, a SGD",
        ),
        ({"state": None}, "state is None"),
        ({"buffers": [torch.ones(1)]}, "buffers are a list"),
    ],
)
def test_other_kinds_of_arguments_are_refused(arguments, message):
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    usual = {"optimizer": optimizer, "state": ll.init_state(model, optimizer), "gradients": {"bias": torch.ones(1)}}
    with pytest.raises(TypeError, match=message):
        ll.apply_gradients(**usual | arguments)


def test_counts_that_contradict_each_other_are_refused():
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state, grads = ll.init_state(model, optimizer), {"bias": torch.ones(1)}
    with pytest.raises(ValueError, match="one of them"):
        ll.apply_gradients(optimizer, state, grads, samples=4, same_batch=True)
    with pytest.raises(ValueError, match="samples is -1"):
        ll.apply_gradients(optimizer, state, grads, samples=-1)
    with pytest.raises(ValueError, match="running"):
        ll.apply_gradients(optimizer, state, grads, buffers={"running": torch.ones(1)})


def test_gradients_of_a_part_or_of_a_scaled_loss_are_refused():
    model, optimizer = nn.Linear(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    state = ll.init_state(model, optimizer)
    out = ll.make_grad_fn(model, lambda model, x: model(x).mean())(state, torch.ones(4, 2))
    with pytest.raises(ValueError, match="microbatch"):
        ll.apply_gradients(optimizer, state, out._replace(weight=4))
    with pytest.raises(ValueError, match="scaled loss"):
        ll.apply_gradients(optimizer, state, out._replace(scale=torch.tensor(2.0)))
    with pytest.raises(ValueError, match="scaled loss"):
        ll.apply_gradients(optimizer, state, out.grads, scale=2.0)
    scaling = ll.chain(ll.optim.dynamic_loss_scale(), optimizer)
    state = ll.init_state(model, scaling)
    for gradients in (out, out.grads):
        with pytest.raises(ValueError, match=r"ll\.apply_gradients\(.*scale=optimizer\.loss_scale"):
            ll.apply_gradients(scaling, state, gradients)
    with pytest.raises(ValueError, match=r"Gradients\.scale.*leave scale= out"):
        ll.apply_gradients(scaling, state, out._replace(scale=torch.tensor(2.0)), scale=2.0)


def test_a_state_of_another_optimizer_is_refused():
    model = nn.Linear(2, 1)
    state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1))
    with pytest.raises(ValueError, match="opt_state"):
        ll.apply_gradients(ll.optimizer(torch.optim.AdamW, lr=0.1), state, {"bias": torch.ones(1)})
