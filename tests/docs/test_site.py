"""The site is built with warnings as errors, holds together, needs no network, and looks right in a browser.

``make docs`` builds it in the same way. The build is shared by all tests of this file, also by those of other processes.
"""

from __future__ import annotations

import fcntl
import importlib
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

import dualdelay as dd

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
LOOKED_AT = [
    "index.html",
    "tutorial/first_run.html",
    "explanation/what_dude_is.html",
    "how_to/read_results.html",
    "notebooks/compare_methods.html",
    "results/methods.html",
    "reference/methods.html",
    "reference/laws.html",
    "reference/api/options.html",
]
CONTRAST = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const faint = {};
  for (const e of document.querySelectorAll('article *, .sidebar-tree *')) {
    if (e.closest('svg') || e.closest('.headerlink') || !e.checkVisibility({opacityProperty: true})) continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    const a = light(parse(style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = size >= 24 || (size >= 18.6 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) faint[`${e.tagName}.${e.className} ${style.color}`] = ratio.toFixed(2);
  }
  return faint; }"""


class Page(HTMLParser):
    """What a page links to, what it loads, and the places that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.places |= {named[name] for name in ("id", "name") if name in named}
        self.links += [named["href"]] if tag == "a" and "href" in named else []
        if named.get("rel") not in ("search", "index", "next", "prev", "canonical"):
            self.loads += [value for name, value in named.items() if (tag, name) in LOADING]
        self.without_text += [named.get("src", "")] if tag == "img" and not named.get("alt") else []


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = shared / "site"
        if not (shared / "site.log").exists():
            flags = ["-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(shared / "doctrees")]
            done = subprocess.run(
                [sys.executable, "-m", "sphinx", *flags, str(ROOT / "docs"), str(out)],
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            (shared / "site.log").write_text(f"{done.returncode}\n{done.stderr}")
    return out


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    code, _, said = (site.parent / "site.log").read_text().partition("\n")
    assert (code, said) == ("0", "")


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Page]) -> None:
    broken = defaultdict(set)
    inner = 0
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith(("data:", "//")):
                continue
            inner += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or (parts.fragment and target in pages and parts.fragment not in pages[target].places):
                broken[path.name].add(link)
    assert inner > 2000
    assert dict(broken) == {}


def test_links_out_of_the_pages_lead_to_files_of_the_repository(pages: dict[Path, Page]) -> None:
    begin = "https://github.com/dualdelay/dualdelay/"
    ours = {link for page in pages.values() for link in page.links if link.startswith(begin)}
    files = [link.removeprefix(begin).split("#")[0].split("/", 2) for link in ours]
    named = [rest[0] for kind, _, *rest in files if kind in ("blob", "tree", "edit") and rest]
    assert len(named) > 30 and "notebooks/real_workers.ipynb" in named
    assert [name for name in named if name.startswith("docs/notebooks")] == [], "these are copies, which git does not have"
    assert [name for name in named if not (ROOT / name.split("?")[0]).exists()] == []


def test_no_page_loads_anything_from_a_network(site: Path, pages: dict[Path, Page]) -> None:
    loads = {load for page in pages.values() for load in page.loads}
    assert [load for load in loads if urlsplit(load).netloc] == []
    styles = [path for path in site.rglob("*.css") if "url(http" in path.read_text() or "@import" in path.read_text()]
    assert styles == []


def test_no_page_is_heavy(site: Path, pages: dict[Path, Page]) -> None:
    weights: dict[str, list[int]] = {}
    for path, page in pages.items():
        parts = {path, *((path.parent / urlsplit(load).path).resolve() for load in page.loads)}
        sizes = {part: part.stat().st_size for part in parts if part.is_file()}
        pictures = sum(size for part, size in sizes.items() if part.parent.name == "_images")
        weights[path.relative_to(site).as_posix()] = [sum(sizes.values()) - pictures, pictures]
    assert {name: weight for name, weight in weights.items() if weight[0] > 500_000 or weight[1] > 750_000} == {}
    assert sum(weights["index.html"]) < 500_000
    gallery = [path.stat().st_size for path in PICTURES.glob("gallery_*.png")]
    assert len(gallery) == 5 and max(gallery) < 150_000
    assert (PICTURES / "report.png").stat().st_size < 150_000


def test_large_pictures_are_shown_small_and_open_in_full(site: Path, pages: dict[Path, Page]) -> None:
    page = pages[site / "results" / "paper.html"]
    shown = [load for load in page.loads if load.endswith(".webp")]
    assert len(shown) >= 4
    for load in shown:
        full = load.replace(".webp", ".png")
        assert full in page.links
        original, copy = ((site / "results" / name).stat().st_size for name in (full, load))
        assert copy < original / 2


def test_every_notebook_has_its_page_with_what_it_showed(site: Path, pages: dict[Path, Page]) -> None:
    names = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")]
    links = pages[site / "index.html"].links
    counts = [links.count(f"notebooks/{name}.html") for name in names]
    assert len(counts) == 3 and min(counts) > 1  # in the table of contents, and where the text names it
    assert all("cell_output" in (site / "notebooks" / f"{name}.html").read_text() for name in names)


def test_files_of_the_pages_are_shown_with_their_names(site: Path) -> None:
    text = (site / "how_to" / "workers.html").read_text() + (site / "reference" / "shell.html").read_text()
    names = ("speeds.csv", "away.csv", "mine.py")
    assert [name for name in names if f'<span class="caption-text">{name}</span>' not in text] == []


def test_every_picture_has_a_text(pages: dict[Path, Page]) -> None:
    assert {str(path): page.without_text for path, page in pages.items() if page.without_text} == {}


@pytest.fixture(scope="session")
def documented(site: Path) -> set[str]:
    """The names that the reference has, from what other sites would look them up in."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}


@pytest.mark.parametrize(
    "module", [dd, dd.algorithms, dd.problems, dd.speeds, dd.theory], ids=lambda module: module.__name__
)
def test_the_reference_has_every_public_name(module: ModuleType, documented: set[str]) -> None:
    place = {"dualdelay.simulation": "dualdelay.speeds"}.get(module.__name__, module.__name__)
    public = getattr(module, "__all__", None) or [
        name for name, thing in vars(module).items() if getattr(thing, "__module__", "").startswith("dualdelay.")
    ]
    things = {name: getattr(module, name) for name in public}
    names = [name for name, thing in things.items() if not isinstance(thing, (ModuleType, dict))]
    known = {f"{where}.{name}" for where in (place, "dualdelay", "dualdelay.algorithms") for name in names} & documented
    assert len(names) > 9
    assert [name for name in names if not any(each.endswith(f".{name}") for each in known)] == []


@pytest.mark.parametrize("name", ["Evaluation", "EarlyStop", "Compute", "Server", "Saving", "Reporting", "SimulatedFleet"])
def test_the_reference_has_every_option(name: str, documented: set[str]) -> None:
    assert [each.name for each in fields(getattr(dd, name)) if f"dualdelay.{name}.{each.name}" not in documented] == []


def script(name: str) -> Any:
    """A script of the folder of pictures, as a module."""
    sys.path.insert(0, str(PICTURES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PICTURES))


def test_the_picture_of_the_two_delays_is_that_of_its_run() -> None:
    assert [path.name for path, text in script("two_delays").pictures().items() if path.read_text() != text] == []


def require_alike(drawn: Path, kept: Path) -> None:
    """Two pictures are the same but for letters, which differ between machines."""
    from PIL import Image

    one, other = (np.asarray(Image.open(path).convert("L"), dtype=float) for path in (drawn, kept))
    assert one.shape == other.shape and np.abs(one - other).mean() < 1.0, kept.name


def test_the_pictures_of_a_split_and_of_speeds_are_those_of_the_package(tmp_path: Path) -> None:
    for path in script("portraits").draw(tmp_path):
        require_alike(path, PICTURES / path.name)


@pytest.mark.slow
def test_the_gallery_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "results" / "gallery.md").read_text()
    gallery = script("gallery")
    assert all(f"python docs/pictures/gallery.py {name}\n" in page for name in gallery.PICTURES)
    for path in gallery.draw([], tmp_path):
        require_alike(path, PICTURES / path.name)


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on this machine alone: a browser does not search in files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_look_right_in_a_browser(browser: Any, address: str, scheme: str, width: int) -> None:
    view = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, asked = view.new_page(), [], []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    for name in LOOKED_AT:
        page.goto(f"{address}/{name}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than the window"
        assert page.evaluate(CONTRAST) == {}, name
    view.close()
    assert said == []
    assert [url for url in asked if not url.startswith((address, "data:"))] == []


def test_the_entry_of_a_page_is_in_view_and_the_page_at_its_top(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 600})
    page.goto(f"{address}/results/speed.html")
    entry = page.locator(".sidebar-tree .current-page > a").bounding_box()
    assert 0 < entry["y"] < 600 and page.evaluate("window.scrollY") == 0
    page.close()


def test_search_finds_words_of_the_pages(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    page.fill("input.sidebar-search", "straggler")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a:text-is('Words')")  # results come one after the other
    page.close()


def test_the_two_delays_can_be_stepped_through_and_stand_still_on_request(browser: Any, address: str) -> None:
    steps = "[...document.querySelectorAll('.step')]"
    shown = f"() => {steps}.filter(e => getComputedStyle(e).opacity > 0.5).map(e => e.classList[1])"
    still = browser.new_context(reduced_motion="reduce")
    page = still.new_page()
    page.goto(f"{address}/explanation/what_dude_is.html")
    assert page.evaluate(shown) == ["step-8"]
    page.click("label[for=update-3]")
    assert page.evaluate(shown) == ["step-3"]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(shown) == ["step-4"]
    still.close()
    page = browser.new_page()
    page.goto(f"{address}/explanation/what_dude_is.html")
    assert page.evaluate("document.getAnimations().length") == 8
    assert page.evaluate(shown) == ["step-1"]
    page.close()
