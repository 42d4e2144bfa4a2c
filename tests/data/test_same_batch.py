"""Several steps on each batch: without `same_batch` the position moves by each, which is warned of."""

import contextlib

import pytest
import torch
from shared import SGD

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
    state = ll.init_state(model, SGD, epoch_length=len(loader))
    for count, batch in enumerate(loader(state), 1):
        for step in steps:
            state, _ = step(state, batch)
        if look == "save" and count == 3:
            break
    expected = pytest.warns(UserWarning, match="moved by 2 batches for each batch.* same_batch=True")
    with contextlib.nullcontext() if same_batch else expected:
        ll.checkpoint_io(tmp_path).save(state) if look == "save" else loader(state)
    restored = ll.checkpoint_io(tmp_path).restore(ll.init_state(model, SGD, epoch_length=len(loader)))
    assert len(list(loader(restored))) == (5 if look != "save" else 2 if same_batch else 4)


@pytest.mark.parametrize("skip", [0, 2])
def test_one_batch_is_overfitted_on_purpose_in_silence(skip, tmp_path):
    model, (step, _) = spec_of(False, True)
    loader = ll.make_loader(torch.arange(20.0)[:, None] / 20, batch_size=4)
    state = ll.init_state(model, SGD, epoch_length=len(loader))
    for count, batch in enumerate(loader(state)):
        state, _ = step(state, batch)
        if count == skip:
            break
    for _ in range(skip + 97):
        state, _ = step(state, batch)
    ll.checkpoint_io(tmp_path).save(state)
    assert len(list(loader(state))) > 0
