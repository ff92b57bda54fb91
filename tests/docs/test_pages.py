"""What the pages show holds: Python and commands run, printed results come out, links lead somewhere, names exist.

A block marked ``python`` is run, one marked ``py`` is only shown; ``python NAME`` and ``csv NAME`` are files that the
commands of the page find, and those of the page on a model of one's own are run by test_own_model.py.
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
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.cli.shell import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINKED = [
    *PAGES,
    ROOT / "DESIGN.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("experiments/**/*.md"),
]
EXPLANATION, DUDE = ROOT / "docs" / "explanation" / "how_it_works.md", ROOT / "src/dualdelay/algorithms/dude.py"
FENCE = re.compile(r"^( *)```(\S*) ?(\S*)\n(.*?)^\1```$", re.S | re.M)
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def name_of(page: Path) -> str:
    """A page's path, as a test's name has it."""
    return str(page.relative_to(ROOT)).removeprefix("docs/").removesuffix(".md")


def blocks(page: Path, language: str) -> list[str]:
    """The unnamed code blocks of a page in a language."""
    fences = FENCE.findall(page.read_text())
    return [textwrap.dedent(text) for _, marked, name, text in fences if (marked, name) == (language, "")]


def pages_with(language: str) -> list[Any]:
    """The pages that have such blocks; those with real workers are marked so and share one Ray.

    Of the README, the tutorial and the reference, make test runs what needs none; make slow runs all other pages.
    """
    ray, params = re.compile(r"\bdd\.train\b|RayFleet|--fleet ray"), []
    for page in PAGES:
        text = "\n".join(blocks(page, language))
        real, first = bool(ray.search(text)), page.parent == ROOT or {"tutorial", "reference"} & set(page.parts)
        marks = [pytest.mark.real] * real + [pytest.mark.slow] * (real or not first)
        params += [pytest.param(page, id=name_of(page), marks=marks)] * bool(text)
    return params


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
def test_the_commands_of_a_page_run(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    makefile, project = (ROOT / "Makefile").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for _, _, name, text in FENCE.findall(page.read_text()):
        if name:
            Path(name).write_text(text)
    for line in "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert f"\n{words[0]}:" in makefile
        elif program == "dualdelay" and words[0] == "data":  # a download, which test_downloads.py and test_texts.py see to
            with pytest.raises(SystemExit):
                main([*words, "--folder", "empty", "--source", "nowhere"])
            assert "source is 'nowhere'" in capsys.readouterr().err, line
        elif program == "dualdelay" and "src/dualdelay/algorithms" not in words:  # test_contributing.py does that in a copy
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


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in slugs(target), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "DESIGN.md"], ids=name_of)
def test_every_public_name_and_argument_on_a_page_exists(page: Path) -> None:
    text = page.read_text().replace("dd.algorithms.HalfSteps(LR)", "")  # which a reader of add_a_method.md writes
    for name in set(re.findall(r"\bdd((?:\.[A-Za-z_]\w*)+)", text)):
        thing: Any = dd
        for part in name[1:].split("."):
            assert hasattr(thing, part), f"dd{name}"
            thing = getattr(thing, part)
    for name, arguments in re.findall(r"\bdd\.([\w.]+)\(([^()]*)\)", text):
        thing = dd
        for part in name.split("."):
            thing = getattr(thing, part)
        if thing is dd.grid:  # its arguments are the settings of the method
            thing = getattr(dd, arguments.partition(",")[0].removeprefix("dd."))
        known = inspect.signature(thing).parameters
        for argument in re.findall(r"\b(\w+)=(?!=)", re.sub(r"\[.*?\]|\".*?\"", "", arguments)):
            assert argument in known, f"dd.{name} has no argument {argument}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    places = [ROOT, ROOT / "src", ROOT / "src" / "dualdelay", ROOT / "tests", ROOT / "benchmarks", page.parent]
    text = FENCE.sub("", page.read_text()).replace("`src/dualdelay/algorithms/half_steps.py`", "")
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|md|txt|cpp))(?:::\w+)?`", text)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_page_stands_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    links = {
        (start.parent / link).resolve()
        for start in (index, ROOT / "docs" / "reference" / "api" / "index.md")
        for link in re.findall(r"\]\(([\w./]+\.md)\)", start.read_text())
    }
    assert [name_of(page) for page in DOCS if page not in {*links, index}] == []


def test_every_speed_model_has_its_row() -> None:
    workers = (ROOT / "docs" / "how_to" / "workers.md").read_text()
    assert all(f"`{name}[" in workers for name in dd.speeds.SPEEDS)


def test_the_pages_on_real_workers_have_every_setting() -> None:
    page = "".join((ROOT / "docs" / "how_to" / name).read_text() for name in ("deploy.md", "survive_faults.md"))
    settings = {*inspect.signature(dd.RayFleet).parameters, *inspect.signature(dd.FaultPolicy).parameters}
    assert [name for name in settings if f"`{name}" not in page] == []


def test_the_page_on_the_shell_has_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "shell.md").read_text()
    assert [name for name in COMMANDS if f"| `{name}` |" not in page] == []


def test_the_page_on_clusters_has_every_setting() -> None:
    page = (ROOT / "docs" / "how_to" / "cluster_sweeps.md").read_text()
    assert [name for name in inspect.signature(dd.Cluster).parameters if f"| `{name}" not in page] == []


def test_dudes_file_is_shown_as_it_is() -> None:
    again = "write it again: python tests/docs/test_pages.py"
    assert blocks(EXPLANATION, "py") == [DUDE.read_text()], again


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


if __name__ == "__main__":
    shown = re.compile(r"(?<=^```py\n).*?(?=^```$)", re.S | re.M)
    EXPLANATION.write_text(shown.sub(lambda _: DUDE.read_text(), EXPLANATION.read_text()))
