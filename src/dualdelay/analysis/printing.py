"""What is printed at the end of a command: tables and sentences."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ..core.errors import BadInput
from ..engine.delays import used_in
from ..engine.metrics import NAMES
from ..engine.result import Run
from ..engine.table import Table
from ..runs.names import label, parameters
from ..runs.outcome import state_of
from ..runs.sweep import Sweep
from ..simulation.speeds import SpeedModel
from ..theory.advice import KAPPA, Advice, Later
from ..theory.constants import Constants, Estimate
from ..theory.cost import Cost
from ..theory.sizing import Size
from .figures import DIVERGED

_MOST_RANKED = 4  # methods that the sentence about a comparison names beside the best
_MOST_WARNINGS = 6  # methods of which it says what is wrong with their runs
_USUAL = ("objective", "pooled_loss", "accuracy", "gradient_norm")  # metrics, before those of the user's own
_MOST_WORKERS = 30  # rows in the table of a run's workers
_MOST_HETEROGENEOUS = 10  # rows in the table of the most heterogeneous workers
_STATES = {"left": "left", "frozen": "frozen", "joined": "present", "thawed": "present"}  # of a worker after an event


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}g}"


def counted(count: int, noun: str) -> str:
    """So many of something."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ending(run: Run) -> str:
    """How a run ended, in words, or that it goes on."""
    return "under way" if state_of(run) == "under way" else run.ending


def measured(summaries: Sequence[Mapping[str, Any]], metrics: Iterable[str]) -> list[str]:
    """Those metrics, the usual ones first, that at least one run has a value of at its end."""
    known = [name for name in dict.fromkeys(metrics) if name not in NAMES]
    return [name for name in (*_USUAL, *known) if any(number(one.get(name)) != "-" for one in summaries)]


def _spread(values: Sequence[float]) -> str:
    """The mean over seeds, with the standard deviation where there are several."""
    mean = number(float(np.mean(values)))
    if len(values) == 1 or not np.isfinite(values).all():
        return mean
    return f"{mean} ±{number(float(np.std(values, ddof=1)), 2)}"


def _mean_count(counts: Sequence[int]) -> str:
    """The mean of whole numbers, such as updates, with all its digits before the point."""
    mean = float(np.mean(counts))
    return f"{mean:,.0f}" if mean.is_integer() else f"{mean:,.1f}"


def _spread_of_counts(counts: Sequence[int]) -> str:
    more = f" ±{number(float(np.std(counts, ddof=1)), 2)}" if len(counts) > 1 else ""
    return f"{_mean_count(counts)}{more}"


def _grid(title: str, first: str, *columns: str) -> Grid:
    """A table whose title and headings are shown literally: brackets in a user's texts are no markup."""
    grid = Grid(box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), collapse_padding=True, pad_edge=False)
    grid.title = Text(title, style="table.title")
    grid.add_column(Text(first), no_wrap=True, overflow="fold")
    for column in columns:
        grid.add_column(Text(column), justify="right", no_wrap=True)
    return grid


def print_rows(
    title: str, rows: Sequence[Sequence[str]], console: Console, caption: str | None = None, *, header: bool = True
) -> None:
    """Print a table of texts whose first row is the headings; without those it is a list of facts, which read from left."""
    grid = _grid(title, *rows[0])
    grid.caption, grid.show_header = caption, header
    for column in grid.columns[1:] if not header else ():
        column.justify, column.no_wrap = "left", False
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    console.print(grid)


