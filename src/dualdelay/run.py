"""What a person calls: simulate a run on a virtual clock, or train with real workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .clocks import Change
from .config import describe
from .core import Algorithm, Problem
from .draws import Draws
from .drive import Watch, drive, totals
from .errors import BadInput, require_kind
from .evaluation import Metric
from .files import pack
from .fleet import using_threads
from .folder import Folder
from .links import Link
from .monitor import Logger
from .optimizer import Maker, make_optimizer
from .plan import Plan
from .ray_fleet import RayFleet
from .recorded import resume
from .result import EarlyStop, Run
from .setup import (
    Start,
    configuration,
    identified,
    make_loop,
    manned,
    require_same,
    starting_point,
    suited,
    versions,
)
from .speeds import SpeedModel


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
    stop: EarlyStop | None = None,
    bad: str = "retry",
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
) -> Run:
    """Run an algorithm on a virtual clock until ``updates`` or ``time``, whichever comes first.

    ``seed`` names the initial weights and the server's own draws. Each ``watch`` function is called with the state and the
    arrival after every arrival. The model is evaluated every ``evaluate_every`` updates and ``evaluate_seconds`` simulated
    seconds, by default fifty times in all; ``metrics`` are functions of ``problem.model(x)`` of your own. With a ``folder``
    the run can be killed, resumed and replayed: it is saved every ``checkpoint_every`` updates, by default twenty times in
    all, and the newest ``keep`` checkpoints stay; with ``go_on`` a folder that holds the same run already is resumed.
    ``bad`` says what a gradient that is not finite does: "retry" or "stop". Torch uses ``threads`` threads: small models
    are faster with one, another number gives other bits, and None leaves torch's own. The server's step is plain SGD, or
    ``optimizer`` with ``schedule``: names from torch.optim such as "Adam[betas=(0.9,0.99)]" and "StepLR[step_size=100]", or
    functions that make one. Each ``log`` function is told the run's vital signs about once a second.

    ``device`` is "cpu" or "cuda", by default where the problem's data are. On the processor jobs in flight are computed on
    ``cores`` cores with the same bits whatever their number: by default on all if a gradient takes longer than handing it
    over. On a GPU they are computed many in one call, which ``batch`` turns on or off; that gives other bits in the last
    place. ``precision`` there is "float32", or "tf32" or "bfloat16" for the networks' products and convolutions. ``table``
    says how a method that remembers gradients keeps them: "full", in "half" the memory (bfloat16), or on the "host".
    """
    plan = Plan(
        *(algorithm, problem, speeds, updates, time, seed, checkpoint_every, keep, start, link, changes, metrics),
        *(evaluate_every, evaluate_seconds, stop, bad, threads, optimizer, schedule, device, precision, batch, table),
    )
    config = plan.config
    with manned(config, algorithm, plan.problem, speeds=speeds, cores=cores) as crew:
        loop = make_loop(config, algorithm, plan.problem, crew, plan.x, metrics, plan.stepper)
        plan.require_rules(loop.state)
        with using_threads(config["threads"]):
            loop.begin()
        if stop is not None:
            stop(loop.table)  # says so if there is nothing to stop by
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
                speeds=speeds,
                metrics=metrics,
                optimizer=optimizer,
                schedule=schedule,
                watch=watch,
                log=log,
                cores=cores,
            )
        config["versions"] = versions()
        return drive(loop, config, Folder.create(Path(folder), config, plan.x), watch, stop, log=log)


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
    stop: EarlyStop | None = None,
    bad: str = "retry",
    optimizer: Maker = None,
    schedule: Maker = None,
    log: Sequence[Logger] = (),
) -> Run:
    """Run an algorithm on real workers, one process each, until ``updates`` or ``time`` in seconds, whichever comes first.

    The arguments are those of ``simulate``; ``fleet`` says where the workers run, by default on this machine, and what
    happens when they fail. Workers evaluate their part of F between two jobs while the others go on. With a ``folder`` the
    run can be resumed after a crash of the server, and replayed in one process to the same bits.
    """
    fleet = RayFleet() if fleet is None else fleet
    require_kind("fleet", fleet, RayFleet, "dd.RayFleet()")
    require_kind("algorithm", algorithm, Algorithm, "dd.DuDe(lr=0.05)")
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    problem, stepper = suited(problem, algorithm), make_optimizer(optimizer, schedule, updates)
    config = configuration(
        *(algorithm, problem, seed, metrics, stop, bad, keep, fleet.threads, fleet.server_threads, stepper, "full"),
        {"fleet": describe(fleet), **totals(updates, time, evaluate_every, evaluate_seconds, checkpoint_every)},
    )
    x = starting_point(problem, start, seed).cpu()  # the server works there, wherever its workers do
    if x.dtype not in (torch.float64, torch.float32, torch.float16):
        raise BadInput(f"the weights are {x.dtype}, which numpy and so Ray cannot carry; use float32, float64 or float16.")
    for worker in fleet.absent:
        if type(algorithm).leave is Algorithm.leave:
            algorithm.leave(algorithm.init(x, problem.workers, Draws(seed, "server")), worker)  # says that it has no rule
    if folder is not None:
        Folder.require_new(Path(folder))  # before processes are started for it
    with manned(config, algorithm, problem, fleet=fleet) as crew:
        loop = make_loop(config, algorithm, problem, crew, x, metrics, stepper)
        loop.begin()
        if folder is None:
            return drive(loop, config, None, watch, stop, log=log)
        config = {**identified(config, problem, x), "versions": versions()}
        return drive(loop, config, Folder.create(Path(folder), config, x), watch, stop, log=log)
