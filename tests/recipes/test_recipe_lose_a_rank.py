"""Killed processes are replaced, and the run ends with the bits of one that nobody disturbed, also after Ctrl-C."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(**settings):
    options = [f"--{name}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / "lose_a_rank.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(**settings):
    """Run the recipe; return its lines and the numbers in the last one."""
    process = start(**settings)
    shown, _ = process.communicate(timeout=3000)
    assert process.returncode == 0, shown
    found = ast.literal_eval(re.search(r"^{.*?}", shown, re.MULTILINE)[0])
    return shown, (found["steps"], found["kills"], found["recoveries"], found["checksum"])


def interrupt(**settings):
    """Press Ctrl-C after the second epoch, as in a terminal, where all processes receive the signal."""
    process = start(**settings)
    shown = ""
    while "epoch   2.00" not in shown:
        shown += (line := process.stdout.readline())
        assert line, shown
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 130, shown + rest
    assert "stopped; run the same command to continue" in rest
    assert "Traceback" not in rest


LARGE = pytest.mark.large


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("engine", "replicas", "kills", "epochs"),
    [
        ("ddp", 2, 2, 30),
        ("reduce", 3, 2, 30),
        *(pytest.param(engine, ranks, 50, 200, marks=LARGE) for engine in ("reduce", "ddp") for ranks in (2, 3)),
    ],
)
def test_killed_ranks_are_replaced_with_the_bits_of_an_undisturbed_run(engine, replicas, kills, epochs, tmp_path):
    settings = {"engine": engine, "replicas": replicas, "epochs": epochs}
    undisturbed, killed = ({**settings, "directory": str(tmp_path / name)} for name in ("undisturbed", "killed"))
    _, (steps, none, never, expected) = run(**undisturbed)
    assert (steps, none, never) == (19 * epochs, 0, 0)
    if engine == "reduce":  # what the supervisor does alike for both
        shown, found = run(**undisturbed)
        assert f"already finished at step {steps}" in shown
        assert found == (steps, 0, 0, expected)
        interrupt(**killed)
    shown, (again, kills_made, recoveries, state) = run(kills=kills, **killed)
    if engine == "reduce":
        assert re.search(r"continuing from step \d+", shown)
        assert "epoch   1.00" not in shown
    assert (again, kills_made, state) == (steps, kills, expected)
    assert 0 < recoveries <= kills
