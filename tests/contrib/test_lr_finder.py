"""The learning-rate finder against a loop written by hand and a bound of stability."""

import math

import numpy as np
import pytest
import torch
from shared import bits, both_states, both_steps
from torch import nn

import looplib as ll
from looplib.contrib import find_lr


def smoothed(values, keep):
    """Exponential average at each value, corrected for its beginning; NaN is left out."""
    total = weight = 0.0
    averages = []
    for value in values:
        if not math.isnan(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(math.nan if math.isnan(value) else total / weight)
    return averages


def task():
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    grad_fn = ll.make_grad_fn(model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    return model, grad_fn, list(zip(x.split(32), y.split(32), strict=True))


def adamw(lr):
    return ll.optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.1)


@pytest.mark.filterwarnings("ignore:.*still has the weights of before training")
@both_steps
@both_states
def test_looking_for_a_learning_rate_leaves_the_run_as_it_was(donate, bound):
    model, grad_fn, batches = task()
    train_step = ll.make_train_step(grad_fn, adamw(0.01), donate=donate)
    state = ll.init_state(model, adamw(0.01), epoch_length=len(batches))
    state = state if bound else ll.copy_state(state)
    for batch in batches[:3]:
        state, _ = train_step(state, batch)

    def surroundings():
        modes = [module.training for module in model.modules()]
        return bits((state, dict(model.state_dict()), torch.get_rng_state(), modes))

    kept = surroundings()
    samples = [(x, y) for x, y in zip(*batches[0], strict=True)]
    for given in (batches, torch.utils.data.DataLoader(samples, 8, shuffle=True)):
        find_lr(grad_fn, adamw, state, given, steps=30)
    assert surroundings() == kept
    train_step(state, batches[3])  # nothing is spent


def test_the_curve_is_that_of_a_loop_written_by_hand():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [torch.randn(8, 4) for _ in range(3)]

    def loss_fn(model, x):
        return (model(x) - 1).square().mean()

    curve = find_lr(ll.make_grad_fn(model, loss_fn), sgd, ll.init_state(model, sgd(1.0)), batches, steps=80, high=100)
    raw = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    for index, (lr, loss) in enumerate(zip(curve.lrs, curve.losses, strict=True)):
        raw.param_groups[0]["lr"] = lr
        assert lr == pytest.approx(1e-7 * 1e9 ** (index / 79))
        raw.zero_grad()
        value = loss_fn(model, batches[index % 3])
        assert value.item() == loss
        value.backward()
        raw.step()
    assert list(curve.smoothed) == smoothed(curve.losses, 0.9)
    best = min(curve.smoothed)
    assert curve.smoothed[-1] > 4 * best
    assert len(curve.lrs) < 80
    falling = curve.losses[: curve.smoothed.index(best) + 1]
    slopes = [np.polyfit(range(8), falling[at : at + 8], 1)[0] for at in range(len(falling) - 7)]
    steepest = int(np.argmin(slopes))
    assert curve.suggestion == pytest.approx(math.sqrt(curve.lrs[steepest] * curve.lrs[steepest + 7]))


def sgd(lr):
    return ll.optimizer(torch.optim.SGD, lr=lr)


def quadratic(curvature):
    """On a quadratic, gradient descent diverges from 2 / curvature on."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    grad_fn = ll.make_grad_fn(model, lambda model, x: 0.5 * curvature * model(x).square().mean() + 1)
    return grad_fn, ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=1.0))


@pytest.mark.parametrize("curvature", [0.1, 1.0, 100.0])
def test_the_suggestion_is_below_the_bound_of_stability(curvature):
    grad_fn, state = quadratic(curvature)
    curve = find_lr(grad_fn, sgd, state, [torch.ones(2, 1)], low=1e-6, high=1e3)
    assert 0.005 / curvature < curve.suggestion < 2 / curvature


def test_a_looplib_loader_is_read_on_into_its_next_epochs():
    seen = []

    def loss_fn(model, x):
        seen.extend(x[:, 0].tolist())
        return model(x).square().mean()

    model = nn.Linear(1, 1)
    loader = ll.make_loader([torch.tensor([float(i)]) for i in range(12)], batch_size=4, seed=0)
    state = ll.init_state(model, adamw(0.01), loader=loader)
    find_lr(ll.make_grad_fn(model, loss_fn), adamw, state, loader, steps=12, diverged=math.inf, high=0.1)
    epochs = [seen[low : low + 12] for low in range(0, 48, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_loss_that_never_falls_has_no_suggestion():
    grad_fn, state = quadratic(1.0)

    def up(lr):
        return ll.optimizer(torch.optim.SGD, lr=lr, maximize=True)

    curve = find_lr(grad_fn, up, state.replace(step=1000), [torch.ones(2, 1)])
    assert curve.suggestion is None
    assert curve.lrs[0] == 1e-7  # wherever the run stands


def test_a_sweep_that_cannot_be_is_refused():
    grad_fn, state = quadratic(1.0)
    for changes, error, named in (
        ({"low": 0}, ValueError, "low is 0"),
        ({"low": 1.0, "high": 0.1}, ValueError, "high is 0.1"),
        ({"steps": 5}, ValueError, "steps is 5"),
        ({"batches": iter([torch.ones(2, 1)])}, ValueError, "ended after 1.* 100 steps"),
        ({"batches": [torch.full((2, 1), math.nan)]}, ValueError, "nan at the first batch"),
        ({"state": ll.TrainState()}, ValueError, "opt_state"),
        ({"optimizer_of_lr": adamw(0.1)}, TypeError, "optimizer_of_lr"),
    ):
        values = {"optimizer_of_lr": sgd, "state": state, "batches": [torch.ones(2, 1)], "diverged": math.inf}
        with pytest.raises(error, match=named):
            find_lr(grad_fn, **values | changes)
