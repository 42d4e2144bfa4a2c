"""Gradients of a loss: grad modes, modules in eval mode, hooks, and a backward pass within the backward pass."""

import contextlib
import copy
import functools
import weakref

import pytest
import torch
from shared import SGD, both_states, both_steps, mean_output, mean_square
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looplib as ll

SGD_HALF = ll.optimizer(torch.optim.SGD, lr=0.5, fused=False)


def test_a_loss_may_have_one_element_and_a_parameter_no_graph():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    one = ll.make_grad_fn(model, lambda model, x: model(x).mean(0))(ll.init_state(model), x)
    state = ll.init_state(model)
    plain = state.replace(params={name: tensor.detach().clone() for name, tensor in state.params.items()})
    grad_fn = ll.make_grad_fn(model, mean_output)
    other = grad_fn(plain, x)
    assert all(torch.equal(grad, other.grads[name]) for name, grad in one.grads.items())
    computed = state.replace(params={**state.params, "weight": state.params["weight"] * 2})
    with pytest.raises(ValueError, match=r"parameter weight of the state was computed from others.*MulBackward0"):
        grad_fn(computed, x)


def test_a_parameter_that_is_not_trained_keeps_its_flag_and_its_gradient():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).sum(), trainable=lambda name, _: name.startswith("1"))
    model[0].weight.grad = torch.ones(2, 3)
    assert grad_fn(ll.init_state(model), torch.ones(4, 3)).grads.keys() == {"1.weight", "1.bias"}
    assert model[0].weight.requires_grad
    assert torch.equal(model[0].weight.grad, torch.ones(2, 3))


def test_a_selection_of_frozen_parameters_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"trainable= chose 0\.weight of this Sequential, which require no gradient"):
        ll.make_grad_fn(model, mean_output, trainable=lambda name, _: name.startswith("0"))


def test_a_step_of_a_part_has_the_bits_of_a_raw_loop_over_one_state_of_all_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    raw, x = copy.deepcopy(model), torch.randn(4, 3)
    adamw = ll.optimizer(torch.optim.AdamW, lr=0.1, fused=False)
    state, raw_adamw = ll.init_state(model, adamw), torch.optim.AdamW(raw.parameters(), lr=0.1, fused=False)
    steps = [
        ll.make_train_step(ll.make_grad_fn(model, mean_output, trainable=trainable), adamw)
        for trainable in (lambda name, _: name.startswith("1"), None)
    ]
    for number in (0, 1, 0):
        state, _ = steps[number](state, x)
        raw_adamw.zero_grad()
        raw[0].requires_grad_(number == 1)
        mean_output(raw, x).backward()
        raw_adamw.step()
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())


def test_the_callers_grad_mode_is_kept():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    grad_fn = ll.make_grad_fn(model, mean_output)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert grad_fn(ll.init_state(model), x).grads.keys() == {"weight", "bias"}
            assert torch.is_grad_enabled() == enabled


class Headed(nn.Module):
    def __init__(self, *within):
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(2, 2), *within), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


def test_a_part_that_was_left_in_eval_mode_is_named():
    # As of from_pretrained, within a module of one's own, or within peft's.
    model = Headed(nn.Dropout(0.1))
    model.backbone.eval()
    with pytest.warns(UserWarning, match=r"backbone \(Sequential\) is in eval mode .* call model\.train\(\)"):
        ll.make_grad_fn(model, lambda model, batch: model(batch))


def test_a_whole_model_in_eval_mode_is_trained_and_its_layers_are_named():
    model = Headed(nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Dropout(0.0)).eval()
    with pytest.warns(UserWarning, match="eval mode") as caught:
        grad_fn = ll.make_grad_fn(model, mean_output)
    assert caught[0].filename == __file__
    assert len(caught) == 1
    message = str(caught[0].message)
    assert all(name in message for name in ("backbone.1 (BatchNorm1d)", "backbone.2 (Dropout)", "model.train()"))
    assert "backbone.3" not in message
    out = grad_fn(ll.init_state(model), torch.randn(4, 2))
    assert out.buffers["backbone.1.num_batches_tracked"] == 1
    assert not model.training


