"""What the commands train, compare, resume, replay, list and data do; flags.py has what they take, other files the rest."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..analysis import printing
from ..analysis.figures import draw
from ..analysis.loggers import TensorBoard
from ..core import Algorithm
from ..core.errors import BadInput, RunFailed, nearest, shown
from ..core.own_code import names_code
from ..core.texts import literal
from ..engine.monitor import Logger
from ..engine.result import EarlyStop, Run
from ..problems.files import cache_folder
from ..runs import own
from ..runs import replay as replaying
from ..runs import resume as resuming
from ..runs.names import HEADINGS, REGISTRIES, alternatives, call, label, parse, slug
from ..runs.progress import RunProgress, SweepProgress
from ..runs.runner import Interrupted
from ..runs.seeds import unvaried
from ..runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
from ..runs.simulate import run_one
from ..runs.spec import Options
from ..runs.sweep import label_of, named, one_table, path_of, require_place, run_points
from ..runs.together import Point
from ..simulation.availability import announced
from ..simulation.link import Link
from ..simulation.speeds import SpeedModel
from ..storage.files import make_folder, remove, save_table, write
from ..storage.folder import Folder
from ..storage.record import RunRecord
from ..workers.ray_tasks import Cluster
from ..workers.settings import WorkerFleet
from . import config, datasets, downloads, shared, texts
from .flags import Common, Compare, Data, List, Paper, Replay, Resume, Train

_SIMULATION_FLAGS = ("speeds", "absences", "latency", "bandwidth", "threads", "device", "cores", "precision")


def _way(text: str | None) -> str | float | None:
    """How messages are made small: a word, or a share."""
    return None if text is None else literal(text)


def options_of(flags: Common, folder: Path, batch: bool | None = None) -> Options:
    """What the runs of a command have in common; ``batch`` says whether jobs may be computed many in one call."""
    early = flags.target is not None or flags.patience is not None
    if not early and flags.metric != "objective":
        raise BadInput(f"metric {flags.metric} is given, but neither target nor patience; give one of the two.")
    stop = EarlyStop(flags.metric, flags.target, flags.patience) if early else None
    when = (flags.evaluate_every, flags.evaluate_seconds, flags.evaluate_samples)
    return Options(
        flags.updates,
        flags.time,
        Saving(folder, flags.checkpoint_every, flags.keep),
        Evaluation(*when, best_by=flags.keep_best, early_stop=stop),
        Compute(flags.device, flags.cores, flags.precision, flags.threads, batch),
        Server(
            flags.start,
            flags.optimizer,
            flags.schedule,
            flags.on_nonfinite,
            _way(flags.uplink),
            _way(flags.downlink),
            flags.table,
        ),
    )


def _simulated_workers(flags: Common, speeds: SpeedModel, workers: int) -> SimulatedFleet:
    """So many simulated workers with these speeds."""
    changes = [] if flags.absences is None else announced(flags.absences, workers)
    return SimulatedFleet(speeds, Link(flags.latency, flags.bandwidth), changes)


def _real_workers(flags: Common, fleet: str) -> WorkerFleet | None:
    """The real workers that --fleet describes; None if it says that workers are simulated."""
    name, settings = call(fleet)
    if name == "simulated" and settings:
        raise BadInput(f"{fleet!r} has settings; describe simulated workers by --speeds, --latency and --bandwidth.")
    if name == "simulated":
        return None
    workers = real_fleet(fleet)
    require_real(flags, f"--fleet {fleet}")
    return workers


def real_fleet(text: str) -> WorkerFleet:
    """The real workers that a text describes."""
    name, _ = call(text)
    if name not in REGISTRIES["fleet"]:
        raise BadInput(f"there is no fleet {name!r}; {nearest(name, ['simulated', *REGISTRIES['fleet']])}")
    workers: WorkerFleet = parse("fleet", text)
    return workers


def require_real(flags: Common, where: str) -> None:
    """Refuse flags that describe simulated workers, where they are real."""
    changed = [field.name for field in fields(flags) if getattr(flags, field.name) != field.default]
    if others := [f"--{name}" for name in changed if name in _SIMULATION_FLAGS]:
        raise BadInput(
            f"{' and '.join(others)} cannot be chosen for real workers ({where}): they are as fast as they are. "
            "Leave it out, or simulate them (--fleet simulated). Threads are a setting of the fleet: 'ray[threads=2]'."
        )


def train(flags: Train) -> None:
    """Train with one method, on simulated workers or on real ones."""
    common, seed = flags.common, flags.seed
    shared.import_all(common.imports)
    method = parse("algorithm", flags.algorithm)
    real, problem = _real_workers(common, flags.fleet), shared.make_problem(common.problem, seed)
    folder = common.folder or shared.free_folder(f"{slug(label(method))}-seed{seed}")
    again = _named_again(common)
    with continued_by(f"dualdelay resume {folder}{again}"), boards(common.tensorboard) as log:
        n = problem.workers
        workers = real or _simulated_workers(common, shared.make_speeds(common.speeds, n, seed), n)
        reporting = Reporting([_Noted(folder, config.written("train", flags, folder))], log)
        run = run_one(options_of(common, folder), method, problem, workers, seed, reporting)
    print_run(run, common.json, "train")


def _named_again(common: Common) -> str:
    """The flags that name a run's own code again."""
    words = [word for file in common.imports for word in ("--import", file)]
    words += ["--problem", common.problem] if names_code(common.problem) else []
    return "".join(f" {shlex.quote(word)}" for word in words)


