"""One HTML page about runs, with pictures that can be asked: everything is in the file, and it never uses a network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ...core.errors import BadInput, NotSaved, require_path, shown
from ...core.version import __version__
from ...engine.result import Run
from ...engine.table import Table
from ...runs.load import Kept
from ...storage.files import make_folder, write
from .content import page_content
from .entries import Thing, entries_of

_EARLY = 'document.documentElement.classList.add("scripted");'  # before anything is laid out


def write_report(things: Sequence[Thing], path: str | Path = "report.html", title: str = "") -> Path:
    """Write one page about runs, sweeps and tables together."""
    require_path("path", path)
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise BadInput(f"{str(path)!r} cannot be the page; expected the name of a file that ends in .html.")
    for thing in things:
        if not isinstance(thing, (Run, Table, Kept)):
            raise BadInput(f"{shown(thing)} cannot be reported; expected a run, a sweep or a table.")
    page = report_page(things, title).encode()
    make_folder(path.parent)
    try:
        write(path, page)
    except NotSaved as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise BadInput(f"{path} cannot be written ({why}); choose another place for the page.") from None
    return path


def report_page(things: Sequence[Thing], title: str = "") -> str:
    """The text of the page."""
    from jinja2 import Environment  # torch brings it

    content = page_content(entries_of(things))
    library, script = _text("plotly-basic.min.js"), _text("page.js")
    scripts = " ".join(f"'sha256-{_sha256(text)}'" for text in (_EARLY, library, script))
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_text("page.html"))
    return template.render(
        title=title or content.title,
        content=content,
        data=for_script(content.data),
        policy=policy,
        early=_EARLY,
        library=library,
        script=script,
        style=_text("page.css"),
        version=__version__,
    )


def for_script(data: Any) -> str:
    """Plain values as JSON inside a script element, which no text in them can end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
