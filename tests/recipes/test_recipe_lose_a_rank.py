"""Killed processes are replaced, and the run ends with the bits of one that nobody disturbed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(**settings):
    options = [f"--{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "lose_a_rank.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = ast.literal_eval(re.search(r"^{.*?}", done.stdout, re.MULTILINE)[0])
    return found["steps"], found["kills"], found["recoveries"], found["checksum"]


LARGE = pytest.mark.large


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("engine", "replicas", "kills", "epochs"),
    [
        ("reduce", 2, 2, 6),
        ("ddp", 2, 2, 6),
        ("reduce", 3, 2, 6),
        *(pytest.param(engine, ranks, 50, 200, marks=LARGE) for engine in ("reduce", "ddp") for ranks in (2, 3)),
    ],
)
def test_killed_ranks_are_replaced_and_the_bits_are_those_of_a_run_that_nobody_disturbed(
    engine, replicas, kills, epochs
):
    settings = {"engine": engine, "replicas": replicas, "epochs": epochs}
    steps, none, never, expected = run(**settings)
    assert (steps, none, never) == (19 * epochs, 0, 0)
    again, killed, recoveries, state = run(kills=kills, **settings)
    assert (again, killed, state) == (steps, kills, expected)
    assert 0 < recoveries <= kills