class _Noted:
    """A watch function that writes a command into the folder of its run, once there is one."""

    def __init__(self, folder: Path, text: bytes) -> None:
        self._folder, self._text, self._written = folder, text, False

    def __call__(self, *_: object) -> None:
        if not self._written:
            write(self._folder / config.FILE, self._text)
            self._written = True


def cluster_of(flags: Compare | Paper) -> Cluster | None:
    """The cluster that the runs of a command are computed on; None: this machine."""
    if flags.cluster is None:
        given = {"--cluster-cpus": flags.cluster_cpus != 1.0, "--cluster-gpus": flags.cluster_gpus != 0.0}
        if others := [flag for flag, said in {**given, "--insecure": flags.insecure}.items() if said]:
            raise BadInput(f"{' and '.join(others)} is given without a cluster; name it: --cluster 10.0.0.5:6379")
        return None
    address = None if flags.cluster == "local" else flags.cluster
    return Cluster(address, flags.cluster_cpus, flags.cluster_gpus, insecure=flags.insecure)


def compare(flags: Compare) -> None:
    """Train with several methods on the same data, simulated speeds, initial weights and minibatches."""
    common, seeds, cluster = flags.common, flags.seeds, cluster_of(flags)
    if cluster is not None and common.tensorboard is not None:
        raise BadInput("--tensorboard is written by this process, and --cluster computes elsewhere; leave out one of both.")
    shared.import_all(common.imports)
    methods = [parse("algorithm", text) for texts in flags.algorithms for text in alternatives(texts)]
    named(methods)  # refuses an empty or doubled list before anything is computed
    if not seeds or len(set(seeds)) != len(seeds):
        raise BadInput(f"seeds is {list(seeds)}; expected at least one, each only once.")
    folder, console = common.folder or shared.free_folder("compare"), shared.make_console(common.json)

    @contextmanager
    def display(point: Point) -> Iterator[Reporting]:
        name = f"{label_of(point.names)} seed {point.seed}"
        board = common.tensorboard and common.tensorboard / (point.path or Path(name)).name
        with boards(board) as log, RunProgress(name, common.updates, common.time) as watcher:
            yield Reporting([watcher], log, progress=False)

    options = options_of(common, folder, batch=False if common.tensorboard else None)
    points = _points(common, methods, seeds, folder)
    noted = _noted_first(folder, config.written("compare", flags, folder), points)
    with continued_by(f"the same command and --folder {folder}"), SweepProgress() as report, noted:
        sweep = run_points(
            points,
            options,
            watch=Reporting(progress=False, report=report),
            display=display,
            notes=[f"the same for all seeds: {what}" for what in _constants(common, seeds)],
            on=cluster,
            here=common.tensorboard is not None,
        )
    printing.print_comparison(sweep, console)
    figure = shared.print_figure(lambda: draw(sweep, folder / "comparison.png"), console)
    console.print(printing.sentence(sweep))
    for note in sweep.notes:
        console.print(f"note: {note.rstrip('.')}.")
    for k, why in sweep.failed.items():
        console.print(f"failed: {label_of(sweep.points[k])} seed {sweep.points[k]['seed']}: {why}")
    console.print(f"folder: {folder}")
    save_table(folder / "comparison.parquet", sweep.columns)  # once all is told: on a full disk this fails
    rows = [{"algorithm": name, "seed": seed, **run.summary()} for name, seed, run in sweep.ended]
    shared.finish(common.json, "compare", folder=str(folder), figure=figure, runs=rows, failed=len(sweep.failed))
    if sweep.failed:
        raise RunFailed(f"{len(sweep.failed)} of {len(sweep.runs)} runs did not come to their end.")


