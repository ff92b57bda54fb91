"""The files by which others build, check, cite and run the project say what holds."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def commands(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job.get("steps", ()) if "run" in step]


def test_the_workflows_are_those_that_a_release_needs_and_run_what_one_runs_oneself():
    assert set(WORKFLOWS) == {"tests.yml", "docs.yml", "release.yml"}
    for name, workflow in WORKFLOWS.items():
        for command in commands(workflow):
            program, *words = shlex.split(command)
            assert program == "make", name
            assert {word for word in words if "=" not in word} <= TARGETS, name
    matrix = WORKFLOWS["tests.yml"]["jobs"]["tests"]["strategy"]["matrix"]["python"]
    classified = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    assert matrix == classified


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_may_read_and_only_the_jobs_that_publish_may_do_more(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    more = {job: what["permissions"] for job, what in workflow["jobs"].items() if "permissions" in what}
    publish, deploy = {"id-token": "write"}, {"pages": "write", "id-token": "write"}
    assert more == {"tests.yml": {}, "release.yml": {"publish": publish}, "docs.yml": {"deploy": deploy}}[name]
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 60
        for step in job.get("steps", ()):
            assert "uses" not in step or re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", step["uses"]), "pinned by version"


def test_what_is_published_is_what_was_tested_and_only_for_a_tag():
    release = WORKFLOWS["release.yml"]
    assert set(release[True]) == {"push"}, "YAML reads the word on as true"
    assert set(release[True]["push"]) == {"tags"}
    assert release["jobs"]["publish"]["needs"] == "tests"
    assert (ROOT / release["jobs"]["tests"]["uses"]).is_file()
    uploaded = [
        step["with"]["name"] for step in WORKFLOWS["tests.yml"]["jobs"]["dist"]["steps"] if "upload" in step.get("uses", "")
    ]
    fetched = [step["with"]["name"] for step in release["jobs"]["publish"]["steps"] if "download" in step["uses"]]
    assert uploaded == fetched == ["dist"]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with what it is given."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_is_built_from_files_that_exist_and_runs_as_nobody_special():
    lines = instructions()
    assert lines[0][0] == "FROM"
    known = {"FROM", "ARG", "RUN", "COPY", "USER", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in lines} <= known | {"STOPSIGNAL", "VOLUME", "EXPOSE", "HEALTHCHECK"}
    stages = {given.split()[-1] for word, given in lines if word == "FROM" and " AS " in given}
    for word, given in lines:
        if word == "FROM":
            assert re.match(r"python:3\.\d+-slim\b", given) or given.split()[0] in stages
        if word == "RUN":
            bound = re.findall(r"--mount=type=bind,source=([^,]+)", given)
            assert all((ROOT / name).exists() for name in bound)
            assert "pip install" not in given or "--no-cache-dir" in given
    last = max(place for place, (word, _) in enumerate(lines) if word == "FROM")
    after = dict(lines[last:])
    assert after["USER"] not in ("root", "0")
    assert [word for word, _ in lines[last:]].index("USER") > max(
        i for i, (word, _) in enumerate(lines[last:]) if word == "RUN"
    )
    assert after["ENTRYPOINT"] == f'["{next(iter(PROJECT["scripts"]))}"]'
    extras = re.findall(r"\.whl\)\[(\w+)\]", (ROOT / "Dockerfile").read_text())
    assert extras[-1] == "all"
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def test_the_hooks_need_no_network_and_are_those_of_make_test():
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        assert f"\t{hook['entry'].removesuffix(' --force-exclude')}" in makefile


def test_the_citation_has_what_its_schema_requires_and_agrees_with_the_package_and_the_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["url"] == PROJECT["urls"]["Documentation"]
    assert citation["keywords"] == PROJECT["keywords"]
    paper, readme = citation["preferred-citation"], (ROOT / "README.md").read_text()
    [names] = re.findall(r"author=\{(.*)\}", readme)
    assert [f"{who['family-names']}, {who['given-names']}" for who in paper["authors"]] == names.split(" and ")
    [title] = re.findall(r"title=\{(.*)\},", readme)
    assert paper["title"] == title.replace("{", "").replace("}", "")
    assert f"year={{{paper['year']}}}" in readme


def test_the_changelog_has_a_place_for_what_comes_and_a_link_for_every_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.M)
    assert versions[0] == "[Unreleased]"
    for heading in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|unreleased)", heading)
    for heading in versions:
        assert re.search(rf"^{re.escape(heading.split(' - ')[0])}: {PROJECT['urls']['Source']}/", text, re.M)


@pytest.mark.parametrize("name", ["README.md", "Dockerfile", ".github/workflows/tests.yml"])
def test_an_extra_that_is_named_exists(name):
    text = (ROOT / name).read_text()
    for extras in re.findall(r"(?:dualdelay|\.whl|'\.|PATH)\[([a-z,]+)\]", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_no_message_asks_for_an_extra_of_a_package_that_may_be_on_no_registry():
    for path in (ROOT / "src").rglob("*.py"):
        assert "pip install 'dualdelay" not in path.read_text(), path
