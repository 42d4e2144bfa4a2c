"""A run that continues with other settings than it began with says so by name."""

import argparse
import dataclasses
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from files import manifest_of
from torch import nn

import looplib as ll

ROOT = Path(__file__).parents[2]


def started(optimizer=None, seed=0, **kwargs):
    torch.manual_seed(seed)
    return ll.init_state(nn.Linear(3, 2), optimizer or adamw(), **kwargs)


def adamw(**settings):
    return ll.optimizer(torch.optim.AdamW, **{"lr": 0.1, **settings})


def warned(restore):
    """The settings that a restore warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restore()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) <= 1
    if not messages:
        return []
    _, _, rest = messages[0].partition("was saved with other settings: ")
    return rest.partition(". The run continues")[0].split("; ")


def run(folder, state, describe=None):
    """One life of a script that restores, makes a step and saves."""
    ckpt = ll.checkpoint_io(folder, describe=describe)
    restored = []
    found = warned(lambda: restored.append(ckpt.restore(state)))
    ckpt.save(restored[0].replace(step=restored[0].step + 1))
    return found


def test_a_changed_hyperparameter_is_named_though_nobody_described_it(tmp_path):
    assert run(tmp_path, started()) == []
    assert run(tmp_path, started()) == []
    assert run(tmp_path, started(adamw(lr=0.2, weight_decay=0.5))) == [
        "optimizer lr was 0.1, is 0.2",
        "optimizer weight_decay was not given, is 0.5",
    ]
    assert run(tmp_path, started(adamw(lr=0.2, weight_decay=0.5))) == []  # it has been saved with these


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (adamw, lambda: ll.optimizer(torch.optim.Adam, lr=0.1), "class was torch.optim.adamw.AdamW, is torch.optim.adam.Adam"),
        (
            lambda: adamw(lr=lambda step: 0.1 * step),
            lambda: adamw(lr=lambda step: 0.2 * step),
            "lr was lambda step: ... (0.1), is lambda step: ... (0.2)",
        ),
        (lambda: ll.ema(adamw(), decay=0.9), lambda: ll.ema(adamw(lr=0.5), decay=0.9), "lr was 0.1, is 0.5"),
        (
            lambda: ll.optim.partition({"a": adamw(), "b": adamw()}, lambda name, tensor: "ab"[tensor.ndim == 1]),
            lambda: ll.optim.partition({"a": adamw(), "b": adamw(lr=0.3)}, lambda name, tensor: "ab"[tensor.ndim == 1]),
            "b lr was 0.1, is 0.3",
        ),
    ],
)  # fmt: skip
def test_each_number_of_an_optimizer_is_described(tmp_path, before, after, difference):
    assert run(tmp_path, started(before())) == []
    assert run(tmp_path, started(before())) == []
    assert run(tmp_path, started(after())) == [f"optimizer {difference}"]


def test_what_the_user_describes_is_compared(tmp_path):
    @dataclasses.dataclass
    class Config:
        width: int
        dropout: float = 0.1

    def settings(augment, width, factor):
        return {"augment": augment, "model": Config(width), "args": argparse.Namespace(factor=factor)}

    odd = {"complex": 1j, "scalar": np.float64(0.5), "large": 2**70, "nan": float("nan"), "many": list(range(1000))}
    assert run(tmp_path, started(), settings(True, 8, 2.0) | odd) == []
    assert run(tmp_path, started(), settings(True, 8, 2.0) | odd) == []
    assert run(tmp_path, started(), settings(False, 9, 3.0)) == [
        "augment was True, is False",
        "model width was 8, is 9",
        "args factor was 2.0, is 3.0",
    ]
    assert run(tmp_path, started(), {"new": 1}) == []  # what one of the two does not describe is not compared
    assert run(tmp_path, started()) == []
    with pytest.raises(TypeError, match="describe is a list; give a mapping of names to settings"):
        ll.checkpoint_io(tmp_path, describe=[1])


def grad_fn():
    return ll.make_grad_fn(nn.Linear(3, 2), lambda model, x: model(x).square().mean())


def stepped(state, donate=False):
    step = ll.make_train_step(grad_fn(), adamw(), donate=donate)
    return step(state, torch.ones(4, 3))[0]


PATHS = {
    "donated steps": lambda state: stepped(stepped(state, donate=True), donate=True),
    "replace": lambda state: state.replace(step=1, extra={"note": 1}, opt_state=state.opt_state),
    "bind": lambda state: ll.bind(nn.Linear(3, 2), state),
    "stack": lambda state: ll.transforms.stack_states([state, state]),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_state_brings_its_settings_to_any_checkpoint_io(tmp_path, path):
    """One that has seen neither the first state nor a description."""
    state = PATHS[path](started())
    saved = manifest_of(ll.checkpoint_io(tmp_path).save(state))
    assert saved["made_with"] == {"optimizer": {"class": "torch.optim.adamw.AdamW", "lr": 0.1}}


OTHER_PROCESS = """
import sys, torch, looplib as ll
loader = ll.make_loader(range(9), batch_size=3, order=ll.data.weighted(torch.arange(9.0)))
optimizer = ll.optimizer(torch.optim.AdamW, lr=lambda step: 0.1 * step, groups=[(lambda name, p: p.ndim < 2, {"lr": 1})])
state = ll.init_state(torch.nn.Linear(2, 1), optimizer)
next(loader(state))
ll.checkpoint_io(sys.argv[1], describe={"names": {"a", "b", "c"}, "clip": len}).save(state)
"""


@pytest.mark.filterwarnings("ignore")
def test_the_settings_of_another_process_equal_those_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "here")])
    exec(OTHER_PROCESS, {})
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-W", "ignore", "-c", OTHER_PROCESS, str(tmp_path / "there")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    one, other = (manifest_of(tmp_path / place / "step-00000000")["made_with"] for place in ("here", "there"))
    assert one == other
    assert one.keys() == {"optimizer", "loaders", "names", "clip"}


def test_injected_hyperparameters_survive_a_checkpoint(tmp_path):
    optimizer = adamw(lr=ll.optim.injected(0.1))
    changed = ll.optim.set_hyperparameters(started(optimizer), lr=0.02)
    ll.checkpoint_io(tmp_path).save(changed)
    restored = ll.checkpoint_io(tmp_path).restore(started(optimizer))
    assert ll.optim.hyperparameters(optimizer, restored)["lr"] == pytest.approx(0.02)


def test_a_state_made_from_its_fields_knows_no_settings(tmp_path):
    """The limit that `CheckpointIO` states; `describe` is for such states."""
    by_hand = dataclasses.replace(started())
    assert manifest_of(ll.checkpoint_io(tmp_path / "a").save(by_hand))["made_with"] == {}
    ckpt = ll.checkpoint_io(tmp_path / "b", describe={"optimizer": adamw()})
    saved = manifest_of(ckpt.save(by_hand))
    assert saved["made_with"] == {"optimizer": {"class": "torch.optim.adamw.AdamW", "lr": 0.1}}
    ckpt = ll.checkpoint_io(tmp_path / "b")
    assert warned(lambda: ckpt.restore(started(adamw(lr=0.2)))) == ["optimizer lr was 0.1, is 0.2"]


def test_a_changed_seed_is_named_and_that_of_the_checkpoint_is_kept(tmp_path):
    ll.checkpoint_io(tmp_path).save(started().replace(seed=3))
    with pytest.warns(UserWarning, match="seed was 3, is 5") as caught:
        state = ll.checkpoint_io(tmp_path).restore(started().replace(seed=5))
    (message,) = [str(warning.message) for warning in caught]
    assert (
        "other settings: seed was 3, is 5. The run continues from it with the checkpoint's seed (state.rep" in message
    )
    assert "new ones" not in message
    assert state.seed == 3
    with pytest.warns(
        UserWarning, match=r"lr was 0\.1, is 0\.2; seed was 3, is 5\. .* new ones and the checkpoint's seed"
    ):
        ll.checkpoint_io(tmp_path).restore(started(adamw(lr=0.2)).replace(seed=5))


def trained(folder, epochs, loader, *, lr=0.1, loaders=None, save_every=None):
    """A script without a description; returns the settings that it warns of, and the state that it ends with."""
    ckpt, save_every = ll.checkpoint_io(folder), ll.at_epoch_end() if save_every is None else save_every
    step = ll.make_train_step(grad_fn(), adamw(lr=lr), donate=True)
    states = []

    def run():
        state = ckpt.restore(started(adamw(lr=lr), epoch_length=len(loader)))
        while state.epoch < epochs:
            used = loader if loaders is None else loaders(state)
            for batch in zip(*(each(state) for each in used), strict=True) if isinstance(used, list) else used(state):
                state, _ = step(state, torch.cat(batch) if isinstance(batch, tuple) else batch)
                if save_every(state):
                    ckpt.save(state)
        states.append(state)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = []
    for warning in caught:
        _, _, rest = str(warning.message).partition("was saved with other settings: ")
        found += rest.partition(". The run continues")[0].split("; ")
    return found, states[0]


def batches(batch_size=4, samples=24, **kwargs):
    return ll.make_loader(torch.randn(samples, 3), batch_size=batch_size, **kwargs)


def test_a_changed_loader_is_named_though_nobody_described_it(tmp_path):
    assert trained(tmp_path, 1, batches())[0] == []
    assert trained(tmp_path, 2, batches())[0] == []  # more epochs are no other settings
    assert trained(tmp_path, 2, batches(8), lr=0.2)[0] == ["optimizer lr was 0.1, is 0.2", "epoch_length was 6, is 3"]
    found, state = trained(tmp_path, 4, batches(8, order=ll.data.in_order()))
    assert found == [
        "epoch_length was 6, is 3",
        "loader order was shuffled(), is in_order()",
        "loader batch_size was 4, is 8",
    ]
    assert (state.epoch, state.step, state.samples) == (4, 18, 96)
    assert trained(tmp_path, 5, batches(8, order=ll.data.in_order(), seed=1))[0] == ["loader seed was 0, is 1"]
    assert trained(tmp_path, 6, batches(8, order=ll.data.in_order(), seed=1))[0] == []
    (saved,) = manifest_of(ll.checkpoint_io(tmp_path).latest().path)["made_with"]["loaders"]
    assert saved == batches(8, order=ll.data.in_order(), seed=1).description


def test_a_run_of_several_loaders_is_compared_with_each(tmp_path):
    def pair(size=2):
        labeled, unlabeled = batches(4), batches(size, samples=100, limit=6)
        return lambda state: [labeled, unlabeled]

    assert trained(tmp_path, 1, batches(), loaders=pair())[0] == []
    assert trained(tmp_path, 2, batches(), loaders=pair())[0] == []
    assert trained(tmp_path, 3, batches(), loaders=pair(3))[0] == ["loader batch_size was 2, is 3"]
    assert trained(tmp_path, 4, batches(), loaders=pair(3))[0] == []

    def phases(state):
        return batches(4) if state.epoch < 2 else batches(4, order=ll.data.in_order())

    folder = tmp_path / "phases"
    assert trained(folder, 1, batches(), loaders=phases)[0] == []
    assert trained(folder, 3, batches(), loaders=phases)[0] == []  # the first run would have come there, too


def test_a_run_with_a_loader_for_each_epoch_does_not_make_its_checkpoints_grow(tmp_path):
    assert trained(tmp_path, 12, batches(), loaders=lambda state: batches(seed=state.epoch))[0] == []
    assert len(manifest_of(ll.checkpoint_io(tmp_path).latest().path)["made_with"]["loaders"]) == 8
    assert trained(tmp_path, 14, batches(), loaders=lambda state: batches(seed=state.epoch))[0] == []


def test_a_described_loader_is_named_once(tmp_path):
    """By the restore, and not by the loader again."""
    for batch_size, expected in ((4, 0), (8, 1)):
        loader = batches(batch_size)
        ckpt = ll.checkpoint_io(tmp_path, describe={"train": loader})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = ckpt.restore(started(epoch_length=len(loader)))
            for _ in loader(state):
                pass
        assert len(caught) == expected
        ckpt.save(state.replace(step=state.step + 1))


def test_weights_alone_are_taken_without_a_word(tmp_path):
    ll.checkpoint_io(tmp_path).save(started())
    ckpt = ll.checkpoint_io(tmp_path)
    assert warned(lambda: ckpt.restore(started(adamw(lr=0.5)), weights_only=True)) == []
