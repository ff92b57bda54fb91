"""DESIGN.md's map is that of the folders, and the files it names exist.

``python tests/docs/test_design.py`` writes the map anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dualdelay"
PAGE = ROOT / "DESIGN.md"
MAP = re.compile(r"(?<=<!-- begin rooms -->\n\n).*?(?=\n<!-- end rooms -->)", re.S)


def layers() -> list[list[str]]:
    """The rooms by who may import whom, as the test of the architecture has them."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS"]
    rooms: list[list[str]] = ast.literal_eval(values[0])
    return rooms


def the_map() -> str:
    """A row for each room: its layer, its name and the first sentence of its docstring."""
    rows = ["| layer | room | what lies in it |", "| --- | --- | --- |"]
    for layer, rooms in enumerate(layers(), 1):
        for room in rooms:
            docstring = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or ""
            about = docstring.split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")
            rows.append(f"| {layer} | [`{room}/`](src/dualdelay/{room}) | {about} |")
    return "\n".join(rows) + "\n"


def test_the_map_is_that_of_the_folders() -> None:
    assert MAP.findall(PAGE.read_text()) == [the_map()], "write it again: python tests/docs/test_design.py"
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == {room for rooms in layers() for room in rooms}


def test_every_room_has_a_folder_of_tests() -> None:
    assert all((ROOT / "tests" / room).is_dir() for rooms in layers() for room in rooms)


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:src|tests|docs|experiments|benchmarks)/[\w/.]*)`", PAGE.read_text())
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_promise_names_its_tests() -> None:
    promises = PAGE.read_text().split("## Promises\n")[1].split("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| **")]
    assert len(rows) == 6
    assert all(re.search(r"`tests/[\w/]+\.py`", row.split("|")[3]) for row in rows)


if __name__ == "__main__":
    PAGE.write_text(MAP.sub(lambda _: the_map(), PAGE.read_text()))