def test_a_layer_that_goes_into_eval_mode_too_late_is_named_once():
    model = Headed(nn.BatchNorm1d(2))
    grad_fn = ll.make_grad_fn(model, mean_output)
    model.backbone[1].eval()
    with pytest.warns(
        UserWarning, match=r"^backbone\.1 \(BatchNorm1d\) went into eval mode after .* eval\(\) before make_grad_fn"
    ):
        grad_fn(ll.init_state(model), torch.randn(4, 2))
    grad_fn(ll.init_state(model), torch.randn(4, 2))
    grad_fn = ll.make_grad_fn(model.train(), mean_output)
    grad_fn(ll.init_state(model), torch.randn(4, 2))
    model.backbone[1].eval()  # in the middle of a run
    with pytest.warns(UserWarning, match="went into eval mode"):
        grad_fn(ll.init_state(model), torch.randn(4, 2))
    grad_fn(ll.init_state(model.eval()), torch.randn(4, 2))  # all of it, as for an evaluation by hand
    grad_fn = ll.make_grad_fn(model.train(), mean_output)
    with pytest.warns(
        UserWarning, match=r"^backbone\.1 \(BatchNorm1d\) went into eval mode"
    ):  # before the first step
        grad_fn(ll.init_state(model.eval()), torch.randn(4, 2))
    grad_fn(ll.init_state(model), torch.randn(4, 2))


@both_steps
@pytest.mark.parametrize("later", [True, False], ids=["thawed", "frozen"])
def test_a_layer_that_is_frozen_or_thawed_after_make_grad_fn_is_named_once(later, donate):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(not later)
    step = ll.make_train_step(ll.make_grad_fn(model, mean_square), SGD, donate=donate)
    state = ll.init_state(model, SGD)
    chosen = ll.make_grad_fn(model, mean_square, trainable=lambda name, tensor: name.startswith("1."))
    state, _ = step(state, torch.ones(4, 2))
    model[0].requires_grad_(later)
    with pytest.warns(UserWarning, match=r"0\.weight, 0\.bias changed after make_grad_fn.*trainable=") as caught:
        state, _ = step(state, torch.ones(4, 2))
    assert [one.filename for one in caught] == [__file__]
    step(state, torch.ones(4, 2))
    grads = chosen(ll.init_state(model), torch.ones(4, 2)).grads  # whatever the flags say
    assert grads.keys() == {"1.weight", "1.bias"}


@pytest.mark.parametrize("which", ["trained", "eval", "frozen", "without dropout", "the dropout alone"])
def test_eval_mode_that_is_meant_is_no_matter(which):
    within = [] if which == "eval" else [nn.BatchNorm1d(2), nn.Dropout(0.0 if which == "without dropout" else 0.1)]
    model = Headed(*within)
    model.backbone.eval()
    if which == "trained":
        model.train()
    elif which == "eval":
        model.eval()  # all of it, without a layer that differs
    elif which == "frozen":
        model.backbone.requires_grad_(False)
    elif which == "the dropout alone":
        model.train()
        model.backbone[2].eval()
    ll.make_grad_fn(model, lambda model, batch: model(batch))  # a warning would be an error


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_act_on_bound_states_and_are_refused_on_others(register):
    model, calls = nn.Linear(3, 1), []
    getattr(model.weight, register)(lambda grad: calls.append(1))
    grad_fn = ll.make_grad_fn(model, mean_square)
    state, x = ll.init_state(model, SGD), torch.ones(2, 3)
    pure, donated = (ll.make_train_step(grad_fn, SGD, donate=donate) for donate in (False, True))
    after, _ = pure(state, x)  # on the module's own parameters
    message = r"the parameter weight has a hook of its own .* train with donate=True on a state that is bound"
    for step in (pure, donated):
        with pytest.raises(ValueError, match=message):
            step(after, x)
    with pytest.raises(ValueError, match=message):
        ll.compile_step(pure, backend="eager")(state, x)
    ll.make_eval_step(model, lambda model, x: {"out": model(x).sum()})(after, x)
    for _ in range(2):
        state, _ = donated(state, x)
    assert len(calls) == 3


def test_an_empty_batch_is_refused_and_an_empty_microbatch_adds_nothing():
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    grad_fn = ll.make_grad_fn(model, mean_square)
    state = ll.init_state(model)
    with pytest.raises(ValueError, match="the batch has no samples"):
        grad_fn(state, x[:0])
    (weight, bias) = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    out = ll.accumulate(grad_fn)(state, [x[:0], x[:2], x[2:], x[:0]])
    torch.testing.assert_close(out.grads, {"weight": weight, "bias": bias})
    assert out.samples == 3


