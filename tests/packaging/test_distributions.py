"""What is built for others to install: small, whole, and named after the tag."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.core import version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree and the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(built):
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {str(path.relative_to(ROOT / "src")) for path in here}
    assert "dualdelay/py.typed" in names
    assert wheel.stat().st_size < 2_500_000


def test_the_sdist_holds_what_builds_the_package_and_no_results(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    assert tops == {"src", "pyproject.toml", "PKG-INFO", ".gitignore", *files}
    assert sdist.stat().st_size < 2_500_000


def test_the_pages_of_the_registry_accept_both_and_render_the_readme(built):
    files = [str(path) for path in built.iterdir()]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_links_of_the_readme_are_absolute_in_the_metadata_and_lead_to_files_that_exist(built):
    [wheel] = built.glob("*.whl")
    text = metadata(wheel).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", str(text))
    assert len(links) == len(re.findall(r"\]\([^)]+\)", (ROOT / "README.md").read_text()))
    for link in links:
        assert re.match(r"https://|#", link), link
        ours = re.match(r"https://(?:github|raw\.githubusercontent)\.com/dualdelay/dualdelay/(?:blob/)?main/([^#]*)", link)
        assert ours is None or (ROOT / ours[1]).exists(), link
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", str(text))
    assert all("/blob/" not in link for link in shown), "GitHub's page about an image is not the image"


def test_the_metadata_say_where_everything_is(built):
    [wheel] = built.glob("*.whl")
    about = metadata(wheel)
    urls = dict(text.split(", ") for text in about.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert about["License-Expression"] == "Apache-2.0"
    assert set(about.get_all("Provides-Extra", [])) == {"plots", "ray", "sites", "tensorboard", "docs", "all", "dev"}
    extras: dict[str, set[str]] = {name: set() for name in about.get_all("Provides-Extra", [])}
    for text in about.get_all("Requires-Dist", []):
        requirement, _, marker = text.partition("; extra == ")
        if marker:
            extras[marker.strip("'")].add(requirement)
    assert extras["all"] == extras["plots"] | extras["ray"] | extras["sites"] | extras["tensorboard"]
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in about.get_all("Classifier", [])


def small_project(folder: Path) -> Path:
    """A project of one file with the build settings of this one."""
    (folder / "src/dualdelay").mkdir(parents=True)
    (folder / "src/dualdelay/__init__.py").write_text('"""Nothing."""\n')
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    return folder


def version_of(project: Path) -> str:
    """The version that a build would have."""
    command = [sys.executable, "-m", "hatchling", "version"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout.strip()


def test_the_version_is_the_tag_and_says_how_far_one_is_beyond_it(tmp_path):
    project = small_project(tmp_path)
    assert version_of(project) == "0.0"

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=project, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "First.")
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", version_of(project))
    git("tag", "v0.3.0")
    assert version_of(project) == "0.3.0"
    git("commit", "--allow-empty", "-m", "Second.")
    assert re.fullmatch(r"0\.3\.1\.dev1\+g[0-9a-f]+", version_of(project))


def test_a_tree_on_the_path_does_not_take_the_version_of_a_copy_that_is_installed(tmp_path):
    copy = tmp_path / "version.py"
    shutil.copy(version.__file__, copy)
    values = runpy.run_path(str(copy))
    assert values["__version__"] == "0.0+source"
    assert values["install_command"]("ray") == "pip install ray"


def test_an_editable_installation_is_found_by_its_address_and_an_installed_copy_by_its_place(tmp_path, monkeypatch):
    tree, site = tmp_path / "a tree", tmp_path / "site"
    for folder in (tree / "src", site):
        (folder / "dualdelay/core").mkdir(parents=True)
        shutil.copy(version.__file__, folder / "dualdelay/core")
    about = site / "dualdelay-4.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Name: dualdelay\nVersion: 4.5\nRequires-Dist: ray-lite\nRequires-Dist: ray>=9; extra == 'x'\n"
    )
    monkeypatch.syspath_prepend(site)
    in_tree, in_site = (folder / "dualdelay/core/version.py" for folder in (tree / "src", site))

    def seen(path: Path) -> tuple[str, str]:
        values = runpy.run_path(str(path))
        return values["__version__"], values["install_command"]("ray")

    assert (seen(in_site), seen(in_tree)) == (("4.5", "pip install 'ray>=9'"), ("0.0+source", "pip install ray"))
    (about / "direct_url.json").write_text(f'{{"url": "{tree.as_uri()}", "dir_info": {{"editable": true}}}}')
    assert (seen(in_site), seen(in_tree)) == (("0.0+source", "pip install ray"), ("4.5", "pip install 'ray>=9'"))


def test_the_version_of_a_run_is_in_its_folder_and_one_of_another_version_is_continued(tmp_path, monkeypatch):
    folder, problem = tmp_path / "run", dd.Quadratic([[0.0], [6.0]])
    monkeypatch.setattr("dualdelay.runs.record.__version__", "0.0.7.dev3+g1a2b3c4")
    dd.simulate(dd.DuDe(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0]), updates=10, folder=folder)
    assert '"dualdelay": "0.0.7.dev3+g1a2b3c4"' in (folder / "config.json").read_text()
    monkeypatch.undo()
    assert dd.replay(folder).version == 10
    assert dd.resume(folder, updates=12).version == 12
