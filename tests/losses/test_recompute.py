"""Recomputation against the same loss without it, to the bit, and against what torch's own checkpoint keeps."""

import pytest
import torch
from far.test_cases import bits
from shared import SGD, both_steps
from shared import mean_square as loss_fn
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import looplib as ll
from looplib.contrib import neftune
from looplib.losses import recompute


class Block(nn.Module):
    """Something of all that a second run could get wrong."""

    def __init__(self, width=6):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(width), nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Dropout(0.3))
        self.out = spectral_norm(nn.Linear(12, width))  # its power iteration writes the buffers it reads
        self.register_buffer("mask", torch.arange(width) > 0)
        self.calls = 0

    def forward(self, x, *, scale=None):
        self.calls += 1
        y = self.out(self.inner(self.norm(x))).masked_fill(~self.mask, 0.0)
        return x + (y if scale is None else y * scale)


class Stack(nn.Module):
    """Four blocks, one of them called twice, and by keyword."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.last = (
            nn.Linear(3, 6),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(6, 1),
        )

    def forward(self, x):
        x = self.first(x)
        for i in (0, 1, 0, 2):
            x = self.blocks[i](x, scale=x.mean() + 2)
        return self.last(x)


CHOICES = {
    "a class": Block,
    "classes": (nn.Linear, nn.BatchNorm1d),
    "nested": (Block, nn.Sequential, nn.GELU),
    "names": lambda name, module: name in ("blocks.0", "blocks.2"),
    "the whole": lambda name, module: name == "",
}


# The same bits


def batch(device="cpu"):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).to(device)


def run(loss, microbatches, donate, bound=True, device="cpu"):
    model, losses = Stack().to(device), []
    grad_fn = ll.accumulate(ll.make_grad_fn(model, loss), microbatches)
    step, state = ll.make_train_step(grad_fn, SGD, donate=donate), ll.init_state(model, SGD)
    state = state if bound else ll.copy_state(state)
    for _ in range(3):
        state, metrics = step(state, batch(device))
        losses.append(ll.compute(metrics)["loss"])
    return bits((state.params, state.buffers, losses))


@pytest.mark.slow
@both_steps
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("microbatches", [2, 1])
def test_a_run_has_the_bits_of_one_without(donate, bound, microbatches):
    expected = run(loss_fn, microbatches, donate, bound)
    for choice in CHOICES.values():
        assert run(recompute(loss_fn, choice), microbatches, donate, bound) == expected


def grads(model, loss, x):
    return bits(ll.make_grad_fn(model, loss)(ll.init_state(model), x).grads)


def test_noise_of_neftune_is_in_the_second_run_too():
    model = nn.Sequential(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    tokens, first = torch.arange(6).reshape(2, 3), lambda name, module: name == "0"
    expected = grads(model, neftune(loss_fn, "0.0"), tokens)
    assert grads(model, neftune(recompute(loss_fn, first), "0.0"), tokens) == expected
    assert grads(model, recompute(neftune(loss_fn, "0.0"), first), tokens) == expected


# What is left behind


def test_each_chosen_module_runs_twice_and_is_then_as_it_was():
    model, x = Stack(), torch.randn(8, 3)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    state = ll.init_state(model)
    ll.make_grad_fn(model, recompute(loss_fn, Block))(state, x)
    assert [block.calls for block in model.blocks] == [4, 2, 2]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert bits(dict(model.named_parameters())) == bits(dict(state.params))


def test_a_forward_of_the_instances_own_comes_back_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward = own = lambda x: -x

    def broken(model, x):
        assert model[0].forward is not own
        model(x)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        recompute(broken, nn.Linear)(model, torch.zeros(1, 2))
    assert model[0].forward is own
    assert "forward" not in vars(model[1])


def test_a_choice_of_nothing_and_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="Stack"):
        recompute(loss_fn, nn.Conv2d)(Stack(), torch.zeros(2, 3))
    for modules in (nn.Linear(2, 2), "Block", (nn.Linear, 3)):
        with pytest.raises(TypeError, match="modules"):
            recompute(loss_fn, modules)
