"""A save of a step that is there already, whatever ends it, and entries that are no checkpoints."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import looplib as ll

ROOT = Path(__file__).parents[2]


def state_of(value, step=3):
    return ll.TrainState(step=step, samples=value, params={"w": torch.full((1000,), float(value))})


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.name != ".lock")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_metrics_of_weights_that_are_saved_again_are_kept(tmp_path, asynchronous):
    ckpt = ll.checkpoint_io(tmp_path, keep_last=1, monitor="loss", asynchronous=asynchronous)
    ckpt.save(state_of(1, step=1), {"loss": 0.5})
    ckpt.save(state_of(2, step=2), {"loss": 0.25})
    ckpt.save(state_of(2, step=2).replace(extra={"done": True}))  # as a script does at its end
    ckpt.wait()
    assert ckpt.best().step == 2
    assert ckpt.best().metrics == {"loss": 0.25}
    assert ckpt.restore(state_of(0).replace(extra={"done": False})).extra == {"done": True}
    ckpt.save(state_of(3, step=2))  # different weights, which nobody has measured
    ckpt.wait()
    assert ckpt.latest().metrics == {}
    assert ckpt.best() is None


def test_a_reader_never_takes_a_replaced_or_deleted_checkpoint_for_a_damaged_one(tmp_path):
    """While another process saves each step twice, and keeps only the last."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests/checkpoint")!r})
import test_same_step as t
ckpt = t.ll.checkpoint_io({str(tmp_path)!r}, keep_last=1)
for value in range(10**9):
    ckpt.save(t.state_of(value, step=value // 2))
"""
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        reader, seen = ll.checkpoint_io(tmp_path), []
        while len(set(seen)) < 10:
            assert writer.poll() is None
            restored = reader.restore(state_of(-1))
            assert set(restored.params["w"].tolist()) == {float(restored.samples)}
            if restored.samples >= 0:
                seen.append(restored.samples)
        assert seen == sorted(seen)
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("after", ["remove", "rename"])
def test_a_replacement_that_was_cut_short_is_finished_by_the_next_run(tmp_path, after, monkeypatch):
    """At each moment between its renames: the later save is the one that counts."""
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_of(1))

    rename, rmtree = Path.rename, shutil.rmtree

    def killed_before_it_is_removed(path, target):  # both are there
        if Path(target).name.startswith(".deleting-"):
            raise KeyboardInterrupt
        return rename(path, target)

    def killed_after_it_is_removed(path, **options):  # the later one alone
        rmtree(path, **options)
        if path.name.startswith(".deleting-"):
            raise KeyboardInterrupt

    if after == "rename":
        monkeypatch.setattr(Path, "rename", killed_before_it_is_removed)
    else:
        monkeypatch.setattr(shutil, "rmtree", killed_after_it_is_removed)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(state_of(2))
    monkeypatch.undo()
    assert [found.samples for found in ll.checkpoint_io(tmp_path).steps()] == [2]
    assert ll.checkpoint_io(tmp_path).restore(state_of(0)).params["w"][0] == 2
    del ckpt
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.delete(after=2)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["dangling", "file"])
def test_an_entry_that_is_no_directory_is_left_out_with_a_warning(tmp_path, kind):
    ckpt = ll.checkpoint_io(tmp_path)
    ckpt.save(state_of(1, step=1))
    path = tmp_path / "step-00000002"
    if kind == "file":
        path.write_text("")
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.warns(UserWarning, match="step-00000002.*this checkpoint is left out"):
        assert [found.step for found in ckpt.steps()] == [1]
    assert ckpt.restore(state_of(0)).samples == 1
    ckpt.save(state_of(2, step=2))  # its name is free again
    assert ckpt.restore(state_of(0)).samples == 2
    assert sum(name.startswith("damaged-") for name in names_in(tmp_path)) == 1


def test_a_checkpoint_that_is_a_symbolic_link_goes_without_what_it_leads_to(tmp_path):
    elsewhere = ll.checkpoint_io(tmp_path / "elsewhere").save(state_of(1, step=1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-00000001").symlink_to(elsewhere)
    ckpt = ll.checkpoint_io(tmp_path / "run", keep_last=1)
    assert ckpt.restore(state_of(0)).samples == 1
    ckpt.save(state_of(2, step=2))
    assert names_in(tmp_path / "run") == ["step-00000002"]
    assert ll.checkpoint_io(tmp_path / "elsewhere").restore(state_of(0)).samples == 1