def print_run(run: Run, console: Console, name: str = "") -> None:
    """Print how a run ended, and what each of its workers did; the method's name is needed where the run has none."""
    summary, trace, events = run.summary(), run.trace, Counter(event["kind"] for event in run.trace.events)
    metrics = ["objective"] if not len(run.metrics) else measured([summary], run.metrics) or ["objective"]
    facts = {name.replace("_", " "): number(summary.get(name)) for name in metrics}
    facts |= {"updates": f"{run.version:,}", "arrivals": f"{len(trace):,}", "rejected": f"{run.rejected:,}"}
    if run.gradients != len(trace):
        facts["gradients in all jobs"] = f"{run.gradients:,}"
    facts["MB sent up, down"] = f"{number(run.bytes_up / 1e6)}, {number(run.bytes_down / 1e6)}"
    facts |= {kind: f"{events[kind]:,}" for kind in ("crashed", "failed") if events[kind]}
    facts["tau_max, tau_avg"] = f"{run.delays.tau_max:,}, {number(run.delays.tau_avg)}"
    facts |= {"audit of the sum (relative error)": number(run.audit)} if run.audit is not None else {}
    grid = _grid(f"{name or label(run.algorithm)}: {ending(run).removesuffix(' by time')} at time {run.time:g}", "", "")
    grid.show_header = False
    for fact in facts.items():
        grid.add_row(*fact)
    console.print(grid)
    _print_workers(run, [kind for kind in ("crashed", "failed", "rejected") if events[kind]], console)
    ends = [float(run.metrics.objective[k]) for k in (0, -1)] if len(run.metrics) else [0.0, 0.0]
    if 0 < ends[0] < ends[1] / DIVERGED:
        began, ended = map(number, ends)
        console.print(f"note: it diverged: the objective began at {began} and ended at {ended}; try a smaller lr.")


def _print_workers(run: Run, faults: Sequence[str], console: Console) -> None:
    """Print a line for each worker: arrivals, times, delays, these kinds of faults, and its state if one ever left.

    Of sites it has their names, and what each has sent and was sent.
    """
    trace, workers = run.trace, run.state.workers
    events = Counter((event["kind"], event["worker"]) for event in trace.events)
    states = {event["worker"]: _STATES[event["kind"]] for event in trace.events if event["kind"] in _STATES}
    delay = used_in(trace) - trace.version
    sites = {event["worker"]: event["text"].partition(" ")[0] for event in trace.events if event["kind"] == "place"}
    sizes = {"MB up": trace.bytes, "MB down": trace.down} if sites else {}
    rows = [["worker", "arrivals", "share", "mean seconds", "mean delay", "max delay", *sizes, *faults, "state"]]
    for worker in range(min(workers, _MOST_WORKERS)):
        own = trace.worker == worker
        cells = [f"{worker} {sites.get(worker, '')}".strip(), "0", "0.0%", "-", "-", "-"]
        if count := int(own.sum()):
            cells[1:] = f"{count:,}", f"{100 * count / len(trace):.1f}%", number(float(trace.seconds[own].mean()))
            cells += number(float(delay[own].mean())), str(delay[own].max())
        cells += [number(float(size[own].sum()) / 1e6) for size in sizes.values()]
        rows.append([*cells, *(f"{events[kind, worker]:,}" for kind in faults), states.get(worker, "present")])
    rows = rows if states else [row[:-1] for row in rows]
    print_rows("workers", rows, console, f"and {workers - _MOST_WORKERS:,} more" if workers > _MOST_WORKERS else None)


