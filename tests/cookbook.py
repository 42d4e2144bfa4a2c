"""The cookbook's pages. `python tests/cookbook.py` writes the lists of tasks at their beginnings."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"
INDEX = FOLDER / "COOKBOOK.md"
PAGES = [
    FOLDER / f"COOKBOOK_{name}.md" for name in ("DATA", "LOSSES", "OPTIMIZERS", "NETWORKS", "LOGS", "CHECKPOINTS")
]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
[SETUP] = BLOCK.findall(INDEX.read_text())
TABLE = re.compile(r"(?:^\| .*\n)+", re.M)
SECTIONS = {  # heading -> text, of all pages
    heading: text
    for page in PAGES
    for heading, text in re.findall(r"^### ([^\n]+)\n(.*?)(?=^###? |\Z)", page.read_text(), re.M | re.S)
}


def contents(page: Path) -> str:
    """The table of a page's tasks, a row for each group."""
    rows = ["| group | tasks |", "| --- | --- |"]
    for marks, heading in re.findall(r"^(###?) (.+)$", page.read_text(), re.M):
        link = f"[{heading}](#{_anchor(heading)})"
        if marks == "##":
            rows.append(f"| **{heading}** | ")
        else:
            rows[-1] += f"{'' if rows[-1].endswith('| ') else ' · '}{link}"
    return "".join(f"{row}{' |' if number > 1 else ''}\n" for number, row in enumerate(rows))


def index() -> str:
    """The table of all pages' tasks, a row for each page."""
    rows = ["| page | tasks |", "| --- | --- |"]
    for page in PAGES:
        title = page.read_text().partition("\n")[0].removeprefix("# Cookbook: ")
        groups = re.findall(r"^\| (\*\*.*)\*\* \| (.*) \|$", contents(page), re.M)
        tasks = ". ".join(f"{group}:** {links}" for group, links in groups).replace("](#", f"]({page.name}#")
        rows.append(f"| [{title[0].upper()}{title[1:]}]({page.name}) | {tasks} |")
    return "\n".join(rows) + "\n"


def texts() -> dict[Path, str]:
    """Each page with the table at its beginning as it should be."""
    tables = {INDEX: index(), **{page: contents(page) for page in PAGES}}
    return {
        page: TABLE.sub(lambda _, table=table: table, page.read_text(), count=1) for page, table in tables.items()
    }


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    for page, text in texts().items():
        page.write_text(text)
