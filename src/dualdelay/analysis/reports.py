"""What a person reads at the end: tables and one sentence."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ..engine.delays import used_in
from ..engine.result import Run
from ..runs.names import label, parameters
from ..runs.sweep import Sweep
from ..theory.advice import KAPPA, Advice, Later
from ..theory.constants import Constants

_NAMED = 4  # methods that the sentence names beside the best
_MOST_WORKERS = 30  # rows in the table of workers
_UNLIKE = 10  # rows in that of unlike workers
_STATES = {"left": "left", "frozen": "frozen", "joined": "present", "thawed": "present"}  # of a worker after an event


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}g}"


def _grid(title: str, first: str, *columns: str) -> Grid:
    """A table; its texts are a user's, so brackets in them are no markup."""
    grid = Grid(box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), collapse_padding=True, pad_edge=False)
    grid.title = Text(title, style="table.title")
    grid.add_column(Text(first), no_wrap=True, overflow="fold")
    for column in columns:
        grid.add_column(Text(column), justify="right", no_wrap=True)
    return grid


def print_run(run: Run, console: Console) -> None:
    """How a run ended, and what each of its workers did."""
    summary, trace = run.summary(), run.trace
    grid = _grid(f"{label(run.algorithm)}: ended by {run.ended} at time {run.time:g}", "", "")
    grid.show_header = False
    for name in ("objective", "pooled_loss", "accuracy", "gradient_norm"):
        grid.add_row(name.replace("_", " "), number(summary.get(name)))
    grid.add_row("updates", f"{run.version:,}")
    grid.add_row("arrivals", f"{len(trace):,}")
    grid.add_row("rejected", f"{run.rejected:,}")
    faults = Counter((event["kind"], event["worker"]) for event in trace.events)
    for kind in ("crashed", "failed"):
        if count := sum(many for (name, _), many in faults.items() if name == kind):
            grid.add_row(kind, f"{count:,}")
    grid.add_row("tau_max, tau_avg", f"{run.delays.tau_max:,}, {number(run.delays.tau_avg)}")
    grid.add_row("audit of the sum (relative error)", number(run.audit))
    console.print(grid)
    seen = [kind for kind in ("crashed", "failed", "rejected") if any(name == kind for name, _ in faults)]
    states = {event["worker"]: _STATES[event["kind"]] for event in trace.events if event["kind"] in _STATES}
    columns = ("arrivals", "share", "mean seconds", "mean delay", "max delay")
    workers = _grid("workers", "worker", *columns, *seen, *(["state"] if states else []))
    delay = used_in(trace) - trace.version
    for worker in range(min(run.state.workers, _MOST_WORKERS)):
        mine = trace.worker == worker
        count = int(mine.sum())
        cells = ["0", "0.0%", "-", "-", "-"]
        if count:
            times = (number(float(trace.seconds[mine].mean())), number(float(delay[mine].mean())), str(delay[mine].max()))
            cells = [f"{count:,}", f"{100 * count / len(trace):.1f}%", *times]
        cells += [f"{faults[kind, worker]:,}" for kind in seen]
        workers.add_row(str(worker), *cells, *([states.get(worker, "present")] if states else []))
    if run.state.workers > _MOST_WORKERS:
        workers.caption = f"and {run.state.workers - _MOST_WORKERS:,} more"
    console.print(workers)


def print_rows(title: str, rows: Sequence[Sequence[str]], console: Console) -> None:
    """A table of texts, a line of headings first."""
    grid = _grid(title, *rows[0])
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    console.print(grid)


def print_comparison(sweep: Sweep, console: Console) -> None:
    """One line for each method: means over the seeds, with the standard deviation where there are several.

    Methods on different problems or at different speeds stand in tables of their own: their objectives are not comparable.
    """
    settings = sweep.settings()
    for setting, methods in settings.items():
        times = sorted({run.time for runs in methods.values() for run in runs if run is not None})
        if not times:
            continue
        when = f"at time {times[0]:g}" if len(times) == 1 else f"at the end (times {times[0]:g} to {times[-1]:g})"
        some = any(run is None for runs in methods.values() for run in runs)
        heads = ("updates", "objective F", "pooled loss", "accuracy", "tau_max", "audit", *(["runs"] if some else []))
        grid = _grid(f"{setting}: {when}" if len(settings) > 1 else when, "method", *heads)
        for name, runs in methods.items():
            rows = [run.summary() for run in runs if run is not None]
            if not rows:
                grid.add_row(Text(name), *["-"] * 6, f"0 of {len(runs)}")
                continue
            cells = [_spread([row[key] for row in rows]) for key in ("updates", "objective", "pooled_loss", "accuracy")]
            audits = [row["audit"] for row in rows if row["audit"] is not None]
            cells += [f"{max(row['tau_max'] for row in rows):,}", number(max(audits), 1) if audits else "-"]
            grid.add_row(Text(name), *cells, *([f"{len(rows)} of {len(runs)}"] if some else []))
        console.print(grid)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return number(float(np.mean(values)))
    return f"{number(float(np.mean(values)))} ±{number(float(np.std(values, ddof=1)), 2)}"


