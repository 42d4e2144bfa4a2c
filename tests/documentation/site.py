"""Builds the site: a page for each room by pdoc, and the pages of `pages.py` in the same frame."""

from __future__ import annotations

import html
import inspect
import json
import posixpath
import re
import shutil
import types
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pdoc.doc
import pdoc.render
import pdoc.render_helpers
import pdoc.search
from pdoc.render_helpers import format_signature, to_html
from pygments.formatters import HtmlFormatter

import looplib

from .links import ROOMS, Names, names_of_trainers, shortened, to_pages, uses, words
from .pages import ROOT, Page, document, fenced, pages, source_file, with_python
from .trainers import LIBRARIES

HERE = Path(__file__).parent
IMAGES = {".png", ".svg", ".jpg", ".gif"}


def build(target: Path) -> list[str]:
    """Write the site into a folder, which is emptied first; returns the addresses of its pages."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    return _Site(target).write()


class _Site:
    """State of the site while it is written.

    Attributes:
        target: the folder.
        pages: by name, such as "recipes.COOKBOOK"; files that a page links to join them.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.pages = {page.name: page for page in [_index(), *pages()]}
        self._names = Names()
        self._rooms = {f"looplib.{name}": pdoc.doc.Module(room) for name, room in ROOMS.items()}
        pdoc.render.configure(docformat="google", include_undocumented=False, template_directory=HERE / "templates")
        groups: dict[str, list[tuple[str, str]]] = {"Learn": [], "Cookbook": [], "Reference": [], "Recipes": []}
        for page in self.pages.values():
            groups.setdefault(page.group, []).append((page.name, _in_its_group(page)))
        groups["Reference"] = [(name, f"ll.{name.partition('.')[2]}") for name in self._rooms]
        pdoc.render.env.globals["groups"] = {heading: links for heading, links in groups.items() if heading}
        pdoc.render_helpers.markdown_extensions["toc"]["depth"] = 3
        pdoc.render.env.filters["with_python"] = with_python
        pdoc.render.env.globals["is_shown"] = _is_public
        pdoc.render.env.filters["readable"] = _readable
        pdoc.render.env.globals["is_for_users"] = _is_for_users
        pdoc.render.env.globals["first_line"] = lambda entry: entry.docstring.partition("\n\n")[0]
        counts = uses(page.text for page in self.pages.values() if page.group in ("Learn", "Cookbook", "Recipes"))
        pdoc.render.env.globals["by_use"] = lambda room: sorted(
            filter(_is_public, room.own_members), key=lambda entry: -counts[entry.fullname]
        )
        pdoc.render.env.globals["dark_code"] = HtmlFormatter(style="github-dark").get_style_defs(".pdoc-code")

    def write(self) -> list[str]:
        written: list[str] = []
        for name, room in self._rooms.items():
            self._write(name, shortened(self._rendered(room)))
            written.append(name)
        waiting = list(self.pages.values())
        while waiting:
            page = waiting.pop(0)
            module = types.ModuleType(page.name, page.text)
            module.__dict__.update(__all__=[], __docformat__="markdown")
            for name, data in page.images.items():
                self._file(page.source.with_name(name)).write_bytes(data)
            known = set(self.pages)
            self._write(page.name, self._rendered(pdoc.doc.Module(module), page), page)
            waiting += [self.pages[name] for name in self.pages.keys() - known]  # files that it links to
            written.append(page.name)
        (self.target / "search.js").write_text(self._search())
        return [f"{name.replace('.', '/')}.html" for name in written]

    def _rendered(self, module: pdoc.doc.Module, page: Page | None = None) -> str:
        with warnings.catch_warnings():
            # pdoc cannot evaluate the annotations of a NamedTuple's constructor, which the templates leave out.
            warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
            template = pdoc.render.env.get_template("module.html.jinja2")
            return template.render(module=module, page=page, all_modules=self._rooms, root_module_name="looplib")

    def _write(self, name: str, text: str, page: Page | None = None) -> None:
        up = "../" * name.count(".")
        start, end = text.index("<main"), text.index("</main>")
        content = text[start:end]
        if page:
            content = to_pages(content, str(page.source.parent), up, self._address)
        file = self._file(PurePosixPath(f"{name.replace('.', '/')}.html"))
        file.write_text(text[:start] + self._names.linked(content, up) + text[end:])

    def _file(self, path: PurePosixPath) -> Path:
        file = self.target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def _address(self, path: str) -> str:
        """Address in the site of a path of the repository. A file that is not in the site yet is added."""
        file = ROOT / path
        if (self.target / path).is_file() or path.endswith(".html"):
            return path
        if (
            path.startswith("looplib/")
            and file.name == "__init__.py"
            and f"looplib.{file.parent.name}" in self._rooms
        ):
            return f"{posixpath.dirname(path)}.html"
        if file.is_dir():
            inside = [page for page in self.pages.values() if str(page.source.parent) == path]
            if not inside:
                raise ValueError(f"a page links to the folder {path}, which has no page: link to a file in it")
            return f"{path}/{inside[0].source.stem}.html"
        if not file.is_file():
            raise ValueError(f"a page links to {path}, which is not in the repository")
        if file.suffix in IMAGES:
            shutil.copyfile(file, self._file(PurePosixPath(path)))
            return path
        address = str(PurePosixPath(path).with_suffix(".html"))
        name = ".".join(PurePosixPath(path).with_suffix("").parts)
        if name not in self.pages and name not in self._rooms:
            self.pages[name] = document(file, "") if file.suffix == ".md" else source_file(file)
        return address

    def _search(self) -> str:
        """pdoc's index of the rooms, with each page, its sections and its rows, and the words that lead to them."""

        found = pdoc.search.make_index(self._rooms, _is_public, "google")
        for entry in found:
            if entry["kind"] == "function":
                signature = self._rooms[entry["modulename"]].get(entry["qualname"]).signature
                # A Markup escapes what is put into it.
                entry["signature"] = shortened(str(format_signature(_readable(signature), colon=False)))
        for page in self.pages.values():
            if page.group and page.name not in ("index", "recipes.WORDS"):
                opening = page.text.partition("\n## ")[0].partition("\n")[2]
                found.append(
                    _searched(page, "", opening.partition("\n| ")[0] if page.group == "Cookbook" else opening)
                )
                for _, heading, text in page.sections:
                    if text.strip():  # else a group of sections, which are found by themselves
                        found.append(_searched(page, heading, text.partition("\n<table")[0]))
                for answer in page.library.answers if page.library else ():
                    text = f"{answer.note}\n\n{fenced(answer.code, 'python') if answer.code else ''}"
                    names = ", ".join(answer.names)
                    found.append(_searched(page, names, text) | {"qualname": answer.anchor, "kind": "row"})
        known = words(self.pages["recipes.WORDS"].text, self._names)
        trainers = names_of_trainers(LIBRARIES, known)
        template = pdoc.render.env.get_template("search.js.jinja2")
        constants = {"search_index": found, "words": known, "trainers": trainers}
        return template.render({name: json.dumps(value) for name, value in constants.items()})


