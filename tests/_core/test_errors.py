"""Errors of the user's own functions are short, and say what the batch and the layer were."""

import traceback

import pytest
import torch
from shared import SGD, both_steps
from torch import nn

import looplib as ll

MODEL = nn.Linear(4, 2)
BATCH = {"x": torch.zeros(6, 4), "y": torch.zeros(6, dtype=torch.int64)}
NOTES = ["The batch was a dict {x: float32 (6, 4), y: int64 (6,)}."]
LAYER = " The layer was the model itself: Linear(in_features=4, out_features=2, bias=True)."


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
        (note,) = raised.value.__notes__
        assert note.removesuffix(LAYER) in NOTES
        folded = traceback.extract_tb(raised.value.__traceback__)
        assert not any(
            frame.filename.endswith("modules.py") for frame in folded
        )  # which puts the state into the module
        assert "_call_impl" not in [frame.name for frame in folded]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(7, 2))

    def forward(self, x):
        return self.blocks(x)


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


SHAPES = [
    # (batch, error, layer, functions in the traceback after this test's)
    ((torch.zeros(6, 5), BATCH["y"]), RuntimeError, "blocks.0: Linear(in_features=4, out_features=8, bias=True)", 4),
    ((torch.zeros(6, 4), BATCH["y"]), RuntimeError, "blocks.2: Linear(in_features=7, out_features=2, bias=True)", 4),
    ((torch.zeros(6, 4), BATCH["y"] + 0.5), RuntimeError, None, 2),
    ((torch.zeros(6, 4), BATCH["y"] + 2), IndexError, None, 2),
]


@pytest.mark.parametrize("wrap", [lambda grad_fn: grad_fn, lambda grad_fn: ll.accumulate(grad_fn, 2)])
@both_steps
@pytest.mark.every_case
def test_mistakes_in_shapes_and_dtypes_name_the_layer_in_a_few_frames(wrap, donate, monkeypatch):
    for batch, error, layer, depth in SHAPES:
        model = Net()
        if layer is None:
            model.blocks[2] = nn.Linear(8, 2)
        state = ll.init_state(model, SGD)
        step = ll.make_train_step(wrap(ll.make_grad_fn(model, cross_entropy)), SGD, donate=donate)
        with pytest.raises(error) as raised:
            step(state, batch)
        assert (f"The layer was {layer}." if layer else "The batch was a tuple (float32") in raised.value.__notes__[0]
        frames = traceback.extract_tb(raised.value.__traceback__)
        assert [frame.name for frame in frames[1:]][:2] == ["cross_entropy", "forward" if layer else "cross_entropy"]
        assert len(frames) == 1 + depth
        monkeypatch.setenv("LOOPLIB_FULL_TRACEBACKS", "1")
        with pytest.raises(error) as raised:
            step(state, batch)  # which is as it was, donated or not
        assert len(traceback.extract_tb(raised.value.__traceback__)) > depth + 7
        monkeypatch.delenv("LOOPLIB_FULL_TRACEBACKS")


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


def test_a_traceback_of_pytest_ends_at_the_function_that_refuses():
    for call in (
        lambda: ll.init_state(MODEL, MODEL),
        lambda: ll.accumulate(ll.make_grad_fn(MODEL, takes_a_tuple), 0),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert raised.traceback.filter(raised)[-1].name in ("init_state", "accumulate")
