"""The pages that are made from docstrings: the API reference, and the list of recipes.

A docstring is plain text in paragraphs; here it is turned into Markdown that a forge shows as it is: examples and
indented blocks become code, lists of arguments become lists, and names in backticks lead to what they name.

`python tests/reference.py` writes looplib/README.md and recipes/README.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import looplib as ll

ROOT = Path(__file__).parent.parent
REFERENCE, RECIPES = ROOT / "looplib/README.md", ROOT / "recipes/README.md"

# The order to learn things in. A module with public names is in one of these.
TOPICS = {
    "The state": "state",
    "The optimizer": "optimizer",
    "Schedules": "schedules",
    "Gradients": "gradients accumulation clipping",
    "Steps": "steps compiling _tracing",
    "Batches": "loader",
    "Predicates": "predicates stopping signals",
    "Metrics": "metrics scores torch_metrics",
    "Evaluation and prediction": "evaluation prediction evaluation_retry",
    "Checkpoints": "checkpoint _tree_file",
    "Logs and pictures": "sinks progress sink_wrappers tables boards pictures",
    "Precision and memory": "precision recompute",
    "Averages, skips and combinations": "averaging skipping composing",
    "Losses": "losses",
    "Weights in and out": "export",
    "Costs and learning rates": "costs lr_finder",
    "Many processes": "distributed",
    "Tests of a step": "testing",
    "Any step again": "replaying",
    "Many members in one step": "ensemble",
    "Gradients through training": "unrolling",
    "Single examples": "per_sample",
}
# Bare words that more often mean something else: an argument, torch's own, a thing of the loop.
NOT_LINKED = {"batch_size", "differentiable", "optimizer", "progress", "predicate", "record", "state_dict", "step"}
HEADINGS = {"Args": "Arguments"}
# The order to read recipes in; others come after these.
ORDER = """
    classify_digits from_transformers from_fastnlp from_dist_trainer trainer_callbacks language_model fine_tune_lora
    vision click_through with_torchmetrics testing_your_step language_model_ddp language_model_fsdp sweep_lr
    optuna_pruning ensemble_digits gan_digits dp_sgd_digits maml_sinusoids
"""
INTRODUCTION = """\
Every public name of looplib: its arguments, examples that run in the tests, what it raises, and where it comes from.
All are attributes of the package (`import looplib as ll`), those of `distributed` and `testing` of these two modules.
Types read as in the source, where `Tensor` is `torch.Tensor` and `nn` is `torch.nn`. Whole scripts are among the
[recipes](../recipes/README.md). The page is made from the docstrings by `python tests/reference.py`.
"""

RECIPES_INTRODUCTION = """\
Each is one script (one a folder, with its tests) that can be copied out and run: real data that comes with
scikit-learn or Python, settings on the command line, the numbers that it reached in its docstring, and a test
that runs it small. Times are those of one core of a small machine. `python -m looplib.recipes copy NAME` copies
one out of an installed looplib. The names below each recipe are those that it uses and most others do not; they
lead to [the reference](../looplib/README.md). This page is made from the recipes by `python tests/reference.py`.

