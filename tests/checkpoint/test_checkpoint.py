"""Saves that are whole or not there, policies against brute force, and restores that fit or say why not."""

import builtins
import contextlib
import errno
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from files import DATA, MANIFEST
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import file_size_limit
from torch import nn

import looplib as ll
from looplib.predicates import BestSoFar

pytree = torch.utils._pytree
COUNTS = ("step", "epoch", "batch", "epoch_length", "samples", "batch_samples", "batch_steps", "seed")
ROOT = Path(__file__).parents[2]
adamw = ll.optimizer(torch.optim.AdamW, lr=0.1)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def fresh(values=0, **kwargs):
    return ll.init_state(net(values), adamw, **kwargs)


def unbound(values=0, **kwargs):
    return ll.copy_state(fresh(values, **kwargs))


def advanced(state, steps=1):
    model = net()
    grad_fn = ll.make_grad_fn(model, lambda model, x: model(x).square().mean())
    step = ll.make_train_step(grad_fn, adamw)
    for i in range(steps):
        state, _ = step(state, torch.ones(5, 3) * i + torch.eye(5, 3))
    return state


def same(one, other):
    counts = all(getattr(one, name) == getattr(other, name) for name in COUNTS)
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return counts and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def here(ckpt):
    return [c.step for c in ckpt.steps()]


def saved(ckpt, *states):
    for state in states:
        ckpt.save(state)
    ckpt.wait()


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.name != ".lock")


def damage(path, name=DATA):
    content = bytearray((path / name).read_bytes())
    content[-70 if name == MANIFEST else -2] ^= 1
    (path / name).write_bytes(content)


# Policies


@settings(max_examples=25, deadline=None)
@given(
    keep_last=st.none() | st.integers(1, 4),
    keep_best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
    keep_every=st.none() | st.integers(1, 5),
    keep=st.none() | st.sets(st.integers(0, 20)),
    asynchronous=st.booleans(),
    saves=st.lists(st.tuples(st.integers(0, 3), st.none() | st.sampled_from([-1, 0, 0.5, float("inf")])), max_size=9),
)
def test_the_policies_keep_what_brute_force_keeps(keep_last, keep_best, mode, keep_every, keep, asynchronous, saves):
    with tempfile.TemporaryDirectory() as folder:
        ckpt = ll.checkpoint_io(
            folder, keep_last=keep_last, keep_best=keep_best, monitor=BestSoFar("score", mode=mode), keep_every=keep_every,
            keep=None if keep is None else lambda c: c.step in keep, asynchronous=asynchronous,
        )  # fmt: skip
        state, kept, step = ll.TrainState(params={"w": torch.zeros(1)}), [], 0
        for number, (more, score) in enumerate(saves):
            step += more
            ckpt.save(state.replace(step=step, samples=number), None if score is None else {"score": score})
            if kept and kept[-1][1] == step:  # a save of the same step replaces the one before it,
                score = kept[-1][2] if score is None else score  # and these weights were scored already
                kept.pop()
            kept.append((number, step, score))
            scored = [entry for entry in kept if entry[2] is not None]
            best = sorted(scored, key=lambda entry: (entry[2] if mode == "min" else -entry[2], entry[0]))
            kept = [
                entry
                for position, entry in enumerate(kept)
                if entry == kept[-1]
                or entry in best[: max(keep_best, 1)]
                or (keep_last is None or position >= len(kept) - keep_last)
                or (keep_every and entry[1] % keep_every == 0)
                or (keep and entry[1] in keep)
            ]
            ckpt.wait()
            assert [(c.samples, c.step, c.metrics.get("score")) for c in ckpt.steps()] == kept
            assert ckpt.latest().samples == number
            assert ckpt.best() == next((c for c in ckpt.steps() if best and c.samples == best[0][0]), None)
            assert ckpt.restore(state).samples == number
            again = ll.checkpoint_io(folder, monitor=BestSoFar("score", mode=mode))
            assert again.steps() == ckpt.steps()
        assert all(name.startswith("step-") for name in names_in(folder))


