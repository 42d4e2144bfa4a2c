"""Tensors out of a loss: a hidden state that is carried from batch to batch, beside a raw loop that detaches it."""

import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
from shared import SGD
from torch import nn

import looplib as ll


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.head(out), hidden


def loss_fn(model, batch):
    x, hidden = batch
    out, hidden = model(x, hidden.transpose(0, 1).contiguous())
    return (out - x.sum(2, keepdim=True)).square().mean(), {"hidden": ll.metrics.Cat(hidden, dim=1)}


def chunks(count):
    return torch.randn(count, 6, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def raw_run(count):
    model = Reader().double()
    sgd, hidden = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(6, 1, 4, dtype=torch.float64)
    for x in chunks(count):
        sgd.zero_grad()
        loss, aux = loss_fn(model, (x, hidden))
        loss.backward()
        sgd.step()
        hidden = aux["hidden"].tensor.detach().transpose(0, 1)
    return dict(model.named_parameters()), hidden


@pytest.mark.every_case
@pytest.mark.parametrize("how", ["pure", "donated", "accumulated", "graph"])
def test_a_hidden_state_is_carried_as_in_a_raw_loop(how):
    model = Reader().double()
    grad_fn = ll.make_grad_fn(model, loss_fn)
    grad_fn = ll.accumulate(grad_fn, 4) if how == "accumulated" else grad_fn
    step = ll.make_train_step(grad_fn, SGD, donate=how == "donated")
    step = ll.compile_step(step, backend="eager") if how == "graph" else step
    state, hidden = ll.init_state(model, SGD), torch.zeros(6, 1, 4, dtype=torch.float64)
    for x in chunks(5):
        state, metrics = step(state, (x, hidden))
        hidden = metrics["hidden"].compute().transpose(0, 1)
        assert hidden.grad_fn is None
        assert not hidden.requires_grad
        assert list(ll.compute(metrics)) == ["loss"]
    params, expected = raw_run(5)
    torch.testing.assert_close(state.params, params, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_merging_concatenates_along_the_dimension(shape):
    parts = [torch.randn(shape) for _ in range(3)]
    merged = ll.metrics.merge(*({"x": ll.metrics.Cat(part)} for part in parts))["x"].compute()
    assert torch.equal(merged, torch.cat([part.reshape(-1) if not shape else part for part in parts]))


@dataclasses.dataclass(frozen=True)
class Largest:
    """A user's record."""

    value: torch.Tensor

    def merge(self, other):
        return Largest(torch.maximum(self.value, other.value))

    def compute(self):
        return self.value


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_a_users_own_record_holds_no_graph_and_no_memory_that_a_later_step_writes(donate):
    model = nn.Linear(3, 1)
    activations = []

    def loss_fn(model, x):
        inner = x * model.weight
        activations.append(weakref.ref(inner))
        return model(x).mean(), {"largest": Largest(inner.max()), "weight": Largest(model.weight)}

    step = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD, donate=donate)
    state, before = ll.init_state(model, SGD), model.weight.detach().clone()
    state, metrics = step(state, torch.ones(4, 3))
    gc.collect()
    assert metrics["largest"].value.grad_fn is None
    assert activations[0]() is None
    assert torch.equal(metrics["weight"].value, before)
    step(state, torch.ones(4, 3))
    assert torch.equal(metrics["weight"].value, before)


def test_evaluate_warns_of_a_tensor_that_it_leaves_out_and_evaluate_records_returns_it():
    model = torch.nn.Linear(2, 1)
    state, x = ll.init_state(model), torch.randn(6, 2)
    step = ll.make_eval_step(model, lambda model, x: {"mean": model(x).mean(), "outputs": ll.metrics.Cat(model(x))})
    with pytest.warns(UserWarning, match=r"leaves out 'outputs', a Cat.*ll\.evaluation\.evaluate_records") as caught:
        assert [*ll.evaluate(step, state, x.split(4))] == ["mean"]
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = ll.evaluation.evaluate_records(step, state, x.split(4))
    torch.testing.assert_close(records["outputs"].compute(), model(x).detach())
