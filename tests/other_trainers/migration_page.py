"""A migration page, and what runs the code of its rows.

A row of recipes/FROM_*.md is an anchor, the names of the other library in bold, a sentence or two, and some lines of
code, or the reason why there are none. Its code runs with the names that the page says are at hand, and a check looks
at the names that it leaves. A check is a function; its parameters are such names, or fixtures that are made before the
code runs. One with a parameter `run` calls it itself: `run()` runs the code and returns the names that it leaves.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import at_hand
import torch

ROOT = Path(__file__).parents[2]
# Fixtures of conftest.py that a row's code may use by these names.
AT_HAND = """
    model loss_fn metric_fn train_set test_set test_batches batch grad_fn optimizer train_step eval_step predict_step
    loader state ckpt rows log train tokens gpt2 lm_loss terminal classifier words lengths
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Row:
    """The answer to some names; `code` is empty where they have no meaning here."""

    anchor: str
    names: list[str]
    text: str
    code: str
    path: Path
    line: int

    def __str__(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Page:
    """Rows and an index of names, in one page or split by subject into pages whose names begin like the first one's."""

    path: Path

    @cached_property
    def texts(self) -> dict[Path, str]:
        return {path: path.read_text() for path in sorted(self.path.parent.glob(f"{self.path.stem}*.md"))}

    @cached_property
    def index(self) -> dict[str, tuple[str, str]]:
        """The address, "FILE.md#anchor", and the answer of each name, `Owner.name`."""
        index, owner = {}, ""
        for path, text in self.texts.items():
            for line in text.splitlines():
                if heading := re.fullmatch(r"\| (.*) \| answer \|", line):
                    owner = heading[1]
                elif entry := re.fullmatch(r"\| \[`(.*)`\]\((.*)#(.*)\) \| (.*) \|", line):
                    index[f"{owner}.{entry[1]}"] = f"{entry[2] or path.name}#{entry[3]}", entry[4]
        return index

    @cached_property
    def rows(self) -> list[Row]:
        owners = {name.partition(".")[0] for name in self.index}
        rows = []
        pattern = r'<a id="(.*)"></a>\n\*\*(`[^*]*`)\*\*:\s((?:.+\n)+)(?:\n```py\n((?:.*\n)*?)```\n)?'
        for path, row in [(path, row) for path, text in self.texts.items() for row in re.finditer(pattern, text)]:
            names, owner = [], ""
            for name in re.findall(r"`(.*?)`", row[2].replace("\n", " ")):
                if name.partition(".")[0] in owners and "." in name:  # else that of the name before
                    owner, _, name = name.partition(".")
                names.append(f"{owner}.{name}")
            line = row.string.count("\n", 0, row.start(4)) if row[4] else 0
            rows.append(Row(row[1], names, row[3].strip(), row[4] or "", path, line))
        return rows

    @property
    def with_code(self) -> list[Row]:
        return [row for row in self.rows if row.code]

    def blocks(self) -> list[str]:
        text = "".join(self.texts.values())
        return re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)

    def run(self, row: Row, check: Callable[..., None], fixture: Callable[[str], Any]) -> None:
        """Run the code of a row, and the check of what it leaves; `fixture(name)` is pytest's `getfixturevalue`."""
        torch.manual_seed(0)
        words = set(re.findall(r"\w+", row.code))
        wanted = inspect.signature(check).parameters
        before = {name: fixture(name) for name in wanted if name not in {*words, "run", "after"}}
        names = vars(at_hand) | {
            name: before[name] if name in before else fixture(name) for name in AT_HAND if name in words
        }

        def run(**others: Any) -> SimpleNamespace:
            names.update(others)
            # empty lines, so that an error points at the line of the page
            exec(compile("\n" * row.line + row.code, str(row.path), "exec"), names)
            return SimpleNamespace(**names)

        if "run" in wanted:
            before["run"] = run
        else:
            before["after"] = run()
        assert check(**{name: before[name] if name in before else names[name] for name in wanted}) in (None, True)


def assert_complete(page: Page, names: dict[str, Iterable[str]], checks: Iterable[str]) -> None:
    """Each name of the other library stands in one row and in the index, and each check has a row."""
    there = sorted(name for row in page.rows for name in row.names)
    expected = sorted(f"{owner}.{name}" for owner in names for name in names[owner])
    assert there == expected, (
        f"no row, or two: {Counter(expected) - Counter(there) or Counter(there) - Counter(expected)}"
    )
    for row in page.rows:
        assert row.anchor == re.sub(r"[^a-z0-9]+", "-", str(row).lower()).strip("-")
        answers = ("looplib", "torch") if row.code else ("no meaning here",)
        for name in row.names:
            address, answer = page.index[name]
            assert address == f"{row.path.name}#{row.anchor}", f"the index leads from {name} to {address}"
            assert answer in answers, f"the index of {page.path.name} answers {name} by {answer!r}"
    assert page.index.keys() == set(expected)
    assert set(checks) <= set(map(str, page.with_code)), "a check has no row"


def assert_readable(page: Page) -> None:
    """Each row says something in a sentence, its code is short, and no two rows have the same anchor."""
    assert [str(row) for row in page.rows if not row.text.endswith((".", ":", ")", "?"))] == []
    lines = {str(row): [line for line in row.code.splitlines() if line.strip()] for row in page.with_code}
    assert [row for row, code in lines.items() if len(code) > 16 or max(map(len, code)) > 118] == []
    anchors = [row.anchor for row in page.rows]
    assert len(set(anchors)) == len(anchors)