def print_comparison(sweep: Sweep, console: Console) -> None:
    """Print one line for each method: means over the seeds, with the standard deviation where there are several.

    Methods on different problems or at different speeds stand in tables of their own: their objectives are not comparable.
    """
    settings, chosen = sweep.settings(), _chosen(sweep, console)
    for setting, methods in settings.items():
        ended = {name: [run for run in runs if run is not None] for name, runs in methods.items()}
        all_ended = [run for runs in ended.values() for run in runs]
        times = sorted({run.time for run in all_ended})
        if not times:
            continue
        when = f"at time {times[0]:g}" if len(times) == 1 else f"at the end (times {times[0]:g} to {times[-1]:g})"
        metrics = measured([run.summary() for run in all_ended], (name for run in all_ended for name in run.metrics))
        metrics = [name for name in metrics if name != "gradient_norm"]
        audited = any(run.audit is not None for run in all_ended)
        heads = ["objective F" if name == "objective" else name.replace("_", " ") for name in metrics]
        rows = [["method", "updates", *heads, "tau_max", *(["audit"] if audited else []), "runs"]]
        for name, runs in methods.items():
            summaries = [run.summary() for run in ended[name]]
            cells = ["-"] * (len(rows[0]) - 2)
            if summaries:
                audits = [summary["audit"] for summary in summaries if summary["audit"] is not None]
                means = [_spread([summary.get(key, math.nan) for summary in summaries]) for key in metrics]
                cells = [_spread_of_counts([summary["updates"] for summary in summaries]), *means]
                cells.append(f"{max(summary['tau_max'] for summary in summaries):,}")
                cells += [number(max(audits), 1) if audits else "-"] if audited else []
            rows.append([name, *cells, f"{len(summaries)} of {len(runs)}"])
        if all(run is not None for runs in methods.values() for run in runs):
            rows = [row[:-1] for row in rows]
        seeds = max(map(len, methods.values()))
        said = [f"mean ± standard deviation of {seeds} seeds"] if seeds > 1 else []
        said += ["audit: the relative error of a kept sum of gradients, if one is kept"] if audited else []
        print_rows(f"{setting}: {when}" if len(settings) > 1 else when, rows, console, "; ".join(said) or None)
        if setting in chosen:
            print_rows("each method at its best settings, and seed by seed", chosen[setting], console)


def _chosen(sweep: Sweep, console: Console) -> dict[str, list[list[str]]]:
    """By problem and speeds, each method at its best settings and its distance to the first method, seed by seed.

    There is nothing to add where no setting is to be chosen and no seed to be compared.
    """
    methods = _methods(sweep)
    first, choosing = methods[0], len({str(names["algorithm"]) for names in sweep.points}) > len(methods)
    places = [name for name in ("problem", "speeds") if name in sweep]
    over = [name for name in sweep.names if name not in (*places, "algorithm", "method", "seed")]
    try:
        best = list(sweep.best([*places, "method"], over).rows())
        apart = list(sweep.paired(first, [*places, "method"], over=over).rows()) if len(best) > 1 else []
    except BadInput as error:  # of runs that are not all there yet
        console.print(f"note: no best settings: {error}")
        return {}
    several, tables = bool(apart) and max(row["seeds"] for row in best) > 1, dict[str, list[list[str]]]()
    if not choosing and not several:
        return {}
    distances = {tuple(row[name] for name in (*places, "method")): row for row in apart}
    for row in best:
        heads = [
            "method",
            *over,
            "objective F",
            *([f"F less {first}'s", "95 %", "better in", "p (Holm)"] if several else []),
        ]
        rows = tables.setdefault(", ".join(str(row[name]) for name in places), [heads])
        std = "" if math.isnan(row["std"]) else f" ±{number(row['std'], 2)}"
        cells = [str(row["method"]), *(_with_edge(row, name, len(over)) for name in over), f"{number(row['mean'])}{std}"]
        other = distances.get(tuple(row[name] for name in (*places, "method")))
        if several and other is None:
            cells += ["-"] * 4
        elif several and other is not None:
            low, high = number(other["low"], 3), number(other["high"], 3)
            span = "-" if low == "-" else f"{low} to {high}"
            cells += [number(other["difference"], 3), span, f"{other['wins']} of {other['n']}", number(other["p_holm"], 2)]
        rows.append(cells)
    return tables


def _methods(sweep: Sweep) -> list[str]:
    """The names of the methods in their order, those of which every run failed among them."""
    found = {str(run["algorithm"]): str(run["method"]) for run in (*sweep.absent, *sweep.rows())}
    return list(dict.fromkeys(found[str(names["algorithm"])] for names in sweep.points))


def _with_edge(row: Mapping[str, Any], name: str, count: int) -> str:
    """A chosen setting, and whether it is the lowest or highest that was tried."""
    value = row[name]
    edges = dict(part.rsplit(" ", 1) for part in row["edge"].split(", ") if part) if count > 1 else {name: row["edge"]}
    edge = f" ({edges[name]})" if edges.get(name) in ("lowest", "highest") else ""
    return f"{number(value) if isinstance(value, float) else value}{edge}"


