"""What a page says: facts and tables as texts, and the numbers of its pictures, packed."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...core.environment import environment
from ...core.errors import BadInput
from ...engine.delays import used_in
from ...engine.metrics import metric_and_way
from ...engine.result import FAULTS, Run
from ...engine.table import Column, Table
from ...engine.trace import Trace
from ..printing import number, sentence
from .entries import Entries, Entry, tidy
from .looks import looks
from .reproduce import command, commands

_VALUES = 200_000  # numbers of all curves
_JOBS = 30_000  # that can be looked at, of all runs
_DELAYS = 40_000  # points of all delays, and as many of the workers' losses
_INSIDE = 120  # runs whose workers are shown
_WORKERS = 40  # rows of the picture of who computed what
_SHARES = 500  # workers whose share of the arrivals is drawn
_LINES = 20  # workers whose delays and losses are drawn
_ROWS = 2_000  # of all tables of workers; and as many of events
_TABLE = 200  # rows of a table that is shown as it is
_HIDDEN = ("answered", "share", "samples")  # columns that no curve is drawn of, unless they vary
_KINDS = (("u1", 2**8), ("u2", 2**16), ("u4", 2**32))


@dataclass(frozen=True)
class Grid:
    """A table of texts; columns of numbers stand to the right."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[bool] = ()
    note: str = ""


@dataclass(frozen=True)
class Inside:
    """What is known of the workers of one run."""

    name: str
    facts: Mapping[str, str]
    workers: Grid
    events: Grid
    notes: Sequence[str]


@dataclass(frozen=True)
class Repeat:
    """How a run is computed again."""

    name: str
    command: str
    unsaid: Sequence[str]
    lines: Sequence[str]


@dataclass
class Content:
    """A page without its layout."""

    title: str = ""
    summary: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    results: Grid | None = None
    best: Grid | None = None
    paired: Grid | None = None
    rows: Grid | None = None
    inside: list[Inside] = field(default_factory=list)
    inside_note: str = ""
    failed: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    settings: Grid | None = None
    environment: Grid | None = None
    repeat: list[Repeat] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The parts that the page has: their ids and headings."""
        there = {
            "curves": ("Curves", bool(self.data.get("runs"))),
            "results": ("Results", self.results is not None),
            "steps": ("Best settings", self.best is not None),
            "paired": ("Paired differences", self.paired is not None),
            "inside": ("Workers", bool(self.inside)),
            "rows": ("Table", self.rows is not None),
            "trouble": ("Notes", bool(self.notes or self.failed)),
            "settings": ("Settings", self.settings is not None),
            "repeat": ("Reproduce", bool(self.repeat)),
        }
        return [(key, heading) for key, (heading, shown) in there.items() if shown]


def page_content(entries: Entries) -> Content:
    """Everything that a page about these entries says."""
    runs, content = entries.runs, Content(notes=list(entries.notes), failed=entries.failed)
    if entries.rows is not None:
        content.rows = _as_it_is(entries.rows)
    if not runs:
        content.title, content.summary = (
            "A table",
            f"{len(entries.rows or ()):,} rows, which have neither time nor version.",
        )
        return content
    metrics = _metrics(runs)
    main = "objective" if "objective" in metrics else metrics[0]
    content.data = _curves(runs, metrics, main)
    inside = [entry for entry in runs if entry.run is not None and len(entry.run.trace)]
    shown = inside[:_INSIDE]
    content.inside = [_inside(entry, max(10, _ROWS // len(shown))) for entry in shown]
    content.data["inside"] = [_pictures(entry, len(shown)) for entry in shown]
    if len(inside) > len(shown):
        content.inside_note = f"The workers of the first {len(shown)} of {len(inside)} runs are shown."
    labels = list(dict.fromkeys(run.label for run in runs))
    content.results = _results(runs, metrics) if len(runs) > 1 else None
    _say(content, entries, labels, main)
    if len(runs) > 1:
        _compare(content, runs, labels, main)
    _repeat(content, runs)
    return content


def larger_is_better(metric: str) -> bool:
    """Which way a metric is good; smaller where its name does not say it."""
    try:
        return metric_and_way("metric", metric)[1] == "max"
    except BadInput:
        return False


def _metrics(runs: Sequence[Entry]) -> list[str]:
    """The columns that all runs have and that say something."""
    names = [name for name in runs[0].metrics if name not in ("time", "version")]
    common = [name for name in names if all(name in run.metrics for run in runs)]
    values = {name: np.concatenate([run.metrics[name] for run in runs]).astype(float) for name in common}
    said = [name for name in common if np.isfinite(values[name]).any()]
    kept = [name for name in said if name not in _HIDDEN or len(set(values[name].tolist())) > 1]
    if not kept:
        raise BadInput("the runs have no metric in common, so there is nothing to draw; expected one, such as objective.")
    return kept


# --- numbers of the pictures ---


def packed(values: Any, kind: str = "") -> dict[str, str]:
    """Numbers as the page reads them: their type, and their bytes in base 64; whole ones in as few bytes as they need."""
    column = np.asarray(values)
    if not kind:
        most = int(column.max()) if len(column) else 0
        kind = (
            next((name for name, limit in _KINDS if most < limit), "f8") if not len(column) or column.min() >= 0 else "f8"
        )
    with np.errstate(over="ignore"):
        column = column.astype(f"<{kind}")
    return {"t": kind, "b": base64.b64encode(column.tobytes()).decode()}


def _thinned(count: int, most: int) -> Column:
    """The places of at most so many of these rows, evenly, with the first and the last."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, max(most, 2)).round().astype(int))