def test_policies_that_cannot_be(tmp_path):
    for options, message in [
        ({"keep_last": 0}, "keep_last is 0; give a whole number of at least 1"),
        ({"keep_every": True}, "keep_every is True"),
        ({"keep_best": -1, "monitor": "loss"}, "keep_best is -1; give a whole number of at least 0"),
        ({"keep_best": 2}, "keep_best=2 needs monitor="),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            ll.checkpoint_io(tmp_path, **options)
    with pytest.raises(ValueError, match=r"no best without a metric: give checkpoint_io\(\.\.\., monitor="):
        ll.checkpoint_io(tmp_path).best()
    with pytest.raises(ValueError, match="no best without a metric"):
        ll.checkpoint_io(tmp_path).restore(fresh(), "best")


def test_a_monitor_that_is_missing_is_an_error_and_nothing_is_written(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path / "c", monitor="eval/loss", asynchronous=True)
    for metrics, error, message in [
        ({"loss": 1.0, "acc": 2.0}, ValueError, "'eval/loss' is not among the metrics given: loss, acc"),
        ({}, ValueError, "'eval/loss' is not among the metrics given: none"),
        ({"eval/loss": [1]}, TypeError, "the metric 'eval/loss' is a list; give a number"),
    ]:
        with pytest.raises(error, match=message):
            ckpt.save(fresh(), metrics)
    assert not (tmp_path / "c").exists()
    ckpt.save(fresh(), {"eval/loss": torch.tensor(0.5), "other": float("nan"), "third": -float("inf")})
    ckpt.wait()
    assert str(ckpt.best().metrics) == "{'eval/loss': 0.5, 'other': nan, 'third': -inf}"
    ckpt.save(fresh().replace(step=3))  # without metrics it is no candidate
    ckpt.wait()
    assert ckpt.best().step == 0
    # A metric that was NaN when nobody monitored it is no candidate either.
    assert ll.checkpoint_io(tmp_path / "c", monitor=BestSoFar("other", mode="min")).best() is None


def test_later_steps_of_another_run_are_refused(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    for step in (0, 10, 20, 30):
        ckpt.save(fresh().replace(step=step))
    other = ll.checkpoint_io(tmp_path)
    with pytest.raises(
        ValueError, match=r"(?s)holds later steps \(20, 30\) than this state's 15.*another run"
    ) as error:
        other.save(fresh().replace(step=15))
    assert "ckpt.delete(after=15)" in str(error.value)
    assert "ckpt.restore(state)" in str(error.value)
    assert here(other) == [0, 10, 20, 30]
    other.delete(after=15)
    other.save(fresh().replace(step=15))
    assert here(other) == here(ckpt) == [0, 10, 15]


# All or nothing


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_a_full_disk_leaves_the_last_one_good(tmp_path, asynchronous, size):
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1, asynchronous=asynchronous)
    state = unbound()
    ckpt.save(state)
    ckpt.wait()
    with file_size_limit(size):
        words = r"step-00000001 could not be saved: File too large \(4 MB to write, .* free there\); the .* untouched"
        with pytest.raises(OSError, match=words) as e:
            saved(ckpt, state.replace(step=1, extra=torch.zeros(10**6)))
        assert e.value.errno == errno.EFBIG
    assert names_in(tmp_path) == ["step-00000000"]
    assert same(ckpt.restore(unbound(1)), state)
    ckpt.save(state.replace(step=1))
    ckpt.wait()
    assert names_in(tmp_path) == ["step-00000001"]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is a file, and checkpoint_io needs a directory"):
        ll.checkpoint_io(tmp_path / "file")
    ckpt = ll.checkpoint_io(tmp_path / "file" / "deeper")
    assert ckpt.latest() is None
    with pytest.raises(OSError, match=r"checkpoints cannot be written into .*deeper \(.*\): give checkpoint_io"):
        ckpt.save(unbound())


OTHER_RUN = """
import sys, torch, looplib as ll
ckpt = ll.checkpoint_io(sys.argv[1])
for save in (lambda: ckpt.save(ll.TrainState(step=5, params={"w": torch.zeros(1)})), lambda: ckpt.delete(after=0)) * 2:
    try:
        save()
        print(ckpt.latest().step, flush=True)
    except BlockingIOError as error:
        print(error, flush=True)
    sys.stdin.readline()
"""


def test_two_processes_on_one_directory(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(unbound())
    second = ll.checkpoint_io(tmp_path)
    second.save(unbound().replace(step=1))  # the same process may have two
    (tmp_path / ".writing-step-00000009-0000").mkdir()  # as if a save of ours were under way
    command = [sys.executable, "-c", OTHER_RUN, str(tmp_path)]
    refused = f"process {os.getpid()} is writing checkpoints into {tmp_path} already; give each run a directory"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        for _ in range(2):
            assert other.stdout.readline().startswith(refused)
            assert names_in(tmp_path) == [".writing-step-00000009-0000", "step-00000000", "step-00000001"]
            if _:
                del ckpt, second
            other.stdin.write("\n")
            other.stdin.flush()
        assert other.stdout.readline() == "5\n"
        assert names_in(tmp_path) == ["step-00000000", "step-00000001", "step-00000005"]
        other.stdin.write("\n\n")
        other.stdin.flush()
        assert other.stdout.readline() == "0\n"
    assert names_in(tmp_path) == ["step-00000000"]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_lock_that_leads_elsewhere_is_refused_and_nothing_written(tmp_path, kind):
    outside, folder = tmp_path / "outside", tmp_path / "checkpoints"
    outside.write_text("mine")
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / ".lock")
    else:
        (folder / ".lock").symlink_to(outside if kind == "link" else tmp_path / "new")
    with pytest.raises(ValueError, match=r"checkpoints/\.lock is a link, or no file.*delete"):
        ll.checkpoint_io(folder).save(unbound())
    assert outside.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [folder, outside]


def test_an_interrupt_amid_a_save_leaves_nothing(tmp_path, monkeypatch):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(unbound())

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)  # all is written
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(unbound().replace(step=1))
    assert names_in(tmp_path) == ["step-00000000"]


