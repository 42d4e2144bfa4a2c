"""In-place writes of a forward pass: made as in a raw loop by donated steps, refused by name in pure ones."""

import pytest
import torch
import torch.nn.functional as F
from problem import step_of
from shared import SGD, mean_square
from torch import nn

import looplib as ll

ROWS, OTHER_ROWS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [4, 5]])


class Renormed(nn.Module):
    """An embedding whose rows of a norm above 0.5 are shortened by each forward pass."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.embedding, self.linear = nn.Embedding(6, 3), nn.Linear(3, 1)
        with torch.no_grad():
            self.embedding.weight.mul_(10)

    def forward(self, rows):
        return self.linear(self.function(rows, self.embedding.weight, max_norm=0.5))


FUNCTIONS = [F.embedding, F.embedding_bag]


def loss_fn(model, batch):
    rows, factor = batch
    return model(rows).square().mean() * factor


def skipping(optimizer):
    return ll.optim.apply_if_finite(optimizer, 9)


GOOD, BAD = (ROWS, torch.tensor(1.0)), (OTHER_ROWS, torch.tensor(torch.inf))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_that_writes_the_given_state_is_refused_by_name(function):
    model = Renormed(function)
    state = ll.copy_state(ll.init_state(model, SGD))
    message = r"wrote to the parameter embedding\.weight in place, as F\.embedding\(max_norm"
    with pytest.raises(RuntimeError, match=message):
        step_of(model, SGD, loss_fn=loss_fn)(state, GOOD)
    for make in (ll.make_eval_step, ll.make_predict_step):
        with pytest.raises(RuntimeError, match=message):
            make(model, lambda model, rows: {"loss": model(rows).mean()})(state, OTHER_ROWS)


@pytest.mark.parametrize("batches", [[GOOD, BAD], [BAD, GOOD]])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_donated_step_may_write_what_it_trains_as_a_raw_loop_does(function, batches):
    model, optimizer = Renormed(function), skipping(SGD)
    step, raw = step_of(model, optimizer, True, loss_fn), Renormed(function)
    sgd, state = torch.optim.SGD(raw.parameters(), lr=0.1), ll.init_state(model, optimizer)
    for batch in batches:
        before = state
        state, _ = step(state, batch)
        with pytest.raises(ll.DonatedStateError, match=f"that run is at step {state.step} now"):  # skipped or not
            _ = before.params
        sgd.zero_grad()
        loss_fn(raw, batch).backward()
        if batch is GOOD:
            sgd.step()
    assert state.step == 1
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))


def test_a_step_that_fails_spends_the_state_whose_parameters_it_has_written():
    model = Renormed(F.embedding)

    def failing(model, batch):
        loss_fn(model, batch)
        raise KeyError("the loss function's own")

    step = step_of(model, SGD, True, failing)
    state = ll.init_state(model, SGD)
    with pytest.raises(KeyError):
        step(state, BAD)
    with pytest.raises(ll.DonatedStateError, match="there is no state after it"):
        _ = state.params


def test_evaluation_of_inference_tensors_counts_no_writes():
    model = nn.Linear(2, 1)
    with torch.inference_mode():
        state = ll.copy_state(ll.init_state(model))
    assert ll.make_predict_step(model, lambda model, x: model(x))(state, torch.ones(3, 2)).shape == (3, 1)


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        self.linear.weight.data.clamp_(-0.01, 0.01)
        return self.linear(x)


def test_pure_steps_find_writes_to_data_though_torch_does_not_count_them():
    model = Clamped()
    grad_fn = ll.make_grad_fn(model, mean_square)
    message = r"wrote to the parameter linear\.weight in place"
    for step in (ll.make_train_step(grad_fn, SGD), ll.make_predict_step(model, lambda model, x: model(x))):
        with pytest.raises(RuntimeError, match=message):
            step(ll.copy_state(ll.init_state(model, SGD)), torch.ones(4, 3))


class Momentum(nn.Module):
    """A frozen network that follows the trained one, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return (self.online(x) - self.target(x)).square().mean()


def test_a_donated_step_may_move_a_momentum_encoder_as_a_raw_loop_does():
    model, optimizer = Momentum(), skipping(SGD)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x))
    with pytest.raises(RuntimeError, match=r"wrote to the parameter target\.weight, target\.bias in place"):
        ll.make_train_step(grad_fn, optimizer)(ll.copy_state(ll.init_state(model, optimizer)), torch.ones(4, 3))
    step = ll.make_train_step(grad_fn, optimizer, donate=True)
    state, batches = ll.init_state(model, optimizer), torch.randn(5, 4, 3)
    batches[3] = torch.inf
    raw = Momentum()
    sgd = torch.optim.SGD(raw.online.parameters(), lr=0.1)
    for batch in batches:
        before = ll.TrainState(params={"slow": state.params["target.weight"]})
        state, _ = step(state, batch)
        sgd.zero_grad()
        raw(batch).backward()
        if not state.skipped:
            sgd.step()
        with pytest.raises(ll.DonatedStateError):  # the skipped step has moved the encoder too
            _ = before.params
    assert state.step == 4
    torch.testing.assert_close(dict(state.params), dict(raw.named_parameters()))