Until looplib is on PyPI, `pip install -c tests/constraints.txt -e ".[recipes]"` in a checkout stands for `pip
install "looplib[recipes]"`, and so with the other extras.
"""


@dataclass(frozen=True)
class Entry:
    """One public name: a heading of the reference."""

    name: str  # after "ll.": "optimizer", "distributed.setup", "Loader.parts"
    value: Any
    module: str  # the file that defines it
    line: int

    @property
    def kind(self) -> str:
        """What stands before the name in its heading, so that `Optimizer` and `optimizer` have two anchors."""
        if isinstance(self.value, type) and issubclass(self.value, BaseException):
            return "exception "
        if not isinstance(self.value, type) and not inspect.isroutine(self.value) and not self.owner:
            return "type "
        if getattr(self.value, "_is_protocol", False):
            return "type "
        return "class " if isinstance(self.value, type) and self.name.rpartition(".")[2][0].isupper() else ""

    @property
    def owner(self) -> str:
        """The class, of a method."""
        before = self.name.rpartition(".")[0]
        return before if before[:1].isupper() or isinstance(getattr(ll, before, None), type) else ""

    @property
    def rank(self) -> tuple[Any, ...]:
        """What is called comes first, then what it returns, then what it raises."""
        return ["", "class ", "type ", "exception "].index(self.kind), self.line

    @property
    def doc(self) -> str:
        if self.alias:
            return documented_assignments(ROOT / f"looplib/{self.module}.py")[self.name]
        return inspect.getdoc(self.value) or ""

    @property
    def anchor(self) -> str:
        return slug(f"{self.kind}{self.name}")

    @property
    def parameters(self) -> list[inspect.Parameter]:
        if self.kind == "exception " or not callable(self.value) or self.alias:
            return []
        found = inspect.signature(self.value.__call__ if self.protocol else self.value).parameters.values()
        return [each for each in found if each.name != "self"]

    @property
    def alias(self) -> bool:
        """Whether it is a name for a type, such as `Schedule`."""
        return self.kind == "type " and not isinstance(self.value, type)

    @property
    def protocol(self) -> bool:
        return isinstance(self.value, type) and bool(getattr(self.value, "_is_protocol", False))

    @cached_property
    def methods(self) -> list[Entry]:
        """The documented methods and properties of a class."""
        if not isinstance(self.value, type):
            return []
        found = []
        for name, value in vars(self.value).items():
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if name[0] != "_" and isinstance(function, (types.FunctionType, property)) and function.__doc__:
                shown = value if isinstance(value, property) else getattr(self.value, name)
                found.append(Entry(f"{self.name}.{name}", shown, self.module, self.line))
        return found


def slug(heading: str) -> str:
    """The anchor that forges give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def aliases() -> dict[str, dict[str, str]]:
    """The names that modules give to types for themselves, which signatures are to spell out."""
    found: dict[str, dict[str, str]] = {}
    for path in (ROOT / "looplib").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, node.value
                plain = isinstance(value, (ast.Name, ast.BinOp)) or (
                    isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name)
                )
                if re.fullmatch(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*", name) and plain and name not in ll.__all__:
                    found.setdefault(path.stem, {})[name] = ast.unparse(value).replace("'", '"')
    return found


def documented_assignments(path: Path) -> dict[str, str]:
    """The strings below `Name = ...`, which is where a type alias has its docstring."""
    found = {}
    for pair in pairwise(ast.parse(path.read_text()).body):
        match pair:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def lines_of(path: Path) -> dict[str, int]:
    """Where each name at the top of a file is defined."""
    found: dict[str, int] = {}
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node.lineno
            case ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = node.lineno
    return found


def entries() -> dict[str, list[Entry]]:
    """The public names by the module that defines them, each module's in the order of the page."""
    files = {path.stem: lines_of(path) for path in sorted((ROOT / "looplib").glob("*.py")) if path.stem != "__init__"}
    found: dict[str, list[Entry]] = {}
    for scope in [ll, *(value for value in vars(ll).values() if public_module(value))]:
        prefix = scope.__name__.partition(".")[2]
        for name in scope.__all__:
            value = getattr(scope, name)
            if isinstance(value, types.ModuleType):
                continue
            home = getattr(value, "__module__", "").partition(".")[2]
            if home not in files:  # an alias of a type from elsewhere
                home = next(stem for stem, names in files.items() if name in names)
            full = f"{prefix}.{name}" if prefix else name
            found.setdefault(home, []).append(Entry(full, value, home, files[home][name]))
    missing = sorted(found.keys() - " ".join(TOPICS.values()).split())
    if missing:
        raise ValueError(f"looplib/{missing[0]}.py has public names, and is in none of the TOPICS here: add it")
    return {home: sorted(names, key=lambda entry: entry.rank) for home, names in found.items()}


def public_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.partition(".")[2] in ll.__all__


@dataclass
class Links:
    """From what stands in backticks to the heading that it names, if it names one."""

    page: str = ""  # what comes before "#" in a link
    anchors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, list[Entry]], page: str = "") -> Links:
        anchors = {}
        for entry in (entry for names in found.values() for entry in names):
            for each in (entry, *entry.methods):
                anchors[each.name] = each.anchor
        for topic, modules in TOPICS.items():
            anchors |= {
                name: slug(topic)
                for name in modules.split()
                if name in ll.__all__ and public_module(getattr(ll, name))
            }
            for name in modules.split():
                anchors[f"looplib.{name}"] = slug(topic)
                if public_module(getattr(ll, name, None)):
                    anchors[name] = slug(topic)
        return cls(page, anchors)

    def __call__(self, code: str, scope: str = "", own: frozenset[str] = frozenset()) -> str | None:
        """The address for a piece of code in the docstring of a module `scope`, whose own words are `own`."""
        called = re.fullmatch(r"([\w.]+)(\(.*\))?", code, re.DOTALL)
        if called is None or (name := called[1]) in own:
            return None
        bare = name.removeprefix("ll.")
        if name == bare and bare in NOT_LINKED:
            return None
        anchor = (name == bare and self.anchors.get(f"{scope}.{bare}")) or self.anchors.get(bare)
        return anchor and f"{self.page}#{anchor}"


