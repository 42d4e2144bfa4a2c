"""The page "Write your own": its code is short, public, and equal to a loop in plain PyTorch however it is run."""

import dataclasses
import re
from typing import NamedTuple

import pytest
import torch
from public import ROOT
from shared import both_steps
from torch import nn

import looplib as ll

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "recipes/WRITE_YOUR_OWN.md").read_text(), re.DOTALL)
OWN = {"__name__": __name__, "ll": ll, "torch": torch, "dataclasses": dataclasses, "NamedTuple": NamedTuple}
for block in BLOCKS:
    exec(compile(block, "WRITE_YOUR_OWN.md", "exec"), OWN)
Largest = OWN["Largest"]  # by which pickle finds it, on its way to other ranks
STEPS = 12


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batches(count=STEPS):
    draw = torch.Generator().manual_seed(1)
    scale = [1.0 if number % 3 else 0.01 for number in range(count)]  # each third is easy
    data = [torch.randn(8, 5, generator=draw, dtype=torch.float64) for _ in range(count)]
    return [(rows[:, :4] * by, rows[:, 4:] * by) for rows, by in zip(data, scale, strict=True)]


def loss_fn(model, batch):
    x, y = batch
    error = (model(x) - y).square()
    return ll.Mean(error.sum(), len(x)), {"largest": Largest(error.detach().max())}


def by_hand(*models):
    """The same in plain PyTorch: weights, their averages, number of updates, and largest error of each batch, of each model.

    Several models are the members of a stack: the schedule moves on when one of them is updated.
    """
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1.0) for model in models]
    step, largest = 0, [[] for _ in models]
    averages = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]
    counts = [0 for _ in models]
    for x, y in batches():
        updated = False
        for at, (model, optimizer, errors) in enumerate(zip(models, optimizers, largest, strict=True)):
            error = (model(x) - y).square()
            errors.append(error.max().item())
            optimizer.zero_grad()
            error.mean().backward()
            for parameter in model.parameters():
                if parameter.grad.ndim > 1:
                    parameter.grad -= parameter.grad.mean(1, keepdim=True)
            norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
            if norm >= 0.25:
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step % 5 / 5)
                optimizer.step()
                for name, p in model.named_parameters():
                    averages[at][name].lerp_(p.detach(), 4.0 / (4.0 + counts[at]))
                counts[at] += 1
                updated = True
        step += updated
    return [
        (dict(model.named_parameters()), mean, step, errors)
        for model, mean, errors in zip(models, averages, largest, strict=True)
    ]


CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def check(state, optimizer, largest):
    [(params, mean, step, expected)] = by_hand(net())
    assert 0 < step < STEPS
    assert state.step == step
    torch.testing.assert_close(dict(state.params), params, **CLOSE)
    torch.testing.assert_close(dict(ll.eval_state(optimizer, state).params), mean, **CLOSE)
    torch.testing.assert_close(largest, expected, **CLOSE)
    numbers = ll.optim.hyperparameters(optimizer, state)
    assert numbers["part_of_latest"] == 4 / (4 + step)
    assert numbers["lr"] == 1e-2 * (1 - step % 5 / 5)


def run(step, state, data):
    largest = []
    for batch in data:
        state, metrics = step(state, batch)
        largest.append(ll.compute(metrics)["largest"])
    return state, largest


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@both_steps
def test_it_is_the_loop_by_hand(donate, compiled):
    model = net()
    step, optimizer = OWN["make_step"](model, loss_fn, donate)
    step = ll.transforms.compile_step(step, backend="eager") if compiled else step
    state, largest = run(step, ll.init_state(model, optimizer), batches())
    check(state, optimizer, largest)


def test_each_member_of_a_stack_is_the_loop_by_hand():
    model = net()
    step, optimizer = OWN["make_step"](model, loss_fn)
    stack = ll.transforms.stack_states([ll.init_state(net(seed), optimizer, seed=seed) for seed in (0, 5)])
    mapped, largest = ll.vmap_step(step), [[], []]
    for batch in batches():
        stack, metrics = mapped(stack, batch)
        for member, scores in enumerate(ll.transforms.compute_members(metrics)):
            largest[member].append(scores["largest"])
    members = zip(by_hand(net(0), net(5)), ll.transforms.unstack_states(stack), largest, strict=True)
    for (params, mean, _, expected), state, scores in members:
        torch.testing.assert_close(dict(state.params), params, **CLOSE)
        torch.testing.assert_close(dict(ll.eval_state(optimizer, state).params), mean, **CLOSE)
        torch.testing.assert_close(scores, expected, **CLOSE)


def test_the_predicate_and_the_logger(tmp_path):
    at_powers_of_two = OWN["at_powers_of_two"]
    fired = [
        step for step in range(1, 40) if (at_powers_of_two & ~ll.predicates.at_step(8))(ll.TrainState(step=step))
    ]
    assert fired == [1, 2, 4, 16, 32]
    log = ll.tee(OWN["as_markdown"](tmp_path / "log.md"))
    log(ll.TrainState(step=3), {"loss": 0.5})
    assert (tmp_path / "log.md").read_text() == "| 3 | 0.500000 |\n"


def test_a_transform_goes_around_a_compiled_step():
    model = torch.nn.Linear(3, 2)
    step, optimizer = OWN["make_step"](model, lambda model, batch: model(batch[0]).square().mean())
    checked = OWN["of_size"](ll.compile_step(step, backend="eager"), 4)
    state, _ = checked(ll.init_state(model, optimizer), (torch.ones(4, 3),))
    assert state.batch == 1
    with pytest.raises(ValueError, match="3 samples, and this run takes 4"):
        checked(state, (torch.ones(3, 3),))


def test_each_is_short_and_imports_nothing_private():
    for block in BLOCKS:
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) < (25 if "evaluation" in block else 10), block
        assert not re.search(r"\b_[a-z]\w*\.|import|ll\._", block), block