def sentence(sweep: Sweep) -> str:
    """What is to be seen in a comparison's figure, from its numbers: a sentence for each problem and speeds."""
    settings = sweep.settings()
    said = [_ranking(methods, f"for {setting} " if len(settings) > 1 else "") for setting, methods in settings.items()]
    return "\n".join(f"To be seen: {one}" for one in said if one)


def _ranking(methods: Mapping[str, Sequence[Run | None]], where: str) -> str:
    """Who is lowest in the mean over all seeds; a method some of whose runs failed is not ranked by the others."""
    final, partly = {}, []
    for name, runs in methods.items():
        ends = [math.nan if run is None else float(run.metrics.objective[-1]) for run in runs]
        if all(map(math.isfinite, ends)):
            final[name] = float(np.mean(ends))
        else:
            partly.append(f"{name} failed or diverged in {sum(not math.isfinite(end) for end in ends)} of {len(ends)} runs")
    order = sorted(final, key=lambda name: final[name])
    partly += [f"{name} ends above where it began" for name in order if _rose(methods[name], final[name])]
    rest = f" {'; '.join(partly)}." if partly else ""
    if not order:
        return f"{where}no method came to a finite objective in all its runs.{rest}"
    best = order[0]
    if len(order) == 1 and not partly:
        return f"{where}{best} ends with objective {number(final[best])}."
    updates = {name: f"{np.mean([run.version for run in methods[name] if run is not None]):,.0f}" for name in order}
    others = "; ".join(f"{name} {number(final[name])} after {updates[name]}" for name in order[1 : 1 + _NAMED])
    more = len(order) - 1 - _NAMED
    times = {f"{run.time:g}" for name in order for run in methods[name] if run is not None}
    when = f"at time {times.pop()}" if len(times) == 1 else "at the end (their times differ)"
    then = f" (then {others} updates{f', and {more} more' if more > 0 else ''})" if others else ""
    return (
        f"{where}{when} {best} has the lowest objective, {number(final[best])} after {updates[best]} updates{then}; lower "
        f"is better, and F counts every worker the same.{rest}"
    )


def _rose(runs: Sequence[Run | None], end: float) -> bool:
    """Whether a method's objective is larger in the end than at first."""
    return end > float(np.mean([run.metrics.objective[0] for run in runs if run is not None]))


def print_advice(advice: Advice, commands: Sequence[str], missing: Sequence[str], console: Console) -> None:
    """How unlike and how stale, what suits and why, where to start, what to type next, and what is not known."""
    _print_unlike(advice, console)
    if advice.staleness:
        rows = [["wait_for", "updates/s", "gradients/s", "tau_avg", "tau_max", "time spent waiting"]]
        for row in advice.staleness:
            mark = " *" if row.wait_for == advice.wait_for else ""
            rates = (number(row.updates_per_second, 3), number(row.arrivals_per_second, 3))
            rows.append(
                [f"{row.wait_for}{mark}", *rates, number(row.tau_avg, 3), f"{row.tau_max:,}", f"{row.idle_share:.0%}"]
            )
        print_rows("how stale gradients will be (* advised)", rows, console)
    title = {"dude": "DuDe", "vanilla": "vanilla ASGD", "sync": "synchronous SGD"}[advice.method]
    waiting = f" with wait_for={advice.wait_for}" if advice.method == "dude" and advice.staleness else ""
    console.print(f"What suits: {title}{waiting}.")
    for reason in advice.reasons:
        console.print(f"- {reason}")
    made, steep = advice.chosen, math.nan if advice.constants is None else advice.constants.smoothness.value
    delay = "the mean delay of equally fast workers" if made is None else f"the mean delay, {number(made.tau_avg, 3)}"
    over = f" and the smoothness, {number(steep, 3)}" if steep > 1 else ""
    console.print(f"\nWhere to start: lr={advice.lr:g}: {KAPPA:g} over {delay}{over}. Try a quarter and four times it too.")
    if math.isfinite(advice.theory_lr):
        since = f" from {advice.horizon:,.0f} updates on" if math.isfinite(advice.horizon) else " never, for lack of noise"
        console.print(
            f"The theorem's step for {advice.updates:,} updates is {number(advice.theory_lr, 2)}, {advice.smaller:,.0f} "
            f"times smaller, but proved as far as the measured constants hold. (As printed it holds{since}.)"
        )
    for text, command in zip(("Next:", "To check the choice:"), commands, strict=False):
        console.print(f"\n{text}\n  {command}")
    console.print()
    for sentence in (*(f"not known: {text}" for text in missing), *(f"note: {text}" for text in advice.notes)):
        console.print(sentence)


