"""dualdelay show: what a folder holds."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis import printing
from ..core.errors import BadInput, require_path, shortened
from ..engine.result import Run
from ..runs.load import kept_in, not_looked_into, run_folders, run_label
from ..runs.names import REGISTRIES, label, parameters, rebuild
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
_MANY = 8  # entries of a list: no more of them are shown


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
    facts["size"] = _size(folder)
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
    """What a record says of a problem, fleet or speed model, in one text; one of ours is not built, which may take data."""
    if "name" in description:
        return _as_text(kind, description)
    try:
        if kind != "problem":
            return label(rebuild(kind, description))
    except BadInput:  # the user's own, and not imported
        pass
    return f"{shortened(str(description.get('repr', description.get('class'))))}, your own"


def _as_text(kind: str, description: Mapping[str, Any]) -> str:
    """The name of something of ours, with the settings that are not the defaults."""
    name, ours = description["name"], REGISTRIES[kind].get(description["name"])
    usual = {} if ours is None else {key: _text(each.default) for key, each in parameters(ours).items()}
    given = {key: _text(value) for key, value in description.items() if key != "name" and value is not None}
    changed = ",".join(f"{key}={text}" for key, text in given.items() if text != usual.get(key))
    return f"{name}[{shortened(changed)}]" if changed else str(name)


def _text(value: Any) -> str:
    """A setting as a person reads it: numbers rounded, long lists cut short."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        name, inside = value.get("name", ""), {key: item for key, item in value.items() if key != "name"}
        settings = ",".join(f"{key}={_text(item)}" for key, item in inside.items() if item is not None)
        return f"{name}[{settings}]" if settings or not name else str(name)
    if isinstance(value, (list, tuple)):
        some = [_text(item) for item in value[:_MANY]]
        return f"[{', '.join([*some, *([f'... {len(value):,} in all'] if len(value) > _MANY else [])])}]"
    return str(value)


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
            facts[name.replace("_", " ")] = _SAID.get(name, _text)(value)
    facts["written by"] = f"dualdelay {record.dualdelay}"
    return facts


def _optimizer(value: Mapping[str, Any]) -> str:
    """The server's step, with its schedule."""
    schedule = f", with the schedule {_own(value['schedule'])}" if value.get("schedule") is not None else ""
    return f"{'SGD' if value.get('optimizer') is None else _own(value['optimizer'])}{schedule}"


def _own(value: Any) -> str:
    """A part of the server's step: torch's by its text, a function of the user's by its name."""
    return value if isinstance(value, str) else f"{value['function']}, your own"


def _stop(value: Mapping[str, Any]) -> str:
    """When a run was to stop early."""
    ends = [] if value["target"] is None else [f"when {value['metric']} is {value['target']:g} or better"]
    if value["patience"] is not None:
        ends.append(f"after {printing.counted(value['patience'], 'evaluation')} without a better {value['metric']}")
    return ", or ".join(ends)


_SAID: dict[str, Callable[[Any], str]] = {"optimizer": _optimizer, "stop": _stop, "metrics": ", ".join}


def _ends(record: RunRecord) -> str:
    ends = {name: getattr(record, name) for name in _LENGTHS}
    return " or ".join(_length(name, value) for name, value in ends.items() if value is not None)


def _length(name: str, value: float) -> str:
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:,g}"


def _next(run: Run, record: RunRecord, folder: Path) -> list[str]:
    """What to type next."""
    if state_of(run) == "under way":
        return [f"wait until {user_of(folder)} has ended it", f"dualdelay report {shlex.quote(str(folder))}"]
    if run.ended in ("interrupted", "failed"):
        return [_command("resume", folder, record)]
    more = {"updates": str(2 * record.updates)} if record.updates is not None else {"time": f"{2 * (record.time or 0):g}"}
    return [_command("replay", folder, record), _command("resume", folder, record, **more)]


def _command(verb: str, folder: Path, record: RunRecord, **more: str) -> str:
    """What resumes or replays a run: on the shell, or in Python if functions have to be passed again."""
    functions = [name for name in ("optimizer", "schedule") if isinstance((record.optimizer or {}).get(name), Mapping)]
    functions += ["metrics"] if record.metrics and verb == "resume" else []
    if functions:
        kinds = [
            kind for kind in ("problem", "algorithm", "speeds") if "name" not in (getattr(record, kind) or {"name": ""})
        ]
        again = [*(f"{name}={value}" for name, value in more.items()), *(f"{name}=..." for name in kinds + functions)]
        return f"dd.{verb}({str(folder)!r}, {', '.join(again)})"
    command = shared.named_again(verb, folder, record, problem=True)
    if verb == "resume" and (record.fleet or {}).get("name") == "sites":  # whom to let in is not for a folder to decide
        command = f"dualdelay serve ... --folder {shlex.quote(str(folder))}"
    return " ".join([command, *(f"--{name} {value}" for name, value in more.items())])


def _size(folder: Path) -> str:
    """What a folder takes on the disk, in words."""
    size = sum((Path(place) / file).lstat().st_size for place, _, files in os.walk(folder) for file in files)
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.0f} kB"


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
    printing.print_rows(f"{printing.counted(len(kept.runs), 'run')}, {_size(folder)}", rows, console)
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
