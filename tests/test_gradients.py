"""Gradients: clipping against torch's own, and a backward pass within the backward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import looplib as ll
from looplib.types import RunningSum


@given(seed=st.integers(0, 1000), scale=st.floats(1e-4, 1e4), max_norm=st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_clip_by_global_norm_has_the_bits_of_torchs(seed, scale, max_norm):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    x = torch.randn(4, 7) * scale

    def loss_fn(model, x):
        return model(x).square().mean()

    clipped = ll.clip_by_global_norm(ll.make_grad_fn(model, loss_fn), max_norm)
    out = clipped(ll.init_state(model), x)
    loss_fn(model, x).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    assert all(torch.equal(out.grads[name], p.grad) for name, p in model.named_parameters())
    assert ll.compute(out.metrics)["grad_norm"] == norm.item()


def test_a_norm_that_is_not_positive_is_refused():
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_norm is .*above 0"):
            ll.clip_by_global_norm(lambda state, batch, request: None, wrong)
    clipped = ll.clip_by_global_norm(lambda state, batch, request: None, 1.0)
    with pytest.raises(ValueError, match=r"put it around, clip_by_global_norm\(accumulate"):
        clipped(ll.TrainState(), None, ll.types.GradRequest(sum=RunningSum()))


def test_parts_add_up_to_the_whole():
    # What accumulate will stand on: sums and weights of the parts, each added into the gradients so far.
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(10, 5, dtype=torch.double), torch.randint(0, 3, (10,))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def token_loss(model, batch):
        return ll.Mean(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    state = ll.copy_state(ll.init_state(model))
    for fn in (loss_fn, token_loss):
        grad_fn = ll.make_grad_fn(model, fn)
        whole = grad_fn(state, (x, y))
        total, weight = RunningSum(), 0
        for index, batch in enumerate(zip(x.split(4), y.split(4), strict=True)):
            out = grad_fn(state, batch, ll.types.GradRequest(index, sum=total))
            total.grads, weight = out.grads, weight + out.weight
        for name, grad in total.grads.items():
            torch.testing.assert_close(grad * total.normalizer / weight, whole.grads[name], rtol=1e-14, atol=1e-16)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_may_have_one_element_and_a_parameter_no_graph():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    one = ll.make_grad_fn(model, lambda model, x: model(x).mean(0))(ll.init_state(model), x)
    state = ll.init_state(model)
    plain = state.replace(params={name: tensor.detach().clone() for name, tensor in state.params.items()})
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    other = grad_fn(plain, x)
    assert all(torch.equal(grad, other.grads[name]) for name, grad in one.grads.items())
    computed = state.replace(params={**state.params, "weight": state.params["weight"] * 2})
    with pytest.raises(ValueError, match=r"parameter weight of the state was computed from others.*MulBackward0"):
        grad_fn(computed, x)


def test_the_callers_grad_mode_is_kept():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
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


def test_a_whole_model_in_eval_mode_is_trained_in_training_mode_and_its_layers_are_named():
    model = Headed(nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Dropout(0.0)).eval()
    with pytest.warns(UserWarning, match="eval mode") as caught:
        grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).mean())
    assert caught[0].filename == __file__
    assert len(caught) == 1
    message = str(caught[0].message)
    assert all(name in message for name in ("backbone.1 (BatchNorm1d)", "backbone.2 (Dropout)", "model.train()"))
    assert "backbone.3" not in message
    out = grad_fn(ll.init_state(model), torch.randn(4, 2))
    assert out.buffers["backbone.1.num_batches_tracked"] == 1
    assert not model.training


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
    model, optimizer, calls = nn.Linear(3, 1), ll.optimizer(torch.optim.SGD, lr=0.1), []
    getattr(model.weight, register)(lambda grad: calls.append(1))
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    state, x = ll.init_state(model, optimizer), torch.ones(2, 3)
    pure, donated = (ll.make_train_step(grad_fn, optimizer, donate=donate) for donate in (False, True))
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


class RunsAgain(torch.autograd.Function):
    """As a reentrant checkpoint: its backward pass runs the layer, and a backward pass of its own through it."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grad)
        return None, x.grad


def test_a_function_with_a_backward_pass_of_its_own_gives_its_parameters_their_gradients():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(5, 3)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    grad_fn = ll.make_grad_fn(model, lambda model, x: RunsAgain.apply(model[1], model[0](x)).square().mean())
    for _ in range(2):
        grads = grad_fn(ll.init_state(model), x).grads
        torch.testing.assert_close(list(grads.values()), list(expected))
    assert all(param.grad is None for param in model.parameters())
