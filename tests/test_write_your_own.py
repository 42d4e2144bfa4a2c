"""The page "Write your own": its code is short, public, and equal to a loop in plain PyTorch however it is run."""

import re
from typing import NamedTuple

import pytest
import torch
from public import ROOT
from ranks import launch
from shared import both_steps
from torch import nn

import looplib as ll

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "recipes/WRITE_YOUR_OWN.md").read_text(), re.DOTALL)
OWN = {"__name__": __name__, "ll": ll, "torch": torch, "NamedTuple": NamedTuple}
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
    data = [torch.randn(16, 5, generator=draw, dtype=torch.float64) for _ in range(count)]
    data = [(rows[:8] * by, rows[8:]) for rows, by in zip(data, scale, strict=True)]
    return [{key: (r[:, :4], r[:, 4:]) for key, r in zip(("new", "memory"), both, strict=True)} for both in data]


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
    projected = 0
    for batch in batches():
        updated = False
        (x, y), (old_x, old_y) = batch["new"], batch["memory"]
        for at, (model, optimizer, errors) in enumerate(zip(models, optimizers, largest, strict=True)):
            error = (model(x) - y).square()
            errors.append(error.max().item())
            parameters = [*model.parameters()]
            old = torch.autograd.grad((model(old_x) - old_y).square().mean(), parameters)
            old = torch.cat([grad.flatten() for grad in old])
            new = torch.cat([grad.flatten() for grad in torch.autograd.grad(error.mean(), parameters)])
            if new @ old < 0:
                projected += 1
                new = new - (new @ old) / (old @ old) * old
            torch.nn.utils.vector_to_parameters(new, grads := [torch.empty_like(each) for each in parameters])
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.detach()
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
    assert 0 < projected < STEPS * len(models)
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
    assert ll.optim.hyperparameters(optimizer, state)["lr"] == 1e-2 * (1 - step % 5 / 5)


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


@pytest.mark.slow
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


def on_two_ranks():
    with ll.distributed.setup():
        half = slice(4 * ll.distributed.rank(), 4 * ll.distributed.rank() + 4)
        model, largest = net(), []
        step, optimizer = OWN["make_step"](model, loss_fn)
        state = ll.init_state(model, optimizer)
        for batch in batches():
            own = {key: tuple(column[half] for column in columns) for key, columns in batch.items()}
            state, metrics = step(state, own)
            largest.append(ll.compute(ll.distributed.reduce(metrics))["largest"])
        check(state, optimizer, largest)


def test_on_two_ranks_it_is_the_loop_by_hand():
    launch(2, on_two_ranks)


def test_the_predicate_and_the_logger(tmp_path):
    at_powers_of_two = OWN["at_powers_of_two"]
    fired = [
        step for step in range(1, 40) if (at_powers_of_two & ~ll.predicates.at_step(8))(ll.TrainState(step=step))
    ]
    assert fired == [1, 2, 4, 16, 32]
    log = ll.tee(OWN["as_markdown"](tmp_path / "log.md"))
    log(ll.TrainState(step=3), {"loss": 0.5})
    assert (tmp_path / "log.md").read_text() == "| 3 | 0.500000 |\n"


@pytest.mark.slow
def test_a_transform_goes_around_a_compiled_step():
    model = torch.nn.Linear(3, 2)
    step, optimizer = OWN["make_step"](model, lambda model, batch: model(batch[0]).square().mean())
    checked = OWN["of_size"](ll.compile_step(step, backend="eager"), 4)
    batch = {key: (torch.ones(4, 3),) for key in ("new", "memory")}
    state, _ = checked(ll.init_state(model, optimizer), batch)
    assert state.batch == 1
    with pytest.raises(ValueError, match="3 samples, and this run takes 4"):
        checked(state, {key: (torch.ones(3, 3),) for key in batch})


def test_the_gradient_function_refuses_a_part_of_a_batch():
    model = net()
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    batch = {"new": torch.ones(4, 4, dtype=torch.float64), "memory": torch.ones(4, 4, dtype=torch.float64)}
    for inside in (ll.accumulate(OWN["remember"](grad_fn), 2), ll.accumulate(OWN["remember"](grad_fn), size=3)):
        with pytest.raises(ValueError, match="put it around accumulate"):
            inside(ll.init_state(model), batch)


def test_each_is_short_and_imports_nothing_private():
    for block in BLOCKS:
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) < (15 if re.search("evaluation|def dot", block) else 10), block
        assert not re.search(r"\b_[a-z]\w*\.|import|ll\._", block), block