def sentence(sweep: Sweep) -> str:
    """What a comparison shows, in numbers: a line for each combination of problem and speeds."""
    settings, lines, first = sweep.settings(), [], _methods(sweep)[0]
    for setting, methods in settings.items():
        ends = {name: [End.of(run, "" if run is not None else "failed") for run in runs] for name, runs in methods.items()}
        ranked = ranking(ends, f"for {setting} " if len(settings) > 1 else "")
        names = next(names for names in sweep.points if str(names["algorithm"]) in methods and _setting(names) == setting)
        table = sweep.where(**{name: names[name] for name in _SETTING if name in names})
        lines.append(" ".join([f"Result: {ranked}", *caveats(table, first)]))
    return "\n".join(lines)


_SETTING = ("problem", "speeds")


def _setting(names: Mapping[str, Any]) -> str:
    return ", ".join(str(names[name]) for name in _SETTING if name in names)


def caveats(table: Table, against: str = "") -> list[str]:
    """What a ranking of methods does not say: how sure it is, and whether better settings may lie beyond those tried.

    ``against`` is the method that a table beside it compares the others with; by default the best. An interval that both
    have then has the same signs.
    """
    over = [name for name in table.names if name not in (*_SETTING, "algorithm", "method", "seed")]
    try:
        best = sorted(table.best("method", over).rows(), key=lambda row: float(row["mean"]))
        if len(best) < 2:
            return []
        one, other = (best[k]["method"] for k in ((0, 1) if best[1]["method"] == against else (1, 0)))
        apart = {row["method"]: row for row in table.paired(other, "method", over=over).rows()}[one]
    except BadInput:  # of runs that are not all there yet
        return []
    low, high = apart["low"], apart["high"]
    if apart["n"] == 1:
        doubt = "With one seed nothing is known of chance: --seeds 0 1 2 or more."
    elif low > 0 or high < 0:
        doubt = ""
    else:
        span = f" (95 % interval of {one}'s objective less {other}'s: {number(low, 3)} to {number(high, 3)})"
        span = span if math.isfinite(low) and math.isfinite(high) else ""
        doubt = f"The {apart['n']} seeds do not separate {best[0]['method']} from {best[1]['method']}{span}."
    edges = [row["method"] for row in best if any(word in row["edge"] for word in ("lowest", "highest"))]
    beyond = f"Better settings may lie beyond those that were tried for {', '.join(edges)}." if edges else ""
    return [text for text in (doubt, beyond) if text]


@dataclass(frozen=True)
class End:
    """How a run of a ranking ended."""

    start: float
    objective: float
    updates: int
    time: float
    state: str  # why it has no end: failed, interrupted, under way or damaged; "" if it has one

    @classmethod
    def of(cls, run: Run | None, state: str) -> End:
        """That of a run, which may be lost."""
        if run is None or not len(run.metrics):
            return cls(math.nan, math.nan, 0, math.nan, state)
        objective = run.metrics.objective
        return cls(float(objective[0]), float(objective[-1]), run.version, run.time, state)


