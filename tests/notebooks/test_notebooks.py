"""The notebooks run, store small outputs, and progress leaves nothing behind in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = ["compare_methods", "tune_and_report", pytest.param("real_workers", marks=pytest.mark.real)]


@pytest.fixture(autouse=True)
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that runs notebooks, with a kernel whose notebooks find the package as this process does."""
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    import make

    return make


def texts(cell: Any) -> list[str]:
    return [output.get("text", "") for output in cell.outputs if output.output_type == "stream"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_says_nothing_on_standard_error(name: str, make: Any, tmp_path: Path) -> None:
    notebook = make.executed(NOTEBOOKS / f"{name}.ipynb", tmp_path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(nbformat.writes(notebook)) < 300_000
    for cell in code:
        errors = [output for output in cell.outputs if output.get("name") == "stderr" or output.output_type == "error"]
        assert not errors, (cell.source, errors)
    kinds = {kind for cell in code for output in cell.outputs for kind in output.get("data", ())}
    assert kinds <= {"text/plain", "text/html", "image/png"} and "text/html" in kinds


@pytest.mark.parametrize("name", ["compare_methods", "tune_and_report", "real_workers"])
def test_what_is_stored_was_made_by_running_it(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert sum(bool(cell.outputs) for cell in code) > len(code) // 2 and path.stat().st_size < 300_000
    assert "/tmp/" not in path.read_text() and "/home/" not in path.read_text()


PROGRESS = """
import io, sys, time
import dualdelay as dd
from dualdelay.runs import progress

shown = []
show = progress._Place.show
progress._Place.show = lambda self, text, share=None: (shown.append(text), show(self, text, share))[-1]
print("before")
for after in (0.0, 60.0):
    watch = progress.RunProgress("dude", updates=40, after=after, lines=0.0)
    with watch:
        dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 2]), updates=40, watch=[watch])
    print(len(shown) > 3, shown[-1])
    shown.clear()
    shown.append("nothing")
"""


def test_progress_in_a_notebook_is_replaced_in_its_place_and_gone_in_the_end() -> None:
    seen = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                seen.append(msg["content"]["data"])
            return super().process_message(msg, cell, cell_index)

    notebook = new_notebook(cells=[new_code_cell(PROGRESS)])
    Client(notebook, timeout=60, kernel_name="python3").execute()
    (cell,) = notebook.cells
    printed = "".join(texts(cell)).splitlines()
    assert printed[0] == "before" and printed[1].startswith("True dude: ") and "updates/s" in printed[1]
    assert printed[2] == "False nothing", "a run that is over sooner shows nothing"
    assert len(seen) > 3 and "<progress" in seen[0]["text/html"] and "text/plain" in seen[0] and seen[-1] == {}
    stored = [output.data for output in cell.outputs if output.output_type == "display_data"]
    assert all(not data for data in stored), stored
    assert not [output for output in cell.outputs if output.get("name") == "stderr"]
