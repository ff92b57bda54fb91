"""dualdelay advise: which method, step size and wait_for suit a problem and its workers, on one page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..analysis.figures import draw_waiting
from ..analysis.printing import print_advice
from ..core import Problem
from ..core.errors import MOST, BadInput, DualDelayError, require_path, require_positive, require_whole
from ..runs.names import label, parse, rebuild
from ..runs.progress import SweepProgress
from ..simulation.speeds import SpeedModel
from ..storage.folder import Folder
from ..theory.advice import Advice
from ..theory.advice import advise as advice_for
from ..theory.staleness import measured, per_job, recorded_trace
from ..theory.tries import Report, round_to
from . import shared
from .flags import DEFAULT_PROBLEM, DEFAULT_SPEEDS, Advise

_UNKNOWN = "unknown"  # the speeds of real workers that have not run yet
_REAL = "--fleet ray"
_ROW = ("wait_for", "updates_per_second", "arrivals_per_second", "tau_median", "tau_avg", "tau_max", "idle_share")


@dataclass
class _Case:
    """A problem and speeds to advise on, as far as they could be built, and the flags that name them."""

    seed: int = 0
    problem: Problem | None = None
    speeds: SpeedModel | None = None
    x: Tensor | None = None  # where a run starts
    later: Tensor | None = None  # a model from further on
    flags: str = ""  # of the problem and of the speeds or the fleet; empty if one of them has no name
    errors: list[str] = field(default_factory=list)  # what could not be measured, and why
    wrong: list[str] = field(default_factory=list)  # those of them that are mistakes in what was given
    notes: list[str] = field(default_factory=list)

    def mistake(self, text: str) -> None:
        """Note what could not be measured because of what was given."""
        self.errors.append(text)
        self.wrong.append(text)


def advise(flags: Advise) -> None:
    """Measure, and recommend a method, a step and a wait_for."""
    run, updates, time, json = flags.run, flags.updates, flags.time, flags.json
    if updates is not None:
        require_whole("updates", updates, 1)
    if time is not None:
        require_positive("time", time, MOST)
    if flags.try_seconds is not None:
        require_positive("try", flags.try_seconds, MOST)
    for name, path in (("run", run), ("folder", flags.folder)):
        if path is not None:
            require_path(name, path)
    if run is not None and flags.speeds is not None:
        raise BadInput(f"the run in {run} has times of its own; leave out --speeds.")
    shared.import_all(flags.imports)
    console = shared.make_console(json)
    with SweepProgress("advise") as report, _ticking(report) as ticks:
        case = _described(flags.problem, flags.speeds, flags.seed) if run is None else _recorded(run, flags.problem)
        if case.problem is None and case.speeds is None:
            raise BadInput(" ".join(case.errors))
        if flags.try_seconds is not None:
            _require_triable(case)
        advice = advice_for(
            case.problem, case.speeds, x=case.x, later=case.later, updates=updates, time=time, seed=case.seed, report=ticks
        )
        if flags.try_seconds is not None:
            advice = _tried(advice, case, flags.try_seconds, time, ticks)
    advice = replace(advice, notes=(*case.notes, *advice.notes))
    missing = [*case.errors, *advice.missing]
    commands = _commands(advice, case, updates, time)
    print_advice(advice, commands, missing, console)
    figure = None
    if advice.staleness:
        path = (flags.folder or shared.free_folder("advise")) / "advise.png"
        chosen = f"{advice.method}, wait_for={advice.wait_for}, lr={advice.lr:g}"
        caption = f"{advice.workers} workers. Advised: {chosen}."
        figure = shared.print_figure(lambda: draw_waiting(advice.staleness, path, caption), console)
    if flags.try_seconds is None and case.problem is not None and advice.chosen is not None:
        console.print("To try a few steps for a minute, and be told which is best, add: --try 60")
    shared.finish(json, "advise", **_values(advice), missing=missing, commands=commands, figure=figure)
    if case.wrong:
        raise shared.Incomplete(case.wrong[0])


def _require_triable(case: _Case) -> None:
    """Refuse to try steps where there is nothing to simulate; a mistake in what was given is told by itself."""
    if not case.wrong and (case.problem is None or case.speeds is None):
        raise BadInput(f"--try needs a problem and the speeds of its workers, but {case.errors[0]} Or leave out --try.")


def _tried(advice: Advice, case: _Case, seconds: float, time: float | None, report: Report) -> Advice:
    """The advice after trying some steps, if that is possible."""
    if case.problem is None or case.speeds is None:
        return advice
    try:
        if advice.chosen is None:
            raise BadInput("the workers' delays are not known.")
        return advice.after_trying(case.problem, case.speeds, seconds, time=time, x=case.x, seed=case.seed, report=report)
    except DualDelayError as error:
        case.mistake(f"no steps could be tried: {error}")
        return advice


def _described(problem: str | None, speeds: str | None, seed: int) -> _Case:
    """The case that two texts name; one of them may be wrong."""
    problem, speeds = problem or DEFAULT_PROBLEM, speeds or DEFAULT_SPEEDS
    pace = _REAL if speeds == _UNKNOWN else f"--speeds '{speeds}'"
    case = _Case(seed, flags=f"--problem '{problem}' {pace}")
    try:
        case.problem = shared.make_problem(problem, seed)
    except DualDelayError as error:
        case.mistake(f"the problem could not be measured: {error}")
    if speeds == _UNKNOWN:
        case.errors.append(
            "how fast real workers are is not known before they have run: train for a minute, and give its folder "
            "(dualdelay advise --run FOLDER)."
        )
        return case
    try:
        if case.problem is None:
            case.speeds = parse("speeds", speeds)
        else:
            case.speeds = per_job(shared.make_speeds(speeds, case.problem.workers, seed), case.problem)
    except DualDelayError as error:
        case.mistake(f"delays could not be measured: {error}")
    return case


def _recorded(path: Path, problem: str | None) -> _Case:
    """The case of a recorded run, whose last model is the one from further on; the user's own problem is given."""
    folder = Folder(path)
    record = folder.record()
    case = _Case(record.seed, x=folder.start())
    if record.optimizer is not None:
        step = record.optimizer["optimizer"]
        name = step["function"] if isinstance(step, dict) else step
        case.notes.append(f"the server of this run steps by {name}: lr is advised for plain SGD, so keep that of {name}")
    try:
        if problem is None:
            case.problem, name = rebuild("problem", record.problem), None
        else:
            case.problem, name = shared.make_problem(problem, record.seed), problem
            if case.problem.fingerprint() != record.fingerprint:
                raise BadInput(f"{problem} is not the problem of the run in {path}; give the one that it was made with.")
        pace = _REAL if record.speeds is None else f"--speeds '{label(rebuild('speeds', record.speeds))}'"
        case.flags = f"--problem '{name or label(case.problem)}' {pace}"
    except DualDelayError as error:  # the user's own class: no command can name it
        if problem is not None:
            raise
        if case.problem is None:
            why = str(error)
            if "name" not in record.problem:
                again = shared.named_again("advise --run", path, record, problem=True)
                why = f"it is your own, and no folder decides what code is run. Name it: {again}"
            case.errors.append(f"the run's problem could not be measured: {why}")
    try:
        if case.problem is not None and folder.result() is not None:
            case.later = case.problem.flat(folder.weights("model"))
        case.speeds = measured(recorded_trace(folder), None if case.problem is None else case.problem.workers)
    except DualDelayError as error:
        case.mistake(f"the run's times could not be measured: {error}")
    return case


