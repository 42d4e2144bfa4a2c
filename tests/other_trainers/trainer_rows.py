"""Migration tables from other trainers: what each of their names is in looplib.

A row answers one name of the other library or a few that belong together. It is a function: the lines of its body up
to the comment `# shows` are printed in the document, the lines after it are assertions, and all of them run in the
tests. Lines up to a comment `# given`, if there is one, come first and are not printed. The function's parameters are
ready names such as `model` and `loader`: fixtures of `conftest.py`, made again for each row. A row without a
counterpart has a reason instead of a function.

A line `{{path name ...}}` in an introduction is replaced by the functions of these names in that file, unchanged;
without names, by the whole file.

`python tests/other_trainers/trainer_rows.py` writes the documents of all modules `rows_*.py` in this folder.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import looplib as ll

ROOT = Path(__file__).parents[2]
GIVEN, SHOWS = "# given", "# shows"
ANSWERS = {"looplib": "looplib", "torch": "torch", "none": "no meaning here"}


@dataclass(frozen=True)
class Row:
    """The answer to some names, `Owner.name` each.

    Attributes:
        names: the names.
        answer: "looplib", "torch" or "none".
        text: a sentence or two.
        section: the heading that it stands under.
        function: whose body is the snippet and its assertions; None where the answer is "none".
    """

    names: tuple[str, ...]
    answer: str
    text: str
    section: str
    function: Callable[..., None] | None = None

    def __str__(self) -> str:
        return self.names[0]

    @property
    def parts(self) -> tuple[str, str]:
        """The lines that the document prints, and the assertions."""
        assert self.function is not None
        lines = textwrap.dedent(inspect.getsource(self.function)).splitlines()
        first = next(number for number, line in enumerate(lines) if line.endswith(":") and line[0] in "d)") + 1
        body = textwrap.dedent("\n".join(lines[first:])).splitlines()
        if body.count(SHOWS) != 1:
            raise ValueError(f"the row of {self} needs one line `{SHOWS}`, found {body.count(SHOWS)}")
        place = body.index(SHOWS)
        first = body.index(GIVEN) + 1 if GIVEN in body[:place] else 0
        return "\n".join(body[first:place]).strip("\n"), "\n".join(body[place + 1 :])


@dataclass
class Table:
    """The rows of one library, and the document that is made of them.

    Attributes:
        system: the library, as it calls itself.
        path: of the document, from the repository's root.
        introduction: what the document begins with, a heading first; with scripts as `quoted` puts them in.
        rows: in the order of the document.
    """

    system: str
    path: str
    introduction: str
    rows: list[Row] = field(default_factory=list)
    _section: str = ""

    def section(self, heading: str) -> None:
        """Put the following rows under this heading."""
        self._section = heading

    def looplib(self, *names: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """A decorator: these names are answered by looplib, as the function shows."""
        return self._row("looplib", names, text)

    def torch(self, *names: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """A decorator: these names are answered by torch, or another library that is at hand anyway."""
        return self._row("torch", names, text)

    def none(self, *names: str, text: str) -> None:
        """These names have no meaning here, for this reason."""
        self._add(Row(names, "none", text, self._section))

    def _row(self, answer: str, names: tuple[str, ...], text: str) -> Callable[..., Callable[..., None]]:
        def register(function: Callable[..., None]) -> Callable[..., None]:
            self._add(Row(names, answer, text, self._section, function))
            return function

        return register

    def _add(self, row: Row) -> None:
        twice = [name for name in row.names if name in self.names() or row.names.count(name) > 1]
        if twice or not row.names or not all(name.count(".") for name in row.names):
            raise ValueError(f"names are `Owner.name`, each in one row; given {row.names}, twice {twice}")
        self.rows.append(row)

    def names(self) -> list[str]:
        return [name for row in self.rows for name in row.names]

    def wrong(self, expected: Mapping[str, Iterable[str]]) -> list[str]:
        """Mismatches between the rows and the library's names, by owner; empty if there are none."""
        there = {f"{owner}.{name}" for owner, names in expected.items() for name in names}
        rows = set(self.names())
        missing = [f"{name} of {self.system} has no row in {self.path}" for name in sorted(there - rows)]
        return missing + [f"a row answers {name}, which {self.system} does not have" for name in sorted(rows - there)]

    def count(self) -> Counter[str]:
        """Number of names with each answer."""
        return Counter(row.answer for row in self.rows for _ in row.names)

    def document(self) -> str:
        """The document: the introduction, the rows under their headings, and an index of all names."""
        lines = [quoted(textwrap.dedent(self.introduction).strip()), ""]
        section = None
        for row in self.rows:
            if row.section != section:
                section = row.section
                lines += [f"## {section}", ""]
            said = textwrap.wrap(f"{bold(row)}: {row.text}", 118, break_long_words=False, break_on_hyphens=False)
            lines += [f'<a id="{anchor(row)}"></a>', *said, ""]
            if row.function is not None:
                lines += ["```py", row.parts[0], "```", ""]
        lines += ["## All names", ""]
        for owner in dict.fromkeys(name.partition(".")[0] for name in self.names()):
            lines += [f"| {owner} | answer |", "| --- | --- |"]
            found = {name: row for row in self.rows for name in row.names if name.partition(".")[0] == owner}
            for name, row in sorted(found.items()):
                lines.append(f"| [`{name.partition('.')[2]}`](#{anchor(row)}) | {ANSWERS[row.answer]} |")
            lines.append("")
        return "\n".join(lines)


