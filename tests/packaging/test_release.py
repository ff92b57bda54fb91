"""The release script: what it refuses, what it would run, and that it tags when all went well."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2030-01-31\n\n* New.\n\n## [0.1.0] - 2029-01-31\n\n[0.1.0]: address\n"
)
MAKE = """.PHONY: test slow install-test dist
test slow install-test:
	touch dist/$@
dist:
	touch dist/$$SETUPTOOLS_SCM_PRETEND_VERSION_FOR_DUALDELAY
"""


class Repository:
    """A repository with a changelog and a Makefile, released once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "dist").mkdir()
        (folder / ".gitignore").write_text("dist\n")
        (folder / "CHANGELOG.md").write_text(CHANGELOG)
        (folder / "Makefile").write_text(MAKE)
        self.git("init")
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@localhost")
        self.commit()
        self.git("tag", "-a", "v0.1.0", "-m", "First.")

    def git(self, *words: str) -> str:
        return subprocess.run(["git", *words], cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def commit(self) -> None:
        self.git("add", ".")
        self.git("commit", "-m", "More.")

    def release(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/release.py"), *words]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_dry_run_says_what_it_would_run_and_runs_nothing(repository):
    done = repository.release("0.2.0", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = [line.split(": ")[1] for line in done.stdout.splitlines()]
    assert [*lines[:3], lines[5]] == ["make test", "make slow", "make install-test", "git push origin v0.2.0"]
    assert lines[3].endswith("make dist")
    assert lines[4].startswith("git tag -a v0.2.0")
    assert not list((repository.folder / "dist").iterdir())
    assert repository.git("tag").split() == ["v0.1.0"]


def test_it_tests_builds_with_the_version_to_come_and_tags(repository):
    done = repository.release("0.2.0")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (repository.folder / "dist").iterdir()} == {"test", "slow", "install-test", "0.2.0"}
    assert repository.git("tag").split() == ["v0.1.0", "v0.2.0"]


@pytest.mark.parametrize("target", ["test slow install-test", "dist"])
def test_nothing_is_tagged_when_a_test_or_the_build_fails(repository, target):
    (repository.folder / "Makefile").write_text(MAKE.replace(f"{target}:\n\t", f"{target}:\n\tfalse "))
    repository.commit()
    done = repository.release("0.2.0")
    assert done.returncode == 1
    assert "failed; nothing is tagged" in done.stderr
    assert repository.git("tag").split() == ["v0.1.0"]


def test_every_reason_against_a_release_is_named(repository):
    assert "expected three numbers" in repository.release("0.2", "--dry-run").stderr
    (repository.folder / "new").touch()
    done = repository.release("0.1.0", "--dry-run")
    assert done.returncode == 1
    for words in (
        "not committed",
        "?? new",
        "the last tag v0.1.0; choose a higher",
        "no entry; write one below '## [0.1.0] - YYYY",
    ):
        assert words in done.stderr
