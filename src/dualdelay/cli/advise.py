"""dualdelay advise: what suits a problem and its workers, on one page."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from torch import Tensor

from ..analysis import reports
from ..analysis.figures import draw_waiting
from ..core import Problem
from ..core.errors import MOST, BadInput, DualDelayError, require_path, require_positive, require_whole
from ..engine.trace import Table
from ..runs.names import label, parse, rebuild
from ..runs.progress import Sharing
from ..simulation.speeds import SpeedModel
from ..storage.files import make_folder
from ..storage.folder import Folder
from ..theory.advice import Advice, Report, round_to
from ..theory.advice import advise as advice_for
from ..theory.staleness import measured, per_job, recorded_trace
from .options import Common, MaybeFloat, MaybeInt, MaybePath, MaybeText
from .shell import Partly, finish, free_folder, make_console

COLUMNS = ("wait_for", "updates_per_second", "arrivals_per_second", "tau_avg", "tau_max")
_UNKNOWN = "unknown"


@dataclass
class _Case:
    """What is to be looked at, as far as it could be had, and how it is written on the shell."""

    problem: Problem | None = None
    speeds: SpeedModel | None = None
    x: Tensor | None = None
    later: Tensor | None = None
    seed: int = 0
    flags: str = ""  # problem, and speeds or fleet; empty if one of them has no name
    wrong: tuple[str, ...] = ()


def advise(
    problem: Annotated[
        MaybeText, tyro.conf.arg(help="What is trained, such as 'digits[workers=10,alpha=0.1]'; by default digits.")
    ] = None,
    speeds: Annotated[
        MaybeText,
        tyro.conf.arg(
            help="How fast workers are, such as 'fixed[times=[1,2,4]]'; by default 'truncated_normal[std=1]'. Of real ones "
            "that have not run yet: 'unknown'."
        ),
    ] = None,
    run: Annotated[
        MaybePath, tyro.conf.arg(help="Instead of both, the folder of a run, simulated or real: its problem and its times.")
    ] = None,
    updates: Annotated[
        MaybeInt, tyro.conf.arg(help="How many server updates the run is to make, if that is known.")
    ] = None,
    time: Annotated[
        MaybeFloat, tyro.conf.arg(help="How long the run is to be: simulated, or seconds of real workers.")
    ] = None,
    seed: Annotated[int, tyro.conf.arg(help="Names split, minibatches, speeds and initial weights.")] = 0,
    folder: Annotated[MaybePath, tyro.conf.arg(help="Where the figure goes; by default a new folder under runs/.")] = None,
    json: Annotated[bool, tyro.conf.arg(help="Print one line of JSON at the end, and the rest to standard error.")] = False,
) -> None:
    """Say how heterogeneous workers are, how stale gradients get, and which method, step and wait_for to begin with.

    Example: dualdelay advise --problem 'digits[workers=10,alpha=0.1]' --speeds 'truncated_normal[std=5]' --time 300

    From a run: dualdelay advise --run runs/first
    """
    if updates is not None:
        require_whole("updates", updates, 1)
    if time is not None:
        require_positive("time", time, MOST)
    for name, path in (("run", run), ("folder", folder)):
        if path is not None:
            require_path(name, path)
    if run is not None and (problem is not None or speeds is not None):
        raise BadInput(f"the run in {run} has a problem and speeds of its own; leave out --problem and --speeds.")
    console = make_console(json)
    with Sharing("advise") as report, _ticking(report) as ticks:
        case = _recorded(run) if run is not None else _described(problem, speeds, seed)
        if case.problem is None and case.speeds is None:
            raise BadInput(" ".join(case.wrong))
        advice = advice_for(
            *(case.problem, case.speeds),
            x=case.x,
            later=case.later,
            updates=updates,
            time=time,
            seed=case.seed,
            report=ticks,
        )
    place = folder or free_folder("advise")
    told = [*case.wrong, *advice.missing]
    commands = _commands(advice, case, updates, time)
    reports.print_advice(advice, commands, told, console)
    figure = _draw(advice, place / "advise.png", console)
    finish(json, "advise", **_values(advice), missing=told, commands=commands, figure=figure)
    if case.wrong and speeds != _UNKNOWN:
        raise Partly(case.wrong[0])


def _described(problem: str | None, speeds: str | None, seed: int) -> _Case:
    """What the texts name; of two, one may be wrong."""
    common = Common(problem=problem or Common.problem, speeds=speeds or Common.speeds)
    case, wrong = _Case(seed=seed), []
    try:
        case.problem = common.built(seed)
    except DualDelayError as error:
        wrong.append(f"the problem could not be measured: {error}")
    if common.speeds == _UNKNOWN:
        wrong.append(
            "how fast real workers are is not known before they have run: train for a minute, and give its folder "
            "(dualdelay advise --run FOLDER)."
        )
    else:
        try:
            if case.problem is None:
                case.speeds = parse("speeds", common.speeds)
            else:
                case.speeds = per_job(common.paced(case.problem.workers, seed), case.problem)
        except DualDelayError as error:
            wrong.append(f"delays could not be measured: {error}")
    pace = "--fleet ray" if common.speeds == _UNKNOWN else f"--speeds '{common.speeds}'"
    case.flags = f"--problem '{common.problem}' {pace}"
    case.wrong = tuple(wrong)
    return case


def _recorded(path: Path) -> _Case:
    """What a run's folder holds; its model at the end stands for later on."""
    place = Folder(path)
    config = place.config()
    case, wrong = _Case(seed=config["seed"], x=place.start()), []
    try:
        case.problem = rebuild("problem", config["problem"])
        pace = "--fleet ray" if "fleet" in config else f"--speeds '{label(rebuild('speeds', config['speeds']))}'"
        case.flags = f"--problem '{label(case.problem)}' {pace}"
    except DualDelayError as error:  # something of the user's own: there is no command for it
        if case.problem is None:
            wrong.append(f"the run's problem could not be measured: {error}")
    try:
        if case.problem is not None and place.result() is not None:
            case.later = case.problem.flat(place.weights("model"))
        case.speeds = measured(recorded_trace(place), None if case.problem is None else case.problem.workers)
    except DualDelayError as error:
        wrong.append(f"the run's times could not be measured: {error}")
    case.wrong = tuple(wrong)
    return case


