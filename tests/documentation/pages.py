"""The pages of the site that are not rooms: each is Markdown made from a file of the repository.

A page's path in the site is the path of its file, so that links between files stay as they are.
"""

from __future__ import annotations

import ast
import html
import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from textwrap import dedent

from pdoc.render_helpers import to_html

from .trainers import LIBRARIES, Library, anchor

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    """A page made of Markdown.

    Attributes:
        source: the file that it is made from, relative to the repository.
        title: for the navigation and the browser's tab.
        text: Markdown.
        group: the heading in the navigation that it stands under, or "" for none.
        images: file name -> bytes, saved beside the page.
        library: the library whose names the page has, if it is a table of names.
    """

    source: PurePosixPath
    title: str
    text: str
    group: str = ""
    images: dict[str, bytes] = field(default_factory=dict)
    library: Library | None = None

    @property
    def name(self) -> str:
        """The path without its ending, with dots, as pdoc names modules: "recipes.COOKBOOK"."""
        return ".".join(self.source.with_suffix("").parts)

    @property
    def sections(self) -> Iterator[tuple[int, str, str]]:
        """Each heading below the title: its level, itself, and the Markdown up to the next one."""
        text = re.sub(r"^(`{3,}).*?^\1", lambda block: block[0].replace("\n#", "\n #"), self.text, flags=re.M | re.S)
        _, *parts = re.split(r"^(##+) (.+)$", text, flags=re.M)
        for marks, heading, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            yield len(marks), heading, body


def pages() -> list[Page]:
    """All pages, in the order of the navigation."""
    learn = [
        ROOT / "recipes" / f"{name}.md"
        for name in ("CONCEPTS", "CHEAT_SHEET", "FINE_TUNING", "TAKE_ONE_PIECE", "WORDS")
    ]
    in_order = dict.fromkeys(re.findall(r"COOKBOOK\w+\.md", (ROOT / "recipes/COOKBOOK.md").read_text()))
    cookbook = [ROOT / "recipes" / name for name in ("COOKBOOK.md", *in_order)]
    names = [library.page for library in LIBRARIES]
    trainers = sorted(set((ROOT / "recipes").glob("FROM_*.md")) - set(names))
    about = [ROOT / "recipes/COMPARISON.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    others = {*learn, *cookbook, *trainers, *names, *about, ROOT / "recipes/README.md"}
    advanced = [path for path in sorted((ROOT / "recipes").glob("*.md")) if path not in others]
    scripts = [*sorted((ROOT / "recipes").glob("*.py")), *sorted((ROOT / "recipes").glob("*/*.py"))]
    return [
        replace(document(ROOT / "README.md", "Learn"), title="Install and first loop"),
        *(document(path, "Learn") for path in learn),
        *(notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))),
        *(document(path, "Cookbook") for path in cookbook),
        document(ROOT / "recipes/README.md", "Recipes"),
        *(recipe(path) for path in scripts),
        *(document(path, "From other loops") for path in trainers),
        *(table_of_names(library) for library in LIBRARIES),
        *(document(path, "Advanced") for path in advanced),
        *(document(path, "About") for path in about),
    ]


def document(path: Path, group: str) -> Page:
    """A Markdown file."""
    text = path.read_text()
    return Page(_relative(path), _title(text), text, group)


def table_of_names(library: Library) -> Page:
    """The names of another library; "more" opens the whole code with its note, where the file links to its data."""
    page = document(library.page, "From other loops")
    tables = [f"## {of}\n\n{_table(library, of)}" for of in library.owners]
    return replace(page, text="\n\n".join([library.opening("opens").strip(), *tables]), library=library)


