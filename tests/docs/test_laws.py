"""The page of laws is read from the tests that check them: ``python tests/docs/test_laws.py`` writes it anew.

A file ``tests/algorithms/test_laws_*.py`` is a section: the first line of its docstring is the heading, the rest an
introduction. Each of its tests is a law: its docstring says in one sentence what holds, and after "Catches" which wrong
code breaks it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "laws.md"
FIRST = (
    "aggregate",
    "pseudo_code",
    "equalities",
    "limits",
    "symmetries",
)  # sections in this order, then the others by name
LAWS = re.compile(r"(?<=<!-- begin laws -->\n\n).*(?=\n<!-- end laws -->)", re.S)


class Law(NamedTuple):
    test: str
    holds: str
    catches: str


def read(path: Path) -> tuple[str, str, list[Law]]:
    """The heading, the introduction and the laws of a file of tests."""
    tree = ast.parse(path.read_text())
    heading, _, introduction = (ast.get_docstring(tree) or "").partition("\n\n")
    laws = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = " ".join((ast.get_docstring(node) or "").split())
            holds, _, catches = text.partition(" Catches ")
            laws.append(Law(node.name, holds, catches))
    return heading, introduction.replace("\n", " "), laws


def place(path: Path) -> tuple[int, str]:
    name = path.stem.removeprefix("test_laws_")
    return FIRST.index(name) if name in FIRST else len(FIRST), name


SECTIONS = {path: read(path) for path in sorted((ROOT / "tests" / "algorithms").glob("test_laws_*.py"), key=place)}


def text() -> str:
    """A section for each file, with a table of its laws."""
    parts = []
    for path, (heading, introduction, laws) in SECTIONS.items():
        rows = ["| law, and the test that checks it | wrong code that it catches |", "| --- | --- |"]
        for law in laws:
            cells = [f"{law.holds}<br>`{path.name}::{law.test}`", law.catches]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join([f"## {heading}", "", introduction, "", *rows, ""]))
    return "\n".join(parts)


def test_the_page_is_that_of_the_tests() -> None:
    assert LAWS.findall(PAGE.read_text()) == [text()], "docs/reference/laws.md is out of date: make pages"


def test_every_law_says_what_holds_and_what_it_catches() -> None:
    for path, (heading, introduction, laws) in SECTIONS.items():
        assert heading and introduction.endswith("."), path
        wrong = [law.test for law in laws if not (law.holds.endswith(".") and law.catches.endswith("."))]
        assert laws and wrong == [], path


if __name__ == "__main__":
    PAGE.write_text(LAWS.sub(lambda _: text(), PAGE.read_text()))
