"""dualdelay report: one HTML page about runs, comparisons and sweeps."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ..analysis.report import write_report
from ..core.errors import BadInput
from ..runs.load import Kept, kept_in
from ..runs.progress import SweepProgress
from . import config, shared
from .flags import Report


def report(flags: Report) -> None:
    """Write the page of these folders, and of the comparisons in them."""
    if not flags.folders:
        raise BadInput("no folder is given; expected at least one, such as: dualdelay report runs/compare")
    shared.import_all(flags.imports)
    with SweepProgress("report") as progress:
        all_kept = _read(flags.folders, progress)
        progress(1.0, "writing the page")
        path = write_report(all_kept, flags.out, flags.title or "")
    size = path.stat().st_size
    console = shared.make_console(flags.json)
    runs = {one.path.resolve(): one for kept in all_kept for one in kept.runs}.values()
    damaged = {str(one.path): one.why for one in runs if one.state == "damaged"}
    for place, why in damaged.items():
        console.print(f"damaged: {place}: {why}")
    unfinished = [f"{one.path} ({one.state})" for one in runs if one.state not in ("", "damaged")]
    if unfinished:
        console.print(f"without an end: {', '.join(unfinished)}")
    console.print(f"report: {path} ({size / 1e6:.1f} MB)")
    if any(one.run is not None and one.run.algorithm is None for one in runs):
        named = [file for kept in all_kept for file in config.code_of(kept.folder)[0]]
        again = " ".join(f"--import {shlex.quote(file)}" for file in dict.fromkeys(named)) or "--import FILE.py"
        console.print(f"note: a method of your own has its colour on the page only if you add {again}")
    if flags.open_page and not webbrowser.open(path.resolve().as_uri()):
        raise BadInput(f"no browser could be started; open {path} by hand.")
    shared.finish(flags.json, "report", file=str(path), bytes=size, damaged=damaged)
    if damaged:
        are = "is" if len(damaged) == 1 else "are"
        raise shared.Incomplete(f"{len(damaged)} of the {len(runs)} runs {are} damaged: {', '.join(damaged)}.")


def _read(folders: Sequence[Path], progress: SweepProgress) -> list[Kept]:
    """What these folders hold; of a folder of comparisons what those hold, too."""
    waiting, read, seen = [*folders], list[Kept](), set[Path]()
    while waiting:
        folder, total = waiting.pop(0), len(read) + len(waiting) + 1
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())

        def tell(share: float, text: str, total: int = total) -> None:
            progress((len(read) + share) / total, text)

        tell(0.0, f"{len(read)} of {total} folders read")
        read.append(kept_in(folder, tell))
        waiting += read[-1].deeper
    return read
