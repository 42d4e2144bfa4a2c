"""The recipes out of a wheel, which is built from an sdist, which is built from what lies here."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import looplib as ll
from looplib import recipes

ROOT = Path(__file__).parents[2]
FOLDERS = "looplib", "recipes"
FOLDER = "testing_your_step"  # the one recipe that is not a file
UNTRACKED = shutil.ignore_patterns("__pycache__", ".*", "runs")


def run(*command, cwd, **environment):
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BUILD = """
import os, sys, tarfile
from hatchling import build

folder = sys.argv[1]
with tarfile.open(os.path.join(folder, build.build_sdist(folder))) as archive:
    archive.extractall(folder, filter="data")
    os.chdir(os.path.join(folder, archive.getnames()[0].partition("/")[0]))
build.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel, what it installs, and `tree`, the files that it was built from."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=UNTRACKED)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    run(sys.executable, "-c", BUILD, folder, cwd=tree)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder


def names_in(folder):
    pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
    return {path.stem for path in folder.glob("*.py")} | pages | {FOLDER}


def files_in(tree, folders):
    paths = (path for folder in folders for path in (tree / folder).rglob("*"))
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.slow
def test_the_wheel_holds_looplib_and_its_recipes(built):
    (path,) = built.glob("*.whl")
    assert path.name.startswith(f"looplib-{ll.__version__}-")
    with zipfile.ZipFile(path) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name: text for name, text in files_in(built / "tree", ["looplib"]).items() if name[-3:] != ".md"}
    recipes = {f"looplib/_{name}": text for name, text in files_in(built / "tree", ["recipes"]).items()}
    assert found == package | recipes


# One process, which imports torch once: the command twice.
SESSION = """
import runpy, sys

def command(*arguments):
    sys.argv = [*arguments]
    run = runpy.run_path if arguments[0].endswith(".py") else runpy.run_module
    print("<>", flush=True)
    run(arguments[0], run_name="__main__")

command("looplib.recipes", "list")
command("looplib.recipes", "copy", "classify_digits", "my scripts")
"""
RUN = """
command("my scripts/classify_digits.py", "--epochs", "1", "--width", "4")
"""


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["copied", "and run"])
def test_a_recipe_is_copied_out_of_the_wheel(built, tmp_path, runs):
    (built / "installed/looplib/_recipes/only_there.py").write_text('"""Not in the checkout."""')
    session = SESSION + RUN if runs else SESSION
    printed = run(sys.executable, "-c", session, cwd=tmp_path, PYTHONPATH=str(built / "installed"))
    _, listed, said, *done = printed.split("<>\n")
    listed = dict(line.split(maxsplit=1) for line in listed.splitlines())
    assert listed["classify_digits"] == "Classify handwritten digits with a small convolutional network."
    assert listed.pop("only_there") == "Not in the checkout."
    assert set(listed) == names_in(built / "tree/recipes")
    copied = tmp_path / "my scripts/classify_digits.py"
    assert copied.read_bytes() == (ROOT / "recipes/classify_digits.py").read_bytes()
    assert "pip install scikit-learn matplotlib" in said
    assert "python 'my scripts/classify_digits.py'" in said
    if runs:
        assert re.search(r"[\d.]+% of the 360 held-out digits right", *done)
        assert (tmp_path / "runs/digits/curves.png").exists()


# What follows is of the checkout.


def test_what_is_there_is_never_overwritten(tmp_path):
    for name, place in ("classify_digits", "classify_digits.py"), ("testing_your_step", "testing_your_step/train.py"):
        copied = recipes.copy(name, tmp_path)
        (tmp_path / place).write_text("mine")
        with pytest.raises(FileExistsError, match=f"{re.escape(str(copied))} exists already, and is left as it is"):
            recipes.copy(name, tmp_path)
        assert (tmp_path / place).read_text() == "mine"


def test_an_unknown_name_is_answered_with_near_ones_and_no_command_with_all(tmp_path, monkeypatch, capsys):
    for name, hint in {"classify_digit": "classify_digits[?]", "/etc": ".*click_through, .*sweep_lr"}.items():
        monkeypatch.setattr(sys, "argv", ["recipes", "copy", name, str(tmp_path / "new")])
        with pytest.raises(SystemExit, match=f"there is no recipe '{name}'.*{hint}"):
            recipes._main()
        assert not (tmp_path / "new").exists()
    monkeypatch.setattr(sys, "argv", ["recipes"])
    recipes._main()
    *lines, _, hint = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipes.names()
    assert "python -m looplib.recipes copy NAME" in hint
