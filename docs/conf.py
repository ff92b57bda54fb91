"""The documentation site: sphinx-build -W --keep-going -n -b html docs build/docs, which is ``make docs``.

Pages are plain Markdown that can be read where the source is, too, so a link is a path to a file. One that leads out of
this folder becomes a link to that file in the repository. Notebooks are copied in and shown as they were saved; the tests
execute them. Large pictures are shown as smaller copies that open the originals.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from PIL import Image
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import dualdelay as dd

DOCS = Path(__file__).parent
SOURCE = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["urls"]["Source"]
NOTEBOOKS = DOCS / "notebooks"  # copies of those beside this folder, which Sphinx does not look at
LARGE = 100_000  # bytes of a picture that a page shows a smaller copy of
WIDEST = 1600  # pixels of that copy: twice the width of a page's text

project = "dualdelay"
author = "the dualdelay authors"
project_copyright = "the dualdelay authors, Apache 2.0"
release = dd.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["pictures", "**.ipynb_checkpoints"]
nb_execution_mode = "off"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # Pygments does not know csv

html_theme = "furo"
html_title = "dualdelay"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("sidebar.js", {"defer": "defer"})]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "source_repository": SOURCE,
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#005a9c", "color-brand-content": "#005a9c"},
    "dark_css_variables": {"color-brand-primary": "#6fb7ee", "color-brand-content": "#6fb7ee"},
}
copybutton_exclude = ".linenos, .gp, .go"

autodoc_inherit_docstrings = False  # a method's `step` is explained once, in the base class
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 100
autosummary_generate = False
default_role = "literal"
toc_object_entries = True
toc_object_entries_show_parents = "hide"
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|pathlib|collections)\..*"),  # pages of others, which cannot be looked into without a network
    (r"py:class", r".*\[.*"),  # a piece of an annotation such as dict[str, int]
    (r"py:class", r"dualdelay\.algorithms\.\w+\.\w+State"),  # types that a reader has no need to make, from here on
    (
        r"py:class",
        r"(dualdelay\..*\.)?(S|Tensor|Named|Names|Packed|Point|Shard|Stepper|TableFormat|VirtualClock)",
    ),
    (r"py:class", r"(dualdelay\..*\.)?(Absences|BatchedGradients|Dealt|EventKind|OneAtATime|StatusBoard|WorkerFleet)"),
]

SETTING = re.compile(r"(\w+(?:, \w+)*): (.*)")
FILE = re.compile(r"^( *)```(\w+) ([\w.]+)$", re.M)
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def copy_notebooks(app: Sphinx) -> None:
    """Bring the notebooks into the folder that pages are built from; only those that have changed are written."""
    NOTEBOOKS.mkdir(exist_ok=True)
    originals = {path.name: path.read_bytes() for path in (DOCS.parent / "notebooks").glob("*.ipynb")}
    for path in NOTEBOOKS.iterdir():
        if path.name not in originals:
            path.unlink()
    for name, text in originals.items():
        if not (NOTEBOOKS / name).exists() or (NOTEBOOKS / name).read_bytes() != text:
            (NOTEBOOKS / name).write_bytes(text)


def lead_to_the_repository(app: Sphinx, name: str, text: list[str]) -> None:
    """Links to files outside of this folder lead to the repository, those to notebooks to their pages."""
    here = (DOCS / name).parent

    def outside(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / link[2]))
        if target.is_relative_to(DOCS) or not target.exists():  # one that is not there is left for Sphinx to report
            return link[0]
        if target.suffix == ".ipynb":
            return f"{link[1]}{os.path.relpath(NOTEBOOKS / target.name, here)})"
        kind = "tree" if target.is_dir() else "blob"
        return f"{link[1]}{SOURCE}/{kind}/main/{target.relative_to(DOCS.parent)}{link[3] or ''})"

    text[0] = LINK.sub(outside, text[0])


def name_files(app: Sphinx, name: str, text: list[str]) -> None:
    """A file name that stands after the language of a block is shown above it."""
    text[0] = FILE.sub(r"\1```{code-block} \2\n\1:caption: \3\n", text[0])


def notebooks_are_elsewhere(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """In the repository notebooks are not in the folder of the pages, which the links to a page's source begin with."""
    if name.startswith("notebooks/"):
        context["theme_source_directory"] = ""


