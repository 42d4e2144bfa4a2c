"""Release requirements, and what CONTRIBUTING says about them, agree with pyproject.toml."""

import ast
import inspect
import re
import tomllib
import types
from operator import attrgetter

import pytest
import torch
from packaging.requirements import Requirement
from public import ROOT, public_names

import looplib as ll

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (\S+?)(?:,| \()", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[1] == ll.__version__


def test_the_changelog_names_what_exists():
    public = {name.rpartition(".")[2]: value for name, value in public_names().items()}
    functions = [value for value in public.values() if inspect.isfunction(value)]
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    names = types.SimpleNamespace(ll=ll, torch=torch, **public)
    spans = re.findall(r"`([^`]+)`", (ROOT / "CHANGELOG.md").read_text())
    for span in spans:
        if "=" in span:
            assert span.partition("=")[0] in arguments, span
        elif span not in {"&", "|", "~"} and not span.startswith("python -m "):
            attrgetter(span)(names)  # raises an error that names what is missing
    assert spans


def test_the_command_for_the_oldest_versions_names_them():
    torch = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
    (python,) = re.findall(r"(python3\.\d+) -m venv \.oldest", PAGE)
    (oldest,) = re.findall(r"\.oldest/bin/pip install -c /dev/stdin (torch==\S+)", PAGE)
    assert (python, oldest) == (f"python{OLDEST_PYTHON}", f"torch{str(torch.specifier).replace('>=', '==')}.0")


def test_the_classifiers_begin_with_the_oldest_python_and_agree_with_the_licence():
    versions = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert versions[0] == OLDEST_PYTHON
    assert not any(text.startswith("License ::") for text in PROJECT["classifiers"])  # the SPDX expression has it
    assert PROJECT["license"] == "MIT"


def test_an_unreleased_version_may_lack_an_address_and_a_released_one_may_not():
    unreleased = f"## {ll.__version__}, unreleased" in (ROOT / "CHANGELOG.md").read_text()
    if not unreleased:
        assert {"Repository", "Issues", "Changelog"} <= PROJECT.get("urls", {}).keys()
        assert "<its address>" not in (ROOT / "README.md").read_text()
        assert "not on PyPI yet" not in (ROOT / "recipes/README.md").read_text()  # made by recipes_page.py


def test_the_extras_that_texts_name_exist():
    texts = [path for path in ROOT.rglob("*.md") if ".venv" not in path.parts]
    texts += [
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "recipes").rglob("*.py"),
        *(ROOT / "looplib").rglob("*.py"),
    ]
    named = {
        extra
        for path in texts
        for extras in re.findall(r"""(?:looplib|-e ['"\\]*\.)\[([\w,]+)\]""", path.read_text())
        for extra in extras.split(",")
    }
    assert named <= PROJECT["optional-dependencies"].keys()


def test_no_text_says_to_install_looplib_from_an_index_before_it_is_there():
    unreleased = f"## {ll.__version__}, unreleased" in (ROOT / "CHANGELOG.md").read_text()
    for path in [
        *(ROOT / "recipes").rglob("*.py"),
        *(ROOT / "recipes").glob("*.md"),
        *(ROOT / "looplib").rglob("*.py"),
    ]:
        assert not unreleased or not re.search(r"pip install \S*looplib", path.read_text()), path


@pytest.mark.every_case
@pytest.mark.parametrize("folder", ["looplib", "recipes", "tests"])
def test_the_source_is_of_the_oldest_python(folder):
    version = tuple(map(int, OLDEST_PYTHON.split(".")))
    for path in (ROOT / folder).rglob("*.py"):
        ast.parse(path.read_text(), filename=str(path), feature_version=version)
