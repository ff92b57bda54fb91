import re
import shlex
import textwrap
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks(language):
    return [
        pytest.param(textwrap.dedent(text), id=f"{page.stem}-{number}", marks=[pytest.mark.real] * ("ray" in text.lower()))
        for page in PAGES
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S))
    ]


@pytest.fixture(autouse=True)
def the_same_methods_afterwards():
    known = dict(dd.ALGORITHMS)
    yield
    dd.ALGORITHMS.clear()
    dd.ALGORITHMS.update(known)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_shown_runs(code, inside):
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", blocks("sh"))
def test_the_commands_shown_run(text, inside):
    makefile = (ROOT / "Makefile").read_text()
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert f"\n{words[1]}:" in makefile
        elif words[:1] == ["dualdelay"]:
            main(words[1:])
        else:
            assert words == [] or words[0] in ("pip", "git"), f"nobody checks this command: {line}"


def test_the_readme_shows_dudes_file_as_it_is():
    source = (ROOT / "src/dualdelay/algorithms/dude.py").read_text()
    shown = re.search(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown is not None
    assert shown.group(1) == source


def test_the_readme_lists_every_method():
    text = (ROOT / "README.md").read_text()
    for name, method in dd.ALGORITHMS.items():
        assert f"`{name}`" in text
        assert method.__module__.rpartition(".")[2] + ".py" in text
