"""The command for a GPU runs from end to end on a CPU, at its smallest size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def measured(folder, *arguments):
    """Results of a dry run, and its output."""
    command = [sys.executable, ROOT / "tests" / "benchmarks" / "gpu.py", "--device", "cpu", "--dry-run"]
    run = subprocess.run(
        [*map(str, command), "--out", str(folder), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((folder / "gpu.json").read_text()), run.stdout


def names(found, start):
    return {name for table, rows in found["tables"].items() if table.startswith(start) for name in rows}


@pytest.mark.slow
def test_saves_and_host_reads_are_measured_without_a_gpu(tmp_path):
    found, printed = measured(tmp_path, "--rows", "saves", "reads")
    assert names(found, "saves") == {"synchronous", "asynchronous, donated", "asynchronous, pure"}
    assert len(names(found, "host reads")) == 3
    assert not found["failures"]
    assert "A dry run: the figures mean nothing" in printed
    assert "| asynchronous, pure |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_small_models_are_measured_without_a_gpu(tmp_path):
    found, _ = measured(tmp_path, "--rows", "small")
    assert len(names(found, "MLP")) == len(names(found, "a tiny ResNet")) == 9
    assert {goal["goal"] for goal in found["tables"]["goals"].values()} == {">= 1"}
    assert not found["failures"]


@pytest.mark.slow
def test_language_models_are_measured_without_a_gpu_and_a_missing_library_is_named(tmp_path):
    found, printed = measured(tmp_path, "--rows", "language", "--leave-out", "looplib, compiled whole")
    assert {"raw loop, eager", "looplib, eager", "nanoGPT's loop, compiled", "Trainer, compiled"} <= names(
        found, "a tiny"
    )
    missing = found["failures"]
    assert missing.keys() <= {"a tiny GPT-2, Lightning, compiled"}
    assert all("No module named 'lightning'" in error and error in printed for error in missing.values())
    for entry in found["tables"]["a tiny GPT-2"].values():
        assert entry["tokens a second"]["value"] > 0 < entry["throughput over the best other"]["value"]


@pytest.mark.slow
def test_what_there_is_no_time_for_is_named(tmp_path):
    found, _ = measured(tmp_path, "--rows", "saves", "--seconds", "0")
    assert [error.partition(":")[0] for error in found["failures"].values()] == ["OutOfTimeError"] * 3
    assert not found["tables"]


@pytest.mark.slow
def test_without_an_accelerator_the_tests_for_one_say_so():
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=hidden)
    assert run.returncode == 4
    assert "pytest -m gpu needs an accelerator, and torch finds none on this machine" in run.stderr
