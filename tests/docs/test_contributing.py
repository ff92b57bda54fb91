"""Adding a method by the steps of docs/how_to/add_a_method.md, to the letter, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("src", "tests", "docs", "benchmarks", "experiments", "CONTRIBUTING.md", "DESIGN.md", "README.md", "pyproject.toml")
CHECKS = (
    "tests/algorithms/test_laws_absence.py",
    "tests/algorithms/test_laws_symmetries.py",
    "tests/runs/test_replay.py",
    "tests/runs/test_resume.py",
    "tests/docs/test_methods.py",
    "tests/docs/test_design.py",
    "tests/test_architecture.py",
)


@pytest.mark.slow
def test_a_method_is_one_file_and_one_row(tmp_path: Path) -> None:
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path / 'tests'}"}

    def call(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        return done.stdout

    text = (ROOT / "docs" / "how_to" / "add_a_method.md").read_text()
    text = text.partition("## Into the package")[2]
    commands = re.findall(r"^ *dualdelay (.*)$", text, re.M)
    (row,) = re.findall(r"^ *```py\n(.*?)^ *```$", text, re.S | re.M)
    assert len(commands) == 1 and "half steps" in row
    call("-m", "dualdelay", *commands[0].split())
    tables = tmp_path / "tests" / "tables.py"
    before, begin, after = tables.read_text().partition("ALGORITHMS: dict[str, dd.Algorithm[Any]] = {\n")
    tables.write_text(f"{before}{begin}    {row.strip()}\n{after}")
    pages = [str(page) for page in (tmp_path / "tests" / "docs").glob("test_*.py") if "\nif __name__" in page.read_text()]
    call("-c", f"import runpy\nfor page in {pages}: runpy.run_path(page, run_name='__main__')")  # make pages
    assert "| Half steps | `half_steps`, " in (tmp_path / "docs" / "reference" / "methods.md").read_text()
    new = ("src/dualdelay/algorithms/half_steps.py", "tests/tables.py")
    call("-m", "ruff", "format", "--check", *new)
    call("-m", "ruff", "check", *new)
    which = "half or test_methods or test_design or test_an_algorithm_knows or test_imports_between or imports_itself"
    passed = call("-m", "pytest", "--every-case", "-k", which, "-p", "no:cacheprovider", *CHECKS)
    assert int(re.findall(r"(\d+) passed", passed)[0]) > 20
