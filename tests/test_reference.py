"""The pages made from docstrings: as they are now, with links that lead somewhere, and nothing left unsaid."""

import doctest
import inspect
import re
import types

import pytest
from reference import (
    RECIPES,
    REFERENCE,
    ROOT,
    documented_assignments,
    entries,
    markdown,
    recipe_list,
    recipes,
    reference,
    section,
)

import looplib as ll

FOUND = [entry for names in entries().values() for entry in names]


@pytest.mark.parametrize("made", [reference, recipe_list])
def test_the_page_is_made_from_the_docstrings_as_they_are(made):
    path = {reference: REFERENCE, recipe_list: RECIPES}[made]
    assert path.read_text() == made(), f"{path.name} is older than the docstrings: python tests/reference.py"


def headings(path):
    """The anchors of a page by the rule that forges have: small letters, hyphens for spaces, no other signs."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M)
    return ["".join(c for c in title.lower() if c.isalnum() or c in " -_").replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", [REFERENCE, RECIPES], ids=["looplib", "recipes"])
def test_every_link_leads_somewhere(path):
    anchors = headings(path)
    assert len(anchors) == len(set(anchors))
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 10
    for link in links:
        page, _, anchor = link.partition("#")
        target = path.parent / page if page else path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_every_public_name_has_a_heading():
    public = {name for name in ll.__all__ if not isinstance(getattr(ll, name), types.ModuleType)}
    public |= {f"{module.__name__[8:]}.{name}" for module in (ll.distributed, ll.testing) for name in module.__all__}
    titles = re.findall(r"^### (?:\w+ )?`(.*)`$", REFERENCE.read_text(), re.M)
    assert sorted(titles) == sorted(public)


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_a_docstring_names_every_parameter(entry):
    given = [each.name for each in entry.parameters if each.name[0] != "_"]
    if entry.kind in ("type ", "exception ") or entry.name in ("Checkpoints", "Window"):  # made by other means
        given = []
    said = re.sub(r"^(>>>|\.\.\.).*$", "", entry.doc, flags=re.M)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", said))))
    for names in re.findall(r"^    ((?:\*{0,2}\w+,\s+)*\*{0,2}\w+): ", said, re.M):
        named |= set(re.findall(r"\w+", names))
    assert [name for name in given if name not in named] == []


def test_examples_of_type_aliases_run():
    for module in ("schedules", "sinks"):
        for name, text in documented_assignments(ROOT / f"looplib/{module}.py").items():
            test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
            assert test.examples
            assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_it_reached_and_in_what_time(recipe):
    assert re.search(r"\d", recipe.reached), "its docstring has no sentence 'Reached: ...' with numbers"
    assert recipe.time, "what follows 'Reached' in its docstring has no time, such as 'in 7 seconds on one core'"
    assert recipe.commands
    assert f"[{recipe.place}]({recipe.place})" in RECIPES.read_text()


def test_a_docstring_becomes_markdown():
    doc = inspect.cleandoc(
        """One *sentence* about `x`.

        >>> 1 + 1
        2

        In a loop:

            for x in y:

                pass

        Args:
            x, y: two
                lines.

        It is < 3.
        Raises ValueError for more.
        """
    )
    assert (
        "\n".join(markdown(doc, lambda text: text.upper()))
        == inspect.cleandoc(
            """ONE *SENTENCE* ABOUT `X`.

        ```pycon
        >>> 1 + 1
        2
        ```

        IN A LOOP:

        ```py
        for x in y:

            pass
        ```

        **Arguments**

        - `x`, `y`: TWO
          LINES.

        IT IS < 3.

        RAISES VALUEERROR FOR MORE.
        """
        )
        + "\n"
    )
    assert section("    ValueError: once.\n    TypeError, KeyError: twice.", str) == [
        "- `ValueError`: once.",
        "- `TypeError`, `KeyError`: twice.",
    ]