def _commands(advice: Advice, case: _Case, updates: int | None, time: float | None) -> list[str]:
    """What to type next: the advised run, and where workers are simulated a comparison that checks the advice."""
    real, made = "--fleet ray" in case.flags, advice.chosen
    if case.problem is None or (made is None and not real):
        return []
    wait = f",wait_for={advice.wait_for}" if advice.method == "dude" and advice.wait_for > 1 else ""
    if not case.flags:
        kind = {"dude": "DuDe", "vanilla": "VanillaASGD", "sync": "SyncSGD"}[advice.method]
        given = f"lr={advice.lr:g}{wait.replace(',', ', ')}"
        return [f"dd.train(dd.{kind}({given}), problem, dd.RayFleet(), updates={advice.updates})  # in Python"]
    length = f"--time {time:g}" if time is not None else f"--updates {advice.updates}"
    if made is None and updates is None and time is None:
        length = "--time 60"
    seed = f" --seed {case.seed}" if case.seed else ""
    commands = [f"dualdelay train '{advice.method}[lr={advice.lr:g}{wait}]' {case.flags} {length}{seed}"]
    if real or made is None:
        return commands
    rival = "dude" if advice.method != "dude" else "vanilla"
    grids = [
        f"'{name}[lr={'|'.join(f'{round_to(lr * by):g}' for by in (0.25, 1, 4))}{more}]'"
        for name, lr, more in ((advice.method, advice.lr, wait), (rival, advice.lr_async, ""))
    ]
    until = time if time is not None else round_to(advice.updates / made.updates_per_second)
    seed = f" --seeds {case.seed}" if case.seed else ""
    grids[1:1] = ["auto"] if advice.method == "dude" else []
    return [*commands, f"dualdelay compare {' '.join(grids)} {case.flags} --time {until:g}{seed}"]


def _draw(advice: Advice, path: Path, console: Console) -> str | None:
    """Draw delay and throughput against wait_for, and say where; None if there is nothing to draw, or to draw with."""
    if not advice.staleness:
        return None
    table = Table({name: np.array([getattr(row, name) for row in advice.staleness]) for name in COLUMNS})
    chosen = f"{advice.method}, wait_for={advice.wait_for}, lr={advice.lr:g}"
    try:
        make_folder(path.parent)
        draw_waiting(table, path, f"{advice.workers} workers. Advised: {chosen}.")
    except BadInput as error:  # no matplotlib: the numbers are there all the same
        console.print(f"no figure: {error}")
        return None
    console.print(f"figure: {path}")
    return str(path)


def _values(advice: Advice) -> dict[str, Any]:
    """The advice as strict JSON can hold it."""
    names = ["workers", "method", "wait_for", "lr", "lr_async", "updates", "theory_lr", "horizon", "even", "pull"]
    names += ["reasons", "notes"]
    values = {name: getattr(advice, name) for name in names}
    values["table"] = [{name: getattr(row, name) for name in (*COLUMNS, "idle_share")} for row in advice.staleness]
    found, later = advice.constants, advice.later
    values["constants"] = None if found is None else asdict(found)
    values["later"] = None if later is None else asdict(later)
    made: dict[str, Any] = _strict(values)
    return made


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _ticking(report: Report) -> Iterator[Report]:
    """A report that is repeated while what it told of lasts, so that a long measurement shows that it goes on."""
    said, ended = [(0.0, "reading")], threading.Event()

    def repeat() -> None:
        while not ended.wait(0.5):
            report(*said[-1])

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield lambda share, text: said.append((share, text))
    finally:
        ended.set()
        thread.join()