def _is_public(entry: pdoc.doc.Doc) -> bool:
    """True if an entry is shown: a name of the room, or a class member with its own docstring."""
    if entry.kind == "module" or "." not in entry.qualname:
        return True
    return not entry.name.startswith("_") and bool(re.match(r"(?!Alias for field)\S", entry.docstring))


@dataclass(frozen=True)
class _Shown:
    """A default value that is shown as this text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _readable(signature: inspect.Signature) -> inspect.Signature:
    """A signature without `self`, in which functions as default values go by their names."""

    def named(parameter: inspect.Parameter) -> inspect.Parameter:
        text = repr(parameter.default)
        if not text.startswith("<") or parameter.default is inspect.Parameter.empty:
            return parameter
        name = getattr(parameter.default, "__name__", "<")
        return parameter.replace(default=_Shown(name if re.fullmatch(r"[a-z]\w*", name) else "..."))

    return signature.replace(parameters=[named(p) for name, p in signature.parameters.items() if name != "self"])


def _is_for_users(constructor: inspect.Signature) -> bool:
    """True if a class may be called by users: each of its parameters is public, and so is its type."""
    private = re.compile(r"looplib\.[\w.]*\._")
    return bool(constructor.parameters) and not any(
        name.startswith("_") or name == "kwargs" or private.search(inspect.formatannotation(parameter.annotation))
        for name, parameter in constructor.parameters.items()
    )


def _searched(page: Page, heading: str, text: str) -> dict[str, str]:
    """A section of a page, as pdoc's search knows it."""
    # The words of a title would be those of each task on the page.
    about = "Cookbook" if page.group == "Cookbook" else page.title
    title = html.escape(f"{about}: {heading}".replace("`", "") if heading else page.title)
    names = {"fullname": title, "modulename": page.name, "qualname": _anchor(heading) if heading else ""}
    return {**names, "kind": "page", "doc": to_html(_beginning(text))}


