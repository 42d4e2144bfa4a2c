"""Saves that are whole or not there, and policies against brute force."""

import builtins
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from files import DATA, advanced, names_in, net, same, tensors_of, unbound
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared import examples, file_size_limit, one_report

import looplib as ll
from looplib.predicates import BestSoFar

ROOT = Path(__file__).parents[2]


def state_of(value, step=3):
    return ll.TrainState(step=step, samples=value, params={"w": torch.full((1000,), float(value))})


def saved(ckpt, *states):
    for state in states:
        ckpt.save(state)
    ckpt.wait()


# Policies


# The best is kept though no policy asks for it, and though its step is saved again without metrics.
@example(
    keep_last=1, keep_best=0, mode="min", keep=None, asynchronous=False, saves=[(1, 0), (0, None), (1, 1), (1, 0)]
)
@settings(max_examples=examples(25), deadline=None)
@given(
    keep_last=st.none() | st.integers(1, 4),
    keep_best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
    keep=st.none() | st.sets(st.integers(0, 20)),
    asynchronous=st.booleans(),
    saves=st.lists(st.tuples(st.integers(0, 3), st.none() | st.sampled_from([-1, 0, 0.5, float("inf")])), max_size=9),
)
def test_the_policies_keep_what_brute_force_keeps(keep_last, keep_best, mode, keep, asynchronous, saves):
    with tempfile.TemporaryDirectory() as folder:
        ckpt = ll.checkpoint_io(
            folder, keep_last=keep_last, keep_best=keep_best, monitor=BestSoFar("score", mode=mode),
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
                or (keep and entry[1] in keep)
            ]
            ckpt.wait()
            assert [(c.samples, c.step, c.metrics.get("score")) for c in ckpt.steps()] == kept
            assert ckpt.latest().samples == number
            assert ckpt.best() == next((c for c in ckpt.steps() if best and c.samples == best[0][0]), None)
            assert ckpt.restore(state).samples == number
            assert ll.checkpoint_io(folder).steps() == ckpt.steps()
        assert all(name.startswith("step-") for name in names_in(folder))


STATE = state_of(0)
WRONG = {  # what is called with a path, the type of the error and what it names
    "keep_last": (lambda path: ll.checkpoint_io(path, keep_last=0), ValueError, "keep_last is 0"),
    "keep_best": (lambda path: ll.checkpoint_io(path, keep_best=-1, monitor="loss"), ValueError, "keep_best is -1"),
    "unmonitored": (lambda path: ll.checkpoint_io(path, keep_best=2), ValueError, "monitor="),
    "no best": (lambda path: ll.checkpoint_io(path).best(), ValueError, "monitor="),
    "list as settings": (lambda path: ll.checkpoint_io(path, describe=[1]), TypeError, "describe is a list"),
    "text as function": (lambda path: ll.checkpoint_io(path, select="lora"), TypeError, "select is 'lora'"),
    "nothing selected": (
        lambda path: ll.checkpoint_io(path, select=lambda name, tensor: False).save(STATE), ValueError, "select"
    ),
    "a file": (lambda path: ll.checkpoint_io(ROOT / "LICENSE"), NotADirectoryError, "LICENSE"),
    "in a file": (lambda path: ll.checkpoint_io(ROOT / "LICENSE/deeper").save(STATE), OSError, "LICENSE/deeper"),
    "metrics": (lambda path: ll.checkpoint_io(path).save(STATE, [1]), TypeError, "metrics is a list"),
    "a metric": (lambda path: ll.checkpoint_io(path).save(STATE, {"loss": [1]}), TypeError, "'loss' is a list"),
    "missing": (lambda path: ll.checkpoint_io(path, monitor="loss").save(STATE, {"acc": 1}), ValueError, "'loss'.*acc"),
    "no state": (lambda path: ll.checkpoint_io(path).save(net()), TypeError, "Sequential"),
    "no step": (lambda path: ll.checkpoint_io(path).restore(STATE, 3), ValueError, "checkpoint 3.*none"),
    "no choice": (lambda path: ll.checkpoint_io(path).restore(STATE, "last"), ValueError, "'last'"),
    "none is best": (lambda path: ll.checkpoint_io(path, monitor="loss").restore(STATE, "best"), ValueError, "'best'"),
}  # fmt: skip


@one_report
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path, case):
    call, error, words = WRONG[case]
    with pytest.raises(error, match=words) as raised:
        call(tmp_path / "new")
    assert not isinstance(raised.value, ll.checkpoint.DamagedCheckpointError)
    assert not (tmp_path / "new").exists()