@both_states
@both_steps
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_runs_a_backward_pass_is_refused_and_one_with_an_inner_gradient_is_not(
    donate, bound, microbatches
):
    def twice(model, x):
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        return loss

    def penalized(model, x):
        x = x.clone().requires_grad_()
        (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return mean_square(model, x) + inner.square().mean()

    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    raw = copy.deepcopy(model)
    state = ll.init_state(model, SGD_HALF)
    state = state if bound else ll.copy_state(state)
    steps = [
        ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches), SGD_HALF, donate=donate)
        for loss_fn in (twice, penalized)
    ]
    with pytest.raises(
        ValueError,
        match=r"returns the loss and does not call .* run a backward pass into the parameters.*torch\.autograd\.grad",
    ):
        steps[0](state, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    state, _ = steps[1](state, x)
    penalized(raw, x).backward()
    for name, parameter in raw.named_parameters():
        torch.testing.assert_close(state.params[name], parameter.detach() - 0.5 * parameter.grad)


class Counts(nn.Linear):
    """A layer that counts its passes in a buffer that it writes and in one that it replaces."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("written", torch.tensor(0))
        self.register_buffer("replaced", torch.tensor(0))

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced + 1
        return super().forward(x)


@both_steps
def test_a_microbatch_without_samples_leaves_no_statistics(donate):
    model = Counts()
    grad_fn = ll.accumulate(ll.make_grad_fn(model, mean_square))
    step, x = ll.make_train_step(grad_fn, SGD, donate=donate), torch.randn(3, 2)
    state, _ = step(ll.init_state(model, SGD), [x[:0], x[:2], x[:0], x[2:], x[:0]])
    assert state.buffers == {"written": 2, "replaced": 2}
    assert not donate or model.replaced is state.buffers["replaced"]


@pytest.mark.every_case
@both_states
@both_steps
def test_steps_with_empty_microbatches_continue_and_hold_no_old_weights(donate, bound):
    """Passes that do not count run within others, and leave no note of the tensors that these lend the module."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    raw = copy.deepcopy(model)
    raw_sgd = torch.optim.SGD(raw.parameters(), lr=0.1)
    step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, mean_square)), SGD, donate=donate)
    state = ll.init_state(model, SGD)
    if not bound:
        state = ll.copy_state(state)
    for number in range(4):
        old = weakref.ref(state.params["weight"])
        state, _ = step(state, [x, x[:0]])
        assert donate or (bound and not number) or old() is None
        raw_sgd.zero_grad()
        mean_square(raw, x).backward()
        raw_sgd.step()
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())
    if donate and not bound:
        with pytest.warns(UserWarning, match="this Linear still has the weights of before training"):
            model(x)


@pytest.mark.every_case
@both_steps
def test_a_loss_may_predict_with_the_state_that_it_trains(donate):
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1), torch.randn(3, 2)
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    raw = copy.deepcopy(model)
    raw_sgd = torch.optim.SGD(raw.parameters(), lr=0.1)

    def loss_fn(model, x):
        return (model(x) - 2 * predict_step(state, x) + 1).square().mean()

    step, state = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=donate), ll.init_state(model, SGD)
    for _ in range(4):
        state, _ = step(state, x)
        raw_sgd.zero_grad()
        (raw(x) - 2 * raw(x).detach() + 1).square().mean().backward()
        raw_sgd.step()
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())
    assert torch.equal(predict_step(state, x), raw(x))


def fails(model, x):
    model(x)
    raise ArithmeticError


@pytest.mark.parametrize("loss_fn", [fails, lambda model, x: (model(x) * float("nan")).mean()])
def test_a_module_follows_a_donated_run_after_a_pass_that_failed(loss_fn):
    model, x = Counts(), torch.randn(3, 2)
    optimizer = ll.chain(ll.skip_nonfinite(), SGD)
    good, bad = (
        ll.make_train_step(ll.make_grad_fn(model, each), optimizer, donate=True) for each in (mean_output, loss_fn)
    )
    state, _ = good(ll.init_state(model, optimizer), x)
    with contextlib.suppress(ArithmeticError):
        state, _ = bad(state, x)
    state, _ = good(state, x)
    assert state.buffers == {"written": 2, "replaced": 2}
    assert all(buffer is state.buffers[name] for name, buffer in model.named_buffers())


def test_what_a_loss_detaches_stays_detached_in_a_differentiable_step():
    model = nn.Linear(2, 1, bias=False)
    grad_fn = ll.make_grad_fn(model, lambda model, x: (model.weight.detach() * model.weight).sum() + 0 * x.sum())
    step = ll.transforms.differentiable(ll.make_train_step(grad_fn, SGD))
    start = ll.copy_state(ll.init_state(model, SGD))
    weight = start.params["weight"].detach().requires_grad_()
    state, _ = step(start.replace(params={"weight": weight}), torch.ones(1))
    (found,) = torch.autograd.grad(state.params["weight"].sum(), weight)
    assert torch.equal(found, torch.ones(1, 2))  # of w - lr * w.detach(), and not 1 - lr


class Scaled(nn.Module):
    """A linear layer and a parameter of one element, of which the loss may be a view."""

    def __init__(self, shape):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(shape)), nn.Linear(2, 1)