def _print_unlike(advice: Advice, console: Console) -> None:
    """How far each worker's gradient is from the mean gradient, in lengths of that, and how noisy its minibatches are."""
    found, later, free = advice.constants, advice.later, next(iter(advice.staleness), None)
    if found is None or not math.isfinite(found.gradient.value):
        return
    seen: list[Constants | Later] = [found, *([] if later is None else [later])]
    length = max(one.gradient.value for one in seen) or math.nan
    unlike = [[math.sqrt(each.value) / length for each in one.heterogeneity] for one in seen]
    noise = [math.sqrt(each.value) / length for each in found.variances]
    order = sorted(range(advice.workers), key=lambda worker: -max(one[worker] for one in unlike))[:_UNLIKE]
    heads = ["worker", "unlike at first", *(["unlike later"] if len(seen) > 1 else []), "noise"]
    rows = [[*heads, *(["share of gradients", "mean delay"] if free is not None else [])]]
    for worker in sorted(order):
        cells = [str(worker), *(number(one[worker], 2) for one in unlike), number(noise[worker], 2)]
        cells += [f"{free.shares[worker]:.1%}", number(free.arrival_mean[worker], 3)] if free is not None else []
        rows.append(cells)
    rest = advice.workers - len(order)
    where = f"{advice.workers} workers{f', the {len(order)} most unlike' if rest else ''}"
    print_rows(f"how unlike the workers are: {where}", rows, console)
    means = [math.sqrt(sum(value**2 for value in one) / len(one)) for one in unlike]
    after = f", and {number(means[1], 2)} later" if len(means) > 1 else ""
    noisy = math.sqrt(sum(value**2 for value in noise) / len(noise))
    console.print(
        f"In lengths of the mean gradient: workers' own gradients are {number(means[0], 2)} away from it at first{after} "
        f"(0: all alike), and a minibatch's noise is {number(noisy, 2)}.\n"
    )


def print_kind(heading: str, registry: Mapping[str, Any], console: Console) -> None:
    """The names of one kind, each with its settings and its first sentence."""
    grid = _grid(heading, "name")
    grid.add_column("settings")
    grid.add_column("what it does")
    for name, made in registry.items():
        known = _nameable(made)
        shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in known)
        about = (inspect.getdoc(made) or "").split("\n\n")[0].replace("``", "")
        grid.add_row(*map(Text, (name, shown, about)))
    console.print(grid)


def print_one(name: str, made: Any, console: Console) -> None:
    """What one thing does and each of its settings."""
    console.print(f"{name}\n\n{inspect.getdoc(made)}\n".replace("``", ""))
    notes = setting_notes(made)
    for parameter in _nameable(made):
        default = "needed" if parameter.default is parameter.empty else f"default {parameter.default}"
        note = notes.get(parameter.name, "")
        if note:
            console.print(f"  {parameter.name} ({default}): {note}")
    if hasattr(made, "away"):
        console.print(f"\nA worker that is not there: {made.away}.")
    needed = [p.name for p in parameters(made).values() if p.default is p.empty]
    text = f"{name}[{','.join(f'{key}=...' for key in needed)}]" if needed else name
    console.print(f"\nWrite it as '{text}'{'' if needed else f', or with settings as {name}[setting=value,...]'}.")


def _nameable(made: Any) -> list[inspect.Parameter]:
    """The settings that a text can give, in their order: not those that are kept out of a folder's record too."""
    kept = {f.name for f in dataclasses.fields(made) if not f.repr} if dataclasses.is_dataclass(made) else set()
    return [parameter for name, parameter in parameters(made).items() if name not in kept]


def setting_notes(made: Any) -> dict[str, str]:
    """The sentence under each field of a dataclass and of those it extends."""
    notes: dict[str, str] = {}
    for base in reversed(made.__mro__):
        if dataclasses.is_dataclass(base) and isinstance(base, type):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    notes[ast.unparse(field.target)] = " ".join(str(text.value.value).replace("``", "").split())
    return notes