def _commands(advice: Advice, case: _Case, updates: int | None, time: float | None) -> list[str]:
    """What to type next: the advised run, and where workers are simulated a comparison that checks the advice."""
    real, chosen = _REAL in case.flags, advice.chosen
    if case.problem is None or (chosen is None and not real):
        return []
    wait = f",wait_for={advice.wait_for}" if advice.method == "dude" and advice.wait_for > 1 else ""
    if not case.flags:
        method = {"dude": "DuDe", "vanilla": "VanillaASGD", "sync": "SyncSGD"}[advice.method]
        settings = f"lr={advice.lr:g}{wait.replace(',', ', ')}"
        return [f"dd.train(dd.{method}({settings}), problem, dd.RayFleet(), updates={advice.updates})  # in Python"]
    length = f"--time {time:g}" if time is not None else f"--updates {advice.updates}"
    if chosen is None and updates is None and time is None:
        length = "--time 60"
    seed = f" --seed {case.seed}" if case.seed else ""
    commands = [f"dualdelay train '{advice.method}[lr={advice.lr:g}{wait}]' {case.flags} {length}{seed}"]
    if chosen is not None and not real:
        own = _grid(advice.method, advice.lr, wait)
        if advice.method == "dude":
            methods = f"{own} auto {_grid('vanilla', advice.lr_vanilla)}"
        else:
            methods = f"{own} {_grid('dude', advice.lr_async)}"
        until = time if time is not None else round_to(advice.updates / chosen.updates_per_second)
        seeds = f" --seeds {case.seed}" if case.seed else ""
        commands.append(f"dualdelay compare {methods} {case.flags} --time {until:g}{seeds}")
    return commands


def _grid(method: str, lr: float, more: str = "") -> str:
    """A method at a step size, a quarter and four times it, as compare takes it."""
    return f"'{method}[lr={'|'.join(f'{round_to(lr * factor):g}' for factor in (0.25, 1, 4))}{more}]'"


def _values(advice: Advice) -> dict[str, Any]:
    """The advice for the line of JSON."""
    steps = ("lr", "lr_by_rule", "delay", "lr_async", "lr_vanilla", "theory_lr")
    names = ("workers", "method", "wait_for", *steps, "updates", "horizon", "even", "pull", "reasons", "rests_on", "notes")
    values = {name: getattr(advice, name) for name in names}
    values["table"] = [{name: getattr(row, name) for name in _ROW} for row in advice.staleness]
    values["constants"] = None if advice.constants is None else asdict(advice.constants)
    values["later"] = None if advice.later is None else asdict(advice.later)
    values["tries"] = None if advice.tries is None else {**asdict(advice.tries), "edge": advice.tries.edge}
    return values


@contextmanager
def _ticking(report: Report) -> Iterator[Report]:
    """A report that is repeated every half second, so that a long measurement shows that it goes on."""
    latest, ended = [(0.0, "reading")], threading.Event()

    def repeat() -> None:
        while not ended.wait(0.5):
            report(*latest[-1])

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield lambda share, text: latest.append((share, text))
    finally:
        ended.set()
        thread.join()
