"""What a page says: facts and tables as texts, and the numbers of its pictures, packed."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from ..printing import End, caveats, counted, ending, measured, number, ranking
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
_MOST_SEEDS = 8  # that are named
_LEFT_OUT = 6  # labels of which is said why they are not compared
_HIDDEN = ("answered", "share", "samples")  # columns that no curve is drawn of, unless they vary in a run
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
    best: list[Grid] = field(default_factory=list)  # one for each problem and speeds, as in paired
    paired: list[Grid] = field(default_factory=list)
    rows: Grid | None = None
    inside: list[Inside] = field(default_factory=list)
    inside_note: str = ""
    troubled: Sequence[tuple[str, str]] = ()  # runs without an end, and what is said of them
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
            "steps": ("Best settings", bool(self.best)),
            "paired": ("Paired differences", bool(self.paired)),
            "inside": ("Workers", bool(self.inside)),
            "rows": ("Table", self.rows is not None),
            "trouble": ("Notes", bool(self.notes or self.troubled)),
            "settings": ("Settings", self.settings is not None),
            "repeat": ("Reproduce", bool(self.repeat)),
        }
        return [(key, heading) for key, (heading, shown) in there.items() if shown]


def page_content(entries: Entries) -> Content:
    """Everything that a page about these entries says."""
    runs, content = entries.runs, Content(notes=list(entries.notes), troubled=_troubled(entries))
    if entries.rows is not None:
        content.rows = _as_it_is(entries.rows)
    if not runs:
        content.title, content.summary = (
            "A table",
            f"{counted(len(entries.rows or ()), 'row')} with neither time nor version.",
        )
        return content
    metrics = _metrics(runs)
    main = (
        "objective" if "objective" in metrics else max(metrics, key=lambda name: sum(name in run.metrics for run in runs))
    )
    content.data = _curves(runs, entries.lost, metrics, main)
    inside = [entry for entry in runs if entry.run is not None and len(entry.run.trace)]
    shown = inside[:_INSIDE]
    content.inside = [_inside(entry, max(10, _ROWS // len(shown))) for entry in shown]
    content.data["inside"] = [_pictures(entry, len(shown)) for entry in shown]
    if len(inside) > len(shown):
        content.inside_note = f"The workers of the first {len(shown)} of {len(inside)} runs are shown."
    if len(runs) + len(entries.lost) + len(entries.unnamed) == 1:
        _say_of_one(content, runs[0], main)
    else:
        content.results = _results(runs, metrics)
        _say(content, entries, _compare(content, entries, main), main)
    _repeat(content, runs)
    return content


def _troubled(entries: Entries) -> list[tuple[str, str]]:
    """What is said of each run without an end."""
    drawn = [(run.name, f"has no end: {run.why}") for run in entries.runs if run.state]
    lost = [(run.name, f"has no result: {run.why}") for run in entries.lost]
    return [*drawn, *lost, *((name, f"is left out: {why}") for name, why in entries.unnamed)]


def larger_is_better(metric: str) -> bool:
    """Which way a metric is good; smaller where its name does not say it."""
    try:
        return metric_and_way("metric", metric)[1] == "max"
    except BadInput:
        return False


def _metrics(runs: Sequence[Entry]) -> list[str]:
    """The columns that say something, of whichever runs."""
    names = dict.fromkeys(name for run in runs for name in run.metrics if name not in ("time", "version"))
    values = {name: [run.metrics[name].astype(float) for run in runs if name in run.metrics] for name in names}
    said = [name for name in names if any(np.isfinite(column).any() for column in values[name])]
    kept = [name for name in said if name not in _HIDDEN or any(len(set(column.tolist())) > 1 for column in values[name])]
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


def _curves(runs: Sequence[Entry], lost: Sequence[Entry], metrics: Sequence[str], main: str) -> dict[str, Any]:
    axes = [axis for axis in ("time", "version") if all(axis in run.metrics for run in runs)]
    look, settings = looks(runs), list(dict.fromkeys(run.setting for run in runs))
    most = max(12, _VALUES // (len(runs) * (len(metrics) + len(axes))))
    labels, incomplete = list(look), {run.label for run in (*runs, *lost) if run.state}  # those are not ranked
    ended = {run.curve for run in runs if run.label not in incomplete}
    places = {label: k for k, label in enumerate(labels)}
    packed_runs = []
    thinned = 0
    for run in runs:
        rows = _thinned(len(run.metrics), most)
        thinned = max(thinned, len(run.metrics) if len(rows) < len(run.metrics) else 0)
        columns = {axis: packed(run.metrics[axis][rows], "f8") for axis in axes}
        columns |= {name: packed(run.metrics[name][rows], "f4") for name in metrics if name in run.metrics}
        packed_runs.append(
            {"label": places[run.curve], "setting": settings.index(run.setting), "seed": str(run.seed), "columns": columns}
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
        "labels": [{"text": label, "ended": label in ended, **look[label]} for label in labels],
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


def _say_of_one(content: Content, entry: Entry, main: str) -> None:
    """Title, summary and facts of the page of one run."""
    values, run = entry.metrics[main], entry.run
    content.title = entry.name
    content.summary = f"{main} {number(float(values[0]))} at first, {number(float(values[-1]))} at the end."
    if run is not None:
        content.facts = _facts(run)
        content.summary = (
            f"{counted(run.version, 'update')} from {counted(len(run.trace), 'arrival')} of "
            f"{counted(_size(run), 'worker')}, {ending(run)} at time {number(run.time)}. {_capital(content.summary)}"
        )


def _say(content: Content, entries: Entries, tables: Mapping[str, Table], main: str) -> None:
    """Title, summary and facts; ``tables`` has the runs that can be compared, by problem and speeds."""
    every, without = [*entries.runs, *entries.lost], entries.without_end
    count, methods = len(every) + len(entries.unnamed), len({run.method for run in every})
    curves, settings = {(run.setting, run.curve) for run in entries.runs}, dict.fromkeys(run.setting for run in every)
    lacking = sum(without.values())
    content.title = f"{counted(methods, 'method')}, {counted(count, 'run')}"
    content.title += f", {lacking:,} of them without an end" if lacking else ""
    content.facts = {"methods": f"{methods:,}", "curves": f"{len(curves):,}"}
    content.facts |= {"problems and speeds": f"{len(settings):,}"} if len(settings) > 1 else {}
    content.facts |= {"seeds": f"{len({run.seed for run in every}):,}", "runs": f"{count:,}"}
    content.facts |= {state: f"{number_:,}" for state, number_ in without.items()}
    lines = []
    if lacking:
        told = ", ".join(f"{number_:,} {state}" for state, number_ in without.items())
        lines.append(f"{lacking:,} of {counted(count, 'run')} {'has' if lacking == 1 else 'have'} no end: {told}.")
    if main == "objective" and all(run.run is not None or run.state for run in every):
        for setting in settings:
            ends: dict[str, list[End]] = {}
            for run in (run for run in every if run.setting == setting):
                ends.setdefault(run.label, []).append(End.of(run.run, run.state))
            where = f"on {setting or 'the others'}: " if len(settings) > 1 else ""
            doubts = caveats(tables[setting]) if setting in tables else []
            lines.append(" ".join([_capital(ranking(ends, where)), *doubts]))
    else:
        lines.append(f"{counted(len(entries.runs), 'run')}, {counted(len(curves), 'curve')} of {main}.")
    content.summary = "\n".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _facts(run: Run) -> dict[str, str]:
    summary, delays = run.summary(), run.delays
    facts = {name.replace("_", " "): number(summary[name]) for name in measured([summary], run.metrics)}
    facts.pop("gradient norm", None)
    facts |= {"updates": f"{run.version:,}", "arrivals": f"{len(run.trace):,}", "time": number(run.time)}
    facts |= {"largest delay": f"{delays.tau_max:,}", "mean delay": number(delays.tau_avg)}
    facts["faults"] = ", ".join(f"{count:,} {kind}" for kind, count in run.faults.items()) or "none"
    facts["MB up, down"] = f"{number(run.bytes_up / 1e6, 3)}, {number(run.bytes_down / 1e6, 3)}"
    return facts


def _results(runs: Sequence[Entry], metrics: Sequence[str]) -> Grid:
    """The last values of each curve: mean over seeds and standard deviation."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for run in runs:
        groups.setdefault((run.setting, run.curve), []).append(run)
    several = len({setting for setting, _ in groups}) > 1
    columns = [*(["version"] if any("version" in run.metrics for run in runs) else []), *metrics]
    rows = []
    for (setting, label), own in groups.items():
        ends = [[float(run.metrics[name][-1]) for run in own if name in run.metrics] for name in columns]
        rows.append([label, *([setting or "others"] if several else []), f"{len(own)}", *map(_spread, ends)])
    named = ["label", *(["problem and speeds"] if several else [])]
    heads = [*named, "runs", *("updates" if name == "version" else name.replace("_", " ") for name in columns)]
    caption = "At the end of the runs: the mean over seeds ± the standard deviation."
    caption += " Runs without an end: as far as they came." if any(run.state for run in runs) else ""
    return Grid(caption, heads, rows, [False] * len(named) + [True] * (len(heads) - len(named)))


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = number(float(np.mean(values)))
    return mean if len(values) == 1 or mean == "-" else f"{mean} ± {number(float(np.std(values, ddof=1)), 2)}"


