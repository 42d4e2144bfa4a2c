"""Python values that a compiled step reads: where one changes, the step is compiled again and says so."""

import dataclasses
import sys
import types

import pytest
import torch

import looplib as ll

SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.__file__ = __file__
SETTINGS.scale = 1.0


class Constants:
    scale = 1.0


@dataclasses.dataclass
class Slotted:
    __slots__ = ("scale",)
    scale: float


class Base(torch.nn.Linear):
    scale = 1.0


class Scaled(Base):
    def forward(self, x):
        return super().forward(x) * self.scale


def of_a_module(model, x):
    return model(x).square().mean() * SETTINGS.scale


def of_a_class(model, x):
    return model(x).square().mean() * Constants.scale


SLOTTED = Slotted(1.0)


def of_slots(model, x):
    return model(x).square().mean() * SLOTTED.scale


def of_a_function(model, x):
    return model(x).square().mean() * of_a_function.scale


of_a_function.scale = 1.0

SHARED = types.SimpleNamespace(shift=0.0, scale=1.0)


def shifted(x):
    return x + SHARED.shift


def of_an_object_that_another_function_reads_too(model, x):
    return shifted(model(x)).square().mean() * SHARED.scale


def of_the_models_class(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "owner"),
    [
        (of_a_module, SETTINGS),
        (of_a_class, Constants),
        (of_slots, SLOTTED),
        (of_a_function, of_a_function),
        (of_an_object_that_another_function_reads_too, SHARED),
        (of_the_models_class, Base),
    ],
)
def test_a_number_is_watched_wherever_it_stands(loss_fn, owner, monkeypatch):
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    model = Scaled(2, 1)
    optimizer = ll.optimizer(torch.optim.SGD, lr=0.1)
    grad_fn = ll.make_grad_fn(model, loss_fn)
    train_step = ll.compile_step(ll.make_train_step(grad_fn, optimizer), backend="eager")
    state, x = ll.init_state(model, optimizer), torch.ones(3, 2)
    train_step(state, x)
    monkeypatch.setattr(owner, "scale", 3.0)
    with pytest.warns(UserWarning, match=r"scale changed since the step was compiled"):
        compiled, _ = train_step(state, x)
    plain, _ = ll.make_train_step(grad_fn, optimizer)(state, x)
    for name, tensor in plain.params.items():
        torch.testing.assert_close(compiled.params[name], tensor)