def _table(library: Library, of: str) -> str:
    """One table, in HTML."""
    rows = ["<tr><th>name</th><th>what to write</th><th>test</th></tr>"]
    for name, answer, write in library.rows(of):
        if name == str(answer):
            code = to_html(fenced(answer.code, "python")) if answer.code else ""
            more = f"<details><summary>more</summary>{to_html(answer.note)}{code}</details>"
        else:
            more = f'<a href="#{answer.anchor}">more</a>'
        shown = f'<a id="{anchor(name)}"></a><code>{html.escape(name.removeprefix(of + "."))}</code>'
        test = _inline(answer.test).replace(".", ".<wbr>")
        cells = [shown, f"{_inline(write)} {more if write != answer.note else ''}", test]
        rows.append("".join(["<tr>", *(f"<td>{cell}</td>" for cell in cells), "</tr>"]))
    return "<table class='trainer'>\n" + "\n".join(rows) + "\n</table>"


def _inline(text: str) -> str:
    """Markdown of one line as HTML without a paragraph around it."""
    return re.sub(r"^<p>(.*)</p>$", r"\1", to_html(text).strip(), flags=re.S)


def notebook(path: Path) -> Page:
    """A Jupyter notebook: its texts, its code, and the outputs that are saved with it."""
    parts, images = [], dict[str, bytes]()
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else fenced(text, "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(images)}.png"
                images[name] = b64decode("".join(data["image/png"]))
                parts.append(f"![figure{' on white' * is_opaque(images[name])}]({name})")
            elif "text/html" in data:
                parts.append(f'<div class="output">{" ".join("".join(data["text/html"]).split())}</div>')
            else:
                parts.append(fenced("".join(data["text/plain"]).rstrip(), "text"))
    text = "\n\n".join(parts)
    return Page(_relative(path), f"{path.stem.partition('_')[0]}. {_title(text)}", text, "Learn", images)


def is_opaque(png: bytes) -> bool:
    """True if the first pixel of a PNG hides the page behind it: its alpha, if it has one, is the largest."""
    data, position = b"", 8
    while position < len(png):
        size = int.from_bytes(png[position : position + 4])
        if png[position + 4 : position + 8] == b"IDAT":
            data += png[position + 8 : position + 8 + size]
        position += size + 12
    with_alpha, depth_of_8 = png[25] == 6, png[24] == 8
    return not (with_alpha and depth_of_8) or zlib.decompress(data)[4] == 255  # after the row's filter and R, G, B


def recipe(path: Path) -> Page:
    """A script: its docstring as text, then its code."""
    source = path.read_text()
    tree = ast.parse(source)
    name = path.stem if path.parent.name == "recipes" else f"{path.parent.name}/{path.stem}"
    opening = ast.get_docstring(tree) or ""
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno if opening else 0 :]).strip("\n")
    summary, _, rest = opening.partition("\n\n")
    text = f"# {name}\n\n{summary}\n\n{rest}\n\n## The script\n\n{fenced(code, 'python')}"
    return Page(_relative(path), name, text, "Recipes")


def source_file(path: Path) -> Page:
    """A file of code that some page links to."""
    language = {".py": "python", ".toml": "toml", ".sh": "sh"}.get(path.suffix, "text")
    name = _relative(path)
    return Page(name, str(name), f"# {name}\n\n{fenced(path.read_text(), language)}")


def fenced(text: str, language: str) -> str:
    """A block of code in Markdown, whatever backticks are in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def with_python(text: str) -> str:
    """Markdown whose indented blocks of Python are fenced, so that they are coloured and their names are links."""

    def replaced(match: re.Match[str]) -> str:
        code = dedent(match[0]).strip("\n")
        try:
            ast.parse(code)
        except SyntaxError:
            return match[0]
        return f"\n{fenced(code, 'python')}\n"

    parts = re.split(r"^((`{3,}).*?^\2$)", text, flags=re.M | re.S)  # text, fenced block, its fence, text, ...
    parts[::3] = [re.sub(r"(?:(?<=\n\n)|\A)(?: {4}.*(?:\n+|\Z))+", replaced, part) for part in parts[::3]]
    del parts[2::3]
    return "".join(parts)


def _title(text: str) -> str:
    return re.search(r"^# (.+)$", text, re.M)[1].replace("`", "")


def _relative(path: Path) -> PurePosixPath:
    return PurePosixPath(path.relative_to(ROOT).as_posix())