def quoted(text: str) -> str:
    """The text with the functions that its lines `{{path name ...}}` ask for, by paths from the repository's root."""

    def block(found: re.Match[str]) -> str:
        path, *names = found[1].split()
        source = (ROOT / path).read_text()
        if not names:
            return f"```py\n{source}```"
        functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        parts = [ast.get_source_segment(source, functions[name]) for name in names]
        return "```py\n" + "\n\n\n".join(map(str, parts)) + "\n```"

    return re.sub(r"^\{\{(.*)\}\}$", block, text, flags=re.MULTILINE)


def anchor(row: Row) -> str:
    return re.sub(r"[^a-z0-9]+", "-", str(row).lower()).strip("-")


def bold(row: Row) -> str:
    """The names in bold, with the owner where it is another than that of the name before."""
    owners = ["", *(name.partition(".")[0] for name in row.names)]
    pairs = zip(row.names, owners[:-1], owners[1:], strict=True)
    names = [f"`{name.partition('.')[2] if owner == before else name}`" for name, before, owner in pairs]
    return f"**{', '.join(names)}**"


def equal(one: Any, other: Any) -> bool:
    """True if two states, dicts of tensors or other trees have the same bits."""
    return not ll.debug.differences(one, other)


def close(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> bool:
    """True if they differ at most by the rounding of float32."""
    return not ll.debug.differences(one, other, rtol=rtol, atol=atol)


def on_each_of_two_ranks(function: Callable[[], Any]) -> list[Any]:
    """Its results as the first and as the second of two processes, which send each other nothing."""
    returned = []
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        returned.append(function())
        torch.distributed.destroy_process_group()
    return returned


def tables() -> list[Table]:
    """The tables of all modules of rows; several modules may fill one."""
    found: dict[str, Table] = {}
    for name in sorted(path.stem for path in Path(__file__).parent.glob("rows_*.py")):
        table: Table = importlib.import_module(name).TABLE
        found[table.path] = table
    return list(found.values())


def write() -> None:
    """Write the documents of all tables."""
    for table in tables():
        (ROOT / table.path).write_text(table.document())
        print(f"{table.path}: {len(table.names())} names, {dict(table.count())}")


if __name__ == "__main__":
    import trainer_rows  # as the rows know it, and not as __main__

    trainer_rows.write()