def ranking(methods: Mapping[str, Sequence[End]], where: str = "") -> str:
    """Which methods end lowest in the mean over all seeds; one that lost a run, in whatever way, is not ranked."""
    ranked = {name: runs for name, runs in methods.items() if all(map(_is_sound, runs))}
    warnings = [f"{name} {_what_is_wrong(runs)}" for name, runs in methods.items() if name not in ranked]
    if len(warnings) > _MOST_WARNINGS:
        warnings[_MOST_WARNINGS:] = [f"and {len(warnings) - _MOST_WARNINGS:,} more are not ranked"]
    starts = {name: float(np.mean([run.start for run in runs])) for name, runs in ranked.items()}
    final = {name: float(np.mean([run.objective for run in runs])) for name, runs in ranked.items()}
    order = sorted(final, key=lambda name: final[name])
    warnings += [f"{name} ends above where it began" for name in order if final[name] > starts[name]]
    rest = f" {'; '.join(warnings)}." if warnings else ""
    rest += " Not all of them have the same number of runs." if len({len(runs) for runs in ranked.values()}) > 1 else ""
    if not order:
        return f"{where}no method reached a finite objective in all its runs.{rest}"
    best, *others = order
    if not others and not warnings:
        return f"{where}{best} ends with objective {number(final[best])}."
    updates = {name: _mean_count([run.updates for run in runs]) for name, runs in ranked.items()}
    then = "; ".join(f"{name} {number(final[name])} after {updates[name]}" for name in others[:_MOST_RANKED])
    more = f", and {len(others) - _MOST_RANKED} more" if len(others) > _MOST_RANKED else ""
    times = {f"{run.time:g}" for runs in ranked.values() for run in runs}
    when = f"at time {times.pop()}" if len(times) == 1 else "at the end (their times differ)"
    then = f" (then {then} updates{more})" if then else ""
    return (
        f"{where}{when} {best} has the lowest objective, {number(final[best])} after {updates[best]} updates{then}; lower "
        f"is better, and F counts every worker the same.{rest}"
    )


def _is_sound(run: End) -> bool:
    return not run.state and math.isfinite(run.objective)


def _what_is_wrong(runs: Sequence[End]) -> str:
    """Why a method is not ranked, in words."""
    states = Counter(run.state or "diverged" for run in runs if not _is_sound(run))
    wrong = states["failed"] + states["diverged"]
    parts = [f"failed or diverged in {wrong} of {counted(len(runs), 'run')}"] if wrong else []
    lost = {state: count for state, count in states.items() if state not in ("failed", "diverged")}
    told = ", ".join(f"{count} {state}" for state, count in lost.items())
    parts += [f"is not ranked (of {counted(len(runs), 'run')} {told})"] if lost else []
    return ", and ".join(parts)


def print_advice(advice: Advice, commands: Sequence[str], missing: Sequence[str], console: Console) -> None:
    """Print heterogeneity and delays, the method that suits and why, a step size, what to type next, what is unknown."""
    _print_heterogeneity(advice, console)
    if advice.staleness:
        rows = [["wait_for", "updates/s", "gradients/s", "tau_median", "tau_avg", "tau_max", "time spent waiting"]]
        for row in advice.staleness:
            rates = (row.updates_per_second, row.arrivals_per_second)
            means = [number(mean, 3) for mean in (*rates, row.tau_median, row.tau_avg)]
            advised = " *" if row.wait_for == advice.wait_for else ""
            rows.append([f"{row.wait_for}{advised}", *means, f"{row.tau_max:,}", f"{row.idle_share:.0%}"])
        print_rows("how stale gradients will be (* advised)", rows, console)
    title = {"dude": "DuDe", "vanilla": "vanilla ASGD", "sync": "synchronous SGD"}[advice.method]
    waiting = f" with wait_for={advice.wait_for}" if advice.method == "dude" and advice.staleness else ""
    console.print(f"What suits: {title}{waiting}.")
    for reason in advice.reasons:
        console.print(f"- {reason}")
    smoothness = math.nan if advice.constants is None else advice.constants.smoothness.value
    over = f" and the smoothness ({number(smoothness, 3)})" if smoothness > 1 else ""
    console.print(
        f"\nWhere to start: lr={advice.lr_by_rule:g}: {KAPPA:g} over {_delay(advice)}{over}. Try a quarter and four "
        "times it too."
    )
    if math.isfinite(advice.theory_lr):
        since = f" from {advice.horizon:,.0f} updates on" if math.isfinite(advice.horizon) else " never, for lack of noise"
        console.print(
            f"The theorem's step for {advice.updates:,} updates is {number(advice.theory_lr, 2)}, {advice.smaller:,.0f} "
            f"times smaller, but proved as far as the measured constants hold. (As printed it holds{since}.)"
        )
    _print_tries(advice, console)
    console.print("\nWhat this rests on:")
    for text in advice.rests_on:
        console.print(f"- {text}")
    for text, command in zip(("Next:", "To check the choice:"), commands, strict=False):
        console.print(f"\n{text}\n  {command}")
    console.print()
    for line in (*(f"not known: {text}" for text in missing), *(f"note: {text}" for text in advice.notes)):
        console.print(line)


