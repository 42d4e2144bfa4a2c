"""Recipes: list the example scripts and copy one out of an installed looplib.

    python -m looplib.recipes list
    python -m looplib.recipes copy classify_digits             # into the current folder
    python -m looplib.recipes copy classify_digits scripts     # into scripts/

A recipe is yours to change, so it is copied and not imported. Each is one file that depends on looplib and on nothing
else in this folder.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import shlex
import shutil
import sys
from pathlib import Path

from looplib._core.checks import check


def names() -> list[str]:
    """List the names that `copy` accepts.

    >>> from looplib import recipes
    >>> [name for name in recipes.names() if "digits" in name]
    ['classify_digits', ...]
    """
    return sorted(_recipes())


def copy(name: str, folder: str | Path = ".") -> Path:
    """Copy a recipe into a folder and return its new path.

    >>> import tempfile
    >>> from looplib import recipes
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recipes.copy("classify_digits", folder).name
    'classify_digits.py'

    Args:
        name: one of `names()`. A recipe that is a folder is copied with all its files.
        folder: target folder, created if it does not exist.

    Raises:
        ValueError: there is no recipe of this name.
        FileExistsError: the folder already holds a file or folder of this name. It is left unchanged.
    """
    recipes = _recipes()
    near = difflib.get_close_matches(name, recipes, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(recipes))}"
    check(name in recipes, f"there is no recipe {name!r}; {hint}")
    source = recipes[name]
    target = Path(folder) / source.name
    message = f"{target} exists already, and is left as it is; give another folder, or move it"
    check(not target.exists(), message, FileExistsError)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(source, target, ignore=ignore, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(source, target)
    return target


def _recipes() -> dict[str, Path]:
    """Map each recipe's name to its path: scripts, folders with a script, and pages."""
    package = Path(__file__).parent
    folder = package / "_recipes"  # in an installed wheel
    if not folder.is_dir():
        folder = package.parent / "recipes"  # in a checkout
    scripts = list(folder.glob("*.py")) + [path.parent for path in folder.glob("*/*.py")]
    pages = [path for path in folder.glob("*.md") if path.name != "README.md"]  # the index page
    return {path.stem: path for path in scripts} | {path.name: path for path in pages}


def _opening(recipe: Path) -> list[str]:
    """Lines of a script's docstring, or the title of a page."""
    if recipe.suffix == ".md":
        return [recipe.read_text(encoding="utf-8").partition("\n")[0].strip("# ")]
    script = min(recipe.glob("*.py")) if recipe.is_dir() else recipe
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()


def _commands(recipe: Path) -> str:
    """Commands that install and run a recipe: the first indented lines of its docstring."""
    lines = _opening(recipe)
    first = next((i for i, line in enumerate(lines) if line.startswith("    ")), len(lines))
    last = next((i for i, line in enumerate(lines) if i > first and not line), len(lines))
    return "\n".join(lines[first:last]).replace(f"recipes/{recipe.name}", shlex.quote(str(recipe)))


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m looplib.recipes",
        description="Recipes: scripts that come with looplib, to copy and change. Without a command, lists them.",
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="list the recipes, each with what it does")
    copying = commands.add_parser("copy", help="copy a recipe into a folder; existing files are not overwritten")
    copying.add_argument("name", help="name of the recipe, as listed")
    copying.add_argument("folder", nargs="?", default=".", help="where to (default: the current folder)")
    arguments = parser.parse_args()
    if arguments.command == "copy":
        _copy(arguments.name, arguments.folder)
        return
    _list()
    if arguments.command is None:
        print("\nTo copy one into this folder: python -m looplib.recipes copy NAME")


def _list() -> None:
    recipes = _recipes()
    width = max(map(len, recipes), default=0)
    for name in sorted(recipes):
        print(f"{name:{width}}  {next(iter(_opening(recipes[name])), '')}".rstrip())


def _copy(name: str, folder: str) -> None:
    try:
        recipe = copy(name, folder)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    commands = _commands(recipe)
    print(f"copied to {recipe}" + (f"; to run it:\n\n{commands}\n" if commands else ""))


if __name__ == "__main__":
    _main()
