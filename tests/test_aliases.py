"""Tensors of a user's that share memory with what a donated step writes: the same numbers as in a pure step."""

import pytest
import torch
from shared import SGD, one_report
from torch import nn

import looplib as ll

KINDS = ["pure", "donated", "graph", "donated graph"]
each_kind = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.every_case


def made_step(grad_fn, optimizer, kind):
    step = ll.make_train_step(grad_fn, optimizer, donate="donated" in kind)
    return ll.compile_step(step, backend="eager") if "graph" in kind else step


# The weight of a loss


class Counting(nn.Module):
    """Keeps the number of tokens of its last batch in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1).double()
        self.register_buffer("tokens", torch.zeros((), dtype=torch.float64))

    def forward(self, x, mask):
        self.tokens.copy_(mask.sum())
        return self.linear(x).squeeze(2) * mask


def counted_loss(model, batch):
    x, mask = batch
    return ll.Mean(model(x, mask).square().sum(), model.tokens)


def token_batches(count):
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        lengths = torch.tensor([1, 5, 2, 4]) if number % 2 else torch.tensor([5, 3, 4, 2])
        mask = (torch.arange(5) < lengths[:, None]).double()
        yield torch.randn(4, 5, 3, dtype=torch.float64, generator=generator), mask


@one_report
@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_weight_of_a_loss_may_be_a_buffer_that_the_forward_pass_writes(kind, microbatches):
    model = Counting()
    grad_fn = ll.make_grad_fn(model, counted_loss)
    step = made_step(ll.accumulate(grad_fn, microbatches) if microbatches > 1 else grad_fn, SGD, kind)
    raw, losses = Counting(), []
    sgd, state, kept = torch.optim.SGD(raw.parameters(), lr=0.1), ll.init_state(model, SGD), []
    for x, mask in token_batches(4):
        sgd.zero_grad()
        loss = raw(x, mask).square().sum() / mask.sum()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
        state, metrics = step(state, (x, mask))
        kept.append(metrics)
    for name in ("linear.weight", "linear.bias"):
        torch.testing.assert_close(state.params[name], raw.get_parameter(name).detach(), check_dtype=False)
    assert [ll.compute(metrics)["loss"] for metrics in kept] == pytest.approx(losses, rel=1e-12)


# Functional updates


def net():
    torch.manual_seed(0)
    return nn.ParameterDict({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})


def sum_of_squares(model, x):
    return ((model["a"].square() + model["b"].square()) * x).sum()


UPDATES = {
    "lagging": lambda grads, params: {"a": params["a"] - 0.1 * grads["a"], "b": params["a"].detach()},
    "swapped": lambda grads, params: {"a": params["b"].detach(), "b": params["a"].detach()},
    "swapped and moved": lambda grads, params: {"a": params["b"] - 0.1 * grads["b"], "b": params["a"]},
    "flipped": lambda grads, params: {**params, "a": params["a"].detach().flip(0)},
}


@one_report
@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("how", UPDATES)
def test_a_functional_update_may_return_parameters_in_other_places(how, kind):
    def update_(grads, opt_state, params, step):
        with torch.no_grad():
            return UPDATES[how](grads, params), opt_state

    model, optimizer = net(), ll.optim.part("moves", update_=update_, role="weights")
    step, state = made_step(ll.make_grad_fn(model, sum_of_squares), optimizer, kind), ll.init_state(model, optimizer)
    expected = {name: tensor.detach().clone() for name, tensor in state.params.items()}
    for _ in range(3):
        grads = {name: 2 * tensor for name, tensor in expected.items()}
        expected = {name: tensor.clone() for name, tensor in UPDATES[how](grads, expected).items()}
        state, _ = step(state, torch.ones(2))
        torch.testing.assert_close(state.params, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
        storages = {tensor.untyped_storage().data_ptr() for tensor in state.params.values()}
        assert len(storages) == 2


def test_the_first_half_of_an_update_leaves_no_graph_in_the_state():
    def transform(grads, opt_state, params, step):
        return ll.types.Transformed(grads, {"mean": 0.9 * opt_state["mean"] + 0.1 * params["a"].square().sum()})

    def update_(grads, opt_state, params, step):
        with torch.no_grad():
            params["a"].sub_(0.1 * grads["a"])
        return params, opt_state

    model = net()
    for donate in (False, True):
        optimizer = ll.optim.part(
            "watches",
            init=lambda params: {"mean": torch.zeros(())},
            transform=transform,
            update_=update_,
            role="weights",
        )
        step = ll.make_train_step(ll.make_grad_fn(model, sum_of_squares), optimizer, donate=donate)
        state, _ = step(ll.copy_state(ll.init_state(model, optimizer)), torch.ones(2))
        assert state.opt_state["watches"]["mean"] > 0
        assert state.opt_state["watches"]["mean"].grad_fn is None
        assert not state.opt_state["watches"]["mean"].requires_grad


# Graphs


@pytest.mark.parametrize("kind", ["pure", "graph"])
def test_fields_of_the_state_that_are_none_are_none_in_graphs_too(kind):
    def scaled(grad_fn):
        def scaled_grad_fn(state, batch, **request):
            out = grad_fn(state, batch, **request)
            factor = (1 if state.epoch_length is None else 2) * (1 if state.extra is None else 3)
            return out._replace(grads={name: grad * factor for name, grad in out.grads.items()})

        return scaled_grad_fn

    model = net()
    step = made_step(scaled(ll.make_grad_fn(model, sum_of_squares)), SGD, kind)
    for options, factor in (({}, 1), ({"epoch_length": 5}, 2), ({"extra": {"a": 1}}, 3)):
        state = ll.init_state(net(), SGD, **options)
        new, _ = step(state, torch.ones(2))
        torch.testing.assert_close(
            new.params["a"], state.params["a"].detach() * (1 - 0.2 * factor), check_dtype=False
        )