Inline = Callable[[str], str]


def inline(text: str, link: Callable[[str], str | None]) -> str:
    """A paragraph: what Markdown would take for markup is escaped, and names in backticks become links."""
    parts = re.split(r"(``.+?``|`.+?`)", text, flags=re.DOTALL)
    for number, part in enumerate(parts):
        if number % 2:
            code = part.strip("`")
            address = link(code)
            parts[number] = f"[`{code}`]({address})" if address else f"`{code}`"
        else:
            part = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", re.sub(r"([*<\[\]])", r"\\\1", part))
            parts[number] = re.sub(r"(?m)^([-+#>])(?=\s)", r"\\\1", part)
    return "".join(parts)


def markdown(doc: str, inline: Inline) -> list[str]:
    """The lines of a docstring as Markdown."""
    out: list[str] = []
    for block in blocks(doc):
        first = block.split("\n", 1)[0]
        if block.startswith(">>>"):
            out += ["```pycon", block, "```", ""]
        elif block.startswith("    "):
            out += [*code(textwrap.dedent(block)), ""]
        elif re.fullmatch(r"[A-Z][\w ]*:", first) and "\n    " in block:
            head = first.removesuffix(":")
            out += [f"**{HEADINGS.get(head, head)}**", "", *section(block.split("\n", 1)[1], inline), ""]
        else:
            out += [inline(block), ""]
    return out


def blocks(doc: str) -> Iterator[str]:
    """Paragraphs, examples, and indented blocks with the empty lines within them."""
    waiting = ""
    for block in re.split(r"\n{2,}", doc.strip("\n")):
        if block.startswith("    ") and waiting.startswith("    "):
            waiting += f"\n\n{block}"
            continue
        if waiting:
            yield waiting
        # What is raised, and the source, may follow the sentence before without an empty line.
        *before, waiting = re.split(r"\n(?=(?:Raises [A-Z]|Source: ))", block) if block[:3] != ">>>" else [block]
        yield from before
    yield waiting


def code(text: str) -> list[str]:
    try:
        ast.parse(text)
    except SyntaxError:
        return ["```text", text, "```"]
    return ["```py", text, "```"]


def section(text: str, inline: Inline) -> list[str]:
    """A list of arguments, attributes or errors: `name: text`, or plain text where nothing is named."""
    out = []
    for item in re.split(r"\n(?=\S)", textwrap.dedent(text)):
        item = textwrap.dedent(re.sub(r"\n\s*", "\n", item))
        names = re.match(r"((?:\*{0,2}[\w.]+,\s)*\*{0,2}[\w.]+):\s", item)
        if names is None:
            out.append(inline(item))
            continue
        listed = ", ".join(f"`{name}`" for name in re.split(r",\s", names[1]))
        out.append(textwrap.indent(f"{listed}: {inline(item[names.end() :])}", "  ").replace("  ", "- ", 1))
    return out


