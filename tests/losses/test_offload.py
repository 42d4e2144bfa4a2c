"""Offloaded activations against the same loss without it, to the bit, on the CPU and on a stand-in for an accelerator."""

import pytest
import torch
from far.device import far
from far.test_cases import bits
from shared import SGD, both_steps
from test_recompute import CHOICES, batch, loss_fn, run
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import looplib as ll
from looplib.losses import offload, recompute


@pytest.fixture
def device():
    with far() as device:
        yield device


@pytest.mark.slow
@both_steps
@pytest.mark.parametrize("microbatches", [2, 1])
def test_a_run_has_the_bits_of_one_without(device, donate, microbatches):
    expected = run(loss_fn, microbatches, donate)
    losses = [offload(loss_fn, choice) for choice in CHOICES.values()]
    losses += [
        recompute(offload(loss_fn, lambda name, module: name == "blocks.0"), lambda name, module: name == "blocks.1")
    ]
    for loss in losses:
        assert run(loss, microbatches, donate, device=device) == expected
        assert run(loss, microbatches, donate) == expected


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.outputs = nn.Linear(3, 6), nn.Linear(6, 1), []

    def forward(self, x):
        hidden = self.first(x)
        output = torch.tanh(hidden)  # which tanh saves, and the last layer
        self.outputs = [StorageWeakRef(each.untyped_storage()) for each in (hidden, output)]
        return self.last(output)


def test_between_the_passes_activations_have_left_the_device_and_parameters_have_not(device, monkeypatch):
    def watched(model, x):
        loss = loss_fn(model, x)
        torch.accelerator.synchronize()  # until then the copies are under way
        alive.append([not output.expired() for output in model.outputs])
        return loss

    def counted(tensor, **options):
        copied.extend([tuple(tensor.shape)] if options.get("pin_memory") else [])
        return empty_like(tensor, **options)

    alive, copied, empty_like, model, x = [], [], torch.empty_like, Layers().to(device), batch(device)
    monkeypatch.setattr(torch, "empty_like", counted)
    for loss in (watched, offload(watched, nn.Linear), offload(watched, Layers)):
        ll.make_grad_fn(model, loss)(ll.init_state(model), x)
    assert alive == [[False, True], [False, True], [False, False]]
    # Of the two layers their inputs, but no weight; of the whole also the output of tanh, which the last layer saves too.
    assert copied == [(8, 3), (8, 6), (8, 3), (8, 6), (8, 6)]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.layer(x)).mul_(2)


def test_a_saved_tensor_that_changes_is_refused_or_was_copied_before(device):
    def grads(device, loss, form=InPlace):
        torch.manual_seed(0)
        model = form().to(device)
        return ll.make_grad_fn(model, loss)(ll.init_state(model), batch(device)).grads

    for loss in (loss_fn, offload(loss_fn, InPlace)):
        with pytest.raises(RuntimeError, match=r"in.?place"):
            grads("cpu", loss)
    doubled = grads("cpu", lambda model, x: (2 * torch.tanh(model.layer(x))).square().mean())
    assert bits(grads(device, offload(loss_fn, InPlace))) == bits(doubled)


def test_in_a_graph_it_has_no_effect(monkeypatch):
    def step(loss):
        step = ll.make_train_step(ll.make_grad_fn(model, loss), SGD)
        return ll.compile_step(step, backend="eager")(ll.init_state(model, SGD), batch("cpu"))[0].params

    def hooked(*hooks):
        raise AssertionError("no hook in a graph")

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = bits(step(loss_fn))
    monkeypatch.setattr("torch.autograd.graph.saved_tensors_hooks.__init__", hooked)
    assert bits(step(offload(loss_fn, nn.Linear))) == expected
