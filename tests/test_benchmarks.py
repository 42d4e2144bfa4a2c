"""Benchmarks: the scripts run at a tiny size, one command runs all of them, and its tables reach the pages."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"


@pytest.fixture
def imported(monkeypatch):
    """Imports modules of the benchmarks for one test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def dry_run(script, folder, *arguments, ends=0):
    """Results of a dry run, and its output."""
    path = folder / f"{script}.json"
    command = [sys.executable, BENCHMARKS / f"{script}.py", "--dry-run", "--json", path, *arguments]
    run = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == ends, run.stdout + run.stderr
    return json.loads(path.read_text()), run.stdout


def absent(failures):
    """Failures for another reason than a missing package."""
    return {name: why for name, why in failures.items() if "No module named" not in why}


@pytest.mark.slow
def test_all_specialists_that_are_installed_are_measured_and_agree(tmp_path, imported):
    found, printed = dry_run("specialists", tmp_path)
    assert found["tables"][""].keys() == imported("specialists").ROWS.keys()
    assert found["finished"]
    assert not absent(found["failures"])
    assert found["markdown"] in printed
    assert "A dry run: the figures mean nothing." in printed


@pytest.mark.slow
def test_growth_is_a_table_and_a_figure_of_all_curves(tmp_path, imported):
    found, _ = dry_run("growth", tmp_path)
    growth = imported("growth")
    assert {name.rpartition(", ")[0] for name in found["tables"]["growth"]} == {*growth.CURVES, growth.STEPS}
    assert not found["failures"]
    assert "notebooks/figures/growth.svg" in found["markdown"]
    assert ElementTree.parse(tmp_path / "growth.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["optimizers", "peers", "step_overhead"])
def test_other_scripts_write_their_tables(tmp_path, script):
    arguments = {"optimizers": ["--only", "SGD"], "step_overhead": ["--no-memory"]}
    found, _ = dry_run(script, tmp_path, *arguments.get(script, []))
    assert found["tables"]
    assert not absent(found["failures"])


def test_an_answer_that_differs_is_named(imported):
    check_same = imported("specialists").check_same
    check_same({"looplib": 1.0, "another": 1.00001}, 1e-4)
    with pytest.raises(AssertionError, match="another does not agree with looplib"):
        check_same({"looplib": 1.0, "another": 1.001}, 1e-4)
    with pytest.raises(AssertionError, match="another does not agree with looplib"):
        check_same({"looplib": 1.0, "another": 1.00001}, None)


def test_a_ratio_has_the_interval_of_its_rounds(imported):
    harness = imported("harness")
    base = [1.0 + 0.01 * (number % 7) for number in range(50)]
    same = harness.ratio(base, base)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    twice = harness.ratio([2 * value + 0.1 * (number % 3) for number, value in enumerate(base)], base)
    assert twice.low < twice.value < twice.high
    assert twice.value == pytest.approx(2.1, abs=0.05)
    assert str(harness.ratio(base[:2], base[:2])) == "1.00"  # too few rounds for an interval


GOOD = """
import argparse, pathlib, json
parser = argparse.ArgumentParser()
parser.add_argument("--seconds"), parser.add_argument("--json"), parser.add_argument("--dry-run", action="store_true")
result = {"tables": {"": {"row": {"raw": {"value": 1}}}}, "markdown": "| new |", "failures": {"TorchOpt": "absent"}}
pathlib.Path(parser.parse_args().json).write_text(json.dumps(result))
"""


PAGE = (
    "before\n<!-- measured: broken -->\n\nold\n\n<!-- end -->\n<!-- measured: good -->\n\nold\n\n<!-- end -->\nafter"
)


@pytest.fixture
def every(imported, monkeypatch, tmp_path):
    """The module all.py, with scripts and a page of its own in `tmp_path`."""
    every = imported("all")
    (tmp_path / "page.md").write_text(PAGE)
    for name, value in {"HERE": tmp_path, "PAGES": [tmp_path / "page.md"], "README": tmp_path / "page.md"}.items():
        monkeypatch.setattr(every, name, value)
    monkeypatch.setattr(every, "START", 0.5)
    (tmp_path / "broken.py").write_text("raise SystemExit('no disk')")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)")
    (tmp_path / "good.py").write_text(GOOD)
    return every


def options_for(tmp_path, *names):
    out = tmp_path / "out"
    out.mkdir()
    return argparse.Namespace(out=out, seconds=150.0, only=list(names), dry_run=False, no_pages=False)


@pytest.mark.slow
def test_a_script_that_fails_or_hangs_does_not_stop_the_others(every, monkeypatch, tmp_path):
    monkeypatch.setattr(every, "SHARES", {"broken": 1.0, "hangs": 1.0, "good": 100.0})
    options = options_for(tmp_path, "broken", "hangs", "good")
    ended = every.run_all(options)
    assert {name: how.partition(" ")[0] for name, (how, _) in ended.items()} == {
        "broken": "exit",
        "hangs": "stopped",
        "good": "done",
    }
    results = every.results_in(options.out, options.only)
    assert results.keys() == {"good"}
    text = every.summary(ended, results)
    assert "hangs" in text
    assert "not measured: TorchOpt (absent)" in text
    assert (tmp_path / "page.md").read_text() == PAGE.replace("good -->\n\nold", "good -->\n\n| new |")


def test_each_script_has_its_place_on_a_page_and_its_share_of_the_time(imported):
    every = imported("all")
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {
        "all",
        "evaluation",
        "gpu",
        "harness",
        "loops",
        "models",
    }
    assert every.SHARES.keys() == scripts
    text = "".join(page.read_text() for page in every.PAGES)
    for name in scripts:
        assert text.count(f"<!-- measured: {name} -->\n") == 1, name
    assert text.count("<!-- measured: ") == text.count("<!-- end -->") == len(scripts)