def signature(entry: Entry) -> list[str]:
    """The call, with types and defaults; over several lines where it is long. Nothing for what users do not make."""
    name = f"ll.{entry.name}"
    if entry.kind == "exception ":
        bases = ", ".join(base.__name__ for base in entry.value.__bases__)
        return [f"class {name}({bases})"]
    if isinstance(entry.value, property):
        return [f"{name}: {entry.value.fget.__annotations__['return']}"]
    if entry.alias:
        return [f"{name} = {shown_type(entry.value, {})}"]
    every = aliases()
    known = {each: text for names in every.values() for each, text in names.items()} | every.get(entry.module, {})
    plain = isinstance(entry.value, type) and entry.value.__init__ in (list.__init__, object.__init__)
    if plain and not entry.protocol and not issubclass(entry.value, tuple):
        return []
    if any(each.name.startswith("_") for each in entry.parameters):
        return []
    given, star = [], False
    for each in entry.parameters:
        if each.kind == each.KEYWORD_ONLY and not star:
            given.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f" = {shown_default(each.default)}"
        given.append(f"{stars}{each.name}: {shown_type(each.annotation, known)}{default}")
    value = entry.value.__call__ if entry.protocol else entry.value
    returned = shown_type(inspect.signature(value).return_annotation, known)
    end = ")" if isinstance(value, type) else f") -> {returned}"
    line = f"{name}({', '.join(given)}{end}"
    if len(line) <= 110:
        return [line]
    return [f"{name}(", *(f"    {each}," for each in given), end]


def shown_type(value: Any, known: Mapping[str, str]) -> str:
    """A type as the source has it, with what the `known` names there stand for in their places."""
    text = getattr(value, "__forward_arg__", None) or (value if isinstance(value, str) else repr(value))
    text = re.sub(r"\b(?:collections\.abc|looplib\.\w+|typing)\.", "", text).replace("'", '"')
    while (spelled := re.sub(r"\b[A-Z]\w*", lambda name: known.get(name[0], name[0]), text)) != text:
        text = spelled
    return text


def shown_default(value: Any) -> str:
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__name__}"
    if isinstance(value, types.FunctionType):
        return "..." if value.__name__[0] in "_<" else value.__name__
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return "..." if text.startswith("<") else re.sub(r"^inf$", "math.inf", text)


def sentence(doc: str) -> str:
    """The first one, which is the first paragraph."""
    return next(blocks(doc), "")


def reference() -> str:
    """The page of all public names: an index, and the docstrings by topic."""
    found = entries()
    links = Links.of(found)

    def of(entry: Entry) -> Inline:
        scope = entry.name.rpartition(".")[0]
        own = {each.name for each in entry.parameters} | {entry.name, entry.name.rpartition(".")[2]}
        own |= set(entry.value.__annotations__) if isinstance(entry.value, type) else set()
        return partial(inline, link=partial(links, scope=scope, own=frozenset(own)))

    index: list[str] = []
    text: list[str] = []
    for topic, modules in TOPICS.items():
        index += [f"**[{topic}](#{slug(topic)})**", ""]
        text += [f"## {topic}", ""]
        for module in modules.split():
            if module[0] != "_":
                doc = inspect.getdoc(__import__(f"looplib.{module}", fromlist=["x"])) or ""
                said = markdown(doc, partial(inline, link=partial(links, scope=module)))
                text += [f"From [{module}.py]({module}.py): {said[0][0].lower()}{said[0][1:]}", *said[1:]]
            for entry in found.get(module, []):
                index.append(f"- [`{entry.name}`](#{entry.anchor}): {of(entry)(sentence(entry.doc))}")
                for each in (entry, *entry.methods):
                    text += [f"{'####' if each.owner else '###'} {each.kind}`{each.name}`", ""]
                    if call := signature(each):
                        text += ["```py", *call, "```", ""]
                    text += markdown(each.doc, of(each))
        index.append("")
    return "\n".join(["# API reference", "", INTRODUCTION, *index, *text]).rstrip() + "\n"


