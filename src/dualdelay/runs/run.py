"""What a person calls: simulate a run on a virtual clock, or train with real workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import Algorithm, Problem
from ..core.devices import using_threads
from ..core.draws import Draws
from ..core.environment import environment
from ..core.errors import BadInput, plain_number, require_kind, require_path, require_several, require_threads
from ..engine.evaluation import Metric
from ..engine.monitor import Logger
from ..engine.result import EarlyStop, Run
from ..simulation.clocks import Change
from ..simulation.link import Link
from ..simulation.speeds import SpeedModel
from ..storage.files import pack
from ..storage.folder import Folder
from ..workers.ray_fleet import RayFleet
from .drive import Watch, drive, starting
from .names import describe, label
from .naming import seeded_problem
from .optimizer import Maker, make_optimizer
from .plan import Plan
from .recorded import resume
from .setup import (
    Start,
    borrowed,
    configuration,
    ends,
    identified,
    make_loop,
    manned,
    require_same,
    starting_point,
    suited,
    with_room,
)
from .showing import showing


def simulate(
    algorithm: Algorithm[Any],
    problem: Problem,
    speeds: SpeedModel,
    *,
    updates: int | None = None,
    time: float | None = None,
    seed: int = 0,
    watch: Sequence[Watch] = (),
    folder: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    start: Start = None,
    link: Link | None = None,
    changes: Sequence[Change] = (),
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    evaluate_seconds: float | None = None,
    evaluate_samples: int | None = None,
    stop: EarlyStop | None = None,
    keep_best: str | None = None,
    on_nonfinite: str = "retry",
    threads: int | None = 1,
    optimizer: Maker = None,
    schedule: Maker = None,
    log: Sequence[Logger] = (),
    device: str | None = None,
    cores: int | None = None,
    precision: str = "float32",
    batch: bool | None = None,
    table: str = "full",
    go_on: bool = False,
    progress: bool = True,
) -> Run:
    """Run an algorithm on a virtual clock until ``updates`` or ``time``, whichever comes first.

    ``seed`` names every random choice: split, minibatches, speeds, initial weights and the server's own draws; a problem or
    speeds that were given a seed of their own keep it. Each ``watch`` function is called with the state and the arrival
    after every arrival. The model is evaluated every ``evaluate_every`` updates and ``evaluate_seconds`` simulated seconds,
    by default so often that it takes about a tenth of the work, fifty times at most. ``evaluate_samples`` is how many
    samples of each worker are then looked at, always the same; the end is evaluated on all. ``metrics`` are functions of
    ``problem.model(x)`` of your own. ``keep_best`` names a metric by which the best model is kept; with ``stop`` it is that
    of early stopping, and the run returns its best model. ``on_nonfinite`` says what happens when a worker sends a gradient
    that is not finite: it tries again ("retry"), and ten times in a row end the run, or make the worker "leave"; or the run
    ends at once ("stop").

    With a ``folder`` the run can be killed, resumed and replayed: it is saved every ``checkpoint_every`` updates, by
    default twenty times in all, and the newest ``keep`` checkpoints stay; with ``go_on`` a folder that holds the same run
    already is resumed. The server's step is plain SGD, or ``optimizer`` with ``schedule``: names from torch.optim such as
    "Adam[betas=(0.9,0.99)]" and "StepLR[step_size=100]", or functions that make one. The algorithm's lr is the learning
    rate. Each ``log`` function is told the run's vital signs about once a second, and every evaluation. ``progress`` is
    shown on standard error once a run takes more than two seconds.

    Torch uses ``threads`` threads: small models are faster with one, another number gives other bits, and None leaves
    torch's own. ``device`` is "cpu" or "cuda", by default where the problem's data are. On the processor jobs in flight are
    computed on ``cores`` cores with the same bits whatever their number: by default on all if a gradient takes longer than
    handing it over. On a GPU they are computed many in one call, which ``batch`` turns on or off; that gives other bits in
    the last place. ``precision`` there is "float32", or "tf32" or "bfloat16" for the networks' products and convolutions.
    ``table`` says how a method that remembers gradients keeps them: "full", in "half" the memory (bfloat16), or on the
    "host".
    """
    updates, time, seed, threads, cores = map(plain_number, (updates, time, seed, threads, cores))
    require_threads("threads", count := torch.get_num_threads() if threads is None else threads)
    if cores is not None:
        require_threads("cores", cores)
    if folder is not None:
        require_path("folder", folder)
    require_several("watch", watch, "functions of state and arrival")
    require_several("log", log, "functions of values and step")
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    with using_threads(count), borrowed(problem) as mine:
        plan = Plan(
            *(algorithm, mine, speeds, updates, time, seed, checkpoint_every, keep, start, link, changes, metrics),
            *(evaluate_every, evaluate_seconds, evaluate_samples, stop, keep_best, on_nonfinite, count),
            *(optimizer, schedule, device, precision, batch, table),
        )
        config = plan.config
        with (
            manned(config, algorithm, plan.problem, speeds=plan.speeds, link=link, cores=cores) as crew,
            showing(label(algorithm), updates, time, progress=progress) as shown,
        ):
            watch = (*watch, *shown["watch"])
            loop = make_loop(config, algorithm, plan.problem, crew, plan.x, metrics, plan.stepper)
            plan.require_rules(loop.state)
            loop.begin()
            if stop is not None:
                stop(loop.evaluation.table)  # says so if there is nothing to stop by
            if folder is None:
                return drive(loop, config, None, watch, stop, log=log)
            pack(loop.save(), {})  # says so if something cannot be saved
            config = identified(config, plan.problem, plan.x)
            if go_on and Path(folder).exists():
                require_same(config, Folder(Path(folder)))
                return resume(
                    folder,
                    problem=plan.problem,
                    algorithm=algorithm,
                    speeds=plan.speeds,
                    link=link,
                    metrics=metrics,
                    optimizer=optimizer,
                    schedule=schedule,
                    watch=watch,
                    log=log,
                    cores=cores,
                    progress=False,
                )
            config["environment"] = environment()
            with Folder.create(Path(folder), config, plan.x, plan.problem.fixed()) as place:
                return drive(loop, config, place, watch, stop, log=log)


def train(
    algorithm: Algorithm[Any],
    problem: Problem,
    fleet: RayFleet | None = None,
    *,
    updates: int | None = None,
    time: float | None = None,
    seed: int = 0,
    watch: Sequence[Watch] = (),
    folder: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    start: Start = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    evaluate_seconds: float | None = None,
    evaluate_samples: int | None = None,
    stop: EarlyStop | None = None,
    keep_best: str | None = None,
    on_nonfinite: str = "retry",
    optimizer: Maker = None,
    schedule: Maker = None,
    log: Sequence[Logger] = (),
    progress: bool = True,
) -> Run:
    """Run an algorithm on real workers, one process each, until ``updates`` or ``time`` in seconds, whichever comes first.

    Arguments mean what they do in ``simulate``; ``fleet`` says where the workers run, by default on this machine, and what
    happens when they fail. Workers evaluate their part of F between two jobs while the others go on: a gradient goes before
    an evaluation, and by default evaluations take at most a tenth of any worker's time, on a few of its samples, always the
    same, as often as that allows, fifty times at most. The last evaluation is of all data. With a ``folder`` the run can be
    resumed after a crash of the server, and replayed in one process to the same bits; what the workers print is kept there.
    """
    updates, time, seed, checkpoint_every, keep = map(plain_number, (updates, time, seed, checkpoint_every, keep))
    evaluate_every, evaluate_seconds, evaluate_samples = map(
        plain_number, (evaluate_every, evaluate_seconds, evaluate_samples)
    )
    if folder is not None:
        require_path("folder", folder)
    fleet = RayFleet() if fleet is None else fleet
    require_kind("fleet", fleet, RayFleet, "dd.RayFleet()")
    require_several("watch", watch, "functions of state and arrival")
    require_several("log", log, "functions of values and step")
    require_kind("algorithm", algorithm, Algorithm, "dd.DuDe(lr=0.05)")
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    with using_threads(fleet.server_threads), borrowed(problem) as mine:
        problem = with_room(suited(seeded_problem(mine, seed), algorithm), fleet.room)
        stepper = make_optimizer(optimizer, schedule, updates, algorithm, problem)
        when = (updates, time, evaluate_every, evaluate_seconds, evaluate_samples, checkpoint_every)
        config = configuration(
            *(algorithm, problem, seed, metrics, stop, on_nonfinite, keep_best, keep),
            *(fleet.threads, fleet.server_threads, stepper, "full"),
            {"fleet": describe(fleet), **ends(problem, None, *when)},
        )
        x = starting_point(problem, start, seed).cpu()  # the server works there, wherever its workers do
        if x.dtype not in (torch.float64, torch.float32, torch.float16):
            raise BadInput(
                f"the weights are {x.dtype}, which numpy and so Ray cannot carry; use float32, float64 or float16."
            )
        for worker in fleet.absent_at_first(problem.workers):
            if type(algorithm).leave is Algorithm.leave:
                algorithm.leave(algorithm.init(x, problem.workers, Draws(seed, "server")), worker)  # says it has no rule
        if folder is not None:
            Folder.require_new(Path(folder))  # before processes are started for it
        output = None if folder is None else Path(folder) / "output"
        with (
            showing(label(algorithm), updates, time, progress=progress, real=True) as shown,
            manned(config, algorithm, problem, fleet=fleet, output=output) as crew,
        ):
            loop = make_loop(config, algorithm, problem, crew, x, metrics, stepper)
            with starting("nothing had begun"):
                loop.begin()
            log = (*log, *shown["log"])
            if folder is None:
                return drive(loop, config, None, watch, stop, log=log)
            config = {**identified(config, problem, x), "environment": environment()}
            with Folder.create(Path(folder), config, x, problem.fixed()) as place:
                return drive(loop, config, place, watch, stop, log=log)
