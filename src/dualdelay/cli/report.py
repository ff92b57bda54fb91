"""dualdelay report: one HTML page about runs, comparisons and sweeps."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Sequence

from ..analysis.report import write_report
from ..core.errors import BadInput
from ..engine.result import Run
from ..engine.table import Table
from ..runs.load import load, load_runs
from ..runs.progress import SweepProgress
from ..runs.sweep import Sweep
from . import config, shared
from .flags import Report


def report(flags: Report) -> None:
    """Write the page of these folders."""
    folders = flags.folders
    if not folders:
        raise BadInput("no folder is given; expected at least one, such as: dualdelay report runs/compare")
    shared.import_all(flags.imports)
    things: list[Run | Table] = []
    with SweepProgress("report") as progress:
        for k, folder in enumerate(folders):

            def tell(share: float, text: str, k: int = k) -> None:
                progress((k + share) / len(folders), text)

            if folder.is_dir() and not (folder / "config.json").exists():
                things.append(load_runs(folder, tell))
            else:
                tell(0.0, f"{k} of {len(folders)} folders read")
                things.append(load(folder))
        progress(1.0, "writing the page")
        path = write_report(things, flags.out, flags.title or "")
    size = path.stat().st_size
    console = shared.make_console(flags.json)
    console.print(f"report: {path} ({size / 1e6:.1f} MB)")
    if _lacks_code(things):
        named = [file for folder in folders for file in config.code_of(folder)[0]]
        again = " ".join(f"--import {shlex.quote(file)}" for file in dict.fromkeys(named)) or "--import FILE.py"
        console.print(f"note: a method of your own has its name and colour on the page only if you add {again}")
    if flags.open_page and not webbrowser.open(path.resolve().as_uri()):
        raise BadInput(f"no browser could be started; open {path} by hand.")
    shared.finish(flags.json, "report", file=str(path), bytes=size)


def _lacks_code(things: Sequence[Run | Table]) -> bool:
    """Whether a run was loaded without its method, which is the user's own."""
    runs = [run for thing in things for run in (thing.runs if isinstance(thing, Sweep) else [thing])]
    return any(isinstance(run, Run) and run.algorithm is None for run in runs)