def find_by_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element
) -> nodes.reference | None:
    """Annotations name classes by the file they are in; the pages have them by their public names."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    python = env.domains.python_domain
    known = [f"dualdelay.{place}{name}" for place in ("", "problems.", "speeds.", "theory.", "algorithms.")]
    known.append(f"dualdelay.{name.lower()}")  # an order such as Send is made by a function
    for target in known:
        if target in python.objects:
            entry = python.objects[target]
            where = app.builder.get_relative_uri(env.current_document.docname or node["refdoc"], entry.docname)
            link = nodes.reference("", "", internal=True, refuri=f"{where}#{entry.node_id}")
            link += shown
            return link
    return None


def open_pictures(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """A picture opens in full; that of the two delays has a twin with a button for each step, which a page can hold."""
    for place, image in enumerate(list(doctree.findall(nodes.image))):
        twin = DOCS / Path(image["uri"]).with_suffix(".html")
        if twin.exists():
            image.replace_self(nodes.raw("", twin.read_text(), format="html"))
        elif image["uri"] in app.env.images:
            shown, folder = image.deepcopy(), "../" * name.count("/") + "_images"
            if place:
                shown["loading"] = "lazy"  # it is fetched when a reader comes near it
            file = app.env.images[image["uri"]][1]
            if (copy := smaller(app, DOCS / image["uri"], file)) is not None:
                app.builder.images[image["uri"]] = file  # the original is there to be opened
                shown["uri"], shown["width"], shown["height"] = f"{folder}/{copy[0]}", str(copy[1]), str(copy[2])
            image.replace_self(nodes.reference("", "", shown, refuri=f"{folder}/{file}", internal=True))


def smaller(app: Sphinx, picture: Path, name: str) -> tuple[str, int, int] | None:
    """Write the copy of a large picture that pages show; its name and size, or None for one that is small."""
    if picture.suffix != ".png" or picture.stat().st_size < LARGE:
        return None
    with Image.open(picture) as image:
        width = min(image.width, WIDEST)
        copy = image.convert("RGB").resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    place = Path(app.outdir) / "_images" / f"{Path(name).stem}.webp"
    place.parent.mkdir(parents=True, exist_ok=True)
    copy.save(place, quality=80)
    return place.name, *copy.size


def as_lists(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Lines such as ``lr: the step size`` of a docstring become a list; what is indented otherwise is shown as it is."""
    known = (
        set(inspect.signature(thing).parameters) if what in ("class", "function", "method") and callable(thing) else set()
    )
    shown: list[str] = []
    inside, level = "", 0  # of what the last line was a part, and how far the arguments are indented
    for line in lines:
        if line == "Arguments:":
            level = 4
            continue
        own = line[level:] if line.startswith(" " * level) else line
        setting = SETTING.fullmatch(own)
        if setting and known.intersection(setting[1].split(", ")):
            shown += [*([] if inside == "list" else [""]), f"* ``{setting[1]}``: {setting[2]}"]
            inside = "list"
        elif inside == "list" and own.startswith(" "):
            shown.append(f"  {own.strip()}")
        elif line.startswith(" ") and line.strip():
            shown += [line] if inside == "block" else ["", "::", "", line]
            inside = "block"
        else:
            shown += [*([""] if inside and line else []), line]
            inside, level = "", 0 if line else level
    lines[:] = shown


def as_dots(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """A default that is made anew for each object has no text that can be read as Python."""
    return (signature.replace("<factory>", "..."), returns) if signature and "<factory>" in signature else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook them in."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", lead_to_the_repository)
    app.connect("source-read", name_files)
    app.connect("html-page-context", notebooks_are_elsewhere)
    app.connect("missing-reference", find_by_public_name)
    app.connect("doctree-resolved", open_pictures)
    app.connect("autodoc-process-docstring", as_lists)
    app.connect("autodoc-process-signature", as_dots)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
