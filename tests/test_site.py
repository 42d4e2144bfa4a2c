"""The documentation site: it builds, its links lead somewhere, and each room and public name has an entry."""

import json
import posixpath
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from documentation.site import build
from public import ROOMS, ROOT, public_names


class Reader(HTMLParser):
    """The links, the anchors and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("href", "src", "srcset") if given.get(name)]
        self.anchors += [given[name] for name in ("id", "name") if given.get(name) and tag not in ("meta", "input")]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    addresses = build(folder)
    return folder, {address: Reader((folder / address).read_text()) for address in addresses}


def test_every_link_leads_somewhere(site):
    folder, pages = site
    broken = []
    for address, page in pages.items():
        for link in page.links:
            if re.match(r"(https?|mailto|data):", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(address), path)) if path else address
            if not (folder / target).is_file():
                broken.append(f"{address}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{address}: {link} (no such anchor)")
    assert broken == []


def test_every_page_can_be_reached_from_the_index(site):
    _, pages = site
    reached, waiting = set(), ["index.html"]
    while waiting:
        address = waiting.pop()
        if address in pages and address not in reached:
            reached.add(address)
            folder = posixpath.dirname(address)
            waiting += [
                posixpath.normpath(posixpath.join(folder, link.partition("#")[0])) for link in pages[address].links
            ]
    assert reached == set(pages)


def test_every_room_and_public_name_has_an_entry_with_its_source(site):
    folder, pages = site
    assert {f"looplib/{room}.html" for room in ROOMS} <= set(pages)
    for name in public_names():
        room, _, bare = name.partition(".")
        assert bare in pages[f"looplib/{room}.html"].anchors, name
    text = (folder / "looplib/optim.html").read_text()
    assert "View Source" in text
    assert "def</span>" in text


def test_notebooks_recipes_and_documents_are_pages(site):
    folder, pages = site
    sources = [
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "recipes").glob("*.py"),
        *(ROOT / "recipes").glob("*.md"),
    ]
    for path in sources:
        assert path.relative_to(ROOT).with_suffix(".html").as_posix() in pages
    assert list((folder / "notebooks").glob("*.png"))


def test_every_entry_can_be_searched_for(site):
    folder, pages = site
    start, end = "const docs = ", ";\n\n    // mirrored"
    text = (folder / "search.js").read_text()
    found = json.loads(text[text.index(start) + len(start) : text.index(end)])
    known = {entry["fullname"] for entry in found}
    assert {f"looplib.{name}" for name in public_names()} - known == set()
    assert "Cookbook: Freeze layers" in known
    for entry in found:
        address = f"{entry['modulename'].replace('.', '/')}.html"
        assert entry.get("qualname", "") in ("", *pages[address].anchors), entry["fullname"]


def test_pages_show_no_addresses_of_objects(site):
    _, pages = site
    for address, page in pages.items():
        if address.startswith("looplib/"):
            text = "".join(page.words)
            assert not re.search(r"<(function|class|object)[^>]* at 0x|inspect\._empty", text), address