@pytest.mark.every_case
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_gradient_that_is_a_view_of_the_losss_is_its_parameters_own(shape):
    def loss(model, x):
        return model.linear(x).square().mean() + model.scale.view(())

    def bystander():
        return ll.make_grad_fn(other, mean_output)(ll.init_state(other), torch.ones(4, 2)).grads["weight"].tolist()

    torch.manual_seed(0)
    model, raw, other, x = Scaled(shape), Scaled(shape), nn.Linear(2, 1), torch.randn(4, 2)
    raw.load_state_dict(model.state_dict())
    before, optimizer = bystander(), torch.optim.SGD(raw.parameters(), lr=0.1, fused=True)
    clipped = ll.chain(ll.clip_by_global_norm(0.5), SGD)
    step = ll.make_train_step(ll.make_grad_fn(model, loss), clipped, donate=True)
    state = ll.init_state(model, clipped)
    for _ in range(3):
        optimizer.zero_grad()
        loss(raw, x).backward()
        nn.utils.clip_grad_norm_(raw.parameters(), 0.5)
        optimizer.step()
        state, _ = step(state, x)
    for name, parameter in raw.named_parameters():
        torch.testing.assert_close(state.params[name], parameter, rtol=1e-6, atol=0)  # clipping rounds once less
    accumulated = ll.accumulate(ll.make_grad_fn(model, loss), 2)
    one, two = (accumulated(state, x).grads["scale"] for _ in range(2))
    assert one.item() == two.item() == 1.0
    assert bystander() == before


@both_steps
@pytest.mark.parametrize(
    "loss",
    [lambda m, x: m.w[0], lambda m, x: m.w, lambda m, x: ll.Mean(m.w.view(()), 1)],
    ids=["part", "all", "mean"],
)
def test_the_loss_of_a_step_is_that_before_its_update_though_it_is_a_parameter(loss, donate):
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([3.0]))
    step, state = ll.make_train_step(ll.make_grad_fn(model, loss), SGD, donate=donate), ll.init_state(model, SGD)
    state, metrics = step(state, torch.ones(1))
    step(state, torch.ones(1))
    assert ll.compute(metrics) == {"loss": 3.0}


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gradients_of_ddp_that_are_views_of_its_buckets_are_the_callers(one_process, dtype):
    model = DistributedDataParallel(nn.Linear(2, 1), gradient_as_bucket_view=True)
    plain = copy.deepcopy(model.module)
    x = torch.randn(8, 2)
    of_engine, of_plain = (ll.make_grad_fn(net, mean_square) for net in (model, plain))
    if dtype is not None:
        of_engine, of_plain = (ll.accumulate(grad_fn, 4, dtype=dtype) for grad_fn in (of_engine, of_plain))
    states = ll.init_state(model), ll.init_state(plain)
    outs = [(of_engine(states[0], x * k, donate=True), of_plain(states[1], x * k, donate=True)) for k in range(1, 6)]
    for out, expected in outs:
        for name, grad in expected.grads.items():
            assert torch.equal(out.grads[name], grad)
    step = ll.make_train_step(of_engine, SGD, donate=True)  # an accumulation in another dtype keeps those of a call
    state, _ = step(ll.init_state(model, SGD), x)
    for name, param in plain.named_parameters():
        expected = param.detach() - 0.1 * outs[0][1].grads[name]
        assert torch.equal(state.params[name].detach(), expected)


@pytest.mark.every_case
@both_steps
@pytest.mark.parametrize("around", ["loop", "loss"])
def test_autocast_around_a_whole_loop_has_the_numbers_of_autocast_around_each_pass(donate, around):
    """autocast keeps casts of weights until its block ends, so a raw loop in one block computes with the first ones."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    raw = copy.deepcopy(model)
    raw_sgd = torch.optim.SGD(raw.parameters(), lr=0.5)
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)

    def loss_fn(model, x):
        return (model(x).float() - 1).square().mean()

    grad_fn = ll.make_grad_fn(model, loss_fn if around == "loop" else ll.autocast(loss_fn, torch.bfloat16))
    step, state = ll.make_train_step(grad_fn, SGD_HALF, donate=donate), ll.init_state(model, SGD_HALF)
    predict_step = ll.make_predict_step(model, lambda model, x: model(x))
    outputs, expected = [], []
    with autocast() if around == "loop" else contextlib.nullcontext():
        for _ in range(4):
            if donate:
                model(x)  # outside of a step, the cache is yours
            old = weakref.ref(state.params["weight"])
            state, metrics = step(state, x)
            with contextlib.nullcontext() if around == "loop" else autocast():
                outputs += [metrics["loss"].compute(), predict_step(state, x)]
            assert donate or old() is None or old() is model.weight
    for _ in range(4):
        raw_sgd.zero_grad()
        with autocast():
            loss = loss_fn(raw, x)
        loss.backward()
        raw_sgd.step()
        with autocast(), torch.no_grad():
            expected += [loss.detach(), raw(x)]
    assert all(map(torch.equal, outputs, expected))
    assert all(torch.equal(state.params[name], tensor) for name, tensor in raw.named_parameters())
