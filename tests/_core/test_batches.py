"""Every function that takes a batch takes the same kinds of batches, and gives what it gives for a dict."""

import dataclasses
from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from shared import SGD
from torch import nn
from torch.utils import _pytree as pytree

import looplib as ll


class Pair(NamedTuple):
    x: Any
    name: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any
    name: str = "digits"


class Tokens(UserDict):
    pass


class Graphs:
    def __init__(self, x, y):
        self.x, self.y = x, y


pytree.register_pytree_node(Graphs, lambda g: ([g.x, g.y], None), lambda children, _: Graphs(*children))

KINDS = {
    "dict": lambda x, y: {"x": x, "scale": 1.0, "y": y},
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "UserDict": lambda x, y: Tokens({"x": x, "y": y, "name": "digits"}),
    "read-only": lambda x, y: MappingProxyType({"x": x, "y": y}),
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y, None],
    "namedtuple": lambda x, y: Pair(x, "digits", y),
    "dataclass": Record,
    "registered": Graphs,
    "nested": lambda x, y: {"x": Record(x, None), "y": [y]},
}


def fields(batch):
    """x and y of any of these."""
    if isinstance(batch, (Record, Pair, Graphs)):
        return batch.x, batch.y
    if isinstance(batch, (list, tuple)):
        return batch[0], batch[1]
    x, y = batch["x"], batch["y"]
    return (x.x, y[0]) if isinstance(x, Record) else (x, y)


def loss_fn(model, batch):
    x, y = fields(batch)
    return (model(x) - y).square().mean()


@pytest.fixture
def data():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return model, torch.randn(7, 3).double(), torch.randn(7, 1).double()


@pytest.fixture(params=KINDS)
def batch(request, data):
    return KINDS[request.param](*data[1:])


def expected_grads(data):
    model, x, y = data
    loss = (model(x) - y).square().mean()
    return dict(zip(["weight", "bias"], torch.autograd.grad(loss, [model.weight, model.bias]), strict=True))


@pytest.mark.parametrize(
    "wrap",
    {
        "whole": lambda grad_fn: grad_fn,
        "microbatches": lambda grad_fn: ll.accumulate(grad_fn, 3),
        "size": lambda grad_fn: ll.accumulate(grad_fn, size=2),
    }.items(),
    ids=lambda item: item[0],
)
def test_gradients(wrap, data, batch):
    model = data[0]
    out = wrap[1](ll.make_grad_fn(model, loss_fn))(ll.init_state(model), batch)
    assert out.samples == 7
    torch.testing.assert_close(out.grads, expected_grads(data))


def test_per_sample_gradients(data, batch):
    model = data[0]
    out = ll.contrib.make_per_sample_grad_fn(model, loss_fn)(ll.init_state(model), batch)
    assert out.grads["weight"].shape == (7, 1, 3)
    torch.testing.assert_close({name: grad.mean(0) for name, grad in out.grads.items()}, expected_grads(data))


def test_per_sample_gradients_refuse_a_list_of_one_item_per_sample(data):
    """Each sample would see the items of all."""
    model, x, y = data
    batch = {"x": x, "y": y, "text": list("abcdefg")}
    with pytest.raises(TypeError, match="the batch has a list with one item for each sample"):
        ll.contrib.make_per_sample_grad_fn(model, loss_fn)(ll.init_state(model), batch)


@pytest.mark.parametrize("size", [7, 3])
def test_evaluation_and_prediction(size, data, batch):
    model, x, y = data
    state = ll.init_state(model)

    def metric_fn(model, batch):
        x, y = fields(batch)
        return {"mse": ll.Mean((model(x) - y).square().sum(), len(x))}

    eval_step = ll.evaluation.split_on_oom(ll.make_eval_step(model, metric_fn), size)
    predict_step = ll.make_predict_step(model, lambda model, batch: model(fields(batch)[0]))
    (outputs,) = ll.predict(ll.evaluation.split_on_oom(predict_step, size), state, [batch])
    with torch.no_grad():
        torch.testing.assert_close(outputs, model(x))
        expected = (model(x) - y).square().mean().item()
    assert ll.evaluate(eval_step, state, [batch])["mse"] == pytest.approx(expected)


OUTPUTS = {
    "dict": lambda x, y: {"x": x, "y": y},
    "UserDict": lambda x, y: Tokens({"x": x, "y": y}),
    "namedtuple": lambda x, y: Pair(x, {"deep": y}, y),
    "list": lambda x, y: [x, (y,)],
    "dataclass": lambda x, y: Record(x, y, x + 1),
    "registered": Graphs,
}


@pytest.mark.parametrize("size", [7, 3])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_microbatches_are_joined_in_their_containers(kind, size, data):
    model, x, y = data
    step = ll.make_predict_step(model, lambda model, batch: OUTPUTS[kind](*batch))
    (outputs,) = ll.predict(ll.evaluation.split_on_oom(step, size), ll.init_state(model), [(x, y)])
    assert type(outputs) is type(OUTPUTS[kind](x, y))
    assert torch.equal(fields(outputs)[0], x)
    assert torch.equal(fields(outputs)[1][0] if kind == "list" else fields(outputs)[1], y)


@pytest.mark.every_case
@pytest.mark.parametrize("microbatches", [1, 3])
def test_compiled_steps(microbatches, data, batch):
    model = data[0]
    step = ll.make_train_step(ll.accumulate(ll.make_grad_fn(model, loss_fn), microbatches), SGD)
    state = ll.copy_state(ll.init_state(model, SGD))
    expected = {name: state.params[name] - 0.1 * grad for name, grad in expected_grads(data).items()}
    after, _ = ll.compile_step(step, backend="eager")(state, batch)
    torch.testing.assert_close(dict(after.params), expected)
