"""The list of recipes, made from their docstrings: `python tests/recipes/recipes_page.py` writes recipes/README.md."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "recipes"
PAGE = FOLDER / "README.md"
# The order to read recipes in; others come after these.
ORDER = [
    "classify_digits",
    "from_transformers",
    "from_fastnlp",
    "from_dist_trainer",
    "language_model",
    "fine_tune_lora",
    "restore_vowels",
    "vision",
    "click_through",
    "with_torchmetrics",
    "testing_your_step",
    "language_model_ddp",
    "language_model_fsdp",
    "language_model_mesh",
    "lose_a_rank",
    "change_halfway",
    "sweep_lr",
    "lora_rates",
    "optuna_pruning",
    "ensemble_digits",
    "contrastive_digits",
    "gan_digits",
    "ppo_cartpole",
    "grpo_arithmetic",
    "dp_sgd_digits",
    "maml_sinusoids",
]
INTRODUCTION = """\
Each recipe is one script (or one folder, with its tests) that you can copy and run. It has real data that comes with
scikit-learn or Python, settings on the command line, the numbers it reached in its docstring, and a test that runs it
at a small size. Times are for one core of a small machine that computes in bfloat16. On one that does not (`lscpu` shows
neither `avx512_bf16` nor `amx_bf16`), give `--precision float32` (or `--bf16 0`), since bfloat16 takes thirty times as long
there. Other processors round differently, so your figures may lie a little outside of a range; with
`ATEN_CPU_CAPABILITY=default` or `MKL_CBWR=COMPATIBLE` before a command, torch rounds as on some others.
`python -m looplib.recipes copy NAME` copies a recipe out of an installed looplib.

Each recipe names the packages that it needs besides looplib. looplib is not on PyPI yet; the README says how to install
it from a clone.

For single functions in a loop of your own, see [Take one piece](TAKE_ONE_PIECE.md).

This page is made from the recipes by `python tests/recipes/recipes_page.py`.
"""


@dataclass(frozen=True)
class Recipe:
    """A script of recipes/, or of a folder in it, as its docstring describes it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem if self.path.parent == FOLDER else self.path.parent.name

    @property
    def link(self) -> str:
        return self.path.name if self.path.parent == FOLDER else f"{self.name}/"

    @property
    def paragraphs(self) -> list[str]:
        return re.split(
            r"\n{2,}(?!    )|\n{2,}(?=    )(?<!    )",
            (ast.get_docstring(ast.parse(self.path.read_text())) or "").strip("\n"),
        )

    @property
    def title(self) -> str:
        return " ".join(self.paragraphs[0].split())

    @property
    def commands(self) -> str:
        """The first indented block: how it is installed and run."""
        return next((textwrap.dedent(text) for text in self.paragraphs if text.startswith("    ")), "")

    @property
    def reached(self) -> str:
        """From the word "Reached" to the end of its paragraph, with the table that a colon there announces."""
        reached = ""
        for text in self.paragraphs:
            if reached.endswith(":") and text.startswith("    "):
                return f"{reached}\n\n```text\n{textwrap.dedent(text)}\n```"
            if match := re.search(r"\bReached\b.*", text, re.DOTALL):
                reached = match[0]
        return reached

    @property
    def time(self) -> str:
        """The first time in seconds or minutes after "Reached"."""
        number = r"(?:\d[\d.]*|two|three|four|five)"
        pattern = rf"{number}(?: to {number}| and a half)? (?:seconds|minutes)"
        match = re.search(pattern, " ".join(self.reached.split()))
        return match[0] if match else ""

    def section(self) -> list[str]:
        """Its part of the page."""
        lines = [f"## {self.name}", "", f"[{self.link}]({self.link}): {self.title}", ""]
        if self.commands:
            lines += ["```sh", re.sub(r"(?m)^(.*?\S|) {2,}\((.*)\)$", r"\1  # \2", self.commands), "```", ""]
        if self.reached:
            lines += [self.reached, ""]
        return lines


def recipes() -> list[Recipe]:
    """All of them in the order to read them in."""
    scripts = [Recipe(path) for path in sorted(FOLDER.glob("*.py"))]
    folders = [sorted(folder.glob("*.py")) for folder in FOLDER.iterdir() if folder.is_dir()]
    scripts += [Recipe(paths[0]) for paths in folders if paths]
    order = {name: number for number, name in enumerate(ORDER)}
    return sorted(scripts, key=lambda recipe: (order.get(recipe.name, len(order)), recipe.name))


def page() -> str:
    """The text of recipes/README.md: a table, and for each recipe its command and its numbers."""
    every = recipes()
    rows = [
        f"| [{recipe.name}](#{recipe.name}) | {recipe.title.replace('|', chr(92) + '|')} | {recipe.time} |"
        for recipe in every
    ]
    sections = [line for recipe in every for line in recipe.section()]
    documents = [path for path in sorted(FOLDER.glob("*.md")) if path != PAGE]
    links = [f"- [{path.read_text().partition(chr(10))[0].lstrip('# ')}]({path.name})" for path in documents]
    table = ["| recipe | what it shows | time |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(["# Recipes", "", INTRODUCTION, *table, *sections, "## Pages", "", *links]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(recipes())} recipes")