def test_a_metric_that_is_nan_or_missing_is_no_candidate(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, monitor="eval/loss", asynchronous=True)
    ckpt.save(STATE, {"eval/loss": torch.tensor(0.5), "other": float("nan"), "third": -float("inf")})
    ckpt.save(STATE.replace(step=4))
    ckpt.wait()
    assert str(ckpt.best().metrics) == "{'eval/loss': 0.5, 'other': nan, 'third': -inf}"
    assert ll.checkpoint_io(tmp_path, monitor=BestSoFar("other", mode="min")).best() is None
    with pytest.raises(
        ValueError, match="no checkpoint has the monitored metric 'eval/los': they have 'eval/loss', 'other'"
    ):
        ll.checkpoint_io(tmp_path, monitor="eval/los", mode="min").best()
    with pytest.warns(UserWarning, match="eval/loss.*NaN"):
        ckpt.save(STATE.replace(step=5), {"eval/loss": float("nan")})
    ckpt.wait()
    assert ckpt.best().step == 3


def test_later_steps_of_another_run_are_refused(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    saved(ckpt, *(STATE.replace(step=step) for step in (0, 10, 20, 30)))
    other = ll.checkpoint_io(tmp_path)
    with pytest.raises(ValueError, match=r"20, 30.*15.*delete\(after=15\)"):
        other.save(STATE.replace(step=15))
    assert [c.step for c in other.steps()] == [0, 10, 20, 30]
    other.delete(after=15)
    other.save(STATE.replace(step=15))
    assert [c.step for c in other.steps()] == [c.step for c in ckpt.steps()] == [0, 10, 15]


def test_a_checkpoint_says_the_size_of_its_file(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path)
    assert ckpt.steps() == []
    ckpt.save(ll.TrainState(params={"w": torch.zeros(250_000)}))
    assert ckpt.latest().bytes == (ckpt.latest().path / DATA).stat().st_size


# All or nothing


@pytest.mark.every_case
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_last_one_good(tmp_path, asynchronous):
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1, asynchronous=asynchronous)
    state = unbound()
    saved(ckpt, state)
    for size in (0, 1000, 100_000):
        with file_size_limit(size), pytest.raises(OSError, match=r"step-00000001 .*File too large") as e:
            saved(ckpt, state.replace(step=1, extra=torch.zeros(10**6)))
        assert e.value.errno == errno.EFBIG
        assert names_in(tmp_path) == ["step-00000000"]
    assert same(ckpt.restore(unbound(1)), state)
    saved(ckpt, state.replace(step=1))
    assert names_in(tmp_path) == ["step-00000001"]


def test_an_interrupt_amid_a_save_leaves_nothing(tmp_path, monkeypatch):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(STATE)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)  # all is written
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(STATE.replace(step=4))
    assert names_in(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_of_a_checkpoint_is_synced_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch, asynchronous):
    events = []
    fsync, rename = os.fsync, Path.rename

    def noted(file):
        fsync(file)
        events.append(os.fstat(file).st_ino)

    def checked(path, target):
        if path.name.startswith(".writing"):
            assert {each.stat().st_ino for each in (path, *path.iterdir())} <= {*events}
            events.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    saved(ll.checkpoint_io(tmp_path, asynchronous=asynchronous), STATE)
    assert events == [tmp_path.stat().st_ino]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_metrics_of_weights_that_are_saved_again_are_kept(tmp_path, asynchronous):
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1, monitor="loss", asynchronous=asynchronous)
    ckpt.save(state_of(1, step=1), {"loss": 0.5})
    ckpt.save(state_of(2, step=2), {"loss": 0.25})
    saved(ckpt, state_of(2, step=2).replace(extra={"done": True}))  # as a script does at its end
    assert (ckpt.best().step, ckpt.best().metrics) == (2, {"loss": 0.25})
    assert ckpt.restore(state_of(0).replace(extra={"done": False})).extra == {"done": True}
    saved(ckpt, state_of(3, step=2))  # different weights, which nobody has measured
    assert ckpt.latest().metrics == {}
    assert ckpt.best() is None


def test_a_save_that_meets_another_processes_fails_and_is_never_mixed_with_it(tmp_path, monkeypatch):
    """Both have written their files of one step: this process first, which then continues before the other does."""
    ckpt, other = ll.checkpoint_io(tmp_path, keep_last=1), ll.checkpoint_io(tmp_path, keep_last=1, asynchronous=True)
    ckpt.save(state_of(1, step=1))
    they_have_written, we_have_ended = threading.Event(), threading.Event()

    def in_turn(path, target):
        if Path(target).name.startswith("step-"):
            if threading.current_thread() is threading.main_thread():
                other.save(state_of(3, step=2))
                they_have_written.wait(60)
            else:
                they_have_written.set()
                we_have_ended.wait(60)
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", in_turn)
    try:
        with pytest.raises(OSError, match="step-00000002 could not be saved"):
            ckpt.save(state_of(2, step=2))
    finally:
        we_have_ended.set()
    other.wait()
    assert names_in(tmp_path) == ["step-00000002"]
    assert ll.checkpoint_io(tmp_path).restore(state_of(0)).params["w"][0] == 3


