"""Values that a compiled step reads in Python: numbers that change compile it again, with a warning; tensors are read."""

import dataclasses
import sys
import types

import pytest
import torch
from shared import SGD, one_report
from shared import mean_square as squares

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
    def __init__(self):
        super().__init__(2, 1)
        self.factor, self.shift = 1.0, torch.zeros(1)

    def forward(self, x):
        return super().forward(x) * self.scale * self.factor + self.shift


class Task:
    """A bound method as the loss, with attributes that it does not read."""

    def __init__(self):
        self.scale, self.unread = 1.0, 0

    def loss(self, model, x):
        return squares(model, x) * self.factor()

    def factor(self):
        return self.scale


def of_a_module(model, x):
    return squares(model, x) * SETTINGS.scale


def of_a_class(model, x):
    return squares(model, x) * Constants.scale


class Behind:
    """Numbers that a property, a method of the class and a static one read."""

    scale = 1.0

    def __init__(self):
        self.inner = 1.0

    @property
    def own(self):
        return self.inner

    @classmethod
    def of_all(cls):
        return cls.scale

    @staticmethod
    def of_another():
        return Constants.scale


BEHIND = Behind()


def of_a_property(model, x):
    return squares(model, x) * BEHIND.own


def of_a_class_method(model, x):
    return squares(model, x) * Behind.of_all()


def of_a_static_method(model, x, *, behind=BEHIND):
    return squares(model, x) * behind.of_another()


SLOTTED = Slotted(1.0)


def of_slots(model, x):
    return squares(model, x) * SLOTTED.scale


TASK = Task()


class Steps:
    """A compiled step and the eager one, from the same state."""

    def __init__(self, model, loss_fn):
        self.plain = ll.make_train_step(ll.make_grad_fn(model, loss_fn), SGD)
        self.compiled = ll.compile_step(self.plain, backend="eager")
        self.state = ll.init_state(model, SGD)

    def agree(self, compilations):
        x = torch.ones(3, 2)
        compiled, plain = self.compiled(self.state, x)[0], self.plain(self.state, x)[0]
        torch.testing.assert_close(compiled.params, plain.params)
        assert self.compiled.compiler.compilations == compilations


@one_report
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "owner", "name"),
    [
        (of_a_module, SETTINGS, "scale"),
        (of_a_class, Constants, "scale"),
        (of_slots, SLOTTED, "scale"),
        (of_a_property, BEHIND, "inner"),
        (of_a_class_method, Behind, "scale"),
        (of_a_static_method, Constants, "scale"),
        (squares, Base, "scale"),
        (squares, None, "factor"),
        (TASK.loss, TASK, "scale"),
    ],
)
def test_a_number_is_watched_wherever_it_stands(loss_fn, owner, name, monkeypatch):
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    model = Scaled()
    owner = model if owner is None else owner
    steps = Steps(model, loss_fn)
    steps.agree(1)
    monkeypatch.setattr(owner, name, 3.0)
    with pytest.warns(UserWarning, match=rf"\b{name}\b.* changed since the step was compiled") as told:
        steps.agree(2)
    assert [warning.filename for warning in told] == [__file__]  # which called the step
    steps.agree(2)


def test_a_class_of_the_script_itself_is_watched(monkeypatch):
    monkeypatch.setattr(Constants, "__module__", "__main__")
    steps = Steps(Scaled(), of_a_class)
    steps.agree(1)
    monkeypatch.setattr(Constants, "scale", 3.0)
    with pytest.warns(UserWarning, match="scale.* changed since the step was compiled"):
        steps.agree(2)


def test_what_is_closed_over_is_watched_and_tensors_are_read(monkeypatch):
    model, tensor, own = Scaled(), torch.ones(()), 1.0
    steps = Steps(model, lambda model, x: TASK.loss(model, x) * own * tensor)
    steps.agree(1)
    tensor.fill_(3.0)
    steps.agree(1)
    tensor = torch.full((), 4.0)
    steps.agree(1)
    model.shift = torch.ones(1)
    steps.agree(1)
    monkeypatch.setattr(TASK, "unread", 1)
    steps.agree(1)
    own = 5.0
    with pytest.warns(UserWarning, match="^own changed"):
        steps.agree(2)
    own = torch.full((), 5.0)
    with pytest.warns(UserWarning, match="^own changed"):
        steps.agree(3)


class WithoutLength(torch.nn.Linear):
    """A layer that is false in Python, like an empty container."""

    def __len__(self):
        return 0


@pytest.mark.filterwarnings("ignore:the layers of Sequential changed since")
def test_a_replaced_layer_is_noticed_even_if_it_has_no_length():
    model = torch.nn.Sequential(WithoutLength(2, 2), torch.nn.Linear(2, 1))
    steps = Steps(model, squares)
    steps.agree(1)
    model[0] = WithoutLength(2, 2)
    for step in (steps.plain, steps.compiled):
        with pytest.raises(ValueError, match="layers or parameters of the model were replaced"):
            step(steps.state, torch.ones(3, 2))