def _compare(content: Content, entries: Entries, main: str) -> dict[str, Table]:
    """Add the best settings and the paired differences, problem by problem; returns what was compared on each."""
    every, tables = [*entries.runs, *entries.lost], dict[str, Table]()
    settings, look = list(dict.fromkeys(run.setting for run in every)), looks(entries.runs)
    content.data["steps"] = {}
    for setting in settings:
        runs, failed, notes = _comparable([run for run in every if run.setting == setting], main)
        where = f"On {setting or 'the others'}: " if len(settings) > 1 else ""
        content.notes = [*content.notes, *(f"{where}{note}" for note in notes)]
        if len(runs) + len(failed) < 2 or not runs:
            continue
        table = tables[setting] = tidy(runs, failed, main)
        try:
            steps = _compared(content, table, main, where, look)
        except BadInput as error:  # no run of a method ends with a number, for instance
            content.notes = [*content.notes, f"{where}steps and differences are not all shown: {str(error).rstrip('.')}"]
            continue
        if steps is not None:
            start = float(runs[0].metrics[main][0])
            own = {"setting": setting, "start": start if math.isfinite(start) else None}
            content.data["steps"][content.data["settings"].index(setting)] = steps | own
    return tables


def _comparable(runs: Sequence[Entry], main: str) -> tuple[list[Entry], list[Entry], list[str]]:
    """Those runs of one problem that can be compared, since their labels have the same seeds; those of them that failed
    or have no number; and what is said of the others.
    """
    counted_runs = [run for run in runs if run.state == "failed" or (not run.state and main in run.metrics)]
    seeds = {run.label: {one.seed for one in counted_runs if one.label == run.label} for run in runs}
    sets = {frozenset(own) for own in seeds.values() if own}
    if not sets:
        return [], [], []
    common = max(
        sets, key=lambda own: (len(own) * sum(own <= other for other in seeds.values()), len(own), sorted(map(str, own)))
    )
    left_out = [label for label, own in seeds.items() if not common <= own]
    notes = []
    for label in left_out[:_LEFT_OUT]:
        has = f"the results of {_seeds(seeds[label])}" if seeds[label] else "no result"
        notes.append(f"{label} is not compared with the others: it has {has}, they have those of {_seeds(common)}")
    if len(left_out) > _LEFT_OUT:
        notes.append(f"nor are {len(left_out) - _LEFT_OUT:,} more, which lack seeds, too")
    if any(common < own for label, own in seeds.items() if label not in left_out):
        notes.append(f"best settings and differences are those of {_seeds(common)}, which all that are compared have")
    kept = [run for run in counted_runs if run.label not in left_out and run.seed in common]
    return [run for run in kept if not run.state], [run for run in kept if run.state], notes