def _delay(advice: Advice) -> str:
    """Which delay the step by the rule is over."""
    delay = number(advice.delay, 3)
    if advice.chosen is None:
        return f"the mean delay of equally fast workers ({delay})"
    if advice.method == "vanilla":
        return f"the mean delay of arriving gradients ({delay})"
    weighted = "" if advice.constants is None else ", each worker counted by its curvature"
    return f"the delay ({delay})" if advice.method == "sync" else f"the median delay ({delay}{weighted})"


def _print_tries(advice: Advice, console: Console) -> None:
    """Print what came of the steps that were tried."""
    tries = advice.tries
    if tries is None:
        return
    rows, found = [["lr", "objective"]], math.isfinite(tries.best.objective)
    for run in tries.runs:
        best = " *" if found and run == tries.best else ""
        rows.append([f"{run.lr:g}{best}", number(run.objective) if math.isfinite(run.objective) else "diverged"])
    length = f"time {tries.time:g}" if tries.updates is None else counted(tries.updates, "update")
    console.print()
    print_rows(f"steps that were tried, each until {length} (* best)", rows, console)
    if not tries.tell:
        console.print(f"Such short runs do not tell. Advised, by the rule: lr={advice.lr:g}; give more seconds to try it.")
    elif found:
        console.print(f"Advised: lr={advice.lr:g}. These are single runs: a step half or twice as long may be as good.")
    else:
        console.print(f"Every step that was tried diverged. Advised: lr={advice.lr:g} or less.")
    if tries.share < 1:
        console.print(
            f"Each run has {tries.share:.2g} of the length, for the seconds would not have sufficed for all of it. In a "
            "longer run the best step is often smaller."
        )
    if not tries.complete:
        beyond = f", and the best is the {tries.edge} step" if found and tries.edge else ""
        console.print(f"The seconds were over after {counted(len(tries.runs), 'run')}{beyond}: give more to try further.")


def _print_heterogeneity(advice: Advice, console: Console) -> None:
    """Print how far each worker's gradient is from the mean gradient, in lengths of that, and its minibatches' noise."""
    constants, free = advice.constants, next(iter(advice.staleness), None)
    if constants is None or not math.isfinite(constants.gradient.value):
        return
    models: list[Constants | Later] = [constants] if advice.later is None else [constants, advice.later]
    unit = max(model.gradient.value for model in models) or math.nan

    def lengths(squares: Sequence[Estimate]) -> list[float]:
        return [math.sqrt(square.value) / unit for square in squares]

    def mean(values: Sequence[float]) -> str:
        return number(math.sqrt(sum(value**2 for value in values) / len(values)), 2)

    distances, noise = [lengths(model.heterogeneity) for model in models], lengths(constants.variances)
    order = sorted(range(advice.workers), key=lambda worker: -max(values[worker] for values in distances))
    shown = sorted(order[:_MOST_HETEROGENEOUS])
    heads = ["worker", *("distance at first", "distance later")[: len(models)], "noise"]
    rows = [[*heads, *(["share of gradients", "mean delay"] if free is not None else [])]]
    for worker in shown:
        cells = [str(worker), *(number(values[worker], 2) for values in (*distances, noise))]
        cells += [f"{free.shares[worker]:.1%}", number(free.arrival_mean[worker], 3)] if free is not None else []
        rows.append(cells)
    most = f", the {len(shown)} most heterogeneous" if len(shown) < advice.workers else ""
    print_rows(f"how heterogeneous the workers are: {advice.workers} workers{most}", rows, console)
    later = f", and {mean(distances[1])} later" if len(models) > 1 else ""
    console.print(
        f"In lengths of the mean gradient: workers' own gradients are {mean(distances[0])} away from it at first{later} "
        f"(0: homogeneous), and a minibatch's noise is {mean(noise)}.\n"
    )


