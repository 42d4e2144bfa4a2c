"""The editable install of the README, as mypy and a script see it from the folder above the clone."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, cwd, **environment):
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment in which a clone, in a folder named `looplib`, is installed and nothing else is."""
    folder = tmp_path_factory.mktemp("above")
    clone = folder / "looplib"
    shutil.copytree(ROOT / "looplib", clone / "looplib", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "recipes").mkdir()
    build = f"from hatchling.build import build_editable; build_editable({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True)
    venv.create(folder / "venv")
    (wheel,) = folder.glob("*.whl")
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return folder / "venv/bin/python"


@pytest.mark.slow
def test_mypy_sees_the_types_of_an_editable_install(python, tmp_path):
    above = python.parents[2]  # where `looplib` is also a folder
    (above / "typed.py").write_text(
        "import looplib as ll\n\nreveal_type(ll.every_n_steps(5)(ll.TrainState()))\nll.TrainState().stop\n"
    )
    options = "--python-executable", python, "--cache-dir", tmp_path / "cache"
    code, said = run(sys.executable, "-m", "mypy", *options, "typed.py", cwd=above)
    assert code == 1
    assert re.findall(r"typed.py:(\d): \w+: (.*)", said) == [
        ("3", 'Revealed type is "bool"'),
        ("4", '"TrainState" has no attribute "stop"  [attr-defined]'),
    ], said


@pytest.mark.slow
def test_a_script_in_the_folder_above_the_clone_imports_the_package(python):
    above = python.parents[2]
    (above / "train.py").write_text("import looplib as ll\n\nprint(ll.TrainState(step=7).step, ll.__file__)\n")
    code, said = run(python, "train.py", cwd=above, PYTHONPATH=sysconfig.get_path("purelib"))
    assert (code, said) == (0, f"7 {above}/looplib/looplib/__init__.py\n")