@contextmanager
def _noted_first(folder: Path, text: bytes, points: Sequence[Point]) -> Iterator[None]:
    """Write a command into a folder before its runs begin; if it fails before a new one has, all is as it was."""
    file, absent = folder / config.FILE, [point.path for point in points if point.path and not point.path.exists()]
    before = file.read_bytes() if file.is_file() else None
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    make_folder(folder)
    write(file, text)
    try:
        yield
    except Exception:
        if not any(path.exists() for path in absent):
            if before is None:
                remove(file)
            else:
                write(file, before)
            with suppress(OSError):  # somebody else has put something there
                for place in new:
                    place.rmdir()
        raise


def _points(common: Common, methods: Sequence[Algorithm[Any]], seeds: Sequence[int], folder: Path) -> list[Point]:
    """Every run of a comparison: all methods on all problems at all speeds that the texts name, for every seed."""
    texts = {"problem": alternatives(common.problem), "speeds": alternatives(common.speeds)}
    for axis, several in texts.items():
        if len(set(several)) < len(several):
            raise BadInput(f"{axis} is {shown(getattr(common, axis))}, which has one of them twice; give each only once.")
    require_place(folder)
    problems = {(seed, text): shared.make_problem(text, seed) for seed in seeds for text in texts["problem"]}
    fewest = min(problem.workers for problem in problems.values())
    points = []
    for (seed, text), problem in problems.items():
        for speeds, method in itertools.product(texts["speeds"], methods):
            varied = {axis: one for axis, one in (("problem", text), ("speeds", speeds)) if len(texts[axis]) > 1}
            names = {"algorithm": label(method), "seed": seed, **varied}
            fleet = _simulated_workers(common, shared.make_speeds(speeds, problem.workers, seed), fewest)
            path = path_of(folder, label(method), seed, list(varied.values()), problem, fleet)
            points.append(Point(names, method, problem, fleet, seed, path))
    return points


def _constants(common: Common, seeds: Sequence[int]) -> list[str]:
    """What stays the same although the seeds vary, in words."""
    constants: dict[str, None] = {}
    for text, speeds in itertools.product(alternatives(common.problem), alternatives(common.speeds)):
        workers = shared.make_problem(text, seeds[0]).workers
        constants |= dict.fromkeys(unvaried(parse("problem", text), parse("speeds", speeds, n=workers), seeds))
    return list(constants)


def resume(flags: Resume) -> None:
    """Continue a run from its last good checkpoint."""
    folder = flags.folder
    record = _with_own_code("resume", flags)
    trust = {"address": flags.address, "host": flags.host, "insecure": flags.insecure or None}
    with continued_by(f"dualdelay resume {folder}"), boards(flags.tensorboard) as log:
        given = {name: value for name, value in trust.items() if value is not None}
        if flags.fleet is not None and given:
            raise BadInput(f"--fleet and --{' and --'.join(given)} are given; expected all in one: 'ray[shards=4,...]'.")
        fleet = resuming.recorded_fleet(folder, **given) if flags.fleet is None else real_fleet(flags.fleet)
        problem = None if flags.problem is None else shared.make_problem(flags.problem, record.seed)
        run = resuming.resume(folder, flags.updates, flags.time, problem, fleet=fleet, watch=Reporting(log=log))
    print_run(run, flags.json, "resume")


