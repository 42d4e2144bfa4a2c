"""Several steps on each batch: without `same_batch` the position moves by each, which is warned of."""

import contextlib
import gc
import weakref

import pytest
import torch
from shared import SGD, one_report

import looplib as ll


def spec_of(same_batch, donate):
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    model = torch.nn.ModuleDict({"one": one, "other": other})
    steps = [
        ll.make_train_step(
            ll.make_grad_fn(model, lambda model, x, name=name: model[name](x).square().mean(), allow_unused=True),
            SGD,
            donate=donate,
            same_batch=same_batch and name == "other",
        )
        for name in ("one", "other")
    ]
    return model, steps


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("same_batch", [False, True])
@pytest.mark.parametrize("look", ["next epoch", "save"])
def test_two_steps_on_each_batch_are_warned_of_without_same_batch(donate, same_batch, look, tmp_path):
    model, steps = spec_of(same_batch, donate)
    loader = ll.make_loader(torch.arange(20.0)[:, None] / 20, batch_size=4)
    state = ll.init_state(model, SGD, loader=loader)
    for count, batch in enumerate(loader(state), 1):
        for step in steps:
            state, _ = step(state, batch)
        if look == "save" and count == 3:
            break
    expected = pytest.warns(UserWarning, match="moved by 2 batches for each batch.* same_batch=True")
    with contextlib.nullcontext() if same_batch else expected:
        ll.checkpoint_io(tmp_path).save(state) if look == "save" else loader(state)
    restored = ll.checkpoint_io(tmp_path).restore(ll.init_state(model, SGD, loader=loader))
    assert len(list(loader(restored))) == (5 if look != "save" else 2 if same_batch else 4)


@pytest.mark.parametrize("skip", [0, 2])
def test_one_batch_is_overfitted_on_purpose_in_silence(skip, tmp_path):
    model, (step, _) = spec_of(False, True)
    loader = ll.make_loader(torch.arange(20.0)[:, None] / 20, batch_size=4)
    state = ll.init_state(model, SGD, loader=loader)
    for count, batch in enumerate(loader(state)):
        state, _ = step(state, batch)
        if count == skip:
            break
    for _ in range(skip + 97):
        state, _ = step(state, batch)
    ll.checkpoint_io(tmp_path).save(state)
    assert len(list(loader(state))) > 0


# Branches of a run, several runs and several loaders: what leads a state far ahead of the last iteration, and is no mistake


def counts_of(loader, state, batches=None, steps=1):
    """Train on some batches of a loader, as far as a position in the data tells."""
    for _, _ in zip(range(len(loader) if batches is None else batches), loader(state), strict=False):
        for _ in range(steps):
            ends = state.batch + 1 == state.epoch_length
            state = state.replace(
                step=state.step + 1, epoch=state.epoch + ends, batch=0 if ends else state.batch + 1, batch_samples=4
            )
    return state


def loader_of_ten(seed=0):
    return ll.make_loader(torch.arange(40.0), batch_size=4, seed=seed)


def new(loader):
    return ll.init_state(torch.nn.Linear(1, 1), SGD, loader=loader)


def two_runs_over_one_loader(loader, epochs):
    far, near = new(loader), new(loader)
    for _ in range(epochs):
        far = counts_of(loader, far)
    return counts_of(loader, near), far


def a_branch_that_stays_behind(loader, epochs):
    start = far = new(loader)
    for _ in range(epochs):
        far = counts_of(loader, far)
    for _ in range(20):  # more than are known one by one
        near = counts_of(loader, start)
    return near, far


def branches_in_turn(loader, epochs):
    start = new(loader)
    near, far = start, counts_of(loader, start)
    for _ in range(epochs):
        near, far = counts_of(loader, near), counts_of(loader, far)
    return near, far


def loaders_in_turn(loader, epochs):
    state, other = new([loader, second := loader_of_ten(1)]), second
    for number in range(2 * epochs):
        state = counts_of(other if number % 2 else loader, state)
    return (state,)


def a_loader_for_each_epoch(loader, epochs):
    state = new(loader)
    for epoch in range(epochs):
        state = counts_of(loader_of_ten(epoch), state)
    return (state,)


