"""The answers for the names of another library, and what runs their code.

An answer of recipes/names/*.toml has the names of the other library, a note, and some lines of code, or none where the
names have no meaning here. Its code runs with the names that the table of the library says are at hand, and a check looks
at the names that it leaves. A check is a function; its parameters are such names, or fixtures that are made before the
code runs. One with a parameter `run` calls it itself: `run()` runs the code and returns the names that it leaves.
"""

import ast
import contextlib
import inspect
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import at_hand
import torch
from documentation.trainers import Answer, Library

ROOT = Path(__file__).parents[2]
# Fixtures of conftest.py that the code may use by these names.
AT_HAND = """
    model loss_fn metric_fn train_set test_set test_batches batch grad_fn optimizer train_step eval_step predict_step
    loader state ckpt rows log train tokens gpt2 lm_loss terminal classifier words lengths
""".split()  # noqa: SIM905


def blocks(page: Path) -> list[str]:
    """The blocks of code of a page."""
    return re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def with_code(library: Library) -> list[Answer]:
    return [answer for answer in library.answers if answer.code]


def run_answer(library: Library, answer: Answer, check: Callable[..., None], fixture: Callable[[str], Any]) -> None:
    """Run the code of an answer, and the check of what it leaves; `fixture(name)` is pytest's `getfixturevalue`."""
    torch.manual_seed(0)
    words = set(re.findall(r"\w+", answer.code))
    wanted = inspect.signature(check).parameters
    before = {name: fixture(name) for name in wanted if name not in {*words, "run", "after"}}
    names = vars(at_hand) | {
        name: before[name] if name in before else fixture(name) for name in AT_HAND if name in words
    }

    def run(**others: Any) -> SimpleNamespace:
        names.update(others)
        # empty lines, so that an error points at the line of the file
        exec(compile("\n" * answer.line_of_code + answer.code, str(library.data), "exec"), names)
        return SimpleNamespace(**names)

    if "run" in wanted:
        before["run"] = run
    else:
        before["after"] = run()
    assert check(**{name: before[name] if name in before else names[name] for name in wanted}) in (None, True)


def assert_complete(library: Library, names: dict[str, Iterable[str]], checks: Iterable[str]) -> None:
    """Each name of the other library has one answer, and each check the code that it looks at."""
    there = sorted(name for answer in library.answers for name in answer.names)
    expected = sorted(f"{owner}.{name}" for owner in names for name in names[owner])
    assert there == expected, (
        f"no answer, or two: {Counter(expected) - Counter(there) or Counter(there) - Counter(expected)}"
    )
    unknown = set(checks) - set(map(str, with_code(library)))
    assert not unknown, f"these checks have no answer with code: {unknown}"
    wrong = {answer.names[0] for answer in library.answers if answer.checked != (str(answer) in checks)}
    assert not wrong, f"`checked = true` belongs to the answers that have a check: {wrong}"


def assert_readable(library: Library) -> None:
    """Each answer says something in a sentence, its code is short, and the table is made from it and shows code that exists."""
    assert [str(answer) for answer in library.answers if not answer.note.endswith((".", ":", ")", "?"))] == []
    lines = {
        str(answer): [line for line in answer.code.splitlines() if line.strip()] for answer in with_code(library)
    }
    assert [name for name, code in lines.items() if len(code) > 16 or max(map(len, code)) > 118] == []
    page = library.page.read_text()
    assert page == library.text(), "run `python tests/documentation/trainers.py`, which makes the page"
    assert sorted(re.findall(r"^\| <a id=.*?>`(.*?)` \|", page, re.M)) == sorted(
        name.partition(".")[2] for name in library.of_name
    )
    anchors = re.findall(r'<a id="(.*?)">', page)
    assert len(set(anchors)) == len(anchors)
    for answer, write in library.of_name.values():
        for code in re.findall(r"`([^`]+)`", write):
            assert_shown(answer, code)


# Names that the table uses without saying what they are, beside those at hand.
PLAIN = "scores path label clip step done if while not lambda log_now eval_now save_now state pass"
WORD = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?")


def assert_shown(answer: Answer, code: str) -> None:
    """Code of the table is made of what the answer's code and note have, and the functions of looplib take its arguments."""
    unknown = {*WORD.findall(code)} - {*WORD.findall(f"{answer.code} {answer.note} {PLAIN}"), *AT_HAND}
    assert not unknown, (
        f"{answer}: the table shows {code}, and neither the code nor the note of the answer has {unknown}"
    )
    tree = parsed(code)
    assert tree is not None, f"{answer}: the table shows {code}, which is no Python"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("ll."):
            function = eval(ast.unparse(node.func), vars(at_hand))
            arguments = [
                None for argument in node.args if not isinstance(argument, ast.Constant) or argument.value != ...
            ]
            keywords = {argument.arg: None for argument in node.keywords if argument.arg}
            inspect.signature(function).bind_partial(*arguments, **keywords)


def parsed(code: str) -> ast.AST | None:
    """The code, the head of a block, a part of a call, or a keyword, as Python."""
    if keyword.iskeyword(code):
        return ast.Module([], [])
    for form in (
        "{}",
        "{} pass",
        "try: pass\n{} pass",
        "try: pass\n{}",
        "f({})",
        "def f():\n {}",
        "{}\ndef f(): pass",
    ):
        with contextlib.suppress(SyntaxError):
            return ast.parse(form.format(code))
    return None