def print_kind(heading: str, registry: Mapping[str, Any], console: Console) -> None:
    """Print the names in a registry, each with its settings and its first sentence."""
    grid = _grid(heading, "name")
    grid.add_column("what it does")
    grid.add_column("settings")
    for name, thing in registry.items():
        given = [parameter for parameter in _nameable(thing) if not _of_the_problem(thing, parameter)]
        settings = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in given]
        first = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("``", "")
        grid.add_row(*map(Text, (name, " ".join(first.split()), ", ".join(settings))))
    console.print(grid)


def print_one(name: str, thing: Any, console: Console) -> None:
    """Print what a method, problem, speed model or fleet does, and each of its settings."""
    console.print(f"{name}\n\n{inspect.getdoc(thing)}\n".replace("``", ""))
    notes = _setting_notes(thing)
    for parameter in _nameable(thing):
        if parameter.name in notes:
            default = "needed" if parameter.default is parameter.empty else f"default {parameter.default}"
            default = "taken from the problem" if _of_the_problem(thing, parameter) else default
            console.print(f"  {parameter.name} ({default}): {notes[parameter.name]}")
    if hasattr(thing, "away"):
        console.print(f"\nA worker that is away: {thing.away or 'refused, for the method has no rule for it'}.")
    needed = [p.name for p in parameters(thing).values() if p.default is p.empty and not _of_the_problem(thing, p)]
    text = f"{name}[{','.join(f'{key}=...' for key in needed)}]" if needed else name
    console.print(f"\nWrite it as '{text}'{'' if needed else f', or with settings as {name}[setting=value,...]'}.")


def _of_the_problem(thing: Any, parameter: inspect.Parameter) -> bool:
    """Whether a setting can be left out on the shell, where the problem decides: the workers of a speed model."""
    return isinstance(thing, type) and issubclass(thing, SpeedModel) and parameter.name == "n"


def _nameable(thing: Any) -> list[inspect.Parameter]:
    """The settings that can be written as text, in their order; the others are left out of a run's config, too."""
    hidden = {f.name for f in dataclasses.fields(thing) if not f.repr} if dataclasses.is_dataclass(thing) else set()
    return [parameter for name, parameter in parameters(thing).items() if name not in hidden]


def _setting_notes(thing: Any) -> dict[str, str]:
    """The docstring under each field of a dataclass, of its base classes and of the small values among its settings."""
    notes: dict[str, str] = {}
    groups = {type(parameter.default) for parameter in inspect.signature(thing).parameters.values()}
    for base in (*groups, *reversed(getattr(thing, "__mro__", ()))):
        if dataclasses.is_dataclass(base) and isinstance(base, type):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    first = inspect.cleandoc(str(text.value.value)).split("\n\n")[0]  # the rest is for authors of methods
                    notes[ast.unparse(field.target)] = " ".join(first.replace("``", "").split())
    return notes


_LIMITS = {
    "server": "the server's process: its passes over the weights and its messages",
    "shard": "a shard's process: its passes over its slice and its messages",
    "head": "the head's process: its decisions, and a call for every gradient",
    "lines to the server": "the line to the server, where gradients arrive",
    "lines from the server": "the line from the server, where models leave",
    "cores": "the cores of the machine that most processes share",
    "workers": "the workers: their gradients, copies and messages",
}


_PAGE = 160  # columns, in which the widest table fits
# what is left to do where no single change is enough
_TO_FIT = {
    "server": "put several of them together, or find a machine with more memory.",
    "shard": "put several of them together, with more shards, or find machines with more memory.",
    "head": "it reads all weights at once, whatever the number of shards, and needs a machine with so much memory.",
    "worker": "it holds a model, a gradient and a message, whatever the server does, and needs a machine for them.",
}


def _too_large(kind: str, cost: Cost) -> bool:
    """Whether a kind of process, or what does its work in another plan, has too little memory."""
    return (cost.server.kind if kind in ("server", "shard") else kind) in cost.too_large


