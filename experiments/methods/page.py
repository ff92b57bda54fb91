"""The tables of docs/results/methods.md, which stand there between marks."""

from __future__ import annotations

import re
from pathlib import Path

from dualdelay.storage.files import write

PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "methods.md"


def fill(**tables: str) -> None:
    """Put each table between its marks."""
    text = PAGE.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{PAGE} has no place for {name}: {begin} {end}")
        text = pattern.sub(lambda _, table=table, begin=begin, end=end: f"{begin}\n\n{table}\n{end}", text)
    write(PAGE, text.encode())