def evaluated_within_the_epoch(loader, epochs):
    state = new(loader)
    for _ in range(epochs):
        state = counts_of(loader, state, 3)
        for batches in (3, 10):  # of the rest, and from the start of the data
            list(zip(range(batches), loader(state if batches == 3 else ll.TrainState()), strict=False))
        state = counts_of(loader, state)
    return (state,)


def evaluated_between_batches(loader, epochs):
    state = new(loader)
    for _ in range(epochs):
        batches = iter(loader(state))
        for number in range(10):
            next(batches)
            if number == 5:
                list(zip(range(2), loader(state), strict=False))
            ends = number == 9
            state = state.replace(step=state.step + 1, epoch=state.epoch + ends, batch=0 if ends else number + 1)
    return (state,)


def a_run_that_is_resumed(loader, epochs, folder):
    state = new(loader)
    for _ in range(epochs):
        ckpt = ll.checkpoint_io(folder)
        ckpt.save(counts_of(loader, state, 6))
        state = ckpt.restore(new(loader_of_ten()))
        state = counts_of(loader, state)
    return (state,)


RIGHT = [
    two_runs_over_one_loader,
    a_branch_that_stays_behind,
    branches_in_turn,
    loaders_in_turn,
    a_loader_for_each_epoch,
    evaluated_within_the_epoch,
    evaluated_between_batches,
    a_run_that_is_resumed,
]


@pytest.mark.slow
@one_report
@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("run", RIGHT, ids=lambda run: run.__name__)
def test_states_that_loaders_have_led_where_they_are_are_no_mistake(run, epochs, tmp_path):
    """Warnings are errors in tests."""
    loader = loader_of_ten()
    states = run(loader, epochs, *([tmp_path / "run"] if run is a_run_that_is_resumed else []))
    for number, state in enumerate(states):
        ll.checkpoint_io(tmp_path / str(number)).save(state)
        assert len(list(loader(state))) == 10 - state.batch


@pytest.mark.every_case
@pytest.mark.parametrize(
    "where", ["first epoch", "third epoch", "after another loader", "branch", "other run between"]
)
def test_the_mistake_is_noticed_wherever_it_is_made(where, tmp_path):
    loader = loader_of_ten()
    state = new(loader)
    if where == "third epoch":
        state = counts_of(loader, counts_of(loader, state))
    if where == "branch":
        counts_of(loader, state, 4)
    if where == "after another loader":
        state = counts_of(loader_of_ten(1), state)
    state = counts_of(loader, state, steps=2)
    if where == "other run between":
        counts_of(loader, new(loader))
    for look in (ll.checkpoint_io(tmp_path).save, loader):
        with pytest.warns(UserWarning, match="moved by 2 batches for each batch"):
            look(state)


def test_nothing_is_looked_at_once_the_warnings_are_off(tmp_path):
    loader = loader_of_ten()
    ll.debug.warn_of_misuse(False)
    try:
        state = counts_of(loader, new(loader), steps=2)
        loader(state)
        ll.checkpoint_io(tmp_path).save(state)
    finally:
        ll.debug.warn_of_misuse(True)
    ll.checkpoint_io(tmp_path).save(state)  # what was not looked at is not known


def test_a_run_whose_states_are_gone_is_forgotten():
    loader = loader_of_ten()
    state = counts_of(loader, new(loader), 3)
    run = weakref.ref(state.run)
    del state
    gc.collect()
    assert run() is None


@pytest.mark.slow
def test_a_sweep_in_one_stack_is_warned_of_as_one_state_is():
    model = torch.nn.Linear(1, 1)
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    step = ll.vmap_step(ll.make_train_step(grad_fn, SGD))
    loader = ll.make_loader(torch.arange(20.0)[:, None] / 20, batch_size=4)
    for steps in (1, 2):
        start = ll.init_state(model, SGD, loader=loader)
        stack = ll.transforms.stack_states([ll.state.fold_in(start, number) for number in range(3)])
        for _ in range(2):
            for batch in loader(stack):
                for _ in range(steps):
                    stack, _ = step(stack, batch)
            if steps == 2:
                break
        with contextlib.nullcontext() if steps == 1 else pytest.warns(UserWarning, match="moved by 2 batches"):
            loader(stack)
        for member in ll.transforms.unstack_states(stack)[: 3 * (steps == 1)]:  # each continues alone
            loader(counts_of(loader, member))
