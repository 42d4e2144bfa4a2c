"""Errors of the user's own functions say what the batch was."""

import pytest
import torch
from torch import nn

import looplib as ll

MODEL = nn.Linear(4, 2)
BATCH = {"x": torch.zeros(6, 4), "y": torch.zeros(6, dtype=torch.int64)}
NOTES = ["The batch was a dict {x: float32 (6, 4), y: int64 (6,)}."]


def takes_a_tuple(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def another_width(model, batch):
    return model(batch["x"][:, :3]).mean()


@pytest.mark.parametrize(
    ("function", "error"), [(takes_a_tuple, TypeError), (another_width, RuntimeError), (lambda m, b: b[0], KeyError)]
)
def test_an_error_of_a_loss_function_says_what_the_batch_was(function, error):
    state = ll.init_state(MODEL)
    for step in (ll.make_grad_fn(MODEL, function), ll.make_predict_step(MODEL, function)):
        with pytest.raises(error) as raised:
            step(state, BATCH)
        assert getattr(raised.value, "__notes__", []) == NOTES


def test_looplibs_own_errors_are_as_they_were():
    with pytest.raises(ValueError, match="the loss has shape") as raised:
        ll.make_grad_fn(MODEL, lambda model, batch: model(batch["x"]))(ll.init_state(MODEL), BATCH)
    assert not hasattr(raised.value, "__notes__")


def test_functions_that_take_the_model_and_the_batch_are_not_refused():
    class Loss:
        def __call__(self, model, batch):
            return takes_a_tuple(model, batch)

    def with_a_setting(model, batch, smoothing=0.1):
        return takes_a_tuple(model, batch)

    for function in (
        Loss(),
        Loss().__call__,
        with_a_setting,
        lambda *both: takes_a_tuple(*both),
        torch.no_grad()(takes_a_tuple),
    ):
        ll.make_grad_fn(MODEL, function)
