"""Plain English: words and openings that docstrings, comments and pages avoid, with what to write instead."""

import ast
import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUESTION = re.compile(r"(What|Whatever|Whether|Where|How|When|Who|Whoever|Whose)\b")
# Pattern -> what to write instead.
AVOID = {
    r"\bwhoever\b": 'name the subject, or "you"',
    r"(?:^|[.;:] )Who\b(?![^.]*\?)": 'name the subject, or "if you"',
    r"\banew\b": "again",
    r"\b(?:go|goes|going|went|gone) on\b(?! (?:the|a|disk|top)\b)": "continue",
    r"\bpictures?\b": "plot, figure or image",
    r"(?<!Take one )\bpieces?\b": "microbatch, part, slice, or the name of the thing",
    r"\bsomething else than\b": "something other than",
    r"\bothers than\b": "different from",
    r"(?i:\b(?:after|for|in|into|of|to) so (?:many|much)\b)": '"`n`", or "the given number of"',
    r"\bsure to \d": "accurate to",
    r"\bthe world says\b": "name the signal",
}
# Where a pattern above has another meaning: (file, the text around it).
EXCEPTIONS: set[tuple[str, str]] = set()


def with_statements(node):
    """The node and all statements in it; to visit expressions too takes most of the time."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, []):
            yield from with_statements(child)


def docstrings(tree):
    """(line, text) of every docstring: modules, classes, functions, closures, and the strings below an assignment."""
    for node in with_statements(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for pair in pairwise(node.body):
                match pair:
                    case ((ast.Assign() | ast.AnnAssign()), ast.Expr(value=ast.Constant(value=str(text)))):
                        yield pair[1].lineno, text


def comments(source):
    """(line, text) of every comment; what looks like one within a string is prose too."""
    for match in re.finditer(r"(?:^ *|  )# (.*)$", source, re.M):
        yield source.count("\n", 0, match.start(1)) + 1, match[1]


def prose(path):
    """(line, text, whether it is a docstring) of what a person reads in a file, without code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from ((line, text, True) for line, text in docstrings(ast.parse(source)))
        yield from ((line, text, False) for line, text in comments(source))
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(source)["cells"]):
            if cell["cell_type"] == "markdown":
                yield number, without_code("".join(cell["source"])), False
    elif path.suffix == ".toml":
        for table in tomllib.loads(source)["answer"]:
            yield source.count("\n", 0, source.index(table["note"])) + 1, without_code(table["note"]), False
    else:
        yield 1, without_code(source), False


def blank(match):
    """Spaces instead of a match, with its line breaks, so that lines keep their numbers."""
    return re.sub(r"[^\n]", " ", match[0])


def without_code(text):
    """Markdown without fenced blocks, code spans and HTML tags, with its lines in place."""
    text = re.sub(r"^```.*?^```", blank, text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]+`|</?[a-z][^<>]*>", blank, text)


def faults(path):
    name = path.relative_to(ROOT).as_posix()
    for line, text, documents in prose(path):
        if documents and (match := QUESTION.match(text)) and "?" not in text.partition("\n")[0]:
            yield f"{name}:{line}: begins with {match[0]}; name the thing"
        text = re.sub(r"^\s*>>>.*?(?=\n\s*\n|\Z)", blank, text, flags=re.M | re.S)
        for pattern, instead in AVOID.items():
            for match in re.finditer(pattern, text, re.M):
                around = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
                if not any(file == name and part in around for file, part in EXCEPTIONS):
                    where = line + text.count("\n", 0, match.start())
                    yield f"{name}:{where}: {match[0]!r} in {around!r}; write {instead}"


def files():
    yield from sorted((ROOT / "looplib").rglob("*.py"))
    yield from sorted((ROOT / "recipes").rglob("*.py"))
    yield from sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    yield from sorted((ROOT / "recipes").glob("*.md"))
    yield from sorted((ROOT / "recipes/names").glob("*.toml"))
    yield from sorted((ROOT / "notebooks").glob("*.ipynb"))
    yield from (
        ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "tests/benchmarks/README.md")
    )


def test_the_check_finds_what_it_is_for(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for bad in ("Where the run stands.", "Whoever reads it.", "Some pictures of it.", "After so many steps."):
        for text in (f'"""{bad}"""\n', f'def f():\n    if f:\n        def g():\n            """{bad}"""\n'):
            (tmp_path / "module.py").write_text(text)
            assert list(faults(tmp_path / "module.py"))
    (tmp_path / "module.py").write_text("f = 1  # some pictures of it\n")
    assert list(faults(tmp_path / "module.py"))


def test_plain_english():
    found = [fault for path in files() for fault in faults(path)]
    assert not found, "rewrite these, or list another meaning in EXCEPTIONS:\n" + "\n".join(found)


if __name__ == "__main__":
    import sys

    for path in [Path(each).resolve() for each in sys.argv[1:]] or files():
        print(*faults(path), sep="\n", end="\n" if list(faults(path)) else "")
