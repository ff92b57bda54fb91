"""The command line: dualdelay train | compare | resume | replay | list."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from . import __version__, recorded, reports
from . import comparison as comparing
from . import run as running
from .config import REGISTRIES, label, parse
from .drive import Interrupted
from .errors import BadInput, DualDelayError, nearest
from .figures import draw
from .files import save_table
from .folder import Folder
from .loggers import TensorBoard
from .naming import slug
from .options import BoardPath, Common, FleetText
from .progress import View, Watcher
from .result import Run, plain
from .trace import Table

Json = Annotated[bool, tyro.conf.arg(help="Print one line of JSON at the end, and the rest to standard error.")]


def _free(name: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    base = Path("runs") / name
    return next(p for p in (base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 10_000))) if not p.exists())


@contextmanager
def _going_on_with(command: str) -> Iterator[None]:
    """If the run is interrupted, say how to go on."""
    try:
        yield
    except Interrupted as interrupt:
        raise Interrupted(f"{interrupt}. Go on with: {command}") from None


@contextmanager
def _shown(name: str, *totals: Any, real: bool, board: Path | None) -> Iterator[dict[str, Any]]:
    """What shows how a run goes on, as arguments for it: progress of a simulation, or real workers and what they do."""
    with ExitStack() as stack:
        boards = [] if board is None else [stack.enter_context(TensorBoard(board))]
        if real:
            print("real workers: Ray and their processes take some seconds to start", file=sys.stderr)
            yield {"log": [stack.enter_context(View(name, *totals)), *boards]}
        else:
            yield {"watch": [stack.enter_context(Watcher(name, *totals))], "log": boards}


def _console(json: bool) -> Console:
    console = Console(stderr=json, highlight=False, markup=False, soft_wrap=True)
    return (
        console if console.is_terminal else Console(stderr=json, highlight=False, markup=False, soft_wrap=True, width=120)
    )


def _finish(json: bool, command: str, **values: Any) -> None:
    if json:
        print(jsonlib.dumps({"command": command, **values}))


def _draw(table: Table, path: Path, console: Console, clock: str = "simulated time") -> str | None:
    try:
        draw(table, path, clock)
    except BadInput as error:  # no matplotlib: the numbers are there all the same
        console.print(f"no figure: {error}")
        return None
    console.print(f"figure: {path}")
    return str(path)


def _report(run: Run, json: bool, command: str) -> None:
    assert run.folder is not None
    console, name = _console(json), label(run.algorithm)
    for note in run.notes:
        console.print(f"note: {note}.")
    reports.print_run(run, console)
    clock = "seconds" if "fleet" in Folder(run.folder).config() else "simulated time"
    figure = _draw(comparing.tidy([(name, 0, run)]), run.folder / "figure.png", console, clock)
    console.print(f"folder: {run.folder}")
    _finish(json, command, folder=str(run.folder), figure=figure, algorithm=name, **plain(run.summary()))


def train(
    algorithm: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="ALGORITHM", help="The method, such as 'dude[lr=0.05,wait_for=3]'."),
    ],
    common: tyro.conf.OmitArgPrefixes[Common],
    fleet: FleetText = "simulated",
    seed: Annotated[int, tyro.conf.arg(help="Names split, minibatches, speeds and initial weights.")] = 0,
) -> None:
    """Train with one method, on simulated workers of uneven speed or on real ones.

    Example: dualdelay train 'dude[lr=0.05]' --problem 'digits[workers=10,alpha=0.1]' --updates 2000

    On real workers, for a minute: dualdelay train 'dude[lr=0.05]' --problem 'digits[workers=4]' --fleet ray --time 60
    """
    method = parse("algorithm", algorithm)
    crew, problem, options = common.manned(fleet), common.built(seed), common.options()
    folder = common.folder or _free(f"{slug(label(method))}-seed{seed}")
    options |= {"seed": seed, "folder": folder}
    totals, real = (common.updates, common.time), crew is not None
    with (
        _going_on_with(f"dualdelay resume {folder}"),
        _shown(label(method), *totals, real=real, board=common.tensorboard) as shown,
    ):
        if crew is not None:
            run = running.train(method, problem, crew, **options, **shown)
        else:
            speeds = common.paced(problem.workers, seed)
            run = running.simulate(method, problem, speeds, **options, **common.simulated(), **shown)
    _report(run, common.json, "train")


def compare(
    algorithms: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="ALGORITHM", help="The methods, each such as 'dude[lr=0.05]'."),
    ],
    common: tyro.conf.OmitArgPrefixes[Common],
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help="One run of each method for each seed.")] = (0,),
) -> None:
    """Train with several methods on the same data, simulated speeds, initial weights and minibatches.

    Example: dualdelay compare 'dude[lr=0.05]' 'vanilla[lr=0.05]' 'sync[lr=0.05]' --time 500 --seeds 0 1 2
    """
    methods = [parse("algorithm", text) for text in algorithms]
    comparing.named(methods)  # refuses an empty or doubled list before anything is computed
    if len(set(seeds)) != len(seeds):
        raise BadInput(f"seeds is {list(seeds)}; expected each only once.")
    folder, console = common.folder or _free("compare"), _console(common.json)
    ended = []
    for seed in seeds:
        problem = common.built(seed)
        options = {**common.options(), **common.simulated(), "seed": seed, "folder": folder}
        for method in methods:
            board = common.tensorboard and common.tensorboard / f"{slug(label(method))}-seed{seed}"
            with (
                _going_on_with(f"the same command and --folder {folder}"),
                _shown(f"{label(method)} seed {seed}", common.updates, common.time, real=False, board=board) as shown,
            ):
                speeds = common.paced(problem.workers, seed)
                ended += list(comparing.runs([method], problem, speeds, **options, **shown))
    table = comparing.tidy(ended)
    save_table(folder / "comparison.parquet", table.columns)
    reports.print_comparison(ended, console)
    figure = _draw(table, folder / "comparison.png", console)
    console.print(reports.sentence(ended))
    rows = [{"algorithm": name, "seed": seed, **plain(run.summary())} for name, seed, run in ended]
    _finish(common.json, "compare", folder=str(folder), figure=figure, runs=rows)


def resume(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER", help="The run's folder.")],
    updates: Annotated[int | None, tyro.conf.arg(help="A new total of server updates.")] = None,
    time: Annotated[float | None, tyro.conf.arg(help="A new total of time: simulated, or seconds on real workers.")] = None,
    tensorboard: BoardPath = None,
    json: Json = False,
) -> None:
    """Go on with a run that was stopped, killed or finished, from its last good checkpoint.

    Real workers start anew, with the settings of the fleet that the run had.
    """
    config = Folder(folder).config()
    totals = (config["updates"], config["time"]) if updates is None and time is None else (updates, time)
    with (
        _going_on_with(f"dualdelay resume {folder}"),
        _shown(folder.name, *totals, real="fleet" in config, board=tensorboard) as shown,
    ):
        run = recorded.resume(folder, updates, time, **shown)
    _report(run, json, "resume")


def replay(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER", help="The folder of a finished run.")],
    json: Json = False,
) -> None:
    """Recompute a finished run in its recorded order and check that every bit agrees."""
    config = Folder(folder).config()
    with Watcher(f"replay of {folder.name}", config["updates"], config["time"]) as watcher:
        run = recorded.replay(folder, watch=(watcher,))
    _console(json).print(
        f"{folder}: {len(run.trace)} arrivals replayed; all {run.version} versions and the final weights are the same bits."
    )
    _finish(json, "replay", folder=str(folder), arrivals=len(run.trace), updates=run.version, same=True)


def list_names(
    what: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="NAME", help="algorithms, problems, speeds, fleets, or the name of one of them."),
    ] = "all",
    json: Json = False,
) -> None:
    """Show the algorithms, problems, speeds and fleets there are; with a name, what it does and what it can be told."""
    kinds = {"algorithms": "algorithm", "problems": "problem", "speeds": "speeds", "fleets": "fleet"}
    known = {name: made for kind in kinds.values() for name, made in REGISTRIES[kind].items()}
    console = _console(json)
    if what in known:
        reports.print_one(what, known[what], console)
    elif what == "all" or what in kinds:
        for heading, kind in kinds.items():
            if what in ("all", heading):
                reports.print_kind(heading, REGISTRIES[kind], console)
        console.print("Name one for its settings, such as: dualdelay list dude")
    else:
        raise BadInput(f"there is nothing called {what!r}; {nearest(what, [*known, *kinds])}")
    _finish(json, "list", **{heading: sorted(REGISTRIES[kind]) for heading, kind in kinds.items()})


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "compare": compare,
    "resume": resume,
    "replay": replay,
    "list": list_names,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    if (sys.argv[1:] if arguments is None else list(arguments)) == ["--version"]:
        print(f"dualdelay {__version__}")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="dualdelay", description=_ABOUT, args=arguments)
    except DualDelayError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadInput) else 1)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        sys.exit(130)


_ABOUT = """Asynchronous training over workers of uneven speed and unlike data.

Every command takes --json for one machine-readable line at the end. Exit codes: 0 done, 1 failed (saved as far as it
came), 2 bad input, 130 interrupted (and saved). Quote brackets: 'dude[lr=0.05]'."""
