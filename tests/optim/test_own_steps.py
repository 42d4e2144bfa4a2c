"""Schedules that follow the updates of their own network, beside raw loops with a scheduler for each."""

import pytest
import torch
from torch import nn

import looplib as ll

STEPS = {"critic": 3, "generator": 1}  # updates on each batch


def net():
    torch.manual_seed(0)
    return nn.ModuleDict({"critic": nn.Linear(3, 2), "generator": nn.Linear(3, 2)}).double()


def batches(count):
    return torch.randn(count, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def decay(part, step):
    return {"critic": 0.5, "generator": 0.3}[part] / (1 + step)


def loss_of(part):
    return lambda model, x: model[part](x).square().mean()


def made(kind, wrap=lambda optimizer: optimizer):
    model = net()
    parts = {
        part: ll.optim.own_steps(
            wrap(ll.optimizer(torch.optim.SGD, lr=lambda step, p=part: decay(p, step), momentum=0.9))
        )
        for part in STEPS
    }
    optimizer = ll.optim.partition(parts, lambda name, _: name.split(".")[0])
    steps = {}
    for part in STEPS:
        grad_fn = ll.make_grad_fn(model, loss_of(part), trainable=lambda name, _, part=part: name.startswith(part))
        steps[part] = ll.make_train_step(grad_fn, optimizer, donate=kind == "donated")
        if kind == "graph":
            steps[part] = ll.compile_step(steps[part], backend="eager")
        if kind == "stack":
            steps[part] = ll.vmap_step(steps[part])
    state = ll.init_state(model, optimizer)
    return (ll.transforms.stack_states([state]) if kind == "stack" else state), steps, optimizer


def train(state, steps, x):
    for part, count in STEPS.items():
        for _ in range(count):
            state, _ = steps[part](state, x)
    return state


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["pure", "donated", "graph", "stack"])
def test_each_schedule_counts_the_updates_of_its_own_network(kind):
    state, steps, optimizer = made(kind)
    raw = net()
    sgd = {part: torch.optim.SGD(raw[part].parameters(), lr=1.0, momentum=0.9) for part in STEPS}
    rates = {part: torch.optim.lr_scheduler.LambdaLR(one, lambda n, p=part: decay(p, n)) for part, one in sgd.items()}
    for x in batches(4):
        state = train(state, steps, x)
        for part, count in STEPS.items():
            for _ in range(count):
                sgd[part].zero_grad()
                loss_of(part)(raw, x).backward()
                sgd[part].step()
                rates[part].step()
    params = {name: tensor.squeeze(0) if kind == "stack" else tensor for name, tensor in state.params.items()}
    torch.testing.assert_close(params, dict(raw.named_parameters()), rtol=1e-12, atol=1e-14)
    if kind != "stack":
        shown = ll.optim.hyperparameters(optimizer, state)
        assert shown == {"lr/critic": decay("critic", 12), "lr/generator": decay("generator", 4)}


def test_a_skipped_update_does_not_count():
    state, steps, _ = made("pure", lambda optimizer: ll.chain(ll.skip_nonfinite(5), optimizer))
    state = train(state, steps, batches(1)[0])
    skipped, _ = steps["critic"](state, torch.full((5, 3), torch.inf, dtype=torch.float64))
    counts = [one.opt_state["partition"]["critic"]["own_steps"]["updates"].item() for one in (state, skipped)]
    assert skipped.skipped
    assert counts == [3, 3]