@dataclass(frozen=True)
class Recipe:
    """A script of recipes/, or of a folder in it, as its docstring tells of it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem if self.path.parent.name == "recipes" else self.path.parent.name

    @property
    def place(self) -> str:
        return self.path.name if self.path.parent.name == "recipes" else f"{self.name}/"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def shows(self) -> str:
        return sentence(self.doc)

    @property
    def commands(self) -> str:
        """The first indented block: how it is installed and run."""
        return next((textwrap.dedent(block) for block in blocks(self.doc) if block.startswith("    ")), "")

    @property
    def reached(self) -> str:
        """From the word "Reached" to the end of its paragraph, with the table that a colon there announces."""
        found = ""
        for block in blocks(self.doc):
            if found.endswith(":") and block.startswith("    "):
                return f"{found}\n\n{block}"
            if match := re.search(r"\bReached\b.*", block, re.DOTALL):
                found = match[0]
        return found

    @property
    def time(self) -> str:
        """The first time of seconds or minutes that it says there."""
        said = " ".join(self.reached.split())
        number = r"(?:\d[\d.]*|two|three|four|five)"
        match = re.search(rf"{number}(?: to {number}| and a half)? (?:seconds|minutes)", said)
        return match[0] if match else ""

    @property
    def uses(self) -> set[str]:
        """What it takes from `ll`, such as "optimizer" or "distributed.setup"."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)]
        return {ast.unparse(node).removeprefix("ll.") for node in nodes if ast.unparse(node).startswith("ll.")}


def recipes() -> list[Recipe]:
    """All of them in the order to read them in."""
    found = [Recipe(path) for path in sorted(RECIPES.parent.glob("*.py"))]
    folders = [sorted(folder.glob("*.py")) for folder in RECIPES.parent.iterdir() if folder.is_dir()]
    found += [Recipe(scripts[0]) for scripts in folders if scripts]
    order = {name: number for number, name in enumerate(ORDER.split())}
    return sorted(found, key=lambda recipe: (order.get(recipe.name, len(order)), recipe.name))


def recipe_list() -> str:
    """The page of all recipes: a table, and for each its command, its numbers and what it uses."""
    found = recipes()
    listed = entries()
    links = Links.of(listed, page="../looplib/README.md")
    public = {entry.name for names in listed.values() for entry in names if entry.kind != "type "}
    counts = Counter(name for recipe in found for name in recipe.uses)
    table = ["| recipe | what it shows | time |", "| --- | --- | --- |"]
    text = []
    for recipe in found:
        plain = partial(inline, link=links)
        shows = " ".join(plain(recipe.shows).split()).replace("|", "\\|")
        table.append(f"| [{recipe.name}](#{slug(recipe.name)}) | {shows} | {recipe.time} |")
        text += [f"## {recipe.name}", "", f"[{recipe.place}]({recipe.place}): {plain(recipe.shows)}", ""]
        if recipe.commands:
            text += ["```sh", re.sub(r"(?m)^(.*?\S|) {2,}\((.*)\)$", r"\1  # \2", recipe.commands), "```", ""]
        text += markdown(recipe.reached, plain) if recipe.reached else []
        names = sorted(name for name in recipe.uses & public if counts[name] <= len(found) / 3)
        if names:
            linked = [f"[`{name}`]({links.page}#{links.anchors[name]})" for name in names]
            text += [f"Uses {', '.join(linked)}.", ""]
    pages = [path for path in sorted(RECIPES.parent.glob("*.md")) if path != RECIPES]
    told = [f"- [{path.read_text().partition(chr(10))[0].lstrip('# ')}]({path.name})" for path in pages]
    parts = ["# Recipes", "", RECIPES_INTRODUCTION, *table, "", *text, "## Pages", "", *told]
    return "\n".join(parts).rstrip() + "\n"


def write() -> None:
    """Write both pages."""
    REFERENCE.write_text(reference())
    RECIPES.write_text(recipe_list())
    print(f"{REFERENCE.relative_to(ROOT)}: {sum(map(len, entries().values()))} names")
    print(f"{RECIPES.relative_to(ROOT)}: {len(recipes())} recipes")


if __name__ == "__main__":
    write()