def _seeds(seeds: Iterable[int | str]) -> str:
    """Seeds in words."""
    texts = [str(seed) for seed in sorted(seeds, key=lambda seed: (isinstance(seed, str), seed))]
    if texts == [""]:
        return "one run"
    if len(texts) > _MOST_SEEDS:
        return f"{len(texts):,} seeds"
    return f"seed {texts[0]}" if len(texts) == 1 else f"seeds {', '.join(texts[:-1])} and {texts[-1]}"


def _compared(
    content: Content, table: Table, main: str, where: str, look: Mapping[str, Mapping[str, str]]
) -> dict[str, Any] | None:
    """Add the best settings and the paired differences of one problem; returns what its picture of steps shows."""
    larger, steps = larger_is_better(main), None
    metric = f"{'max' if larger else 'min'} {main}"
    names = [(run["method"], run["algorithm"], run.get("lr")) for run in (*table.rows(), *table.absent)]
    methods, labels = ({one[k] for one in names} for k in (0, 1))
    if len(labels) > len(methods):
        by_step = "lr" in table and len({(method, lr) for method, _, lr in names}) == len(labels)
        over, what = ("lr", "step") if by_step else ("algorithm", "settings")
        note = "lowest, highest: the best step is at an edge of the grid, and a better one may lie beyond it."
        caption = f"{where}The {what} with the best {main} at the end, in the mean over {_seeds(set(table.seed.tolist()))}."
        content.best.append(_grid_of(table.best("method", over, metric), _capital(caption), note if by_step else ""))
        steps = _step_curves(table, main, metric, look) if by_step else None
        if len(methods) > 1:  # each at its best
            chosen = table.best("method", "algorithm", metric).algorithm.tolist()
            table, labels = table.where(algorithm=chosen), labels & set(chosen)
    ends = table.best("algorithm", (), metric)
    means = dict(zip(ends.algorithm.tolist(), ends["mean"].tolist(), strict=True))
    finite = [label for label in means if math.isfinite(means[label])]
    if len(labels) > 1 and finite:
        against = (max if larger else min)(finite, key=lambda label: means[label])
        differences = table.paired(against, "algorithm", metric, over=())
        note = (
            f"difference, low and high: a label's {main} less that of {against}, seed by seed, and its 95 % interval; p: t "
            "test, p holm: corrected for several comparisons, p rank: signed ranks. With few seeds none of them says much."
        )
        caption = (
            f"{where}{main} at the end of {_seeds(set(table.seed.tolist()))}, against {against}, which is best in the mean."
        )
        told = Table({name: column for name, column in differences.items() if _tells(name, column)})
        content.paired.append(_grid_of(told, caption, note))
    return steps