def in_bytes(size: float) -> str:
    """So many bytes, in the unit that suits."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def in_seconds(seconds: float) -> str:
    """A time, in the unit that suits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs"


def size_as_text(size: Size) -> str:
    """The page of ``print_size``, wide enough for its tables."""
    console = Console(width=_PAGE, file=io.StringIO())
    with console.capture() as page:
        print_size(size, console)
    return page.get()


def print_size(size: Size, console: Console) -> None:
    """Print what a run will take: each kind of process, what an update waits for, and what could be done otherwise."""
    cost, plan = size.cost, size.cost.plan
    what = f"{size.method}, {plan.weights:,.4g} weights, {counted(plan.workers, 'worker')}"
    what += f", {counted(plan.shards, 'shard')}" if plan.shards else ""
    what += f", lines of {in_bytes(plan.bandwidth)}/s" if plan.bandwidth is not None and plan.apart else ""
    rows = [["process", "how many", "memory at its peak", "in/update", "out/update", "processor/update", "busy"]]
    for process in cost.processes:
        traffic = [in_bytes(process.bytes_in), in_bytes(process.bytes_out), in_seconds(process.seconds)]
        rows.append([process.kind, f"{process.count:,}", in_bytes(process.peak), *traffic, f"{process.busy:.0%}"])
    print_rows(what, rows, console)
    for process in cost.processes:
        parts = sorted(process.memory.items(), key=lambda part: -part[1])
        console.print(f"{process.kind}: " + ", ".join(f"{in_bytes(value)} {name}" for name, value in parts))
    limits = sorted(cost.limits.items(), key=lambda limit: -limit[1])
    console.print()
    print_rows("an update takes at least", [["of", "seconds"], *([_LIMITS[k], in_seconds(v)] for k, v in limits)], console)
    rates = f"{number(cost.updates_per_second, 3)} updates and {number(cost.gradients_per_second, 3)} gradients a second"
    console.print(f"So {rates}. The bottleneck is {_LIMITS[cost.bottleneck]}.")
    if cost.bottleneck == "workers":
        parts = sorted(((name, seconds) for name, seconds in cost.turn.items() if seconds), key=lambda part: -part[1])
        turn = ", ".join(f"{in_seconds(seconds)} {name}" for name, seconds in parts)
        console.print(f"From one gradient of a worker to its next: {turn}.")
    for process in cost.processes:
        if process.kind in cost.too_large and plan.memory_per_process is not None:
            takes, has = in_bytes(process.peak), in_bytes(plan.memory_per_process)
            console.print(f"It does not fit: a {process.kind} takes {takes}, and has {has}.")
    if size.changes:
        head = ["change", "gains", "server or shard", "worker", "updates/s", "gradients/s", "then waits for"]
        rows = [head if plan.memory_per_process is None else [*head, "too large"]]
        for change in size.changes:
            then, gains = change.cost, ", ".join(change.gains)
            rates_then = [number(then.updates_per_second, 3), number(then.gradients_per_second, 3)]
            memory = [in_bytes(process.peak) for process in (then.server, then.processes[-1])]
            row = [change.shell, gains, *memory, *rates_then, then.bottleneck]
            rows.append(row if plan.memory_per_process is None else [*row, " and ".join(then.too_large) or "nothing"])
        console.print()
        print_rows("what could be done otherwise, each by itself", rows, console)
    for process in cost.processes:
        if process.kind in cost.too_large and all(_too_large(process.kind, change.cost) for change in size.changes):
            console.print(f"No single change lets a {process.kind} fit: {_TO_FIT[process.kind]}")
    if size.why_no_shards:
        console.print(f"No shards are proposed: {size.why_no_shards}")
    cores = f"{size.machine.cores:g} core{'s' if size.machine.cores != 1 else ''}"
    console.print(
        f"Machines have {cores} (--cores), with constants {size.machine.origin}. The method's own arithmetic was timed "
        "now: figures may differ by a tenth another time. Not counted: data, activations, checkpoints, evaluations."
    )
