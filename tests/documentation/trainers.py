"""Names of other Trainers and what to write for each: `python tests/documentation/trainers.py` writes recipes/FROM_*_NAMES.md.

The answers are in recipes/names/*.toml. An answer has the `names` that it is for, a `note`, and `code` that a test runs; it
has no code if the names have no meaning here. The table shows `write`, one text for all names or one for each. If it is
left out, the table shows the only line of the code, or else the first sentence of the note. `checked` says that the test
also looks at what the code leaves.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "recipes"
# Paragraphs; `{more}` says where the link of that name leads.
HOW_TO_READ = [
    """A line has the name, what to write, and the case of [the test]({test}) that runs the whole code. The test also checks
    what the code leaves, except where the line says "runs". A line without a case has no code: the name has no meaning
    here, or is not supported, and the line says why.""",
    """"more" {more} the whole code and its explanation, which [a file]({data}) has for each group of names. To run the
    cases of a name, write `pytest {path} -k warmup`, for example.""",
]
TRANSFORMERS = """\
# From transformers' Trainer: all names

Every field of `TrainingArguments`, every parameter and method of `Trainer`, every event of `TrainerCallback`, and what
`TrainerState` and `TrainerControl` hold, with what to write instead. For a whole script beside its loop and the counts
that differ, read [Coming from transformers' Trainer](FROM_TRANSFORMERS.md) first.

{how_to_read}
In the code, `F` is `torch.nn.functional`, `gpt2` is a transformers model, and `tokens` is a batch of texts for it. Two
functions are used throughout, the model's loss and a loop:

```py
def lm_loss(model, tokens):
    return ll.next_token_loss(model(input_ids=tokens).logits, tokens)

def train(state, steps):  # a list of the states after each step
    states = []
    while len(states) < steps:
        for batch in itertools.islice(loader(state), steps - len(states)):
            state, metrics = train_step(state, batch)
            states.append(state)
    return states
```
"""
FASTNLP = """\
# From fastNLP: all names

Every parameter, method and event of the `Trainer` of fastNLP 1.0.1, its callbacks, drivers and samplers, and every parameter
and method of the `DistTrainer` of 0.5 and 0.7, with what to write instead. For whole scripts beside their loops and the
counts that differ, read [Coming from fastNLP](FROM_FASTNLP.md) or [Coming from fastNLP's
DistTrainer](FROM_DIST_TRAINER.md) first.

{how_to_read}
In the code, `batch` is `(x, y)`; `classifier` is a model for fastNLP, whose `forward`, `train_step` and `evaluate_step`
return dicts, and `words` is a batch for it. `train(state, steps)` is the loop, written as a function that returns a list of
the states after each step. `log` is a logger, such as `ll.console()`.
"""


@dataclass(frozen=True)
class Answer:
    """An answer to some names, each `Owner.name`: what to write instead.

    Attributes:
        write: what the table shows for each name.
        line: number of the line in the file at which it begins.
        line_of_code: number of the line before its code.
    """

    names: list[str]
    write: list[str]
    note: str
    code: str
    checked: bool
    line: int
    line_of_code: int

    def __str__(self) -> str:
        return self.names[0]

    @property
    def anchor(self) -> str:
        return anchor(str(self))

    @property
    def test(self) -> str:
        """The case of the test that runs it."""
        return f"`{self}`{'' if self.checked else ' runs'}" if self.code else ""


@dataclass(frozen=True)
class Library:
    """The names of another library."""

    name: str
    introduction: str

    @property
    def data(self) -> Path:
        return FOLDER / f"names/{self.name}.toml"

    @property
    def page(self) -> Path:
        return FOLDER / f"FROM_{self.name.upper()}_NAMES.md"

    def opening(self, more: str) -> str:
        """The page before its tables."""
        path = f"tests/other_trainers/test_from_{self.name}.py"
        words = {"test": f"../{path}", "path": path, "data": f"names/{self.data.name}", "more": more}
        paragraphs = [" ".join(text.format(**words).split()) for text in HOW_TO_READ]
        filled = [textwrap.fill(text, 124, break_long_words=False, break_on_hyphens=False) for text in paragraphs]
        return self.introduction.format(how_to_read="\n\n".join(filled) + "\n")

    @cached_property
    def answers(self) -> list[Answer]:
        text = self.data.read_text()
        starts = [match.start() for match in re.finditer(r"^\[\[answer\]\]$", text, re.M)]
        tables = tomllib.loads(text)["answer"]
        return [_answer(table, text, start) for table, start in zip(tables, starts, strict=True)]

    @cached_property
    def of_name(self) -> dict[str, tuple[Answer, str]]:
        """The answer to each name and what the table shows, in the order of the table."""
        found = {
            name: (answer, write)
            for answer in self.answers
            for name, write in zip(answer.names, answer.write, strict=True)
        }
        order = lambda name: (self.owners.index(owner(name)), "._" in name, name)  # noqa: E731
        return {name: found[name] for name in sorted(found, key=order)}

    @cached_property
    def owners(self) -> list[str]:
        """The classes and modules that have the names, those with the most public names first."""
        every = [owner(name) for answer in self.answers for name in answer.names if "._" not in name]
        return sorted(dict.fromkeys(every), key=lambda name: -every.count(name))

    def rows(self, of: str) -> list[tuple[str, Answer, str]]:
        """The rows of an owner's table: name, answer, and what to write."""
        return [(name, *row) for name, row in self.of_name.items() if owner(name) == of]

    def text(self) -> str:
        """The page with its tables."""
        return "\n".join([self.opening("leads to"), *map(self._table, self.owners)])

    def _table(self, of: str) -> str:
        lines = [f"## {of}", "", "| name | what to write | test |", "| --- | --- | --- |"]
        for name, answer, write in self.rows(of):
            shown = f'<a id="{anchor(name)}"></a>`{name.removeprefix(of + ".")}`'
            more = "" if write == answer.note else f" [more](names/{self.data.name}#L{answer.line})"
            lines.append(f"| {shown} | {escaped(write)}{more} | {answer.test} |")
        return "\n".join([*lines, ""])


LIBRARIES = [Library("transformers", TRANSFORMERS), Library("fastnlp", FASTNLP)]


def owner(name: str) -> str:
    return name.partition(".")[0]


def anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def escaped(write: str) -> str:
    """A cell of a table in Markdown."""
    return write.replace("|", "\\|")


def _answer(table: dict[str, Any], text: str, start: int) -> Answer:
    """An answer, as the file has it from `start`."""
    note, code = " ".join(table["note"].split()), table.get("code", "").rstrip("\n")
    default = f"`{code}`" if code and "\n" not in code else re.split(r"(?<=\.) (?=[A-Z(])", note)[0]
    write: Any = table.get("write", default)
    names: list[str] = table["names"]
    lines: list[str] = write if isinstance(write, list) else [write] * len(names)
    if len(lines) != len(names):
        raise ValueError(
            f"the answer to {names} has {len(lines)} texts in `write`; give one text for all, or one for each"
        )
    return Answer(
        names=names,
        write=lines,
        note=note,
        code=code,
        checked=table.get("checked", False),
        line=text.count("\n", 0, start) + 1,
        line_of_code=text.count("\n", 0, text.index(code, text.index("\ncode = ", start))) if code else 0,
    )


if __name__ == "__main__":
    for library in LIBRARIES:
        library.page.write_text(library.text())
        print(library.page)