def _beginning(text: str) -> str:
    """The first lines of a section, with an end for the block of code or the table that they are cut off in."""
    if len(text) > 2000:
        text = text[:2000].rpartition("\n")[0]
    fences = re.findall(r"^`{3,}", text, re.M)
    return f"{text}\n{fences[-1]}" if len(fences) % 2 else text


def _index() -> Page:
    """The first page: what looplib is, and the way to everything else."""
    every = pages()
    recipes = [page for page in every if page.group == "Recipes" and page.source.suffix == ".py"]
    rooms = [f"| [`ll.{name}`](looplib/{name}.html) | {_first_line(room)} |" for name, room in ROOMS.items()]
    fills = {
        "opening": looplib.__doc__.replace("looplib: w", "W"),
        "tasks": _tasks(page for page in every if page.name.startswith("recipes.COOKBOOK_")),
        "notebooks": _list(page for page in every if page.name.startswith("notebooks.")),
        "rooms": "\n".join(["| room | what goes in, what comes out |", "| --- | --- |", *rooms]),
        "recipes": "\n".join(
            f"- [{page.title}]({page.source}): {page.text.split(chr(10) * 2)[1]}" for page in recipes
        ),
        **{
            name: _list(page for page in every if page.group == group)
            for name, group in {"trainers": "From other loops", "advanced": "Advanced", "about": "About"}.items()
        },
    }
    text = (HERE / "index.md").read_text()
    for name, fill in fills.items():
        text = text.replace(f"{{{{ {name} }}}}", fill)
    return Page(PurePosixPath("index.md"), "Home", text, "Learn")


def _tasks(cookbook: Iterable[Page]) -> str:
    """Links to the tasks of the cookbook's pages, in a box for each page."""
    boxes = list[list[str]]()
    for page in cookbook:
        boxes.append([f"**[{_in_its_group(page)}]({page.source})**", ""])
        tasks = [heading for level, heading, _ in page.sections if level == 3]
        boxes[-1] += [f"- [{heading}]({page.source}#{_anchor(heading)})" for heading in tasks]
    return "\n\n".join('<div markdown="1">\n\n' + "\n".join(box) + "\n\n</div>" for box in boxes)


def _in_its_group(page: Page) -> str:
    """The title without the name of the page's group."""
    title = page.title.removeprefix(f"{page.group}: ")
    return title if title == page.title else title[0].upper() + title[1:]


def _list(listed: Iterable[Page]) -> str:
    return "\n".join(f"- [{page.title}]({page.source})" for page in listed)


def _first_line(room: types.ModuleType) -> str:
    return (room.__doc__ or "").partition("\n")[0]


def _anchor(heading: str) -> str:
    return re.search(r'id="([^"]*)"', to_html(f"## {heading}"))[1]
