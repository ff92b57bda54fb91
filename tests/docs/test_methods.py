"""The tables of methods on the pages are those of the classes: ``python tests/docs/test_methods.py`` writes them anew."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import dualdelay as dd

DOCS = Path(__file__).parents[2] / "docs"
PAGE = re.compile(r"docs/((?:\w+/)*)(\w+)\.md")


def sentence(kind: Any) -> str:
    """The first sentence of a class's docstring."""
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")


def source(kind: Any) -> str:
    """Where a method comes from, as its file says it after its name."""
    text = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    text = PAGE.sub(lambda page: f"[{page[2].capitalize()}](../{page[1]}{page[2]}.md)", text)
    return text.partition(": ")[2].rstrip(".") or "-"


def table(*rows: list[str]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])) + "\n"


def parts() -> dict[tuple[Path, str], str]:
    """By page and mark, what stands there."""
    methods = dd.ALGORITHMS.values()
    named = {
        kind: f"`dd.{kind.__name__}`" if hasattr(dd, kind.__name__) else f"`dd.algorithms.{kind.__name__}`"
        for kind in methods
    }
    needs = [[kind.title, kind.keeps, kind.needs, kind.wastes, kind.away] for kind in methods]
    return {
        (DOCS / "reference" / "api" / "methods.md", "classes"): "\n".join(
            [
                "```{eval-rst}",
                ".. currentmodule:: dualdelay.algorithms",
                "\n.. autosummary::\n",
                *(f"   {kind.__name__}" for kind in methods),
                *(f"\n.. autoclass:: {kind.__name__}" for kind in methods),
                "```\n",
            ]
        ),
        (DOCS / "reference" / "methods.md", "sources"): table(
            ["method", "on the shell, in Python", "what it does", "source"],
            *([kind.title, f"`{kind.name}`, {named[kind]}", sentence(kind), source(kind)] for kind in methods),
        ),
        (DOCS / "how_to" / "halves.md", "remembers"): table(
            ["method", "what a worker keeps, and what becomes of it when it is lost"],
            *([kind.title, kind.remembers] for kind in methods if kind.remembers),
        ),
        (DOCS / "reference" / "methods.md", "needs"): table(
            ["method", "the server keeps", "must know", "work or time thrown away", "a worker that is away"], *needs
        ),
    }


def place(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- begin {mark} -->\n\n).*?(?=\n<!-- end {mark} -->)", re.S)


def test_the_tables_of_methods_are_those_of_the_classes() -> None:
    for (page, mark), text in parts().items():
        assert place(mark).findall(page.read_text()) == [text], f"{page.name} is out of date: make pages"


def test_every_method_says_what_it_is() -> None:
    for name, kind in dd.ALGORITHMS.items():
        assert name == kind.name and kind.title and source(kind) and sentence(kind).endswith("."), name


if __name__ == "__main__":
    for (page, mark), text in parts().items():
        page.write_text(place(mark).sub(lambda _, text=text: text, page.read_text()))