# Damage


@pytest.mark.parametrize("name", [DATA, MANIFEST])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "hostile"])
def test_a_damaged_latest_is_named_and_the_one_before_it_taken(tmp_path, name, how):
    ckpt = ll.checkpoint_io(tmp_path)
    states = [advanced(unbound(), steps) for steps in range(3)]
    paths = [ckpt.save(state) for state in states]
    ckpt = ll.checkpoint_io(tmp_path)
    if how == "flipped":
        damage(paths[2], name)
    elif how == "cut":
        os.truncate(paths[2] / name, (paths[2] / name).stat().st_size // 2)
    elif how == "missing":
        (paths[2] / name).unlink()
    else:
        torch.save({"w": torch.zeros(9)}, paths[2] / name)
    with pytest.warns(UserWarning, match=rf"step-00000002/{name}"):
        restored = ckpt.restore(unbound(5))
    assert same(restored, states[1])
    assert here(ckpt) == [0, 1]
    # Going on from there, it is put out of the way, and its name is free again.
    ckpt.save(states[2])
    assert same(ckpt.restore(unbound(5)), states[2])
    assert here(ckpt) == here(ll.checkpoint_io(tmp_path)) == [0, 1, 2]
    aside = [entry for entry in names_in(tmp_path) if not entry.startswith("step-")]
    assert len(aside) == 1
    assert re.fullmatch(r"damaged-\w{6}-step-00000002", aside[0])


def test_the_damaged_one_that_was_asked_for_is_an_error(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, monitor=BestSoFar("x", mode="min"))
    for step in range(3):
        damage(ckpt.save(unbound().replace(step=step), {"x": step}))
    given_state, kept = fresh(3), ll.copy_state(fresh(3))
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match="step-00000001/tensors"):
        ckpt.restore(given_state, 1)
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match="step-00000000/tensors"):
        ckpt.restore(given_state, "best")
    with (
        pytest.warns(UserWarning, match="going back"),
        pytest.raises(
            ll.checkpoint.DamagedCheckpointError,
            match=r"no whole checkpoint; steps there: none; damaged: step-0.*, .*2",
        ),
    ):
        ckpt.restore(given_state)
    with pytest.raises(ll.checkpoint.DamagedCheckpointError, match=r"no checkpoint of step 1; .*damaged"):
        ckpt.restore(given_state, 1)
    assert same(given_state, kept)


# Restore


