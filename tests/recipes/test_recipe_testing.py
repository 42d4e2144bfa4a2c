"""The project that shows the checks: its tests are green, and what is broken in it turns its test red."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from looplib import testing

PROJECT = Path(__file__).parents[2] / "recipes/testing_your_step"
TESTS = (PROJECT / "tests/test_your_step.py").read_text()
NAMES = re.findall(r"def (test_\w+)", TESTS)


def run_tests(folder):
    """The names of the tests that failed, by pytest in a process of its own, and all that it wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--color=no", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    said = dict(reversed(line.split(" - ")[0].split("::")) for line in done.stdout.splitlines() if "::test_" in line)
    results = {name: place.split()[0] for name, place in said.items()}
    assert sorted(results) == sorted(NAMES), done.stdout + done.stderr
    failed = [name for name, result in results.items() if result != "PASSED"]
    assert done.returncode == bool(failed)
    return failed, done.stdout


@pytest.fixture
def project(tmp_path):
    return shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_documentation_shows_the_projects_own_tests():
    shown = textwrap.dedent(testing.__doc__[testing.__doc__.index("    import pytest") :].split("\n`recipes/")[0])
    hints = re.compile(r": Run|Run, | -> \w+|\s+#.*")
    lines = [[hints.sub("", line) for line in text.splitlines() if line] for text in (shown, TESTS)]
    assert lines[0] == lines[1]
    checks = set(re.findall(r"testing\.(assert_\w+)", shown))
    others = {"assert_causal", "assert_donated_equals_pure", "assert_ranks_train_alike", "assert_width_stable"}
    assert set(testing.__all__) - checks == others


@pytest.mark.slow
def test_the_project_as_it_is_passes_its_tests(project):
    failed, _ = run_tests(project)
    assert failed == []


@pytest.mark.slow
def test_a_loss_that_is_averaged_wrongly_turns_its_tests_red(project):
    script = project / "train.py"
    text, right = script.read_text(), "ll.Mean((costs * losses).sum(), costs.sum())"
    assert text.count(right) == 1
    script.write_text(text.replace(right, "(costs * losses).sum() / costs.sum()"))  # which weighs by its rows
    failed, said = run_tests(project)
    assert failed == ["test_microbatches_give_the_gradient_of_the_whole"]
    assert "return ll.Mean(total, weight)" in said
