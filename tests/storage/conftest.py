"""The folder of the usual run in two states, computed once and copied for each test: finished, and killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from own import bits, usual


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    usual.run(folder=place / "finished")
    usual.killed(place / "killed", 18)
    return place


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The bits of the run that was never stopped."""
    return bits(usual.run(folder=tmp_path_factory.mktemp("straight") / "run"))


@pytest.fixture
def finished(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "finished", tmp_path / "finished"))


@pytest.fixture
def killed(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "killed", tmp_path / "killed"))