def test_nothing_there_is_a_start(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path / "none", monitor=BestSoFar("x", mode="min"))
    state = fresh()
    assert ckpt.restore(state) is state
    assert ckpt.latest() is ckpt.best() is None
    assert ckpt.steps() == []
    for which, message in [
        (3, "has no checkpoint of step 3; steps there: none"),
        ("best", "was saved with the metric 'x'; steps there: none"),
        ("last", "has no 'last' \\(give 'latest', 'best' or a step\\)"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            ckpt.restore(state, which)
        assert not isinstance(error.value, ll.checkpoint.DamagedCheckpointError)
    with pytest.raises(ValueError, match=r"none has no checkpoint, and required=True"):
        ckpt.restore(state, required=True)
    assert not (tmp_path / "none").exists()


def test_a_restore_says_what_it_restored_and_from_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ckpt = ll.checkpoint_io("runs/first")
    ckpt.restore(fresh())
    ckpt.save(unbound().replace(step=13, epoch=2, batch=1))
    ckpt.restore(fresh(), quiet=True)
    assert capsys.readouterr().out == ""
    for options, words in (
        ({}, "step 13 (epoch 2, batch 1)"),
        ({"weights_only": True}, "weights"),
        ({"names": lambda name: name.startswith("0.")}, "some of the weights"),
    ):
        ckpt.restore(fresh(), 13, **options)
        assert capsys.readouterr().out == f"Restored {words} from runs/first/step-00000013\n"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    ckpt.restore(fresh())
    assert capsys.readouterr().out.endswith(f" from {tmp_path}/runs/first/step-00000013\n")


@pytest.mark.filterwarnings("ignore:.*other settings. seed was")
def test_bound_stays_bound_and_unbound_stays_free(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved = advanced(unbound(1, seed=5, epoch_length=7), 3).replace(
        extra={"ema": torch.ones(2), "count": 3, "best": None}
    )
    ckpt.save(saved)
    model = net(2)
    start = ll.init_state(model, adamw, epoch_length=7, extra={"ema": torch.zeros(2), "count": 0, "best": 1.5})
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    bound = ckpt.restore(start)
    assert same(bound, saved)
    for name, tensor in {**bound.params, **bound.buffers}.items():
        assert tensor is own[name]
        assert torch.equal(tensor, {**saved.params, **saved.buffers}[name])
    with pytest.raises(ll.DonatedStateError, match=r"ckpt\.restore\(state\) has written over its tensors"):
        _ = start.params
    given_state = unbound(2, epoch_length=7, extra={"ema": torch.zeros(2), "count": 0, "best": None})
    kept = ll.copy_state(given_state)
    free = ckpt.restore(given_state)
    assert same(free, saved)
    assert same(given_state, kept)
    assert not any(isinstance(tensor, nn.Parameter) for tensor in free.params.values())
    assert all(tensor.requires_grad for tensor in free.params.values())
    # What was None may have become something.
    later = ckpt.restore(unbound(2, epoch_length=7, extra={"ema": None, "count": None, "best": None}))
    assert torch.equal(later.extra["ema"], torch.ones(2))
    assert later.extra["count"] == 3


def test_a_pure_state_with_frozen_parameters_of_the_module_is_not_written_over(tmp_path):
    model = net()
    model[0].requires_grad_(False)
    start = ll.init_state(model, adamw)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda m, x: m(x).square().mean()), adamw)
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(start)
    state, _ = step(start, torch.randn(5, 3))
    assert state.params["0.weight"] is model[0].weight
    kept = ll.copy_state(state)
    restored = ckpt.restore(state)
    assert same(restored, start)
    assert same(state, kept)
    assert restored.params["0.weight"].requires_grad is False
    # Nor is it spent by a restore into the module, whose frozen parameters have these values already.
    ckpt.restore(start)
    assert same(state, kept)


def test_a_restored_state_can_be_restored_into_again(tmp_path):
    """A run that goes back to its last checkpoint, as after a loss that exploded."""
    ckpt = ll.checkpoint_io(tmp_path)
    model = net()
    state = ll.init_state(model, adamw)
    ckpt.save(state)
    kept = ll.copy_state(state)
    step = ll.make_train_step(ll.make_grad_fn(model, lambda m, x: m(x).square().mean()), adamw, donate=True)
    for _ in range(2):
        state, _ = step(state, torch.randn(4, 3))
        state = ckpt.restore(state)
        assert same(state, kept)
        assert state.params["0.weight"] is model[0].weight


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ties_stay_ties_and_each_tensor_takes_the_layout_of_the_state(tmp_path, asynchronous):
    image, column = torch.randn(2, 3, 4, 5), torch.arange(12.0)
    params = {"a": column, "tied": column, "t": torch.randn(3, 4).T, "e": torch.ones(1).expand(5), "image": image}
    state = ll.TrainState(params=params, extra=(torch.tensor(3, dtype=torch.uint16), [2**80, b"x", 1j]), seed=2**100)
    ckpt = ll.checkpoint_io(tmp_path, asynchronous=asynchronous)
    ckpt.save(state)
    like = {**params, "tied": column.clone(), "image": image.to(memory_format=torch.channels_last)}
    found = ckpt.restore(state.replace(params=like))
    assert same(found, state)
    assert found.params["tied"].data_ptr() == found.params["a"].data_ptr() != column.data_ptr()
    assert {name: found.params[name].stride() for name in ("t", "image")} == {
        "t": (1, 4),
        "image": like["image"].stride(),
    }
    model = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    ckpt.save(ll.init_state(nn.Conv2d(3, 2, 3), adamw).replace(step=1))
    moments = ckpt.restore(ll.copy_state(ll.init_state(model, adamw))).opt_state["state"]["weight"]
    assert moments["exp_avg"].stride() == model.weight.stride()  # which fused kernels pair by


def test_a_bound_state_with_an_expanded_buffer(tmp_path):
    class Model(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2, 3), value))
            self.register_buffer("ids", torch.full((3, 1), value).expand(3, 4))
            self.tied = self.weight

    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(ll.init_state(Model(7.0)))
    model = Model(0.0)
    restored = ckpt.restore(ll.init_state(model))
    assert restored.buffers["ids"] is model.ids
    assert torch.equal(model.ids, torch.full((3, 4), 7.0))
    assert torch.equal(model.tied, torch.full((2, 3), 7.0))