def _tells(name: str, column: Column) -> bool:
    """Whether a column of paired differences is worth showing: unpaired and tied seeds only where there are any."""
    return name not in ("unpaired", "ties") or bool(column.any())


def _step_curves(table: Table, main: str, metric: str, look: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """What each method ends with at each step."""
    curves = []
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
    return {"metric": main, "over": "lr", "curves": curves}


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
        distinct = list(dict.fromkeys(one[key] for one in flat if key in one))
        lack = sum(key not in one for one in flat)
        if not any(distinct):  # such as the commit of a package that was installed
            continue
        if len(distinct) == 1:
            only = f" (not a setting of {counted(lack, 'other run')})" if lack else ""
            rows.append([key, f"{distinct[0]}{only}"])
        elif len(runs) <= 6:
            told = [f"{run.name}: {one.get(key, 'not a setting of it')}" for run, one in zip(runs, flat, strict=True)]
            rows.append([key, "\n".join(told)])
        else:
            shown = ", ".join(value or "empty" for value in distinct[:20])
            only = f"; not a setting of {counted(lack, 'run')}" if lack else ""
            rows.append([key, f"{len(distinct)} values: {shown}{', ...' if len(distinct) > 20 else ''}{only}"])
    return Grid(caption or "Everything that determines the runs.", ["setting", "value"], rows)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = "none" if value is None else str(value)
    return flat
