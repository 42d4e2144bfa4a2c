"""The page "Concepts": its code runs from top to bottom, and what it asserts holds."""

import re

from public import ROOT


def test_the_code_of_the_page_runs(capsys):
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "recipes/CONCEPTS.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 9
    names = {"__name__": __name__}
    for block in blocks:
        exec(compile(block, "CONCEPTS.md", "exec"), names)
    assert capsys.readouterr().out == "old is spent; its counts can still be read: 0\n"