def _curves(runs: Sequence[Entry], metrics: Sequence[str], main: str) -> dict[str, Any]:
    axes = [axis for axis in ("time", "version") if all(axis in run.metrics for run in runs)]
    look, settings = looks(runs), list(dict.fromkeys(run.setting for run in runs))
    most = max(12, _VALUES // (len(runs) * (len(metrics) + len(axes))))
    labels = list(look)
    places = {label: k for k, label in enumerate(labels)}
    packed_runs = []
    thinned = 0
    for run in runs:
        rows = _thinned(len(run.metrics), most)
        thinned = max(thinned, len(run.metrics) if len(rows) < len(run.metrics) else 0)
        columns = {axis: packed(run.metrics[axis][rows], "f8") for axis in axes}
        columns |= {name: packed(run.metrics[name][rows], "f4") for name in metrics}
        packed_runs.append(
            {"label": places[run.label], "setting": settings.index(run.setting), "seed": str(run.seed), "columns": columns}
        )
    real = any(run.record is not None and run.record.real for run in runs)
    simulated = any(run.record is None or not run.record.real for run in runs)
    clock = "seconds" if real and not simulated else "simulated time" if not real else "time"
    if all(run.run is None for run in runs):
        clock = "time"
    return {
        "axes": axes,
        "clock": clock,
        "metrics": list(metrics),
        "main": main,
        "larger": [name for name in metrics if larger_is_better(name)],
        "labels": [{"text": label, **look[label]} for label in labels],
        "settings": settings,
        "runs": packed_runs,
        "thinned": f"Of {thinned:,} evaluations of a run, {most:,} are drawn." if thinned else "",
    }


def _pictures(entry: Entry, count: int) -> dict[str, Any]:
    """Who computed what, delays, shares and losses of one run; ``count`` runs share the room."""
    run = entry.run
    assert run is not None
    trace, size = run.trace, _size(run)
    delay = used_in(trace) - trace.version
    jobs = np.flatnonzero(trace.worker < _WORKERS)[: max(60, _JOBS // count)]
    columns = {"time": packed(trace.time[jobs], "f8"), "seconds": packed(trace.seconds[jobs], "f4")}
    columns |= {"loss": packed(trace.loss[jobs], "f4"), "delay": packed(delay[jobs])}
    columns |= {name: packed(trace[name][jobs]) for name in ("worker", "draw", "version", "after")}
    arrivals = np.bincount(trace.worker, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(trace.worker, weights=delay, minlength=size) / arrivals
        seconds = np.bincount(trace.worker, weights=trace.seconds, minlength=size) / arrivals
    order = [int(worker) for worker in np.argsort(means, kind="stable") if arrivals[worker]]  # those with the least first
    chosen = sorted(order if len(order) <= _LINES else [*order[: _LINES // 2], *order[-_LINES // 2 :]])
    most = int(np.clip(_DELAYS // (count * max(len(chosen), 1)), 6, 150))
    return {
        "name": entry.name,
        "clock": "seconds" if entry.record is not None and entry.record.real else "simulated time",
        "workers": size,
        "rows": min(size, _WORKERS),
        "arrivals": len(trace),
        "jobs": columns,
        "most": int(delay.max()),
        "shares": packed(arrivals[:_SHARES]),
        "pace": packed(seconds[chosen], "f4"),
        "delays": _delays(trace, delay, chosen, most),
        "losses": _losses(run, chosen, most),
        "chosen": chosen,
        "active": len(order),
        "events": [
            {"time": event["time"], "worker": event["worker"], "kind": event["kind"], "text": _short(event["text"])}
            for event in _events(run)[: max(10, _ROWS // count)]
            if 0 <= event["worker"] < _WORKERS and math.isfinite(event["time"])
        ],
    }


def _delays(trace: Trace, delay: Column, chosen: Sequence[int], most: int) -> dict[str, Any]:
    """Each worker's delays over time; of many arrivals the mean and the largest of equally many in a row."""
    columns: dict[str, list[Any]] = {name: [] for name in ("worker", "time", "mean", "most", "count")}
    for worker in chosen:
        own = np.flatnonzero(trace.worker == worker)
        for part in np.array_split(own, min(len(own), most)):
            columns["worker"].append(worker)
            columns["time"].append(float(trace.time[part[-1]]))
            columns["mean"].append(float(delay[part].mean()))
            columns["most"].append(int(delay[part].max()))
            columns["count"].append(len(part))
    kinds = {"time": "f8", "mean": "f4"}
    return {name: packed(values, kinds.get(name, "")) for name, values in columns.items()}


def _losses(run: Run, chosen: Sequence[int], most: int) -> dict[str, Any]:
    """What each worker found at the evaluations, by the columns of ``run.workers``."""
    table = run.workers
    if not len(table):
        return {}
    names = [name for name in table if name not in ("time", "version", "worker", *_HIDDEN)]
    names = [name for name in names if np.isfinite(table[name].astype(float)).any()]
    rows = [np.flatnonzero(table.worker == worker) for worker in chosen]
    kept = np.concatenate([own[_thinned(len(own), most)] for own in rows if len(own)] or [np.arange(0)])
    columns = {"time": packed(table.time[kept], "f8"), "version": packed(table.version[kept])}
    columns |= {"worker": packed(table.worker[kept]), **{name: packed(table[name][kept], "f4") for name in names}}
    return {"names": names, "columns": columns}


def _size(run: Run) -> int:
    """How many workers a run has had."""
    return max(run.state.workers, int(run.trace.worker.max()) + 1 if len(run.trace) else 0)


def _events(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.trace.events if event["kind"] not in ("wake", "evaluated")]


def _short(text: str) -> str:
    """The line of an event's text that says what it was: of a traceback the last."""
    return ((text or "").strip().splitlines() or [""])[-1][:300]


# --- texts ---


def _say(content: Content, entries: Entries, labels: Sequence[str], main: str) -> None:
    """Title, summary and facts."""
    runs = entries.runs
    last = runs[0].metrics[main]
    if len(runs) == 1:
        run = runs[0].run
        content.title = runs[0].name
        content.summary = f"{main} {number(float(last[0]))} at first, {number(float(last[-1]))} at the end."
        if run is not None:
            content.facts = _facts(run)
            content.summary = (
                f"{run.version:,} updates from {len(run.trace):,} arrivals of {_size(run)} workers, {run.ending} "
                f"at time {number(run.time)}. {content.summary[:1].upper()}{content.summary[1:]}"
            )
        return
    seeds = len({run.seed for run in runs})
    methods = len({run.method for run in runs})
    content.facts = {
        "methods": f"{methods:,}",
        "curves": f"{len(labels):,}",
        "seeds": f"{seeds:,}",
        "runs": f"{len(runs):,}",
    }
    content.title = f"{methods:,} {'methods' if methods > 1 else 'method'}, {len(runs):,} runs"
    if content.failed:
        content.facts["without a result"] = f"{len(content.failed):,}"
    if len(entries.sweeps) == 1 and all(run.run is not None for run in runs):
        content.summary = sentence(entries.sweeps[0]).replace("Result: ", "")
        content.summary = content.summary[:1].upper() + content.summary[1:]
    else:
        content.summary = f"{len(runs):,} runs, {len(labels):,} curves of {main}."


def _facts(run: Run) -> dict[str, str]:
    summary, delays = run.summary(), run.delays
    facts = {name.replace("_", " "): number(summary.get(name)) for name in ("objective", "pooled_loss", "accuracy")}
    facts = {name: value for name, value in facts.items() if value != "-"}
    facts |= {"updates": f"{run.version:,}", "arrivals": f"{len(run.trace):,}", "time": number(run.time)}
    facts |= {"largest delay": f"{delays.tau_max:,}", "mean delay": number(delays.tau_avg)}
    facts["faults"] = ", ".join(f"{count:,} {kind}" for kind, count in run.faults.items()) or "none"
    facts["MB up, down"] = f"{number(run.bytes_up / 1e6, 3)}, {number(run.bytes_down / 1e6, 3)}"
    return facts


def _results(runs: Sequence[Entry], metrics: Sequence[str]) -> Grid:
    """The last values of each label: mean over seeds and standard deviation."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for run in runs:
        groups.setdefault((run.label, run.setting), []).append(run)
    several = len({setting for _, setting in groups}) > 1
    rows = []
    for (label, setting), own in groups.items():
        cells = [label, *([setting] if several else []), f"{len(own)}"]
        if all("version" in run.metrics for run in runs):
            cells.append(_spread([float(run.metrics["version"][-1]) for run in own]))
        rows.append([*cells, *(_spread([float(run.metrics[name][-1]) for run in own]) for name in metrics)])
    named = ["label", *(["problem and speeds"] if several else [])]
    updates = ["updates"] if all("version" in run.metrics for run in runs) else []
    heads = [*named, "runs", *updates, *(name.replace("_", " ") for name in metrics)]
    caption = "At the end of the runs: the mean over seeds ± the standard deviation."
    return Grid(caption, heads, rows, [False] * len(named) + [True] * (len(heads) - len(named)))


def _spread(values: Sequence[float]) -> str:
    mean = number(float(np.mean(values)))
    return mean if len(values) == 1 or mean == "-" else f"{mean} ± {number(float(np.std(values, ddof=1)), 2)}"


def _compare(content: Content, runs: Sequence[Entry], labels: Sequence[str], main: str) -> None:
    """The best steps and the paired differences, of runs on one problem at the same speeds."""
    if len({run.setting for run in runs}) > 1:
        content.notes = [*content.notes, "steps and differences are not shown: the runs have several problems or speeds"]
        return
    table, larger = tidy(runs, main), larger_is_better(main)
    metric = f"{'max' if larger else 'min'} {main}"
    try:
        methods, variants = set(table.method.tolist()), set(table.algorithm.tolist())
        if len(variants) > len(methods):
            steps = set() if "lr" not in table else set(zip(table.method.tolist(), table.lr.tolist(), strict=True))
            over, what = ("lr", "step") if len(steps) == len(variants) else ("algorithm", "settings")
            best = table.best("method", over, metric)
            note = "lowest, highest: the best step is at an edge of the grid, and a better one may lie beyond it."
            caption = f"The {what} with the best {main} at the end, in the mean over seeds."
            content.best = _grid_of(best, caption, note if over == "lr" else "")
            if over == "lr":
                content.data["steps"] = _step_curves(table, main, metric, runs)
            if len(methods) > 1:  # each at its best
                chosen = table.best("method", "algorithm", metric).algorithm.tolist()
                table, labels = table.where(algorithm=chosen), [label for label in labels if label in chosen]
        ends = table.best("algorithm", (), metric)
        means = dict(zip(ends.algorithm.tolist(), ends["mean"].tolist(), strict=True))
        finite = [label for label in labels if math.isfinite(means[label])]
        if len(labels) > 1 and finite:
            against = (max if larger else min)(finite, key=lambda label: means[label])
            differences = table.paired(against, "algorithm", metric, over=())
            note = (
                f"Above zero: larger than {against}, seed by seed. low and high: 95 % interval; p: t test, p holm: "
                "corrected for several comparisons, p rank: signed ranks. With few seeds none of them says much."
            )
            caption = f"{main} at the end, against {against}, which is best in the mean."
            told = Table({name: column for name, column in differences.items() if _tells(name, column)})
            content.paired = _grid_of(told, caption, note)
    except BadInput as error:  # seeds that not all steps have, for instance
        content.notes = [*content.notes, f"steps and differences are not all shown: {str(error).rstrip('.')}"]


def _tells(name: str, column: Column) -> bool:
    """Whether a column of paired differences is worth showing: unpaired and tied seeds only where there are any."""
    return name not in ("unpaired", "ties") or bool(column.any())


def _step_curves(table: Table, main: str, metric: str, runs: Sequence[Entry]) -> dict[str, Any]:
    """What each method ends with at each step."""
    look, curves = looks(runs), []
    for method in dict.fromkeys(table.method.tolist()):
        own = table.method == method
        first = str(table.algorithm[own][0])
        middle = list(dict.fromkeys(table.algorithm[own].tolist()))
        points = []
        for lr in sorted(set(table.lr[own].tolist())):
            ends = table.where(method=method, lr=lr).ends(metric, "algorithm")
            finite = ends[main][~ends.failed].tolist()
            if finite:
                mean = float(np.mean(finite)) if len(finite) == len(ends) else None
                points.append([lr, mean, min(finite), max(finite), len(ends) - len(finite)])
        curves.append({"text": method, **look[middle[len(middle) // 2]], "dash": look[first]["dash"], "points": points})
    start = float(runs[0].metrics[main][0])
    return {"metric": main, "over": "lr", "curves": curves, "start": start if math.isfinite(start) else None}


def _grid_of(table: Table, caption: str, note: str = "") -> Grid:
    """Any table as texts."""
    rows = [[value if isinstance(value, str) else _cell(value) for value in row.values()] for row in table.rows()]
    right = [table[name].dtype.kind in "fiub" for name in table]
    return Grid(caption, [name.replace("_", " ") for name in table], rows, right, note)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _as_it_is(table: Table) -> Grid:
    cut = Table({name: table[name][:_TABLE] for name in table})
    more = f"The first {_TABLE:,} of {len(table):,} rows." if len(table) > _TABLE else ""
    return _grid_of(cut, "The table.", more)


def _inside(entry: Entry, most: int) -> Inside:
    """Tables of one run's workers and events, of so many rows at most."""
    run = entry.run
    assert run is not None
    trace, size, events = run.trace, _size(run), _events(run)
    delay = used_in(trace) - trace.version
    faults = Counter(event["worker"] for event in events if event["kind"] in FAULTS)
    workers = run.workers
    losses = dict(zip(workers.worker.tolist(), workers.loss.tolist(), strict=True)) if len(workers) else {}
    rows = []
    for worker in range(min(size, most)):
        own = trace.worker == worker
        count = int(own.sum())
        cells = [str(worker), f"{count:,}", f"{count / max(len(trace), 1):.1%}"]
        means = (trace.seconds, delay) if count else ()
        cells += [number(float(values[own].mean())) for values in means] or ["-", "-"]
        cells += [f"{delay[own].max():,}" if count else "-", number(losses.get(worker)), f"{faults[worker]:,}"]
        rows.append(cells)
    heads = ["worker", "arrivals", "share", "mean seconds", "mean delay", "largest delay", "last loss", "faults"]
    more = f"And {size - most:,} more workers." if size > most else ""
    grid = Grid("What each worker did.", heads, rows, [True] * len(heads), more)
    texts = [
        [number(event["time"]), str(event["worker"]) if event["worker"] >= 0 else "-", event["kind"], _short(event["text"])]
        for event in events[:most]
    ]
    more = f"The first {most:,} of {len(events):,} events." if len(events) > most else ""
    happened = Grid("What happened besides arrivals.", ["time", "worker", "event", "why"], texts, [True, True], more)
    return Inside(entry.name, _facts(run), grid, happened, run.notes)


def _repeat(content: Content, runs: Sequence[Entry]) -> None:
    """Settings, environment and how to compute the runs again."""
    known = [run for run in runs if run.record is not None]
    if known:
        records = [asdict(run.record) for run in known if run.record is not None]
        content.settings = _settings([{k: v for k, v in one.items() if k != "environment"} for one in records], known)
        content.environment = _settings([one["environment"] for one in records], known, "Where it was computed.")
    else:
        computed = [run for run in runs if run.run is not None]
        settings = [{"algorithm": {"name": run.method, **run.settings}, "seed": run.seed} for run in computed]
        content.settings = _settings(settings, computed) if computed else None
        content.environment = _settings([environment()], computed[:1], "Where it was computed.") if computed else None
    for run in known[:_INSIDE]:
        if run.record is not None and run.folder is not None:
            line, unsaid = command(run.record)
            content.repeat.append(Repeat(run.name, line, unsaid, commands(run.record, run.folder)))


def _settings(records: Sequence[Mapping[str, Any]], runs: Sequence[Entry], caption: str = "") -> Grid:
    """All settings: those that all runs share once, the others by run where there are a few, else by their values."""
    flat = [_flat(record) for record in records]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = []
    for key in keys:
        values = [one.get(key, "") for one in flat]
        distinct = list(dict.fromkeys(values))
        if len(distinct) == 1:
            rows.append([key, distinct[0]])
        elif len(runs) <= 6:
            rows.append([key, "\n".join(f"{run.name}: {value}" for run, value in zip(runs, values, strict=True))])
        else:
            shown = ", ".join(value or "none" for value in distinct[:20])
            rows.append([key, f"{len(distinct)} values: {shown}{', ...' if len(distinct) > 20 else ''}"])
    return Grid(caption or "Everything that determines the runs.", ["setting", "value"], rows)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = "none" if value is None else str(value)
    return flat