def test_every_difference_is_told_at_once_and_the_state_stays_good(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved = {"gone": torch.ones(2), "wide": torch.ones(2, 3), "half": torch.ones(2).half()}
    ckpt.save(ll.TrainState(params=saved, extra={"best": 0.5, "note": "text", "tensor": torch.ones(1)}))
    for kind in (torch.Tensor.clone, nn.Parameter):
        params = {"wide": torch.zeros(3, 2), "half": torch.zeros(2), "new/er": torch.zeros(1)}
        params = {name: kind(tensor) for name, tensor in params.items()}
        state = ll.TrainState(params=params, extra={"best": torch.zeros(1), "note": 3, "tensor": 1.0})
        with pytest.raises(ValueError, match="does not fit the state") as error:
            ckpt.restore(state)
        assert str(error.value).splitlines()[1:-1] == [
            "  /params/new~1er is in the state, and not in the checkpoint",
            "  /params/gone is in the checkpoint, and not in the state",
            "  /params/wide has shape (2, 3) in the checkpoint, (3, 2) in the state",
            "  /params/half is float16 in the checkpoint, float32 in the state (or convert=True)",
            "  /extra/best is float in the checkpoint, a tensor in the state",
            "  /extra/note is str in the checkpoint, int in the state",
            "  /extra/tensor is a tensor in the checkpoint, float in the state",
        ]
        assert not isinstance(error.value, ll.checkpoint.DamagedCheckpointError)
        assert not any(tensor.any() for tensor in state.params.values())


def test_what_is_added_to_extra_later_is_told_the_way(tmp_path):
    ckpt, state = ll.checkpoint_io(tmp_path), ll.TrainState(extra={"note": 1})
    ckpt.save(state)
    with pytest.raises(
        ValueError, match=r"/extra/more is in the state.*\n.*replace\(extra={\*\*state\.extra, key: value}"
    ):
        ckpt.restore(state.replace(extra={"note": 0, "more": 2}))


def test_a_checkpoint_of_the_weights_alone_is_a_state_without_the_optimizers(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    state = advanced(unbound(), 2)
    ckpt.save(state.replace(opt_state=None))
    assert ckpt.latest().parts.keys() == {"params", "buffers"}
    best = ckpt.restore(unbound(1), weights_only=True)
    assert same(best, unbound(1).replace(params=state.params, buffers=state.buffers))
    with pytest.raises(ValueError, match=r"/opt_state/state/0\.bias/exp_avg is in the state, and not in"):
        ckpt.restore(unbound())


@pytest.mark.filterwarnings("ignore:.*other settings. seed was")
@pytest.mark.parametrize("bind", [False, True])
def test_weights_alone_a_subset_and_another_dtype(tmp_path, bind):
    ckpt = ll.checkpoint_io(tmp_path)
    saved = advanced(unbound(1, seed=9), 2)
    ckpt.save(saved)

    def other():
        torch.manual_seed(3)
        model = nn.Sequential(*net(3)[:2], nn.Linear(4, 5))  # another head
        state = ll.init_state(model, ll.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), seed=1, extra="mine")
        return model, (state if bind else ll.copy_state(state))

    with pytest.raises(ValueError, match=r"/params/2.weight has shape \(2, 4\) in the checkpoint, \(5, 4\) in the"):
        ckpt.restore(other()[1], weights_only=True)
    model, state = other()
    head = state.params["2.weight"].detach().clone()
    tuned = ckpt.restore(state, names=lambda name: not name.startswith("2."))
    for tree in ("params", "buffers"):
        for name, tensor in getattr(tuned, tree).items():
            if not name.startswith("2."):
                assert torch.equal(tensor, getattr(saved, tree)[name])
    assert torch.equal(tuned.params["2.weight"], head)
    assert (tuned.step, tuned.seed, tuned.extra) == (0, 1, "mine")
    assert (tuned.params["0.weight"] is model[0].weight) == bind

    doubled = pytree.tree_map(lambda t: t.detach().double() if t.is_floating_point() else t, unbound())
    if bind:
        doubled = ll.init_state(net().double(), adamw)
    with pytest.raises(ValueError, match=r"0.weight is float32 in the checkpoint, float64 in the state \(or convert"):
        ckpt.restore(doubled)
    found = ckpt.restore(doubled, convert=True)
    assert found.params["0.weight"].dtype == torch.float64
    assert torch.equal(found.params["0.weight"], saved.params["0.weight"].double())
    assert found.step == 2


def test_an_interrupt_amid_a_bound_restore_waits(tmp_path, monkeypatch):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(unbound(1))
    model = net(2)
    state = ll.init_state(model, adamw)
    copy_, calls = torch.Tensor.copy_, []

    def interrupting(self, *args):
        if len(calls) == 3:
            os.kill(os.getpid(), 2)
        calls.append(1)
        return copy_(self, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupting)
    before = state
    with contextlib.suppress(KeyboardInterrupt):
        state = ckpt.restore(state)
        time.sleep(300)  # the signal comes once the restored state has its name
        pytest.fail("the signal was lost")
    monkeypatch.undo()
    assert len(calls) > 10
    assert same(state, unbound(1))
    with pytest.raises(ll.DonatedStateError, match=r"ckpt.restore\(state\) has written"):
        _ = before.params
    assert torch.equal(model[0].weight, net(1)[0].weight)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_of_a_checkpoint_is_synced_before_it_has_its_name(tmp_path, monkeypatch, asynchronous):
    synced, unsynced = set(), []
    fsync, rename = os.fsync, Path.rename

    def slow(file):
        time.sleep(0.05 if os.fstat(file).st_size > 100_000 else 0)
        fsync(file)
        synced.add(os.fstat(file).st_ino)

    def checked(path, target):
        if path.name.startswith(".writing"):
            unsynced.append([each for each in (path, *path.iterdir()) if each.stat().st_ino not in synced])
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(Path, "rename", checked)
    ckpt = ll.checkpoint_io(tmp_path, asynchronous=asynchronous)
    ckpt.save(unbound().replace(extra=torch.zeros(100_000)))
    ckpt.wait()
    assert unsynced == [[]]


# In the background


def test_a_state_that_is_written_over_while_it_is_saved_is_saved_as_it_was(tmp_path, monkeypatch):
    began, written_over, open_file = threading.Event(), threading.Event(), builtins.open

    def waiting(path, mode="r", *args, **options):
        if mode == "xb":
            began.set()
            assert written_over.wait(300)
        return open_file(path, mode, *args, **options)

    monkeypatch.setattr(builtins, "open", waiting)
    model = net()
    grad_fn = ll.make_grad_fn(model, lambda m, x: m(x).square().mean())
    step = ll.make_train_step(grad_fn, adamw, donate=True)
    donated, _ = step(ll.init_state(model, adamw), torch.ones(5, 3))
    for number, state in enumerate((advanced(unbound()), fresh(), donated)):  # pure, bound, of donated steps
        began.clear()
        written_over.clear()
        kept = ll.copy_state(state)
        ckpt = ll.checkpoint_io(tmp_path / str(number), asynchronous=True)
        path = ckpt.save(state)
        assert began.wait(300)
        assert not path.exists()
        with torch.no_grad():
            for leaf in pytree.tree_leaves((state.params, state.buffers, state.opt_state)):
                leaf.zero_()
        written_over.set()
        ckpt.wait()
        assert same(ckpt.restore(unbound()), kept)


def test_an_error_in_the_background_surfaces_once_and_saving_continues(tmp_path, monkeypatch):
    def failing(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    ckpt = ll.checkpoint_io(tmp_path, asynchronous=True)
    for surface in (ckpt.wait, lambda: ckpt.save(unbound()), lambda: ckpt.restore(unbound())):
        monkeypatch.setattr(os, "fsync", failing)
        ckpt.save(unbound().replace(step=4))
        with pytest.raises(OSError, match=r"step-00000004 could not be saved: No space left on device"):
            surface()
        monkeypatch.undo()
        ckpt.wait()
        assert names_in(tmp_path) == []
    ckpt.save(unbound().replace(step=4))
    ckpt.wait()
    assert here(ckpt) == [4]


ENDS = """
import contextlib, os, sys, threading, time, torch, looplib as ll
fsync = os.fsync

def run(folder, end):
    ckpt = ll.checkpoint_io(folder, asynchronous=True)
    at_end = threading.Event()  # where the process ends without a word, the write is under way for ever

    def slow(*args):
        at_end.wait()
        time.sleep(0.1)
        return fsync(*args)

    def failing(*args):
        raise OSError(28, "No space left on device")

    os.fsync = failing if end == "full" else slow
    ckpt.save(ll.TrainState(step=4 if end == "full" else 5, params={"w": torch.arange(10.0)}))
    if end == "full":
        with contextlib.suppress(OSError):
            ckpt.wait()
        ckpt.save(ll.TrainState(step=5, params={"w": torch.arange(10.0)}))
    if end == "killed":
        os._exit(0)
    at_end.set()
    if end == "exit":
        sys.exit(3)
    if end == "interrupt":
        raise KeyboardInterrupt

for end in ("end", "exit", "interrupt", "killed", "full"):
    os.mkdir(f"{sys.argv[1]}/{end}")
    if not os.fork():
        os.dup2(os.open(f"{sys.argv[1]}/{end}.txt", os.O_WRONLY | os.O_CREAT), 2)
        run(f"{sys.argv[1]}/{end}", end)
        sys.exit()
for _ in range(5):
    os.wait()
"""


def test_a_process_that_ends_right_after_a_save_leaves_all_of_it_or_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True, cwd=ROOT)
    start = ll.TrainState(params={"w": torch.zeros(10)})
    for end, step in {"end": 5, "exit": 5, "interrupt": 5, "killed": 0, "full": 0}.items():
        ckpt = ll.checkpoint_io(tmp_path / end)
        assert ckpt.restore(start).step == step
        ckpt.save(start.replace(step=6))
        assert all(name.startswith("step-") for name in names_in(tmp_path / end))
    # An error is told at exit if nobody has asked for it.
    told = (tmp_path / "full.txt").read_text()
    assert re.search(r"looplib: the last save failed: .*step-00000005 could not be saved: No space left", told)
    assert "step-00000004" not in told


# Looking in


def test_the_table_reads_well(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    assert repr(ckpt.steps()) == "no checkpoints"
    state = ll.TrainState(params={"w": torch.zeros(300)}, opt_state={"m": torch.zeros(250_000)}, epoch=1, batch=3)
    ckpt.save(state.replace(step=500, samples=32_000))
    ckpt.save(state.replace(step=12_000, samples=768_000), {"eval/loss": 0.123456})
    title, first, second = [re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC", "when", line).split()
                            for line in repr(ckpt.steps()).splitlines()]  # fmt: skip
    assert " ".join(title) == "step epoch batch samples saved size params opt_state eval/loss"
    assert " ".join(first) == "500 1 3 32000 when 1 MB 1.2 kB 1 MB"
    assert " ".join(second) == "12000 1 3 768000 when 1 MB 1.2 kB 1 MB 0.12346"
    assert len({*map(len, repr(ckpt.steps()).splitlines())}) == 1
    first = ckpt.steps()[0]
    assert first.parts == {"params": 1200, "opt_state": 1_000_000}
    assert first.bytes == (first.path / DATA).stat().st_size
