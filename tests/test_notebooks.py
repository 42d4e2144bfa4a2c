"""The notebooks run from top to bottom, and are saved with outputs that read well without running them.

`python tests/test_notebooks.py` runs them all and saves them so.
"""

import json
import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import looplib

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
BAR = re.compile(r"\s*|.*\d+%\|.*\|.*")
# torchao, which transformers imports where it is installed, prints what it cannot load, and what torch says about it.
TORCHAO = re.compile(r"Failed to load .*torchao.*|W\d{4} .*<enum '\w+'> is an Enum subclass.*")
MACHINE = re.compile(r"/(home|root|tmp|work|usr|var|opt|mnt|private|Users)/|\b[A-Z]:\\|site-packages")


def run(path, directory):
    """The notebook as it is after a run in this directory."""
    notebook = nbformat.read(path, as_version=4)
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # figures in the notebook
    options = {"kernel_name": "python3", "timeout": 300, "record_timing": False, "store_widget_state": False}
    client = NotebookClient(
        notebook, coalesce_streams=True, resources={"metadata": {"path": str(directory)}}, **options
    )
    client.execute(env=env)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def errors(cell):
    return [output for output in cell.outputs if output.output_type == "stream" and output.name == "stderr"]


def tidied(notebook):
    """Without progress bars, which are gone when a cell is done, and without the versions of this machine."""
    for cell in code_cells(notebook):
        cell.outputs = [
            output
            for output in cell.outputs
            if output not in errors(cell) and "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
        ]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def kinds(notebook):
    return [[(o.output_type, sorted(o.get("data", ()))) for o in cell.outputs] for cell in code_cells(notebook)]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_saved_outputs_are_of_the_same_kinds(path, tmp_path):
    notebook = run(path, tmp_path)  # raises the error of a cell
    for cell in code_cells(notebook):
        for output in errors(cell):
            lines = output.text.splitlines()
            assert all(BAR.fullmatch(line) or TORCHAO.fullmatch(line) for line in lines), output.text
    assert kinds(tidied(notebook)) == kinds(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_notebook_reads_well(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    pictures = [output.data.pop("image/png", None) for cell in cells for output in cell.outputs if "data" in output]
    assert any(pictures)
    assert not any(errors(cell) for cell in cells)
    # Pictures are out, where anything may look like a path; sources are, which have none to say.
    rest = json.dumps([notebook.metadata, *([cell.metadata, cell.get("outputs")] for cell in notebook.cells)])
    assert not MACHINE.search(rest)
    assert "\\r" not in rest


def test_notebooks_are_numbered_and_say_where_to_go_next():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number}_" for number in range(1, len(NOTEBOOKS) + 1)]
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert "## Where to go next" in cells[-1].source, path.name
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / link).exists(), f"{path.name} leads to {link}"
        for name in re.findall(r"`recipes/(\w+\.\w+)`", text):
            assert (path.parents[1] / "recipes" / name).exists(), f"{path.name} names {name}"
        for name in re.findall(r"`ll\.(\w+)", text):
            assert hasattr(looplib, name), f"{path.name} names ll.{name}"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            nbformat.write(tidied(run(path, directory)), path)
