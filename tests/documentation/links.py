"""Links within the site: from a public name to its entry, and from a file of the repository to its page."""

from __future__ import annotations

import inspect
import posixpath
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable

import looplib as ll

from .trainers import Library

ROOMS = {name: getattr(ll, name) for name in ll.__all__ if isinstance(getattr(ll, name), types.ModuleType)}
DOT = '<span class="o">.</span>'
IN_CODE = re.compile(
    rf'<span class="n">ll</span>{DOT}<span class="n">(\w+)</span>(?:{DOT}<span class="n">(\w+)</span>)?'
)
IN_TEXT = re.compile(r'(?<!">)<code>(?:(ll|looplib)\.(\w+)(?:\.(\w+))?|(\w+))(?=[^\w.])')
# -> what stands before the type
MODULES = {"typing": "", "collections.abc": "", "torch.nn.modules.module": "nn", "pathlib._local": "pathlib"}
REFERENCE = re.compile(r'(<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=")([^"#]*)((?:#[^"]*)?")')


def entries() -> dict[str, str]:
    """ "optim.ema" and, for an everyday name, "ema" -> the address of its entry, from the root of the site."""
    found = {room: f"looplib/{room}.html" for room in ROOMS}
    for room, module in ROOMS.items():
        for name in module.__all__:
            found[f"{room}.{name}"] = f"looplib/{room}.html#{name}"
            if hasattr(ll, name) and getattr(ll, name) is getattr(module, name):
                found[name] = found[f"{room}.{name}"]
    return found


def bare_names() -> dict[str, str]:
    """Names that need no `ll.` in a text to be known: classes, and names of several words that are no parameter's too."""
    functions = [getattr(module, name) for module in ROOMS.values() for name in module.__all__]
    functions = [function for function in functions if inspect.isfunction(function)]
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    return {
        name: f"looplib/{room}.html#{name}"
        for room, module in ROOMS.items()
        for name in module.__all__
        if name not in parameters and re.search(r"^[A-Z]|_", name)
    }


def uses(texts: Iterable[str]) -> Counter[str]:
    """ "looplib.optim.ema" -> how often these texts use it, as `ll.optim.ema` or, for an everyday name, as `ll.ema`."""
    homes = {name: f"looplib.{room}.{name}" for room, module in ROOMS.items() for name in module.__all__}
    counts = Counter[str]()
    for text in texts:
        for first, second in re.findall(r"\bll\.(\w+)(?:\.(\w+))?", text):
            counts[f"looplib.{first}.{second}" if first in ROOMS else homes.get(first, "")] += 1
    return counts


class Names:
    """Links public names in the HTML of a page to their entries."""

    def __init__(self) -> None:
        self._entries, self._bare = entries(), bare_names()

    def linked(self, html: str, up: str) -> str:
        """The page with links; `up` leads from the page to the root of the site."""

        def in_code(match: re.Match[str]) -> str:
            package, *names = (f'<span class="n">{name}</span>' for name in ("ll", match[1], match[2]) if name)
            return self._anchor(match[1], match[2], up, DOT.join([package, names[0]]), DOT + names[-1]) or match[0]

        def in_text(match: re.Match[str]) -> str:
            package, first, second, bare = match.groups()
            if bare:
                address = self._bare.get(bare)
                return f'<code><a href="{up}{address}">{bare}</a>' if address else match[0]
            anchor = self._anchor(first, second, up, f"{package}.{first}", f".{second}")
            return f"<code>{anchor}" if anchor else match[0]

        return IN_TEXT.sub(in_text, IN_CODE.sub(in_code, html))

    def address(self, name: str) -> str:
        """The address of the entry of `ll.name`, from the root of the site."""
        return self._entries[name]

    def _anchor(self, first: str, second: str | None, up: str, shown_first: str, shown_second: str) -> str | None:
        """A link from `ll.first.second`, or from `ll.first` alone where `second` is an attribute of it."""
        if second and f"{first}.{second}" in self._entries:
            return f'<a href="{up}{self._entries[f"{first}.{second}"]}">{shown_first}{shown_second}</a>'
        if first in self._entries:
            return f'<a href="{up}{self._entries[first]}">{shown_first}</a>{shown_second if second else ""}'
        return None


Words = list[tuple[str, list[str]]]  # each word, and the places that it leads to


def words(text: str, names: Names) -> Words:
    """The rows of recipes/WORDS.md: each word, and the places that its row gives, "module#anchor", the first one first."""
    found = Words()
    for row in re.findall(r"^\| (?!you look for|---)(.+) \| (.+) \|$", text, re.MULTILINE):
        targets = re.findall(r"`ll\.([\w.]+)`|\]\(([^)]+)\)", row[1])
        places = [_place(names.address(name) if name else f"recipes/{target}") for name, target in targets]
        found += [(word.strip("`"), places) for word in row[0].split(", ")]
    return found


def names_of_trainers(libraries: Iterable[Library], words: Words) -> Words:
    """The names of other libraries: each, alone and with its class, and the places of its answers.

    What WORDS.md gives for the very same name stands first, then looplib's own entry of that name.

    Args:
        libraries: those whose names come first stand first.
        words: see `words`.
    """
    first = {name.rpartition(".")[2]: [_place(address)] for name, address in entries().items()}
    for word, places in words:
        first[word.lower()] = [*places, *first.get(word.lower(), ())]
    found: dict[str, list[str]] = {}
    for library in libraries:
        for full, (answer, _) in library.of_name.items():
            of, _, name = full.partition(".")
            for word in (name.lower(), f"{of.partition(' ')[0]}.{name}".lower()):
                places = found.setdefault(word, [*first.get(word, ())])
                places.append(_place(f"recipes/{library.page.name}#{answer.anchor}"))
    return [(name, [*dict.fromkeys(places)]) for name, places in found.items()]


def _place(address: str) -> str:
    """An address as the search knows it: "looplib.optim#ema"."""
    file, _, anchor = address.partition("#")
    return f"{posixpath.splitext(posixpath.normpath(file))[0].replace('/', '.')}#{anchor}"


def to_pages(html: str, folder: str, up: str, address_of: Callable[[str], str]) -> str:
    """The page with links to files of the repository turned into links to their pages.

    Args:
        html: a page.
        folder: of the file that the page is made from, which its links are relative to.
        up: leads from the page to the root of the site.
        address_of: the address in the site of a path in the repository.
    """

    def rewritten(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if not target or re.match(r"[a-z]+:|//", target):
            return match[0]
        return f"{before}{up}{address_of(posixpath.normpath(posixpath.join(folder, target)))}{after}"

    return REFERENCE.sub(rewritten, html)


def shortened(html: str) -> str:
    """Signatures without the modules of well-known types: `Any`, not `typing.Any`."""
    for module, short in MODULES.items():
        parts = [f'<span class="n">{part}</span>{DOT}' for part in module.split(".")]
        html = html.replace("".join(parts), f'<span class="n">{short}</span>{DOT}' if short else "")
    html = re.sub(rf'<span class="n">looplib</span>(?:{DOT}<span class="n">[a-z_]\w*</span>)+{DOT}', "", html)
    return re.sub(r'(<a href="[^"]*">)looplib\.(?:\w+\.)+(\w+</a>)', r"\1\2", html)