def _with_own_code(command: str, flags: Resume | Replay) -> RunRecord:
    """Load the code that is named, and read what a folder records of its run; refuses one that needs more code."""
    shared.import_all(flags.imports)
    record = Folder(flags.folder).record()
    shared.require_named(command, flags.folder, record, flags.problem)
    return record


@contextmanager
def continued_by(command: str) -> Iterator[None]:
    """Add to an interruption which command continues the run."""
    try:
        yield
    except Interrupted as interrupt:
        raise Interrupted(f"{interrupt.saved}. Go on with: {command}") from None


@contextmanager
def boards(folder: Path | None) -> Iterator[list[Logger]]:
    """The loggers of a run: one that writes for TensorBoard if a folder is given."""
    if folder is None:
        yield []
    else:
        with TensorBoard(folder) as board:
            yield [board]


def print_run(run: Run, json: bool, command: str) -> None:
    """Print the notes, tables, figure and folder of a run, and its line of JSON."""
    folder = run.folder
    assert folder is not None
    console, name = shared.make_console(json), label(run.algorithm)
    for note in run.notes:
        console.print(f"note: {note.rstrip('.')}.")
    printing.print_run(run, console)
    clock = "seconds" if Folder(folder).record().real else "simulated time"
    figure = shared.print_figure(lambda: draw(one_table(name, run), folder / "figure.png", clock), console)
    console.print(f"folder: {folder}")
    shared.finish(json, command, folder=str(folder), figure=figure, algorithm=name, **run.summary())


def replay(flags: Replay) -> None:
    """Recompute a finished run in its recorded order and check that every bit agrees."""
    folder, json, record = flags.folder, flags.json, _with_own_code("replay", flags)
    problem = None if flags.problem is None else shared.make_problem(flags.problem, record.seed)
    run = replaying.replay(folder, problem, rtol=flags.rtol)
    console, exact = shared.make_console(json), bool(run.same_bits)
    same = f"all {run.version} versions and the final weights are the same bits" if exact else "the order is the same"
    console.print(f"{folder}: {len(run.trace)} arrivals replayed; {same}.")
    for note in run.notes:
        console.print(f"note: {note.rstrip('.')}.")
    shared.finish(json, "replay", folder=str(folder), arrivals=len(run.trace), updates=run.version, same=exact)


def list_names(flags: List) -> None:
    """List what has a name, or explain one of them."""
    shared.import_all(flags.imports)
    registries = {heading: {**REGISTRIES[kind], **own.everything(kind)} for kind, heading in HEADINGS.items()}
    things = {name: thing for registry in registries.values() for name, thing in registry.items()}
    what, console = "algorithms" if flags.what == "methods" else flags.what, shared.make_console(flags.json)
    if what in things:
        printing.print_one(what, things[what], console)
    elif what == "all" or what in registries:
        for heading in registries if what == "all" else [what]:
            printing.print_kind(heading, registries[heading], console)
        console.print("Name one for its settings, such as: dualdelay list dude")
    else:
        raise BadInput(f"there is nothing called {what!r}; {nearest(what, [*things, *registries], 'dualdelay list')}")
    shared.finish(flags.json, "list", **{heading: sorted(registry) for heading, registry in registries.items()})


def data(flags: Data) -> None:
    """Put a data set's files into a folder."""
    known = [*datasets.DATA_SETS, *texts.TEXTS]
    if flags.name not in known:
        raise BadInput(f"there are no data {flags.name!r}; {nearest(flags.name, known)}")
    place = flags.folder or cache_folder() / flags.name
    with SweepProgress(flags.name) as report:
        if flags.name in texts.TEXTS:
            outcome = texts.fetch(texts.TEXTS[flags.name], place, flags.source, report=report)
        else:
            outcome = downloads.fetch(datasets.DATA_SETS[flags.name], place, flags.source, report=report)
    shared.make_console(flags.json).print(outcome)
    shared.finish(flags.json, "data", name=flags.name, folder=str(place))
