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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "table", "count"),
    [("saves", "saves", 3), ("reads", "host reads", 3), ("moments", "moments", 3), ("small", "MLP", 8)],
)
def test_the_rows_are_measured_without_a_gpu(rows, table, count, tmp_path):
    found, printed = measured(tmp_path, "--rows", rows)
    assert [len(found["tables"][name]) for name in found["tables"] if name.startswith(table)] == [count]
    assert not found["failures"]
    assert "A dry run: the figures mean nothing" in printed


@pytest.mark.slow
def test_language_models_are_measured_without_a_gpu(tmp_path):
    found, _ = measured(tmp_path, "--rows", "language", "--leave-out", "looplib, compiled whole")
    assert found["failures"] == {}
    for entry in found["tables"]["a tiny GPT-2"].values():
        assert entry["tokens a second"]["value"] > 0 < entry["throughput over the best other"]["value"]


@pytest.mark.slow
def test_what_there_is_no_time_for_is_named(tmp_path):
    found, _ = measured(tmp_path, "--rows", "saves", "--seconds", "0")
    assert [error.partition(":")[0] for error in found["failures"].values()] == ["OutOfTimeError"] * 3
    assert not found["tables"]
