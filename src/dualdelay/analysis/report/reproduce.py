"""How to compute a recorded run again: the command that it can be started with, and what no command can say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import BadInput
from ...runs.names import REGISTRIES, call, parameters
from ...storage.record import RunRecord

_PLAIN = (
    "updates",
    "time",
    "seed",
    "evaluate_samples",
    "on_nonfinite",
    "uplink",
    "downlink",
    "threads",
    "precision",
    "table",
)
_USUAL: dict[str, Any] = {
    "on_nonfinite": "retry",
    "threads": 1,
    "precision": "float32",
    "table": "full",
    "seed": 0,
    "keep": 3,
    "latency": 0.0,
    "device": "cpu",
}  # what a command does without the flag; for all others: nothing


def commands(record: RunRecord, folder: Path) -> list[str]:
    """The lines that go on with a run, check it bit by bit, and load it."""
    own = [axis for axis in ("problem", "algorithm", "speeds") if "name" not in (getattr(record, axis) or {"name": ""})]
    if own:
        given = "".join(f", {axis}=..." for axis in own)
        return [f"dd.resume({str(folder)!r}{given})", f"dd.replay({str(folder)!r}{given})", f"dd.load({str(folder)!r})"]
    place = shlex.quote(str(folder))
    return [f"dualdelay resume {place}", f"dualdelay replay {place}", f"dualdelay report {place}"]


def command(record: RunRecord) -> tuple[str, list[str]]:
    """The command that starts the same run, and what of the run it cannot say."""
    unsaid: list[str] = []

    def named(kind: str, description: Mapping[str, Any] | None) -> str | None:
        try:
            return text_of(kind, description or {}, record.seed)
        except BadInput:
            unsaid.append(f"the {kind}, which is your own")
            return "..."

    flags: dict[str, Any] = {"problem": named("problem", record.problem)}
    if record.real:
        flags["fleet"] = named("fleet", record.fleet)
    else:
        flags["speeds"] = named("speeds", record.speeds)
        link = record.link or {}
        if link.get("name") == "link":
            flags |= {"latency": link["latency"], "bandwidth": link["bandwidth"]}
        elif "name" in link:
            unsaid.append("the link, which all workers share")
        else:
            unsaid.append("the link, which is your own")
    flags |= {name: getattr(record, name) for name in _PLAIN if not (record.real and name in ("threads", "precision"))}
    if not record.evaluates_by_default:
        flags |= {"evaluate_every": record.evaluate_every, "evaluate_seconds": record.evaluate_seconds}
    else:
        del flags["evaluate_samples"]
    flags |= {"checkpoint_every": record.checkpoint_every, "keep": record.keep, "device": record.device}
    if record.stop is not None:
        flags |= {name: record.stop.get(name) for name in ("metric", "target", "patience")}
        if record.stop.get("larger_is_better") is not None:
            flags["metric"] = f"{'max' if record.stop['larger_is_better'] else 'min'} {record.stop['metric']}"
    elif record.keep_best is not None:
        flags["keep_best"] = record.keep_best
    for name, value in (record.optimizer or {}).items():
        if value is None or isinstance(value, str):
            flags[name] = value
        else:
            unsaid.append(f"the {name}, which is your own")
    unsaid += [f"metrics of your own: {', '.join(record.metrics)}"] if record.metrics else []
    unsaid += ["workers that leave and join (--absences takes a file)"] if record.changes else []
    words = ["dualdelay", "train", named("algorithm", record.algorithm) or ""]
    for name, value in flags.items():
        if value is not None and value != _USUAL.get(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words), unsaid


def text_of(kind: str, description: Mapping[str, Any], seed: int) -> str:
    """A recorded description as the shell takes it: the name, and the settings that are not the defaults."""
    name = description.get("name")
    if not isinstance(name, str) or name not in REGISTRIES[kind]:
        raise BadInput(f"a {description.get('class')} has no name on the shell.")
    known, inside = parameters(REGISTRIES[kind][name]), {}
    for key, value in description.items():
        follows = key == "seed" and value == seed  # it is given once, as the run's
        if key != "name" and key in known and value != known[key].default and not follows:
            inside[key] = _value(value, seed)
    text = f"{name}[{','.join(f'{key}={part}' for key, part in inside.items())}]" if inside else name
    again = call(text)[1]
    for key in inside:
        if not isinstance(description[key], Mapping) and _listed(again.get(key)) != description[key]:
            raise BadInput(f"{key} cannot be written on the shell.")
    return text


def _value(value: Any, seed: int) -> str:
    if isinstance(value, Mapping):
        for kind, registry in REGISTRIES.items():
            if value.get("name") in registry:
                return text_of(kind, value, seed)
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value, separators=(",", ":"))


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
