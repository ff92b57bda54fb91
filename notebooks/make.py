"""Run the notebooks and store what they show: ``python notebooks/make.py``, or with the names of some of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
_MOST = 300_000  # bytes of a notebook: they are read in browsers and kept in the history


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a fresh kernel that works in a folder, and nothing that differs between two runs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":  # progress leaves an output without anything in it
            cell.outputs = [output for output in cell.outputs if output.output_type != "display_data" or output.data]
    return notebook


def main(names: list[str]) -> None:
    """Run those that are named, or all, and write them."""
    import tempfile

    for path in [HERE / name for name in names] or sorted(HERE.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        text = nbformat.writes(notebook) + "\n"
        if len(text) > _MOST:
            raise SystemExit(f"{path.name} has {len(text):,} bytes; expected {_MOST:,} at most: show less in it.")
        path.write_text(text)
        print(f"{path.name}: {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
