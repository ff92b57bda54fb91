"""What the pages show holds: Python and commands run, printed results come out, links lead somewhere, names exist.

A block marked ``python`` is run, one marked ``py`` is only shown; ``python NAME`` is a file that test_own_model.py runs.
``python tests/docs/test_pages.py`` copies DuDe's file into the page that shows it.
"""

from __future__ import annotations

import inspect
import io
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINKED = [
    *PAGES,
    ROOT / "DESIGN.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("experiments/**/*.md"),
]
EXPLANATION, DUDE = ROOT / "docs" / "how_it_works.md", ROOT / "src/dualdelay/algorithms/dude.py"
FENCE = re.compile(r"^( *)```(\S*) ?(\S*)\n(.*?)^\1```$", re.S | re.M)
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def blocks(page: Path, language: str) -> list[str]:
    """The unnamed code blocks of a page in a language."""
    fences = FENCE.findall(page.read_text())
    return [textwrap.dedent(text) for _, marked, name, text in fences if (marked, name) == (language, "")]


def pages_with(language: str) -> list[Any]:
    """The pages that have such blocks; those with real workers are marked so, and share one Ray."""
    texts = {page: "\n".join(blocks(page, language)) for page in PAGES}
    ray = re.compile(r"\bdd\.train\b|RayFleet|--fleet ray")
    compared = [page for page in PAGES if language == "python" and blocks(page, "text")]
    marks = {
        page: [pytest.mark.real] if ray.search(texts[page]) else [pytest.mark.numeric] * (page in compared)
        for page in texts
    }
    return [pytest.param(page, id=page.stem, marks=marks[page]) for page, text in texts.items() if text]


@pytest.fixture
def folder(inside: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder; the table of methods is afterwards what it was."""
    known = dict(dd.ALGORITHMS)
    if request.node.get_closest_marker("real"):
        request.getfixturevalue("ray_here")
    yield inside
    dd.ALGORITHMS.clear()
    dd.ALGORITHMS.update(known)


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_runs_and_prints_what_is_shown_below_it(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}  # a later block may use what an earlier one has defined
    printed, end = "", 0
    for block in FENCE.finditer(page.read_text()):
        text = textwrap.dedent(block[4])
        if block[2] == "text" and printed and not block.string[end : block.start()].strip():
            assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", text).split()
            shown, computed = (
                [float(number.replace(",", "")) for number in NUMBER.findall(one)] for one in (text, printed)
            )
            assert computed == pytest.approx(shown, rel=0.05, abs=0.002)  # the pages show two or three digits
        if (block[2], block[3]) == ("python", ""):
            with redirect_stdout(io.StringIO()) as out:
                exec(compile(text, page.name, "exec"), names)
            printed, end = out.getvalue(), block.end()


@pytest.mark.parametrize("page", pages_with("sh"))
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    makefile, project = (ROOT / "Makefile").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, text in re.findall(r"^```csv (\S+)\n(.*?)^```$", page.read_text(), re.S | re.M):
        Path(name).write_text(text)
    for line in "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert f"\n{words[0]}:" in makefile
        elif program == "dualdelay" and words[0] != "new":  # test_contributing.py does that in a copy
            main(words)
        elif program == "python":  # an experiment, which takes minutes or hours
            assert (ROOT / words[0]).exists(), line
        elif program == "pip":
            extras = re.findall(r"\[(.*?)\]", line)
            assert {extra for group in extras for extra in group.split(",")} <= set(project["optional-dependencies"]), line
        else:
            assert program in ("", "git", "dualdelay"), f"this command is not checked: {line}"


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in slugs(target), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "DESIGN.md"], ids=lambda page: page.stem)
def test_every_public_name_and_argument_on_a_page_exists(page: Path) -> None:
    text = page.read_text().replace("dd.algorithms.HalfSteps(LR)", "")  # which a reader of CONTRIBUTING.md writes
    for name in set(re.findall(r"\bdd((?:\.[A-Za-z_]\w*)+)", text)):
        thing: Any = dd
        for part in name[1:].split("."):
            assert hasattr(thing, part), f"dd{name}"
            thing = getattr(thing, part)
    for name, arguments in re.findall(r"\bdd\.([\w.]+)\(([^()]*)\)", text):
        thing = dd
        for part in name.split("."):
            thing = getattr(thing, part)
        known = inspect.signature(thing).parameters
        for argument in re.findall(r"\b(\w+)=(?!=)", re.sub(r"\[.*?\]|\".*?\"", "", arguments)):
            assert argument in known, f"dd.{name} has no argument {argument}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    places = [ROOT, ROOT / "src", ROOT / "src" / "dualdelay", ROOT / "tests", ROOT / "benchmarks", page.parent]
    text = FENCE.sub("", page.read_text()).replace("`src/dualdelay/algorithms/half_steps.py`", "")
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|md|txt|cpp))(?:::\w+)?`", text)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(f"]({page.name})" in index for page in DOCS if page.name != "README.md")


def test_every_speed_model_has_its_row() -> None:
    workers = (ROOT / "docs" / "workers.md").read_text()
    assert all(f"`{name}[" in workers for name in dd.speeds.SPEEDS)


@pytest.mark.parametrize("module", ["problems", "speeds", "theory"])
def test_the_reference_has_every_name_of_the_public_modules(module: str) -> None:
    reference, things = (ROOT / "docs" / "reference.md").read_text(), vars(getattr(dd, module))
    public = [name for name, thing in things.items() if getattr(thing, "__module__", "").startswith("dualdelay.")]
    public = [name for name in public if not name.startswith("_")]
    assert len(public) > 9
    assert [name for name in public if f"`{name}`" not in reference and f"`dd.{module}.{name}`" not in reference] == []


@pytest.mark.parametrize("name", ["Evaluation", "EarlyStop", "Compute", "Server", "Saving", "Reporting", "SimulatedFleet"])
def test_the_reference_has_every_option(name: str) -> None:
    row = next(
        line for line in (ROOT / "docs" / "reference.md").read_text().splitlines() if line.startswith(f"| `{name}` |")
    )
    assert [field.name for field in fields(getattr(dd, name)) if f"`{field.name}`" not in row] == []


def test_the_page_on_real_workers_has_every_setting() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    settings = {*inspect.signature(dd.RayFleet).parameters, *inspect.signature(dd.FaultPolicy).parameters}
    assert [name for name in settings if f"`{name}" not in page] == []


def test_the_page_on_the_shell_has_every_command() -> None:
    page = (ROOT / "docs" / "shell.md").read_text()
    assert [name for name in COMMANDS if f"| `{name}` |" not in page] == []


def test_dudes_file_is_shown_as_it_is() -> None:
    again = "write it again: python tests/docs/test_pages.py"
    assert blocks(EXPLANATION, "py") == [DUDE.read_text()], again


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


if __name__ == "__main__":
    shown = re.compile(r"(?<=^```py\n).*?(?=^```$)", re.S | re.M)
    EXPLANATION.write_text(shown.sub(lambda _: DUDE.read_text(), EXPLANATION.read_text()))
