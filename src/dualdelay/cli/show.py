"""dualdelay show: what a folder holds."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis import printing
from ..core.errors import BadInput, require_path
from ..engine.result import Run
from ..runs.load import kept_in, not_looked_into, run_folders, run_label
from ..runs.names import label, rebuild
from ..runs.outcome import read_run, state_of, user_of
from ..storage.files import Damaged
from ..storage.folder import Folder
from ..storage.record import RunRecord
from . import shared
from .flags import Show

_LENGTHS = ("updates", "time")
_SETTINGS = (
    "optimizer",
    "uplink",
    "downlink",
    "keep_best",
    "stop",
    "device",
    "precision",
    "metrics",
)  # of a run, where they are not as usual
_USUAL: tuple[Any, ...] = (None, [], "cpu", "float32")


def show(flags: Show) -> None:
    """Show a run, or the runs in a folder."""
    folder, console = flags.folder, shared.make_console(flags.json)
    require_path("folder", folder)
    shared.import_all(flags.imports)
    if (folder / "config.json").exists():
        _show_run(folder, console, flags.json)
        return
    if not folder.is_dir() or not any(run_folders(folder)):
        what = "is not there" if not folder.exists() else "holds neither a run (config.json) nor folders of runs"
        raise BadInput(f"{folder} {what}; expected a folder that train, compare or sweep wrote.")
    _show_runs(folder, console, flags.json)


def _show_run(folder: Path, console: Console, json: bool) -> None:
    place = Folder(folder)
    record = place.record()
    name, facts = run_label(folder, record), _facts(record)
    facts["size"] = f"{_size(folder) / 1e6:,.1f} MB"
    printing.print_rows(name, [["", ""], *map(list, facts.items())], console, header=False)
    try:
        run, damage = read_run(folder)
    except Damaged as error:
        console.print(f"damaged: {error}")
        shared.finish(json, "show", folder=str(folder), algorithm=name, **facts, damaged=str(error))
        raise shared.Incomplete(f"{folder} is damaged: {error}") from None
    printing.print_run(run, console, name)
    for note in run.notes:
        console.print(f"note: {note.rstrip('.')}.")
    following = _next(run, record, folder)
    console.print("Next:")
    for command in following:
        console.print(f"  {command}")
    told: dict[str, Any] = {**facts, **run.summary(), "ended": state_of(run) or run.ended}
    told |= {"damaged": damage} if damage else {}
    shared.finish(json, "show", folder=str(folder), algorithm=name, **told, notes=run.notes, next=following)
    if damage:
        raise shared.Incomplete(f"{folder} is damaged: {damage}.")


def described(kind: str, description: Mapping[str, Any]) -> str:
    """What a record says of a method, problem or speed model, in one text."""
    try:
        return label(rebuild(kind, description)) if kind != "problem" else _as_text(description)
    except BadInput:  # the user's own
        return f"{description.get('repr', description.get('class'))}, your own"


def _as_text(description: Mapping[str, Any]) -> str:
    """A problem's name and settings; it is not built, which may take its data."""
    if "name" not in description:
        return f"{description.get('repr', description.get('class'))}, your own"
    settings = ",".join(f"{key}={value}" for key, value in description.items() if key != "name" and value is not None)
    return f"{description['name']}[{settings}]"


def _facts(record: RunRecord) -> dict[str, str]:
    """What was to be computed, by whom."""
    facts = {"problem": described("problem", record.problem)}
    if record.fleet is not None:
        facts["real workers"] = described("fleet", record.fleet)
    elif record.speeds is not None:
        facts["speeds"] = described("speeds", record.speeds)
    facts |= {"seed": str(record.seed), "to be ended by": _ends(record)}
    for name in _SETTINGS:
        if (value := getattr(record, name)) not in _USUAL:
            facts[name.replace("_", " ")] = str(value)
    facts["written by"] = f"dualdelay {record.dualdelay}"
    return facts


def _ends(record: RunRecord) -> str:
    ends = {name: getattr(record, name) for name in _LENGTHS}
    return ", ".join(f"{name} {value:,g}" for name, value in ends.items() if value is not None)


def _next(run: Run, record: RunRecord, folder: Path) -> list[str]:
    """What to type next."""
    resume = shared.named_again("resume", folder, record, problem=True)
    if (record.fleet or {}).get("name") == "sites":  # whom to let in is not for a folder to decide
        resume = f"dualdelay serve ... --folder {shlex.quote(str(folder))}"
    if state_of(run) == "under way":
        return [f"wait until {user_of(folder)} has ended it", f"dualdelay report {shlex.quote(str(folder))}"]
    if run.ended in ("interrupted", "failed"):
        return [resume]
    more = f"--updates {2 * record.updates}" if record.updates is not None else f"--time {2 * (record.time or 0):g}"
    return [shared.named_again("replay", folder, record, problem=True), f"{resume} {more}"]


def _size(folder: Path) -> int:
    return sum((Path(place) / file).lstat().st_size for place, _, files in os.walk(folder) for file in files)


def _show_runs(folder: Path, console: Console, json: bool) -> None:
    kept = kept_in(folder)
    lines: list[dict[str, Any]] = []
    metrics: dict[str, None] = {}
    for one in kept.runs:
        if one.run is not None and one.record is not None:
            names = {"folder": str(one.path), "algorithm": one.names["algorithm"], "seed": one.record.seed}
            lines.append({**names, **one.run.summary(), "ended": one.state or one.run.ended})
            metrics |= dict.fromkeys(one.run.metrics)
    shown = [name for name in printing.measured(lines, metrics) if name not in ("pooled_loss", "gradient_norm")]
    rows = [["folder", "method", "seed", "ended", "updates", "time", *(name.replace("_", " ") for name in shown)]]
    for line in lines:
        numbers = [printing.number(line.get(name)) for name in shown]
        about = [Path(line["folder"]).name, line["algorithm"], str(line["seed"]), line["ended"]]
        rows.append([*about, f"{line['updates']:,}", f"{line['time']:g}", *numbers])
    printing.print_rows(f"{printing.counted(len(kept.runs), 'run')}, {_size(folder) / 1e6:,.1f} MB", rows, console)
    wrong = {one.path.name: one.why for one in kept.runs if one.state == "damaged"}
    for name, why in wrong.items():
        console.print(f"damaged: {name}: {why}")
    under_way = {one.path: user_of(one.path) for one in kept.runs if one.state == "under way"}
    for path, user in under_way.items():
        console.print(f"under way: {path.name} in {user}")
    unfinished = [line for line in lines if line["ended"] in ("interrupted", "failed")]
    if unfinished:
        console.print(
            f"{len(unfinished)} of them did not come to their end: the same command and --folder {folder} goes on."
        )
    for deeper in kept.deeper.items():
        console.print(f"note: {not_looked_into(deeper)}: dualdelay show {shlex.quote(str(deeper[0]))}")
    if (folder / "command.toml").exists():
        console.print(f"The command that made it, and how to run it again: {shlex.quote(str(folder / 'command.toml'))}")
    more = {str(path): count for path, count in kept.deeper.items()}
    shared.finish(json, "show", folder=str(folder), runs=lines, damaged=wrong, deeper=more)
    if wrong:
        are = "is" if len(wrong) == 1 else "are"
        total = printing.counted(len(kept.runs), "run")
        raise shared.Incomplete(f"{len(wrong)} of the {total} in {folder} {are} damaged: {', '.join(wrong)}.")
