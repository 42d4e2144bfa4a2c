"""A run that continues with other settings than it began with says so by name."""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from files import manifest_of
from shared import mean_square
from torch import nn

import looplib as ll


def started(optimizer=None, seed=0, **kwargs):
    torch.manual_seed(seed)
    return ll.init_state(nn.Linear(3, 2), optimizer or adamw(), **kwargs)


def adamw(**settings):
    return ll.optimizer(torch.optim.AdamW, **{"lr": 0.1, **settings})


def warned(run):
    """The settings that a function warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = []
    for warning in caught:
        _, _, rest = str(warning.message).partition("was saved with other settings: ")
        found += rest.partition(". The run continues")[0].split("; ")
    return found


def resumed(folder, state, describe=None):
    """One life of a script that restores, makes a step and saves."""
    ckpt = ll.checkpoint_io(folder, describe=describe)
    restored = []
    found = warned(lambda: restored.append(ckpt.restore(state)))
    ckpt.save(restored[0].replace(step=restored[0].step + 1))
    return found


def parts(lr):
    return ll.optim.partition({"a": adamw(), "b": adamw(lr=lr)}, lambda name, tensor: "ab"[tensor.ndim == 1])


def sign():
    def update_(grads, state, params, step):
        return {name: params[name] - 0.1 * grad.sign() for name, grad in grads.items()}, state

    return ll.optim.part("sign", update_=update_, role="weights")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("before", "after", "differences"),
    [
        (
            adamw,
            lambda: adamw(lr=0.2, weight_decay=0.5),
            ["AdamW lr was 0.1, is 0.2", "AdamW weight_decay was not given, is 0.5"],
        ),
        (
            adamw,
            lambda: ll.chain(("AdamW", ll.optimizer(torch.optim.Adam, lr=0.1))),
            ["AdamW class was torch.optim.adamw.AdamW, is torch.optim.adam.Adam"],
        ),
        (
            lambda: adamw(lr=lambda step: 0.1 * step),
            lambda: adamw(lr=lambda step: 0.2 * step),
            ["AdamW lr was lambda step: ... (0.1), is lambda step: ... (0.2)"],
        ),
        (
            lambda: ll.chain(adamw(), ll.ema(0.9)),
            lambda: ll.chain(adamw(lr=0.5), ll.ema(0.8)),
            ["AdamW lr was 0.1, is 0.5", "ema decay was 0.9, is 0.8"],
        ),
        (lambda: parts(0.1), lambda: parts(0.3), ["partition b AdamW lr was 0.1, is 0.3"]),
        (
            lambda: ll.chain(ll.clip_by_global_norm(1.0), adamw()),
            lambda: ll.chain(ll.clip_by_global_norm(2.0), adamw()),
            ["clip_by_global_norm max_norm was 1.0, is 2.0"],
        ),
        (  # neither optimizer keeps a state, so the restore itself cannot tell them apart
            lambda: ll.optimizer(torch.optim.SGD, lr=0.1),
            sign,
            ["SGD class was torch.optim.sgd.SGD, is not given", "SGD lr was 0.1, is not given"],
        ),
    ],
)
def test_a_changed_hyperparameter_is_named_though_nobody_described_it(tmp_path, before, after, differences):
    for _ in range(2):
        assert resumed(tmp_path, started(before())) == []
    assert resumed(tmp_path, started(after())) == [f"optimizer {each}" for each in differences]
    assert resumed(tmp_path, started(after())) == []  # it has been saved with these


def test_clipping_comes_and_goes_without_a_word(tmp_path):
    """Also within another part: clipping keeps nothing, so there is nothing to restore."""
    clipped = ll.chain(ll.clip_by_global_norm(1.0), adamw())
    both = [{"a": adamw(), "b": inner} for inner in (adamw(), clipped)]
    networks = [ll.optim.partition(each, lambda name, tensor: "ab"[tensor.ndim == 1]) for each in both]
    for number, (one, other) in enumerate([(adamw(), clipped), networks]):
        for optimizer in (one, other, one):
            assert resumed(tmp_path / str(number), started(optimizer)) == []


def test_what_the_user_describes_is_compared(tmp_path):
    @dataclasses.dataclass
    class Config:
        width: int
        dropout: float = 0.1

    def settings(augment, width, factor):
        return {"augment": augment, "model": Config(width), "args": argparse.Namespace(factor=factor)}

    odd = {"complex": 1j, "scalar": np.float64(0.5), "large": 2**70, "nan": float("nan"), "many": list(range(1000))}
    for _ in range(2):
        assert resumed(tmp_path, started(), settings(True, 8, 2.0) | odd) == []
    assert resumed(tmp_path, started(), settings(False, 9, 3.0)) == [
        "augment was True, is False",
        "model width was 8, is 9",
        "args factor was 2.0, is 3.0",
    ]
    secret = {"new": 1, "hub_token": "abc", "nested": [{"apiKey": "abc", "sha": "abc"}], "url": "s3://me:abc@x"}
    assert resumed(tmp_path, started(), secret) == []  # what one of the two has is not compared
    shown = {"new": 1, "hub_token": "***", "nested": [{"apiKey": "***", "sha": "abc"}], "url": "s3://***@x"}
    assert manifest_of(ll.checkpoint_io(tmp_path).latest().path)["made_with"].items() >= shown.items()
    assert resumed(tmp_path, started()) == []


def step_of(lr=0.1, donate=False):
    return ll.make_train_step(ll.make_grad_fn(nn.Linear(3, 2), mean_square), adamw(lr=lr), donate=donate)


def donated_steps(state):
    for _ in range(2):
        state, _ = step_of(donate=True)(state, torch.ones(4, 3))
    return state


PATHS = {
    "donated steps": donated_steps,
    "replace": lambda state: state.replace(step=1, extra={"note": 1}, opt_state=state.opt_state),
    "bind": lambda state: ll.bind(nn.Linear(3, 2), state),
    "stack": lambda state: ll.transforms.stack_states([state, state], same_seeds=True),
    "member": lambda state: ll.transforms.unstack_states(ll.transforms.stack_states([state]))[0],
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "dataclasses.replace": dataclasses.replace,
    "tree_map": lambda state: torch.utils._pytree.tree_map(lambda leaf: leaf, state),
}


def test_a_state_brings_its_settings_to_any_checkpoint_io(tmp_path):
    """One that has seen neither the first state nor a description."""
    settings = {"optimizer": {"AdamW": {"class": "torch.optim.adamw.AdamW", "lr": 0.1}}}
    for name, path in PATHS.items():
        saved = ll.checkpoint_io(tmp_path / name).save(path(started()))
        assert manifest_of(saved)["made_with"] == settings
    # The limit that `CheckpointIO` states; `describe` is for such states.
    by_hand = started().replace(run=ll.types.Run())
    assert manifest_of(ll.checkpoint_io(tmp_path / "a").save(by_hand))["made_with"] == {}
    described = ll.checkpoint_io(tmp_path / "b", describe={"optimizer": adamw()})
    assert manifest_of(described.save(by_hand))["made_with"] == settings
    assert resumed(tmp_path / "b", started(adamw(lr=0.2))) == ["optimizer AdamW lr was 0.1, is 0.2"]


def test_a_changed_seed_is_named_and_that_of_the_checkpoint_is_kept(tmp_path):
    ll.checkpoint_io(tmp_path).save(started().replace(seed=3))
    for lr, words in (
        (0.1, "settings: seed was 3, is 5.*with the checkpoint's seed"),
        (0.2, "lr.*; seed was 3, is 5.*new ones"),
    ):
        with pytest.warns(UserWarning, match=words) as caught:
            state = ll.checkpoint_io(tmp_path).restore(started(adamw(lr=lr)).replace(seed=5))
        assert ("new ones" in str(caught[0].message)) == (lr == 0.2)
        assert state.seed == 3
    assert warned(lambda: ll.checkpoint_io(tmp_path).restore(started(adamw(lr=0.5)), weights_only=True)) == []


def trained(folder, epochs, *loaders, lr=0.1, declared=True, describe=None):
    """A script that saves at the end of each epoch; returns the settings that it warns of, and its last state."""
    ckpt, states = ll.checkpoint_io(folder, describe=describe), []
    data = {"loader": loaders} if declared else {"epoch_length": len(loaders[0])}

    def run():
        state = ckpt.restore(started(adamw(lr=lr), **data))
        while state.epoch < epochs:
            for batch in zip(*(loader(state) for loader in loaders), strict=True):
                state, _ = step_of(lr)(state, torch.cat(batch))
            ckpt.save(state)
        states.append(state)

    return warned(run), states[0]


def batches(batch_size=4, samples=24, **kwargs):
    return ll.make_loader(torch.randn(samples, 3), batch_size=batch_size, **kwargs)


def test_a_changed_loader_is_named_though_nobody_described_it(tmp_path):
    def loader(seed=0):
        return batches(8, order=ll.data.sequential(), seed=seed)

    assert trained(tmp_path, 1, batches())[0] == []
    assert trained(tmp_path, 2, batches())[0] == []  # more epochs are no other settings
    assert trained(tmp_path, 2, batches(8), lr=0.2)[0] == [
        "optimizer AdamW lr was 0.1, is 0.2",
        "epoch_length was 6, is 3",
        "loader batch_size was 4, is 8",
    ]
    found, state = trained(tmp_path, 4, loader())
    assert found == [
        "epoch_length was 6, is 3",
        "loader order was shuffled(), is sequential()",
        "loader batch_size was 4, is 8",
    ]
    assert (state.epoch, state.step, state.samples) == (4, 18, 96)
    assert trained(tmp_path, 5, loader(seed=1))[0] == ["loader seed was 0, is 1"]
    assert trained(tmp_path, 6, loader(seed=1))[0] == []
    (saved,) = manifest_of(ll.checkpoint_io(tmp_path).latest().path)["loaders"]
    assert saved == loader(seed=1).description
    # A state that does not know its loader: the first one that is called is compared.
    assert trained(tmp_path, 7, loader(seed=2), declared=False)[0] == ["loader seed was 1, is 2"]
    assert trained(tmp_path, 8, loader(seed=1), declared=False)[0] == []


def test_a_run_of_several_loaders_is_compared_with_each(tmp_path):
    def pair(size=2):
        return batches(4), batches(size, samples=100, max_batches=6)

    for size, differences in ((2, []), (2, []), (3, ["loader batch_size was 2, is 3"]), (3, [])):
        epochs = len(ll.checkpoint_io(tmp_path).steps()) + 1
        assert trained(tmp_path, epochs, *pair(size))[0] == differences
    assert trained(tmp_path, 5, batches(4))[0] == ["number of loaders was 2, is 1"]


def test_a_described_loader_is_named_once(tmp_path):
    """By the restore, and not by the loader again."""
    changed = ["epoch_length was 6, is 3", "train batch_size was 4, is 8"]
    for declared in (True, False):
        for epochs, size, expected in ((1, 4, []), (2, 8, changed)):
            loader, folder = batches(size), tmp_path / str(declared)
            found, _ = trained(folder, epochs, loader, declared=declared, describe={"train": loader})
            assert sorted(found) == expected


@pytest.mark.parametrize("at", [2, 6])
@pytest.mark.parametrize("declared", [True, False])
def test_a_loader_that_no_checkpoint_knows_is_said_to_be_unknown_within_an_epoch(tmp_path, at, declared):
    loader = batches()
    state = started(epoch_length=6)
    for batch in itertools.islice(loader(state), at):
        state, _ = step_of()(state, batch)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state)
    restored = ckpt.restore(started(**({"loader": loader} if declared else {"epoch_length": 6})))
    said = rf"step-\d+ does not say which loader gave .* at batch {at}, cannot be compared.*loader=loader"
    with contextlib.nullcontext() if at == 6 else pytest.warns(UserWarning, match=said):
        rest = [*loader(restored)]
    assert len(rest) == (6 if at == 6 else 6 - at)  # it is read all the same


def test_a_loader_that_evaluates_is_no_other_setting_of_a_restored_run(tmp_path):
    """At the start of an epoch. Within one, another loader would continue at a batch of different samples."""
    loader, other = batches(), batches(seed=1)
    ckpt = ll.checkpoint_io(tmp_path)
    for at, words in ((6, []), (2, ["loader seed was 0, is 1"])):
        state = started(loader=loader)
        for batch in itertools.islice(loader(state), at):
            state, _ = step_of()(state, batch)
        ckpt.delete(after=0)
        ckpt.save(state)
        restored = ckpt.restore(started(loader=loader))
        assert warned(partial(loader, restored)) == []
        assert warned(partial(other, restored)) == words
        assert warned(partial(other, step_of()(restored, batch)[0])) == []
