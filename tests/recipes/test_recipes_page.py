"""The list of recipes is as their docstrings are now, and each recipe says what it reached."""

import re

import pytest
from recipes_page import PAGE, page, recipes
from shared import one_report


def test_the_page_is_made_from_the_docstrings_as_they_are():
    assert PAGE.read_text() == page(), "recipes/README.md is out of date: run python tests/recipes/recipes_page.py"


@one_report
@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_it_reached_and_in_what_time(recipe):
    assert re.search(r"\d", recipe.reached), "its docstring has no sentence 'Reached: ...' with numbers"
    assert recipe.time, "what follows 'Reached' in its docstring has no time, such as 'in 7 seconds on one core'"
    assert recipe.commands
    assert f"[{recipe.link}]({recipe.link})" in PAGE.read_text()