@pytest.mark.every_case
@pytest.mark.parametrize("after", ["rename", "remove"])
def test_a_replacement_that_was_cut_short_is_finished_by_the_next_run(tmp_path, after, monkeypatch):
    """At each moment between its renames: the later save is the one that counts."""
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_of(1))
    rename, rmtree = Path.rename, shutil.rmtree

    def killed_before_it_is_removed(path, target):  # both are there
        if Path(target).name.startswith(".deleting-"):
            raise KeyboardInterrupt
        return rename(path, target)

    def killed_amid_its_removal(path, **options):  # the later one, and a part of the first
        if path.name.startswith(".deleting-"):
            (path / DATA).unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    if after == "rename":
        monkeypatch.setattr(Path, "rename", killed_before_it_is_removed)
    else:
        monkeypatch.setattr(shutil, "rmtree", killed_amid_its_removal)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(state_of(2))
    monkeypatch.undo()
    ckpt = ll.checkpoint_io(tmp_path)
    assert [found.samples for found in ckpt.steps()] == [2]
    assert ckpt.restore(state_of(0)).params["w"][0] == 2
    ckpt.save(state_of(3))
    assert names_in(tmp_path) == ["step-00000003.2"]
    ckpt.delete(after=2)
    assert names_in(tmp_path) == []


def test_an_entry_that_is_no_directory_is_left_out_with_a_warning(tmp_path):
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1)
    ckpt.save(state_of(1, step=1))
    (tmp_path / "step-00000002").symlink_to(tmp_path / "gone")
    with pytest.warns(UserWarning, match="step-00000002.*this checkpoint is left out"):
        assert [found.step for found in ckpt.steps()] == [1]
    assert ckpt.restore(state_of(0)).samples == 1
    ckpt.save(state_of(2, step=2))  # beside it
    assert ckpt.restore(state_of(0)).samples == 2
    assert names_in(tmp_path) == ["step-00000002", "step-00000002.1"]


@pytest.mark.every_case
@pytest.mark.parametrize(("owner", "function"), [(Path, "lstat"), (Path, "open"), (builtins, "open")])
def test_a_reader_never_takes_a_replaced_checkpoint_for_a_damaged_one(tmp_path, monkeypatch, owner, function):
    """While it lists the entries, and before it reads either file, another process saves the step once more."""
    writer, reader = ll.checkpoint_io(tmp_path, keep_last=1), ll.checkpoint_io(tmp_path)
    writer.save(state_of(1))
    assert reader.latest().samples == 1
    original = getattr(owner, function)

    def replaced(path, *arguments):
        monkeypatch.undo()
        writer.save(state_of(2))
        return original(path, *arguments)

    monkeypatch.setattr(owner, function, replaced)
    assert reader.restore(state_of(0)).params["w"][0] == 2


def test_a_reader_sees_that_a_name_has_been_used_again(tmp_path):
    ckpt, reader = ll.checkpoint_io(tmp_path), ll.checkpoint_io(tmp_path)
    ckpt.save(state_of(1))
    assert reader.latest().samples == 1
    ckpt.delete(after=0)
    ckpt.save(state_of(2))
    assert reader.latest().samples == 2


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
    donated = advanced(ll.init_state(model, ll.optimizer(torch.optim.AdamW, lr=0.1)), 1, model, donate=True)
    for number, state in enumerate((advanced(unbound()), donated)):
        began.clear()
        written_over.clear()
        kept = ll.copy_state(state)
        ckpt = ll.checkpoint_io(tmp_path / str(number), asynchronous=True)
        path = ckpt.save(state)
        assert began.wait(300)
        assert not path.exists()
        with torch.no_grad():
            for leaf in tensors_of(state):
                leaf.zero_()
        written_over.set()
        ckpt.wait()
        assert same(ckpt.restore(unbound()), kept)


def test_an_error_in_the_background_surfaces_once_and_saving_continues(tmp_path, monkeypatch):
    def failing(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    ckpt = ll.checkpoint_io(tmp_path, asynchronous=True)
    for surface in (ckpt.wait, lambda: ckpt.save(STATE), lambda: ckpt.restore(STATE), lambda: ckpt.delete(after=0)):
        monkeypatch.setattr(os, "fsync", failing)
        ckpt.save(STATE.replace(step=4))
        with pytest.raises(OSError, match=r"step-00000004 could not be saved: No space left on device"):
            surface()
        monkeypatch.undo()
        ckpt.wait()
        assert names_in(tmp_path) == []
    saved(ckpt, STATE.replace(step=4))
    assert names_in(tmp_path) == ["step-00000004"]


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
